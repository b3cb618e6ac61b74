"""Calls of a group, as the fleet's heartbeats show them. One process."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from paceline.errors import CallMismatch, FleetError
from paceline.roster.calls import BACKGROUND, CALLS, GROUP
from paceline.transport import heartbeat
from paceline.transport.call_sequences import CallSequences
from paceline.transport.heartbeat import Heartbeat


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Heartbeat]]:
    """Three workers, of which 0 and 1 are a group, with the same rules twenty times faster; none is silent."""
    for name, seconds in (("BEAT_S", 0.02), ("CHECK_S", 0.05), ("SILENT_S", 60.0)):
        monkeypatch.setattr(heartbeat, name, seconds)
    store, launcher, names = dist.HashStore(), dist.HashStore(), [f"worker {rank} (cpu)" for rank in range(3)]
    made = [
        Heartbeat(
            store,
            launcher,
            rank,
            3,
            names=names,
            sequences=CallSequences(CALLS, BACKGROUND, GROUP),
            on_failure=lambda: None,
        )
        for rank in range(3)
    ]
    for one in made[:2]:
        one.group = (0, 1)
    yield made
    for one in made:
        one.stop()


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def await_failure(one: Heartbeat) -> FleetError:
    for _ in range(3000):
        if one.failure is not None:
            return one.failure
        pause(0.01)
    raise AssertionError("no failure was found")


def test_groups_may_make_unlike_numbers_of_calls(crew: list[Heartbeat]) -> None:
    for _ in range(5):
        for one in crew[:2]:
            one.enter("local step", lane=GROUP)
        for one in crew[:2]:
            one.leave(lane=GROUP)
    for one in crew:
        one.enter("a round")
    pause(0.4)
    assert all(one.failure is None for one in crew)


def test_a_member_that_waits_for_the_fleet_while_its_group_waits_for_it_is_named(crew: list[Heartbeat]) -> None:
    crew[0].enter("local step 7", lane=GROUP)
    crew[1].enter("fleet.any()")
    failure = await_failure(crew[0])
    assert isinstance(failure, CallMismatch)
    assert "worker 0 (cpu) called local step 7, but worker 1 (cpu) called fleet.any()" in str(failure)


def test_a_member_that_has_been_in_the_groups_call_is_only_ahead(crew: list[Heartbeat]) -> None:
    for one in crew[:2]:
        one.enter("local step 7", lane=GROUP)
    crew[1].leave(lane=GROUP)
    crew[1].enter("a round")
    pause(0.4)
    assert crew[0].failure is None


def test_a_busy_worker_hears_of_a_failure_and_its_next_call_raises_it(crew: list[Heartbeat]) -> None:
    crew[0].publish("lost", "worker 1 (cpu) went silent")
    assert str(await_failure(crew[2])) == "worker 1 (cpu) went silent"
    with pytest.raises(FleetError, match="went silent"):
        crew[2].enter("a round")
