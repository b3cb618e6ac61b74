"""Every public name says what it is: in ``help()``, in an editor and in the API reference.

The reference page of the documentation is made from the same docstrings (docs/reference.md).
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import paceline
from source_trees import tree

PUBLIC = {name: getattr(room, name) for room in (paceline, paceline.research) for name in room.__all__}
CLASSES = [name for name, value in PUBLIC.items() if inspect.isclass(value)]
HANDLED = ["Fleet", "Step"]
"""What a user holds in the loop: their plain attributes stand in the class's docstring, where ``help()`` shows them."""


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_class_method_and_property_has_a_docstring(name: str) -> None:
    kind = PUBLIC[name]
    assert not (kind.__doc__ or f"{name}(").startswith(f"{name}("), "what a dataclass writes by itself does not count"
    bare = [member for member, value in members(kind) if is_code(value) and not inspect.getdoc(getattr(kind, member))]
    assert not bare, f"{name}: {bare}"


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_value_of_a_class_says_what_it_is(name: str) -> None:
    kind = PUBLIC[name]
    said = {attribute for part in kind.__mro__ for attribute in described(part)}
    plain = {member for member, value in members(kind) if not is_code(value)}
    fields = set(getattr(kind, "__dataclass_fields__", ()))
    assert not (plain | fields) - said, name


@pytest.mark.parametrize("name", HANDLED)
def test_help_shows_every_public_attribute(name: str) -> None:
    kind = PUBLIC[name]
    entries = {line.split()[0] for line in (inspect.getdoc(kind) or "").splitlines() if line.startswith("    ")}
    missing = own_attributes(kind) - entries
    assert not missing, f"{name}: add {sorted(missing)} to Attributes: in its docstring"


@pytest.mark.parametrize("name", ["Adaptive", "Auto", "Cutoff", "Fixed", "Joint"])
def test_every_setting_of_a_pace_is_explained(name: str) -> None:
    kind = PUBLIC[name]
    unsaid = [setting for setting in inspect.signature(kind).parameters if f"``{setting}``" not in kind.__doc__]
    assert not unsaid, f"{name}: {unsaid}"


def test_the_docstring_of_join_names_every_pace_and_combine() -> None:
    from paceline.pace import registered

    text = paceline.join.__doc__ or ""
    for word in [*registered().keys() - {"fixed"}, "fixed:1,1,2", "gradients", "average", "elastic-average"]:
        assert f'"{word}"' in text, word
    for word in ("Adaptive", "Auto", "Equal", "Fixed", "Epoch", "Joint", "Cutoff", "Averaging", "ElasticAverage"):
        assert word in text, word


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """The public names in the bodies of the class and of its bases in this library."""
    for part in kind.__mro__:
        if part.__module__.startswith("paceline"):
            yield from ((name, value) for name, value in vars(part).items() if not name.startswith("_"))


def is_code(value: Any) -> bool:
    return inspect.isroutine(value) or isinstance(value, (property, classmethod, staticmethod))


def described(kind: type) -> set[str]:
    """Names in the class's body with a docstring below them."""
    if not kind.__module__.startswith("paceline"):
        return set()
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    pairs = zip(tree.body, tree.body[1:], strict=False)
    return {name for line, text in pairs if is_text(text) for name in targets(line)}


def is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)


def targets(line: ast.stmt) -> list[str]:
    if isinstance(line, ast.AnnAssign):
        return [line.target.id] if isinstance(line.target, ast.Name) else []
    return (
        [target.id for target in line.targets if isinstance(target, ast.Name)] if isinstance(line, ast.Assign) else []
    )


def own_attributes(kind: type) -> set[str]:
    """Public names that the class's methods assign to ``self``."""
    stored = (node for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind)))) if is_store(node))
    return {node.attr for node in stored if not node.attr.startswith("_")}


