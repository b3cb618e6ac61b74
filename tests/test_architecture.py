"""The shape of the library: its layers, its rooms, and how large a file and a class may be."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from source_trees import tree

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "paceline"
AVERAGES = ("arrivals", "combine", "dealing", "exchange", "outages", "periods", "turns")
MOST_ROOT_MODULES, MOST_METHODS, MOST_LINES = 10, 36, 700

LAYERS: list[tuple[str, ...]] = [
    ("concurrency", "errors", "records", "devices", "signals"),
    ("pace", "roster", "machines"),
    ("feed", "transport"),
    ("settings", "exit", "checkpoint", "combine"),
    ("observe", "simulate", "deep"),
    ("run_recorder",),
    ("loop",),
    ("deadline",),
    ("combine.gradients.combine",),
    tuple(f"combine.averaging.{name}" for name in AVERAGES),
    ("combine.choose",),
    ("training",),
    ("fleet",),
    ("launcher",),
    ("adapters",),
    ("cli",),
]
"""From the floor to the roof. A module imports from its own layer and from those below. The name of a file may stand in
another layer than its room: the two combines are made of what lies in their rooms, and use the loop."""


def modules() -> dict[str, Path]:
    names = {}
    for file in sorted(SOURCE.rglob("*.py")):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return names


MODULES = modules()


def layer_of(module: str) -> int:
    """Of the longest name that it begins with; the package itself is the roof."""
    names = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    found = [name for name in names if module == name or module.startswith(f"{name}.")]
    return names[max(found, key=len)] if found else len(LAYERS)


def imports(source: ast.AST) -> Iterator[tuple[str, int]]:
    """The library's modules that a module imports, wherever it does, and the lines; not those for types alone."""
    for_types = {
        id(inner)
        for node in ast.walk(source)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(source):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "paceline":
            base = (node.module or "").removeprefix("paceline").lstrip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}".lstrip(".")
                yield full if full in MODULES else base, node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("paceline."):
                    yield alias.name.removeprefix("paceline."), node.lineno


def upward(module: str, source: ast.AST) -> list[str]:
    return [
        f"{module}:{line} imports {other}"
        for other, line in imports(source)
        if other and layer_of(other) > layer_of(module)
    ]


def test_no_module_imports_from_a_layer_above_its_own() -> None:
    found = [fault for module, file in MODULES.items() if module for fault in upward(module, tree(file))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("pace.adaptive", "from paceline.loop.steps import Steps"),
        ("combine.header", "from paceline.deadline import proxy"),
        ("loop.step", "def late():\n    from paceline.fleet import Fleet"),
        ("transport.fixed", "import paceline.observe.log.writer"),
    ],
)
def test_an_import_upwards_is_found(module: str, line: str) -> None:
    assert upward(module, ast.parse(line))


def test_every_module_has_a_layer() -> None:
    assert not [module for module in MODULES if module and layer_of(module) == len(LAYERS)]


def test_pace_does_without_torch() -> None:
    for module, file in MODULES.items():
        if module.split(".")[0] == "pace":
            assert not re.search(r"^\s*(import|from) torch\b", file.read_text(), re.MULTILINE), module


def test_the_root_has_few_modules() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= MOST_ROOT_MODULES


def test_files_and_classes_are_of_a_size_to_be_read() -> None:
    long = {module: len(file.read_text().splitlines()) for module, file in MODULES.items()}
    assert not {module: lines for module, lines in long.items() if lines > MOST_LINES}
    large = {
        f"{module}.{node.name}": methods
        for module, file in MODULES.items()
        for node in ast.walk(tree(file))
        if isinstance(node, ast.ClassDef)
        and (methods := sum(isinstance(part, ast.FunctionDef) for part in node.body)) > MOST_METHODS
    }
    assert not large


def test_no_two_classes_have_one_name() -> None:
    names = Counter(
        node.name
        for file in MODULES.values()
        for node in tree(file).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not {name for name, count in names.items() if count > 1}


def test_no_two_programs_beside_the_library_have_one_name() -> None:
    """Tests put several of these folders on the path, in the order in which they happen to run."""
    folders = (
        "harness",
        "benchmarks",
        "benchmarks/papers",
        "examples",
        "tests",
        "tests/fleet",
        "tests/natural",
        "tests/cli",
    )
    names = Counter(file.stem for folder in folders for file in (ROOT / folder).glob("*.py"))
    assert not {name for name, count in names.items() if count > 1}
