"""The default pace against adaptive and joint, on every scenario: it must not lose what either of them has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.pace import Adaptive, Auto, Joint, Pacer
from paceline.pace.pacer import rows
from paceline.simulate import deadline_play, make, matrices
from paceline.simulate.matrices import SCENARIOS
from paceline.simulate.play import Floats, Outcome

STEPS, WARM_UP = 130, 25
"""In the first steps auto waits for everybody whatever the machines do: it judges up to 20 before a deadline."""
EVEN = ("calm", "skewed", "quiet")
"""Times of a worker differ by noise of 5 % at most: a deadline may gain less than is asked of it."""
LEAST = 0.03


def machines(name: str, workers: int, seed: int) -> tuple[Floats, dict[str, Any]]:
    if name == "quiet":  # as machines are with nobody else on them
        dice = np.random.default_rng(seed)
        speeds, noise = dice.standard_normal((1, workers)), dice.standard_normal((STEPS, workers))
        little = lambda rng, shape: np.exp(0.01 * rng.standard_normal(shape))  # noqa: E731
        return np.exp(0.3 * speeds + 0.005 * noise), {"noise": little}
    if name == "stuck":
        within = {"micro_batches": matrices.STUCK_MICRO_BATCHES, "noise": matrices.STUCK_NOISE}
        return matrices.stuck_machines(steps=STEPS, workers=workers, seed=seed), within
    return make(name, steps=STEPS, workers=workers, seed=seed), {}


def played(pacer: Pacer, name: str, workers: int, seed: int) -> Outcome:
    seconds, within = machines(name, workers, seed)
    return deadline_play.play(seconds, pacer, overhead_s=0.01, seed=seed, **within).after(WARM_UP)


@pytest.mark.parametrize(("workers", "seed"), [(2, 5), (6, 6)])
@pytest.mark.parametrize("name", ["quiet", *SCENARIOS])
def test_it_is_as_fast_as_adaptive_when_calm_and_as_joint_when_not(name: str, workers: int, seed: int) -> None:
    adaptive, joint, auto = (
        played(pacer, name, workers, seed).throughput for pacer in (Adaptive(), Joint(), Auto(least_gain=LEAST))
    )
    assert auto > 0.99 * adaptive
    assert auto > 0.98 * joint / (1 + LEAST if name in EVEN else 1)


def test_where_workers_get_stuck_in_micro_batches_it_is_as_fast_as_joint() -> None:
    """Each pace meets stalls of its own there, so single seeds differ by several per cent, to both sides."""
    speeds = []
    for make_one in (Joint, Auto):
        outcomes = [played(make_one(), "stuck", 4, seed) for seed in range(3, 9)]
        speeds.append(sum(one.shares.sum() for one in outcomes) / sum(one.seconds.sum() for one in outcomes))
    assert speeds[1] > 0.98 * speeds[0]


def test_on_quiet_machines_no_step_has_a_deadline_and_the_batch_never_varies() -> None:
    assert played(Auto(), "quiet", 4, 0).count_cv == 0.0


def test_the_table_has_one_row_of_it_which_the_what_if_may_advise() -> None:
    (row,) = rows(Auto, seed=3)
    assert (row.name, row.as_chosen, row.cut_to_fit) == ("auto", True, True)
