"""Larger fleets, deadlines of all lengths, calls of averages, and faults in every call, under a scheduler."""

from __future__ import annotations

import gc

import pytest
from scheduled_wide import draw_wide, play_wide
from scheduler import Task

CHUNK, LONG_CHUNK, LONG = 20, 100, 2_000
FOUND = (40705, 63594)
"""Seeds that showed a bug which is mended since."""


def ends_well(seed: int) -> None:
    verdict = play_wide(seed)
    command = f"python benchmarks/schedules.py --wide --only {seed}"
    assert not verdict.problems, "\n".join([str(draw_wide(seed)), command, *verdict.problems])


@pytest.mark.slow
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("start", range(0, 60, CHUNK))
def test_wide_scripts_end_well_whatever_the_schedule(start: int) -> None:
    for seed in range(start, start + CHUNK):
        ends_well(seed)


@pytest.mark.slow
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found_is_mended(seed: int) -> None:
    ends_well(seed)


@pytest.mark.long
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("start", range(60, LONG, LONG_CHUNK))
def test_wide_scripts_end_well_whatever_the_schedule_in_many_more(start: int) -> None:
    for seed in range(start, min(start + LONG_CHUNK, LONG)):
        ends_well(seed)


def test_nothing_is_left_of_a_run_whose_workers_were_killed() -> None:
    seed = next(seed for seed in range(200) if any(kind == "kill" for _, kind, _, _ in draw_wide(seed).faults))
    assert any("KILL" in line for line in play_wide(seed).log)
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is Task]
