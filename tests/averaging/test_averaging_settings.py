"""What the averages may be set to."""

import math
from typing import Any

import pytest

from paceline.averaging.weighted_average import Averaging, Outer
from paceline.averaging.weights import LocalWork
from paceline.pace import make
from paceline.research.elastic_average import ElasticAverage
from paceline.training.combines import check_combine


def test_rounds_come_every_two_seconds_unless_told_otherwise() -> None:
    assert Averaging().period_s == 2.0
    assert Averaging(every_steps=8).period_s is None


def test_the_named_rule_weighs_the_work() -> None:
    work = LocalWork(steps=[3, 1])
    assert Averaging(weights="samples").mix(work).weights.tolist() == [0.75, 0.25]
    assert Averaging(weights="uniform").mix(work).weights.tolist() == [0.5, 0.5]


def test_groups_hold_every_rank_once() -> None:
    settings = Averaging(groups=[[0, 3], [1, 2]])
    assert settings.groups == ((0, 3), (1, 2))
    settings.check(4)
    for workers in (3, 5):
        with pytest.raises(ValueError, match="each rank from 0"):
            settings.check(workers)
    with pytest.raises(ValueError, match="each rank from 0 to 1 exactly once"):
        Averaging(groups=[[0, 1], [1]]).check(2)


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        ({"period_s": 0}, "period_s is 0"),
        ({"period_s": -1.0}, "above 0"),
        ({"period_s": math.inf}, "period_s is inf"),
        ({"period_s": math.nan}, "period_s is nan"),
        ({"every_steps": 0}, "every_steps is 0"),
        ({"every_steps": 1.5}, "whole number from 1"),
        ({"every_steps": True}, "whole number from 1"),
        ({"every_steps": 2, "period_s": 1.0}, "exclude each other"),
        ({"weights": "best"}, "choose one of wp, uniform, samples, normalised, mse"),
        ({"weight_decay": -1.0}, "weight_decay is -1"),
        ({"outer": 0.7}, "outer is 0.7"),
        ({"overlap": 1.5}, "overlap is 1.5"),
        ({"groups": []}, "at least one group"),
        ({"groups": [[0], []]}, "none of them empty"),
        ({"groups": 2}, "lists of ranks"),
    ],
)
def test_an_average_that_makes_no_sense_is_refused_with_what_to_do(bad: Any, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        Averaging(**bad)


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        ({"tau": 0}, "tau is 0"),
        ({"tau": 2.0}, "whole number from 1"),
        ({"exchange": "clock"}, "choose one of round, arrival"),
        ({"exchange": "arrival", "weights": "clipped"}, "give radius="),
        ({"alpha": 0.0}, "alpha is 0"),
        ({"alpha": 1.5}, r"at most 2 / \(1 \+ workers\)"),
        ({"alpha": math.nan}, "alpha is nan"),
        ({"weights": "wp"}, "choose one of fixed, dynamic, missed, clipped, known"),
        ({"momentum": 0.9}, "choose one of keep, fade, reset"),
        ({"reading": "both"}, "choose one of growth, fall"),
        ({"thresholds": (-0.1, 0.4)}, "0 <= low < high"),
        ({"thresholds": (0.0, 0.0)}, "0 <= low < high"),
        ({"thresholds": (0.4, 0.1)}, "0 <= low < high"),
        ({"thresholds": (0.0, math.nan)}, "0 <= low < high"),
        ({"thresholds": (0.1,)}, "two scores"),
        ({"coefficients": ()}, "newest first and heaviest"),
        ({"coefficients": (0.1, 0.9)}, "newest first and heaviest"),
        ({"coefficients": (0.5, -0.5)}, "numbers above 0"),
        ({"warm_up": -1}, "warm_up is -1"),
        ({"power": 0.0}, "power is 0"),
        ({"radius": 0.0}, "radius is 0"),
        ({"overlap": 1.0}, "from 0 to below 1"),
        ({"overlap": -0.1}, "overlap is -0.1"),
    ],
)
def test_an_elastic_average_that_makes_no_sense_is_refused_with_what_to_do(bad: Any, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        ElasticAverage(**bad)


def test_a_ramp_of_the_dynamic_weights_may_begin_at_a_score_of_zero() -> None:
    settings = ElasticAverage(alpha=0.2, thresholds=(0.0, 0.5), warm_up=0, coefficients=(1.0,))
    memory = settings.memory(3)
    settings.weigh(memory, [1.0, 1.0, 1.0], [True] * 3)
    exchange = settings.weigh(memory, [0.5, math.exp(0.25), 4.0], [True] * 3)
    assert exchange.pull.tolist() == pytest.approx([0.2, 0.6, 1.0])
    assert exchange.push.tolist() == pytest.approx([0.2, 0.1, 0.0])


def test_an_alpha_beyond_the_fleet_s_bound_is_refused_when_the_fleet_is_known() -> None:
    ElasticAverage(alpha=0.4).check(4)
    with pytest.raises(ValueError, match=r"stable for 0 < alpha <= 0\.2222"):
        ElasticAverage(alpha=0.4).check(8)


def test_settings_are_values() -> None:
    assert Averaging(outer=Outer(lr=0.5)) == Averaging(outer=Outer(lr=0.5))
    assert ElasticAverage(tau=2) != ElasticAverage(tau=4)


@pytest.mark.parametrize(
    "settings",
    [
        Averaging(groups=[[0, 1]]),
        Averaging(overlap=True),
        ElasticAverage(overlap=0.25),
        ElasticAverage(exchange="arrival"),
    ],
)
def test_what_needs_a_fixed_number_of_workers_is_refused_where_they_come_and_go(settings: Any) -> None:
    with pytest.raises(ValueError, match="paceline run -n WORKERS"):
        settings.check_elastic()
    with pytest.raises(ValueError, match="paceline run -n WORKERS"):
        check_combine(settings, make("equal"), 2, elastic=True)


def test_averages_as_usual_may_be_had_where_workers_come_and_go() -> None:
    for settings in (Averaging(outer=Outer()), ElasticAverage()):
        check_combine(settings, make("equal"), 2, elastic=True)


def test_an_alpha_of_ones_own_stays_as_long_as_it_is_stable() -> None:
    settings = ElasticAverage(alpha=0.5)
    assert [settings.settling_alpha(workers) for workers in (1, 2, 3)] == [0.5, 0.5, 0.5]
    assert settings.settling_alpha(4) == pytest.approx(0.9 / 4)
    pulls = settings.weigh(settings.memory(4), [1.0] * 4, [True] * 4).pull
    assert pulls.tolist() == pytest.approx([0.9 / 4] * 4)
