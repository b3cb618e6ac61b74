"""The examples that come with the package: where they are, what each is for, and what it needs beside itself."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

SHARED = ("share", "paceline", "examples")
"""Where a wheel puts them, below the environment's folder."""


@dataclass(frozen=True)
class Example:
    """One script among the examples."""

    path: Path
    purpose: str
    """The first sentence of its docstring."""
    beside: tuple[str, ...]
    """Names of the other examples that it imports."""
    needs_demo: bool
    """Whether it needs scikit-learn, which the extra ``demo`` brings."""

    @property
    def name(self) -> str:
        return self.path.stem


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
    imported = _imported(tree)
    return Example(
        path=path,
        purpose=first_sentence(ast.get_docstring(tree) or ""),
        beside=tuple(sorted(imported & names)),
        needs_demo="sklearn" in imported,
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
