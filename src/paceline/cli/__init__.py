"""The command ``paceline``: one file per subcommand, each with a function of the same name.

Help and errors of the command line appear at once: nothing here imports torch. A subcommand imports what it needs when
it runs.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from paceline import __version__, renamed

COMMANDS = ("run", "demo", "simulate", "plan", "learn", "report", "watch", "host", "doctor", "examples")
"""Subcommands in the order of the help."""


class Subcommands(TyperGroup):
    """The subcommands; a former one is refused with its present name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the subcommand that the words ask for, and the words after it."""
        if args and (present := renamed.COMMANDS.get(args[0])) is not None:
            ctx.fail(f"paceline {args[0]} is gone since 0.2: write paceline {present}")
        return super().resolve_command(ctx, args)


class Subcommand(TyperCommand):
    """A subcommand; a former option is refused with what takes its place."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words of the command line into the context."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # NoSuchOption, of click or, in later versions, of typer itself
            option = getattr(error, "option_name", "")
            if option in renamed.OPTIONS:
                ctx.fail(f"{option} is gone since 0.2: write {renamed.OPTIONS[option]}")
            raise


app = typer.Typer(
    name="paceline",
    cls=Subcommands,
    help="Train one PyTorch model on machines that are not alike, at the sum of their speeds.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _add(name: str) -> None:
    # What follows the script on `paceline run` belongs to the script, options included.
    settings = {"allow_interspersed_args": False} if name == "run" else {}
    app.command(name, cls=Subcommand, context_settings=settings)(
        getattr(importlib.import_module(f"paceline.cli.{name}"), name)
    )


for _name in COMMANDS:
    _add(_name)


def main() -> None:
    """Run the command ``paceline``; its entry point."""
    app()
