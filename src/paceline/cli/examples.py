"""``paceline examples``: what examples there are; ``paceline examples digits``: a copy of one, to run and to change."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.terminal import refuse

EXTRAS = {
    "sklearn": ("scikit-learn", "demo"),
    "lightning": ("Lightning", "lightning"),
    "accelerate": ("Accelerate", "accelerate"),
}
"""A package's name and the extra that installs it, by the name under which it is imported."""

Names = Annotated[
    list[str] | None, typer.Argument(metavar="NAME", help="Copy these into the current folder; all: every one.")
]


@dataclass(frozen=True)
class Example:
    """One script among the examples."""

    path: Path
    purpose: str
    """The first sentence of the script's docstring."""
    beside: tuple[str, ...]
    """Names of the other examples that the script imports."""
    needs: tuple[str, ...]
    """The packages of `EXTRAS` that the script imports."""
    start: str
    """Options of ``paceline run`` with which to try the script."""

    @property
    def name(self) -> str:
        return self.path.stem


def examples(names: Names = None) -> None:
    """List the examples that come with Paceline, or copy some into the current folder."""
    try:
        known = read_examples(examples_folder())
        wanted = [known[name] for name in chosen(names or [], known)]
        written = copy(wanted, Path.cwd())
    except ValueError as error:
        refuse(f"examples: {error}")
    except OSError as error:
        refuse(f"examples: cannot write {error.filename} ({error.strerror or error})")
    for line in next_steps(wanted, written) if names else listed(known.values()):
        typer.echo(line)


def chosen(names: Iterable[str], known: Mapping[str, Example]) -> list[str]:
    """Return the names asked for, each once, and before each the examples that it imports."""
    asked = [name.removesuffix(".py") for name in names]
    unknown = [name for name in asked if name not in known and name != "all"]
    if unknown:
        raise ValueError(f"there is no example {unknown[0]!r}, but {', '.join(known)}")
    asked = list(known) if "all" in asked else asked
    return list(dict.fromkeys(part for name in asked for part in (*known[name].beside, name)))


def copy(wanted: Iterable[Example], folder: Path) -> list[Path]:
    """Copy examples into ``folder``; raise ValueError, and write nothing, if a file with other content is there."""
    contents = {folder / example.path.name: example.path.read_bytes() for example in wanted}
    changed = [path for path, content in contents.items() if path.exists() and _content(path) != content]
    if changed:
        raise ValueError(
            f"{changed[0].name} is here already and differs from the example: nothing was written; move it away, or "
            "copy into another folder"
        )
    for path, content in contents.items():
        path.write_bytes(content)
    return list(contents)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def listed(examples: Iterable[Example]) -> list[str]:
    """Return one line per example, and how to copy one."""
    found = list(examples)
    width = max(len(example.name) for example in found)
    lines = [f"{example.name:<{width}}  {example.purpose}" for example in found]
    return [*lines, "", "A copy in the current folder: paceline examples NAME (or all)", *_needs(found)]


def next_steps(wanted: Iterable[Example], written: Iterable[Path]) -> list[str]:
    """Return the lines that name the written files and how to run them."""
    found = list(wanted)
    lines = [f"wrote {path.name}" for path in written]
    return [*lines, f"Try: paceline run {found[-1].start} {found[-1].path.name}", *_needs(found)]


def _needs(found: Iterable[Example]) -> list[str]:
    lines, examples = [], list(found)
    for package, (called, extra) in EXTRAS.items():
        names = [example.name for example in examples if package in example.needs]
        verb = "needs" if len(names) == 1 else "need"
        lines += [f"{', '.join(names)} {verb} {called}: pip install 'paceline[{extra}]'"] if names else []
    return lines


# -- where they are, and what each is for ------------------------------------------------------------------------


def examples_folder() -> Path:
    """Return the folder of the examples: a clone's, else the one inside the installed package; raise ValueError."""
    folders = [Path(__file__).parents[3] / "examples", Path(__file__).parents[1] / "examples"]
    for folder in folders:
        if (folder / "digits.py").is_file() and (folder / "plain_ddp.py").is_file():
            return folder
    looked = " and ".join(str(folder) for folder in folders)
    raise ValueError(f"the examples digits.py and plain_ddp.py are not there (looked in {looked})")


def read_examples(folder: Path) -> dict[str, Example]:
    """Return all examples by name."""
    paths = sorted(folder.glob("[a-z]*.py"))
    names = {path.stem for path in paths}
    return {path.stem: _read(path, names) for path in paths}


def _read(path: Path, names: set[str]) -> Example:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported, purpose = _imported(tree), ast.get_docstring(tree) or ""
    return Example(
        path=path,
        purpose=first_sentence(purpose),
        beside=tuple(sorted(imported & names)),
        needs=tuple(sorted(imported & set(EXTRAS))),
        start="-n 2 --procs-per-worker 2" if "--procs-per-worker" in purpose else "-n 2",
    )


def _imported(tree: ast.Module) -> set[str]:
    """Return the top-level names of the modules that a script imports."""
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return {module.partition(".")[0] for module in modules}


def first_sentence(text: str) -> str:
    r"""Return the first sentence of a text, on one line.

    >>> first_sentence("Digits on whatever\nthere is. And more.\n\n    python digits.py")
    'Digits on whatever there is.'
    """
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    sentence, stop, _ = paragraph.partition(". ")
    return sentence + stop.strip()
