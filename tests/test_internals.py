"""The page on the inside names files, classes, threads and phases: all of them exist, and it stays short."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from paceline.step.step_state import TRANSITIONS, LoopPhase, RoundPhase
from source_trees import tree

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "paceline"
PAGE = (ROOT / "docs" / "internals.md").read_text()
OF_OTHERS = {"p.grad", "step.add", "paceline watch", "paceline host", "paceline.launch", "src/paceline"}
"""What stands in backticks and is neither a file nor a name of the library's inside."""
MOST_CALLS, MOST_WORDS = 15, 1950
MOST_FILES = (12, 12, 14)
"""The files that a step, a death and a step with a deadline may pass."""


def code(text: str) -> list[str]:
    """What stands in backticks outside of blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


class Names:
    """What the library defines: classes with their members, functions and constants, and the names of threads."""

    def __init__(self) -> None:
        self.classes: dict[str, set[str]] = {}
        self.bases: dict[str, list[str]] = {}
        self.others: set[str] = set()
        self.threads: set[str] = set()
        self.unnamed: list[str] = []
        for file in SOURCE.rglob("*.py"):
            self._add_module(tree(file))
            for call in ast.walk(tree(file)):
                if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "Thread":
                    named = [word.value for word in call.keywords if word.arg == "name"]
                    self.threads |= {word.value for word in named if isinstance(word, ast.Constant)}
                    self.unnamed += [] if named else [f"{file.name}:{call.lineno}"]

    def _add_module(self, module: ast.Module) -> None:
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                self.classes.setdefault(node.name, set()).update(members(node))
                self.bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
            else:
                self.others |= defined(node)

    def has(self, name: str) -> bool:
        """Whether this is a class, a class's own or inherited member, a function, a constant, or a member of any class
        where no class is named."""
        owner, _, member = name.partition(".")
        if member:
            return member in self.members_of(owner)
        return name in self.classes or name in self.others or any(name in known for known in self.classes.values())

    def members_of(self, owner: str) -> set[str]:
        inherited = [self.members_of(base) for base in self.bases.get(owner, ())]
        return self.classes.get(owner, set()).union(*inherited)


def defined(node: ast.stmt) -> set[str]:
    """The names that a statement gives: a function, or a variable."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}


def members(kind: ast.ClassDef) -> set[str]:
    """Methods, fields, and what its methods set on ``self``."""
    own = {
        part.attr
        for part in ast.walk(kind)
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self"
        if isinstance(part.ctx, ast.Store)
    }
    return own.union(*map(defined, kind.body))


@cache
def names() -> Names:
    return Names()


def wrong(text: str) -> list[str]:
    """What the text names and nobody knows."""
    return [word for word in code(text) if word not in OF_OTHERS and not known(word)]


def known(word: str) -> bool:
    if "/" in word or word.endswith(".py"):
        return (SOURCE / word).exists() or (ROOT / word).exists()
    if word.startswith("paceline-"):
        return word in names().threads
    return bool(re.fullmatch(r'pace="\w+"', word)) or names().has(word)


def test_every_file_and_name_on_the_page_exists() -> None:
    assert len(code(PAGE)) > 150
    assert not wrong(PAGE)


@pytest.mark.parametrize(
    "name",
    ["loop/turn.py", "Turn", "Steps.books", "TrainingState.opens", "combined_header", "paceline-undertaker", "rooms/"],
)
def test_a_wrong_name_is_found(name: str) -> None:
    assert wrong(f"First `Steps.__iter__` (`step/steps.py`), then `{name}`.") == [name]


def test_every_call_of_a_list_stands_with_a_file_that_has_it() -> None:
    calls = re.findall(r"^\d+\. `(\w+)\.?(\w*)` \(`([\w/]+\.py)`\)", PAGE, re.MULTILINE)
    assert len(calls) > 40
    for owner, member, file in calls:
        text = (SOURCE / file).read_text()
        assert re.search(rf"^(class|def) {owner}\b", text, re.MULTILINE), (owner, file)
        assert not member or re.search(rf"\bdef {member}\b", text), (owner, member, file)


def test_the_page_is_short() -> None:
    lists = re.findall(r"(?:^\d+\. .*\n)+", PAGE, re.MULTILINE)
    assert len(lists) == 3
    assert all(len(calls.splitlines()) <= MOST_CALLS for calls in lists)
    prose = PAGE.partition("## Every wait has an end")[0]  # what follows is for looking up
    assert sum(bool(re.search("[A-Za-z]", word)) for word in prose.split()) < MOST_WORDS


def test_a_step_a_death_and_a_deadline_pass_few_files() -> None:
    lists = re.findall(r"(?:^\d+\. .*\n)+", PAGE, re.MULTILINE)
    passed = [{word for word in code(calls) if word.endswith(".py")} for calls in lists]
    assert all(len(files) <= most for files, most in zip(passed, MOST_FILES, strict=True)), passed


def test_every_thread_is_in_the_table() -> None:
    assert len(names().threads) > 10
    assert not names().threads - set(code(PAGE))
    assert not names().unnamed


def test_the_diagram_shows_the_transitions_of_a_step() -> None:
    shown = dict(re.findall(r"^  ([A-Z_]+) +-> (\(end\)|[A-Z_]+(?:, [A-Z_]+)*)", PAGE, re.MULTILINE))
    phases: list[LoopPhase | RoundPhase] = [*LoopPhase, *RoundPhase]
    assert set(shown) == {phase.name for phase in phases}
    for phase in phases:
        after = set() if shown[phase.name] == "(end)" else set(shown[phase.name].split(", "))
        assert after == {other.name for other in TRANSITIONS[phase]}, phase
