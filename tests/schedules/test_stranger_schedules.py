"""A newcomer whose script makes other calls than the fleet's: it is refused, and the others train on."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from memory_fleet import CRASHED, Verdict, World, fleet_of
from scheduled_fleets import COMBINES, PACES, RECEIVED, data, play_fleet, shuffled
from torch import nn

from paceline import concurrency
from paceline.errors import FLEET_FAILED
from paceline.step.late.catch_up import MOST_BYTES

LENGTH, EPOCHS = 16, 12
ENTERS = 12
"""The number of results that worker 1 has received when the newcomer is started."""


Call = Callable[[Any], Any]


def nothing(fleet: Any) -> None:
    return


def ask(fleet: Any) -> None:
    fleet.any(True)


class StrangeOrder:
    """An order that is the fleet's in the epoch in which a newcomer enters, and another one in each that follows."""

    def __init__(self) -> None:
        self.right: set[int] = set()

    def __call__(self, epoch: int) -> list[int]:
        if epoch and not self.right:
            self.right.add(epoch)
        order = shuffled(LENGTH, epoch)
        return order if epoch in (0, *self.right) else order[::-1]


def train(
    world: World,
    slot: int,
    *,
    pace: str,
    combine: str = "gradients",
    usual: Call = nothing,
    strange: Call = nothing,
    ordered: bool = False,
) -> Any:
    new = (slot == 2 and world.size == 2) or world.newest[slot].life > 0
    order = None if not ordered else StrangeOrder() if new else partial(shuffled, LENGTH)
    with fleet_of(PACES[pace](), COMBINES[combine](), world.folder) as fleet:
        model = fleet.model(nn.Linear(3, 1, dtype=torch.float64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        fleet.track(optimizer=optimizer)
        steps = fleet.steps(data(LENGTH), global_batch=8, micro_batch=2, epochs=EPOCHS, order=order)
        for step in steps:
            for x, y, _ in step:
                concurrency.sleep(0.05)
                step.backward(nn.functional.mse_loss(model(x), y))
            step.commit(optimizer)
            (strange if new else usual)(fleet)
        return model.weight.tolist()


def play(name: str, *, newcomer: int = 2, **how: Any) -> Verdict:
    """Play a fleet that worker 2 enters, or whose worker 0 is killed and enters again."""
    program, size = partial(train, **how), 2 if newcomer == 2 else 3
    kind = "join" if newcomer == 2 else "restart"
    return play_fleet(name, program, size=size, faults=[(ENTERS, kind, 0, RECEIVED)], most_bytes=MOST_BYTES)


def ends_alone(verdict: Verdict, newcomer: str, code: int = FLEET_FAILED) -> None:
    """Expect that this life of a worker was ended by itself, and that those who were there ended well."""
    assert not verdict.problems, "\n".join(verdict.problems)
    ends = dict(re.findall(r"(worker \d\.\d) ended with (\d+)", "\n".join(verdict.log)))
    assert ends[newcomer] == str(code), "\n".join(verdict.log)
    assert {code for one, code in ends.items() if one.endswith(".0") and one != newcomer} == {"0"}
    weights = [one.value for one in verdict.outcomes.values() if one.code == 0 and one.value is not None]
    assert all(one == weights[0] for one in weights)


KINDS = [("equal", "gradients"), ("deadline", "gradients"), ("equal", "average"), ("equal", "period")]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("pace", "combine"), KINDS)
def test_a_newcomer_that_makes_a_call_of_its_own_is_refused_alone(pace: str, combine: str, seed: int) -> None:
    verdict = play(f"stranger {seed}", pace=pace, combine=combine, strange=ask)
    ends_alone(verdict, "worker 2.0")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pace", ["equal", "deadline"])
def test_a_newcomer_that_leaves_a_call_out_is_refused_alone(pace: str, seed: int) -> None:
    verdict = play(f"silent {seed}", pace=pace, usual=ask)
    ends_alone(verdict, "worker 2.0")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pace", ["equal", "deadline"])
def test_one_that_leads_is_refused_as_well(pace: str, seed: int) -> None:
    verdict = play(f"leader {seed}", newcomer=0, pace=pace, strange=ask)
    ends_alone(verdict, "worker 0.1")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pace", ["equal", "deadline"])
def test_a_newcomer_whose_order_turns_out_to_be_another_ends_alone(pace: str, seed: int) -> None:
    verdict = play(f"order {seed}", pace=pace, ordered=True)
    (crash,) = verdict.problems
    assert crash.startswith("CRASH worker 2.0"), crash
    assert "ValueError: workers disagree in order(" in crash
    verdict.problems.clear()
    ends_alone(verdict, "worker 2.0", CRASHED)
