"""Closed forms of goodput against the simulated rules, injected failures, and the time for a piece of work."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from paceline.simulate.goodput import (
    Change,
    ElasticRule,
    FailureCosts,
    RestartRule,
    compare_goodput,
    failures,
    play,
    young_s,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from _goodput_formulas import elastic_goodput, failures_every, restart_goodput, seconds_for

HOUR = 3600.0
COSTS = FailureCosts(
    kill_s=0.1, join_s=1.0, start_s=20.0, load_s=5.0, save_s=0.1, write_s=5.0, every_s=300.0, step_s=0.5
)
ONE = [Change(100.0, 1, comes=False), Change(130.0, 1, comes=True)]


@pytest.mark.parametrize("hours", [2.0, 10.0, 80.0])
@pytest.mark.parametrize("every_s", [60.0, 300.0, 700.0])
def test_a_restart_on_a_spare_machine_meets_dalys_formula(hours: float, every_s: float) -> None:
    machines, costs = 16, replace(COSTS, every_s=every_s)
    mean_s = hours * HOUR / machines
    drawn = failures(machines, mtbf_s=hours * HOUR, replace_s=0.0)
    spent = play(RestartRule([1.0] * machines, costs), drawn, until_s=20_000 * mean_s)
    expected = restart_goodput(fleet_mtbf_s=mean_s, every_s=every_s, write_s=costs.write_s, restart_s=25.0)
    assert spent.useful / spent.total == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("write_s", "mean_s"), [(1.0, 3600.0), (5.0, 3600.0), (20.0, 20_000.0)])
def test_youngs_interval_is_near_the_best_of_that_formula(write_s: float, mean_s: float) -> None:
    def at(every_s: float) -> float:
        return restart_goodput(fleet_mtbf_s=mean_s, every_s=every_s, write_s=write_s, restart_s=30.0)

    young = young_s(write_s, mean_s)
    best = max((0.05 * number * young for number in range(1, 80)), key=at)
    assert best == pytest.approx(young, rel=0.1)
    first_order = 1 - math.sqrt(2 * write_s / mean_s) - 30.0 / mean_s
    assert at(young) == pytest.approx(first_order, abs=0.01)


@pytest.mark.parametrize("hours", [1.0, 5.0, 50.0])
def test_paceline_meets_its_own_formula(hours: float) -> None:
    timing = {"mtbf_s": hours * HOUR, "replace_s": 300.0}
    expected = elastic_goodput(16, COSTS, **timing)
    (found,) = (one for one in compare_goodput([1.0] * 16, COSTS, **timing) if one.rule == "Paceline")
    assert found.goodput == pytest.approx(expected, rel=0.01)


def test_injected_failures_come_between_their_bounds() -> None:
    drawn = list(islice(failures_every(8, between_s=(2700.0, 4500.0), replace_s=600.0), 400))
    lost = [change.at_s for change in drawn if not change.comes]
    gaps = [after - before for before, after in zip([0.0, *lost], lost, strict=False)]
    assert min(gaps) >= 2700
    assert max(gaps) <= 4500
    assert sum(gaps) / len(gaps) == pytest.approx(3600, rel=0.03)


def test_the_time_for_a_piece_of_work() -> None:
    costs = replace(COSTS, every_s=math.inf)
    assert seconds_for(80.0, ElasticRule([1.0], costs), [], limit_s=1e4) == pytest.approx(80.0, abs=2e-3)
    took_s = seconds_for(300.0, ElasticRule([1.0, 1.0], costs), ONE, limit_s=1e4)
    assert play(ElasticRule([1.0, 1.0], costs), ONE, until_s=took_s).useful == pytest.approx(300.0, abs=1e-2)
    with pytest.raises(ValueError, match="not done after 150 s"):
        seconds_for(300.0, RestartRule([1.0, 1.0], costs), ONE, limit_s=150.0)
