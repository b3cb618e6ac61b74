"""The combines by name: the properties of each, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

import paceline
from lone import join, linear, numbers, sgd, training
from paceline.averaging.combine import AveragingCombine
from paceline.pace import make as make_pacer
from paceline.step.combine import GradientCombine
from paceline.training import combines as choose
from paceline.training.combines import (
    check_combine,
    failures_from_env,
    kind_of,
    make_combine,
    name_of,
    register,
)

NAMES = ("gradients", "average", "elastic-average")


@pytest.fixture(autouse=True)
def own_kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the registry after a test."""
    monkeypatch.setattr(choose, "_KINDS", dict(choose._KINDS))
    return


# -- what was asked for ------------------------------------------------------------------------------------------------


def test_a_name_without_settings_stays_a_name_and_an_average_gets_its_usual_ones() -> None:
    assert make_combine("gradients") == "gradients"
    assert make_combine("average") == paceline.Averaging(period_s=2.0)
    assert make_combine("elastic-average") == paceline.research.ElasticAverage()


@pytest.mark.parametrize("settings", [paceline.Averaging(every_steps=3), paceline.research.ElasticAverage(tau=5)])
def test_settings_are_taken_as_they_are(settings: Any) -> None:
    assert make_combine(settings) is settings


@pytest.mark.parametrize("asked", ["averages", "", 3, None, ["average"]])
def test_what_is_unknown_is_refused_with_the_names_that_there_are(asked: Any) -> None:
    with pytest.raises(ValueError, match=r"unknown combine .*; known: gradients, average, elastic-average$"):
        make_combine(asked)


def test_the_names_that_the_command_line_knows_are_those_of_the_registry() -> None:
    assert choose.names() == NAMES
    assert [name_of(make_combine(name)) for name in NAMES] == list(NAMES)


def test_each_name_has_its_class_and_the_averages_are_local() -> None:
    kinds = [kind_of(make_combine(name)) for name in NAMES]
    assert [kind.make for kind in kinds] == [GradientCombine, AveragingCombine, AveragingCombine]
    assert [kind.local for kind in kinds] == [False, True, True]


# -- one of the user's own ---------------------------------------------------------------------------------------------


class Doubled(GradientCombine):
    """The mean gradient, times a factor."""

    def __init__(self, loop: Any, settings: Any = None, parts: Any = None) -> None:
        super().__init__(loop)
        self.factor, self.models = getattr(settings, "factor", 2.0), parts.models

    def exchange(self, step: Any, clip_norm: float | None, *, own: bool) -> bool:
        applied = super().exchange(step, clip_norm, own=own)
        for parameter in self.loop.gradients.everything:
            parameter.grad *= self.factor
        return applied


@dataclass(frozen=True)
class Factor:
    factor: float = 3.0
    name: ClassVar[str] = "times"

    def check(self, workers: int) -> None:
        if self.factor == 0:
            raise ValueError(f"a factor of 0 moves none of {workers} workers")


def trained(folder: Path, combine: Any) -> Any:
    with join(folder, combine=combine) as fleet:
        model = fleet.model(linear())
        before = model.weight.detach().clone()
        steps = training(fleet, model, sgd(model), numbers(8), global_batch=8, micro_batch=4, shuffle=False)
        assert [step.index for step in steps] == [0]
        return model.weight.detach() - before


def test_a_registered_combine_is_found_by_its_name_and_trains(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown combine 'doubled'"):
        join(tmp_path, combine="doubled")
    register("doubled", Doubled)
    assert make_combine("doubled") == "doubled"
    usual, doubled = trained(tmp_path / "usual", "gradients"), trained(tmp_path / "doubled", "doubled")
    assert (doubled - 2 * usual).abs().max() < 1e-12


def test_a_registered_combine_gets_its_settings_and_what_it_is_made_of(tmp_path: Path) -> None:
    register("times", Doubled, settings=Factor)  # type: ignore[arg-type]
    assert make_combine("times") == Factor(3.0)  # type: ignore[comparison-overlap]
    usual = trained(tmp_path / "usual", "gradients")
    for asked, factor in (("times", 3.0), (Factor(5.0), 5.0)):
        assert (trained(tmp_path / str(factor), asked) - factor * usual).abs().max() < 1e-12
    with pytest.raises(ValueError, match="a factor of 0 moves none of 1 workers"):
        join(tmp_path, combine=Factor(0.0))
    with pytest.raises(ValueError, match="known: gradients, average, elastic-average, times"):
        make_combine("other")


# -- what makes no sense together --------------------------------------------------------------------------------------


@pytest.mark.parametrize("combine", ["average", "elastic-average"])
@pytest.mark.parametrize("pace", ["joint", "cutoff"])
def test_local_combines_refuse_a_pace_that_sets_deadlines(combine: str, pace: str) -> None:
    with pytest.raises(ValueError, match=f"pace '{pace}' sets deadlines .* combine '{combine}' has none"):
        check_combine(make_combine(combine), make_pacer(pace), 2)
    check_combine("gradients", make_pacer(pace), 2)
    for other in ("adaptive", "equal", "auto"):
        check_combine(make_combine(combine), make_pacer(other), 2)


def test_a_local_combine_of_the_users_own_refuses_deadlines_too() -> None:
    register("doubled", Doubled)
    register("alone", Doubled, local=True)
    check_combine("doubled", make_pacer("joint"), 2)
    with pytest.raises(ValueError, match="combine 'alone' has none: take pace adaptive or equal"):
        check_combine("alone", make_pacer("joint"), 2)


def test_settings_are_checked_against_the_number_of_workers() -> None:
    equal = make_pacer("equal")
    check_combine(paceline.Averaging(groups=[[0, 1], [2]]), equal, 3)
    with pytest.raises(ValueError, match="each rank from 0 to 1 exactly once"):
        check_combine(paceline.Averaging(groups=[[0, 1], [2]]), equal, 2)
    check_combine(paceline.research.ElasticAverage(alpha=0.5), equal, 2)
    with pytest.raises(ValueError, match="alpha"):
        check_combine(paceline.research.ElasticAverage(alpha=0.5), equal, 9)


@pytest.mark.parametrize(
    "settings",
    [paceline.Averaging(overlap=True), paceline.Averaging(groups=[[0]]), paceline.research.ElasticAverage(overlap=0.2)],
)
def test_what_needs_a_fleet_of_fixed_size_is_refused_where_workers_come_and_go(settings: Any) -> None:
    equal = make_pacer("equal")
    check_combine(settings, equal, 1)
    with pytest.raises(ValueError, match="come and go"):
        check_combine(settings, equal, 1, elastic=True)
    check_combine(paceline.Averaging(), equal, 1, elastic=True)


def test_failures_to_emulate_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_FAILURES", raising=False)
    assert failures_from_env(3) is None
    monkeypatch.setenv("PACELINE_FAILURES", "lost:0.5")
    found = failures_from_env(3)
    assert found is not None
    assert found.describe() == "exchange lost with p 0.5; seed 3"
