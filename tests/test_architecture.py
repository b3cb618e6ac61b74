"""The shape of the library: its layers, its rooms, and how large a file and a class may be."""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from source_trees import tree

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "paceline"
MOST_ROOT_MODULES, MOST_METHODS = 10, 36
MANY_LINES = 700
"""Lines past which a file should be read for its second idea: a sign, never a limit."""

LAYERS: list[tuple[str, ...]] = [
    ("concurrency", "errors", "records", "renamed"),
    ("worker_exit", "pace", "roster", "machines"),
    ("feed", "transport"),
    ("settings",),
    ("checkpoint", "observe"),
    ("gradients", "simulate", "run_recorder"),
    ("step", "page"),
    ("averaging",),
    ("training",),
    ("fleet",),
    ("launcher",),
    ("adapters",),
    ("cli",),
    ("research",),
]
"""From the floor to the roof: packages, and the modules at the root. A module imports from its own package and from
those below."""


def modules() -> dict[str, Path]:
    names = {}
    for file in sorted(SOURCE.rglob("*.py")):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return names


MODULES = modules()


def layer_of(module: str) -> int:
    """Return the layer of a module's package; that of the package itself is the roof."""
    package = module.partition(".")[0]
    return next((number for number, layer in enumerate(LAYERS) if package in layer), len(LAYERS))


def imports(source: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the library's modules that a module imports, wherever it does and be it for types alone, and the lines."""
    for node in ast.walk(source):
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
        if other and other.partition(".")[0] != module.partition(".")[0] and layer_of(other) >= layer_of(module)
    ]


def test_a_package_imports_from_lower_layers_alone_so_none_imports_in_a_circle() -> None:
    found = [fault for module, file in MODULES.items() if module for fault in upward(module, tree(file))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("pace.adaptive", "from paceline.step.steps import Steps"),
        ("gradients.header", "from paceline.step.late import proxy"),
        ("feed.dealing", "if TYPE_CHECKING:\n    from paceline.settings import whole_number"),
        ("pace.adaptive", "from paceline.roster import client"),
        ("step.step", "def late():\n    from paceline.fleet import Fleet"),
        ("transport.fixed", "import paceline.observe.log.writer"),
    ],
)
def test_an_import_upwards_is_found(module: str, line: str) -> None:
    assert upward(module, ast.parse(line))


def research_named(source: ast.AST) -> list[int]:
    """Return the lines that import `paceline.research`, or name a module of it in a string."""
    strings = [
        node.lineno
        for node in ast.walk(source)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("paceline.research")
    ]
    return [line for other, line in imports(source) if other.partition(".")[0] == "research"] + strings


REGISTRIES = {"pace", "pace.forecast", "averaging.merge", "averaging.weights", "cli.learn"}
"""Modules that name a plug-in of research, to be imported when it is asked for."""


def test_nothing_outside_of_research_imports_it_and_registries_alone_name_it() -> None:
    core = {module: tree(file) for module, file in MODULES.items() if module and not module.startswith("research")}
    assert not [
        module for module, source in core.items() if any(other.startswith("research") for other, _ in imports(source))
    ]
    assert {module for module, source in core.items() if research_named(source)} == REGISTRIES


@pytest.mark.parametrize(
    "line",
    [
        "from paceline.research import cutoff",
        "def late():\n    import paceline.research.cutoff",
        "if TYPE_CHECKING:\n    from paceline.research.cutoff import Cutoff",
        "import_module('paceline.research.cutoff')",
    ],
)
def test_an_import_of_research_is_found(line: str) -> None:
    assert research_named(ast.parse(line))


def test_no_module_asks_which_merge_or_settings_it_has() -> None:
    """What others need to know of a merge, its base classes declare (`averaging/merge.py`)."""
    merges = {"Merge", "MergeSettings", "Averaging", "WeightedAverage", "ElasticAverage", "Springs"}
    found = [
        f"{module}:{node.lineno}"
        for module, file in MODULES.items()
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
        if merges & {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
    ]
    assert not found


def test_every_module_has_a_layer() -> None:
    assert not [module for module in MODULES if module and layer_of(module) == len(LAYERS)]


def test_pace_does_without_torch() -> None:
    for module, file in MODULES.items():
        if module.split(".")[0] == "pace":
            assert not re.search(r"^\s*(import|from) torch\b", file.read_text(), re.MULTILINE), module


def test_the_root_has_few_modules() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= MOST_ROOT_MODULES


def long_files(lines: Mapping[str, int]) -> dict[str, int]:
    """Return the files past `MANY_LINES`, and warn of each."""
    long = {module: count for module, count in lines.items() if count > MANY_LINES}
    for module, count in long.items():
        warnings.warn(f"{module} has {count} lines: look for its second idea", stacklevel=2)
    return long


def test_a_long_file_is_a_sign_and_no_error() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert long_files({"step.long": 701, "step.usual": 700}) == {"step.long": 701}
    assert [str(one.message) for one in said] == ["step.long has 701 lines: look for its second idea"]
    long_files({module: len(file.read_text().splitlines()) for module, file in MODULES.items()})


def test_classes_are_of_a_size_to_be_read() -> None:
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
