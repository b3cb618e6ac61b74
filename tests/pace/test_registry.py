"""Paces by name: registering one, what it says of itself, and the rows it gets in the simulator's table."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import paceline
from paceline.pace import DEFAULT, Equal, Fixed, Simulated, Traits, baseline, make, register, registered, traits_of
from paceline.pace import pacer as paces
from paceline.pace.pacer import played, rows
from paceline.research.forecasts import LastValue
from paceline.simulate import compare, compare_stuck
from paceline.simulate import make as scenario
from source_trees import tree


@pytest.fixture(autouse=True)
def _own_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(paces.PACES, "_entries", dict(registered()))


class Mine(Equal):
    name = "mine"
    traits = Traits(follows_speed=True)


def test_a_registered_pace_is_made_by_its_name_and_named_among_the_known() -> None:
    assert register(Mine) is Mine
    assert isinstance(make("mine"), Mine)
    with pytest.raises(
        ValueError, match=r"Known names: equal, fixed:1,1,2 .*, epoch, adaptive, cutoff, joint, auto, mine"
    ):
        make("mine:3")


def test_a_name_stands_for_one_class() -> None:
    register(Mine)
    register(Mine)
    with pytest.raises(ValueError, match="there is a pace 'mine' already, Mine: take another name"):
        register(type("Other", (Equal,), {"name": "mine"}))


@pytest.mark.parametrize("name", ["", "a:b", "a b", 3, None])
def test_a_pace_without_a_usable_name_is_refused(name: object) -> None:
    with pytest.raises(ValueError, match="a pace is a class with a name"):
        register(type("Nameless", (Equal,), {"name": name}))


def test_an_instance_is_no_class() -> None:
    with pytest.raises(ValueError, match="a pace is a class"):
        register(Equal())  # type: ignore[arg-type]


def test_a_pace_that_is_not_known_here_has_the_default_traits() -> None:
    assert traits_of("mine") == traits_of("") == Traits()
    register(Mine)
    assert traits_of("mine").follows_speed


def test_the_baseline_and_the_default_are_registered() -> None:
    assert baseline() is Equal
    assert DEFAULT in registered()


def test_every_pace_that_is_advised_exists() -> None:
    for name in registered():
        said = traits_of(name)
        assert {said.if_stalled, said.if_cut} - {""} <= set(registered()), name


def test_a_pace_is_played_as_it_says_or_by_whether_it_sets_deadlines() -> None:
    late = type("Late", (Equal,), {"name": "late", "deadlines": True})
    assert [played(kind) for kind in (Mine, late, registered()["cutoff"])] == ["shares", "rounds", "arrivals"]


def test_a_pace_has_one_row_in_the_simulator_unless_it_says_otherwise() -> None:
    assert [(row.name, type(row.pacer)) for row in rows(Mine)] == [("mine", Mine)]
    assert not rows(Fixed)
    names = [row.name for row in rows(registered()["cutoff"], forecast=LastValue())]
    assert names == ["Elfving", "last value", "smoothed", "window", "auto", "last value"]


def test_of_a_pace_with_several_rows_only_the_one_that_can_be_chosen_stands_for_it() -> None:
    class Several(Mine):
        @classmethod
        def simulated(cls, *, seed: int, forecast: object) -> list[Simulated]:
            return [Simulated("mine, one way", cls(), as_chosen=False), Simulated("mine, the usual way", cls())]

    register(Several)
    outcomes = compare(scenario("calm", steps=6, workers=3))
    found = {outcome.name: (outcome.pace, outcome.shown) for outcome in outcomes if outcome.name.startswith("mine")}
    assert found == {"mine, one way": ("", False), "mine, the usual way": ("mine", True)}


def test_a_registered_pace_is_in_both_tables_of_the_simulator() -> None:
    register(Mine)
    for outcomes in (
        compare(scenario("calm", steps=6, workers=3)),
        compare_stuck(scenario("calm", steps=6, workers=3)),
    ):
        assert "mine" in {outcome.pace for outcome in outcomes}
        assert (outcomes[0].pace, outcomes[-1].pace) == (Equal.name, "")


def test_no_file_outside_of_the_room_knows_a_pace() -> None:
    """But for the default of `paceline.join`, which stands in its signature so that help shows it."""
    root = Path(paceline.__file__).parent
    names = set(registered()) - {"equal", "epoch", "fixed", "auto"}  # these words have other meanings too
    classes = {kind.__name__ for kind in registered().values()}
    found = {
        (str(file.relative_to(root)), word)
        for file in sorted(root.rglob("*.py"))
        if file.relative_to(root).parts[0] not in ("pace", "research", "__init__.py")
        for word in (_strings(file) & names) | (_imported(file) & classes)
    }
    assert found <= {("fleet.py", DEFAULT)}


def _strings(file: Path) -> set[str]:
    nodes = ast.walk(tree(file))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _imported(file: Path) -> set[str]:
    """Names from this room."""
    nodes = [node for node in ast.walk(tree(file)) if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in nodes if (node.module or "").startswith("paceline.pace") for alias in node.names}