def is_store(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


NO_VERBS = {
    *("A", "All", "An", "By", "Each", "Everybody", "How", "It", "Its", "No", "None", "Nothing", "Of", "One", "The"),
    *("What", "When", "Where", "Whether", "Which", "Who", "Whose", "With"),
}


def fragments(source: ast.AST) -> list[str]:
    """Return the functions whose docstring is no sentence with a verb; a property's is a noun phrase."""
    return [
        f"{node.name}: {text.splitlines()[0]}"
        for node in ast.walk(source)
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node))
        if not any("property" in ast.unparse(one) for one in node.decorator_list)
        if text.split()[0].strip(",:;.") in NO_VERBS
    ]


NO_NOUNS = {
    *("After", "Before", "By", "Called", "Counted", "Dealt", "Everybody", "False", "For", "From", "How", "It", "Its"),
    *("No", "Nothing", "Of", "Once", "True", "What", "When", "Where", "Which", "Who", "Whose", "With"),
}
NOUNS_TOO = {
    *("Changes", "Checks", "Log", "Name", "Names", "Notes", "Pass", "Passes", "Reports", "Rounds", "Runs", "Seed"),
    *("Signals",),
}
"""Words that begin the docstring of some function, as verbs, and are nouns as well."""
NAMED_BY_NOUNS = ("pace", "feed", "checkpoint", "observe", "simulate", "machines", "launcher", "training")
"""The rooms whose classes and attributes are held to nouns."""


def verbs(sources: Iterable[ast.AST]) -> set[str]:
    """Return the words with which functions' docstrings begin, and their third person."""
    functions = [node for source in sources for node in ast.walk(source) if isinstance(node, ast.FunctionDef)]
    plain = [node for node in functions if not any("property" in ast.unparse(one) for one in node.decorator_list)]
    found = {text.split()[0].strip(",:;.") for node in plain if (text := ast.get_docstring(node))}
    return found | {f"{verb}s" for verb in found} | {f"{verb}es" for verb in found} | {f"{v[:-1]}ies" for v in found}


def named_without_a_noun(source: ast.AST, verbs: set[str]) -> list[str]:
    """Return the classes and attributes whose docstring does not begin with a noun."""
    texts = [(node.name, ast.get_docstring(node)) for node in ast.walk(source) if isinstance(node, ast.ClassDef)]
    for node in ast.walk(source):
        body = getattr(node, "body", None)
        for line, text in pairwise(body if isinstance(body, list) else []):
            if isinstance(line, (ast.Assign, ast.AnnAssign)) and is_text(text):
                texts.append((ast.unparse(line).partition("\n")[0], text.value.value))
    begins = [(name, text, text.split()[0].strip(",:;.")) for name, text in texts if text]
    return [
        f"{name}: {text.splitlines()[0]}"
        for name, text, word in begins
        if word in NO_NOUNS or (word in verbs and word not in NOUNS_TOO) or not re.match(r"[A-Z`]", word)
    ]


def test_the_docstring_of_a_class_or_attribute_begins_with_a_noun() -> None:
    source = Path(paceline.__file__).parent
    known = verbs(tree(file) for file in source.rglob("*.py"))
    found = [
        f"{file.relative_to(source)}: {one}"
        for room in NAMED_BY_NOUNS
        for file in sorted((source / room).rglob("*.py"))
        for one in named_without_a_noun(tree(file), known)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text", ["How long it takes.", "Returns the shares.", "What is left.", "... or twice running."]
)
def test_a_name_without_a_noun_is_found(text: str) -> None:
    for code in (f'class Pause:\n    """{text}"""', f'PAUSE_S = 1.0\n"""{text}"""'):
        assert named_without_a_noun(ast.parse(code), {"Returns"})
        assert not named_without_a_noun(ast.parse(code.replace(text, "Seconds that it takes.")), {"Returns"})


def test_the_docstring_of_a_function_begins_with_a_verb() -> None:
    source = Path(paceline.__file__).parent
    found = [f"{file.relative_to(source)}: {one}" for file in source.rglob("*.py") for one in fragments(tree(file))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", ["Whether it is over.", "The sum.", "Of a worker: its rank."])
def test_a_fragment_is_found(text: str) -> None:
    assert fragments(ast.parse(f'def over():\n    """{text}"""'))
    assert not fragments(ast.parse(f'@property\ndef over(self):\n    """{text}"""'))
