"""``paceline examples``: what examples there are; ``paceline examples digits``: a copy of one, to run and to change."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.errors import refuse

SHARED = ("share", "paceline", "examples")
"""Where a wheel puts them, below the environment's folder."""

EXTRAS = {"sklearn": ("scikit-learn", "demo"), "lightning": ("Lightning", "lightning")}
"""Packages by the names that they are imported by: what they are called, and the extra that brings them."""

Names = Annotated[
    list[str] | None, typer.Argument(metavar="NAME", help="Copy these into the current folder; all: every one.")
]


@dataclass(frozen=True)
class Example:
    """One script among the examples."""

    path: Path
    purpose: str
    """The first sentence of its docstring."""
    beside: tuple[str, ...]
    """Names of the other examples that it imports."""
    needs: tuple[str, ...]
    """The packages of `EXTRAS` that it imports."""
    start: str
    """Options of ``paceline run`` to try it with."""

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
    for line in told(wanted, written) if names else listed(known.values()):
        typer.echo(line)


def chosen(names: Iterable[str], known: Mapping[str, Example]) -> list[str]:
    """The names asked for, each once, and before each the examples that it imports."""
    asked = [name.removesuffix(".py") for name in names]
    unknown = [name for name in asked if name not in known and name != "all"]
    if unknown:
        raise ValueError(f"there is no example {unknown[0]!r}, but {', '.join(known)}")
    asked = list(known) if "all" in asked else asked
    return list(dict.fromkeys(part for name in asked for part in (*known[name].beside, name)))


def copy(wanted: Iterable[Example], folder: Path) -> list[Path]:
    """Copies into ``folder``; nothing is written when a file of that name, with other content, is there already."""
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
    """A line each, and how to go on."""
    found = list(examples)
    width = max(len(example.name) for example in found)
    lines = [f"{example.name:<{width}}  {example.purpose}" for example in found]
    return [*lines, "", "A copy in the current folder: paceline examples NAME (or all)", *_needs(found)]


def told(wanted: Iterable[Example], written: Iterable[Path]) -> list[str]:
    """What was written, and how to run it."""
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
    """In a clone beside the package's source, else where the wheel put them; ValueError when they are not there."""
    places = list(dict.fromkeys([Path(__file__).parents[3] / "examples", *_installed(), Path(sys.prefix, *SHARED)]))
    for place in places:
        if (place / "digits.py").is_file() and (place / "plain_ddp.py").is_file():
            return place
    looked = " and ".join(str(place) for place in places)
    raise ValueError(f"the examples digits.py and plain_ddp.py are not there (looked in {looked})")


def _installed() -> list[Path]:
    """Where the installer says that it put them: below the environment, the user's folder or another prefix."""
    try:
        files = metadata.files("paceline") or ()
    except metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())).resolve().parent for file in files if file.parts[-4:] == (*SHARED, "digits.py")]


def read_examples(folder: Path) -> dict[str, Example]:
    """All of them by name."""
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
        start="-n 2 --group 2" if "--group" in purpose else "-n 2",
    )


def _imported(tree: ast.Module) -> set[str]:
    """Top-level names of the modules that a script imports."""
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return {module.partition(".")[0] for module in modules}


def first_sentence(text: str) -> str:
    """
    >>> first_sentence("Digits on whatever\\nthere is. And more.\\n\\n    python digits.py")
    'Digits on whatever there is.'
    """
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    sentence, stop, _ = paragraph.partition(". ")
    return sentence + stop.strip()
