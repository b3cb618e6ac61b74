"""Seeded scenarios: the same seed is the same matrix, and each has the trouble it is named for."""

import numpy as np
import pytest

from paceline.simulate import SCENARIOS, make, matrix


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize(("steps", "workers"), [(1, 1), (1, 7), (40, 1), (30, 158)])
def test_every_scenario_has_any_size_and_only_usable_seconds(name: str, steps: int, workers: int) -> None:
    seconds = make(name, steps=steps, workers=workers, seed=3)
    assert matrix(seconds).shape == (steps, workers)
    assert np.array_equal(seconds, make(name, steps=steps, workers=workers, seed=3))
    assert not np.array_equal(seconds, make(name, steps=steps, workers=workers, seed=4))


def relative(name: str, *, steps: int = 600, workers: int = 160) -> np.ndarray:
    """Seconds over each worker's median."""
    seconds = make(name, steps=steps, workers=workers)
    return seconds / np.median(seconds, axis=0)


def test_calm_is_calm() -> None:
    seconds = make("calm", steps=200, workers=100)
    assert seconds.std() / seconds.mean() < 0.1


def test_skewed_machines_differ_for_good() -> None:
    means = make("skewed", steps=200, workers=200).mean(axis=0)
    assert np.quantile(means, 0.95) / np.quantile(means, 0.05) > 2.5
    assert relative("skewed").std() < 0.06


def test_drifting_machines_change_their_order_slowly() -> None:
    log = np.log(make("drifting", steps=600, workers=160))
    assert np.corrcoef(log[100], log[101])[0, 1] > 0.9
    assert np.corrcoef(log[100], log[500])[0, 1] < 0.5


def test_a_burst_hits_a_whole_node_and_no_other() -> None:
    slow = relative("bursts") > 1.4
    together = np.corrcoef(slow.T.astype(float))
    assert together[0, 39] > 0.9
    assert abs(together[0, 40]) < 0.3
    assert 0.1 < slow.mean() < 0.4  # 0.03 / (0.03 + 0.1) in the long run


def test_periodic_slow_downs_come_every_twelve_steps_for_three() -> None:
    slow = relative("periodic") > 1.5
    assert slow.mean() == pytest.approx(0.25, abs=0.01)
    assert np.mean(slow[12:] == slow[:-12]) > 0.99
    assert np.all(slow[:, :40].mean(axis=1).round(1) == slow[:, 0])


def test_stalls_are_rare_and_heavy() -> None:
    seconds = relative("stalls")
    assert np.mean(seconds > 1.6) == pytest.approx(0.01, abs=0.003)
    assert seconds.max() > 20


def test_long_sequences_have_no_memory() -> None:
    seconds = relative("long-sequences")
    assert np.corrcoef(seconds[1:].ravel(), seconds[:-1].ravel())[0, 1] == pytest.approx(0, abs=0.02)
    assert seconds.std() > 0.15


@pytest.mark.parametrize(
    ("name", "size", "part"),
    [
        ("stormy", {}, "unknown scenario 'stormy'; known: calm, skewed"),
        ("calm", {"steps": 0}, "at least one step"),
        ("calm", {"workers": 0}, "at least one step and one worker"),
        ("calm", {"seed": -1}, "from 0"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused(name: str, size: dict[str, int], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        make(name, **{"steps": 3, "workers": 3, **size})
