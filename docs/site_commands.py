"""Writes the tables of the command line into the reference when the site is built, from the commands themselves.

MkDocs calls `on_page_markdown` for every page. Where a page holds the line `MARK`, the options of every command take
its place, so that no table has to be kept by hand.
"""

from __future__ import annotations

from typing import Any

MARK = "<!-- every command and its options -->"


def on_page_markdown(markdown: str, *, page: Any, config: Any, **more: Any) -> str:
    """Return the page's text, with the tables of all commands in the mark's place."""
    return markdown.replace(MARK, tables()) if MARK in markdown else markdown


def tables() -> str:
    """Return one section per command: its summary, its arguments, and its options in the panels of its help."""
    import typer

    from paceline.cli import app

    group = typer.main.get_command(app)
    return "\n\n".join(_section(name, command) for name, command in group.commands.items())  # type: ignore[attr-defined]


def _section(name: str, command: Any) -> str:
    takes = " ".join((one.metavar or one.name.upper()) for one in command.params if one.param_type_name == "argument")
    lines = [f"### paceline {name}", "", (command.help or "").split("\n\n")[0].replace("\n", " "), ""]
    lines += [
        f"`paceline {name} [OPTIONS] {takes}`".replace(" `", "`"),
        "",
        "| option | value | meaning |",
        "|---|---|---|",
    ]
    for panel, options in _panels(command).items():
        lines += [f"| **{panel}** | | |"] if panel else []
        lines += [_row(option) for option in options]
    return "\n".join(lines)


def _panels(command: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for one in command.params:
        if one.param_type_name == "option" and "--help" not in one.opts:
            found.setdefault(getattr(one, "rich_help_panel", None) or "", []).append(one)
    return found


def _row(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    value = "" if option.is_flag else f"`{option.metavar or option.name.upper()}`"
    default = option.default
    shown = "" if option.is_flag or default in (None, ()) or callable(default) else f" Default: `{default}`."
    meaning = (option.help or "").replace("|", "\\|")  # within code a bar separates no cells
    return f"| {names} | {value} | {meaning}{shown} |"
