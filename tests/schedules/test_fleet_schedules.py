"""Whole elastic fleets under a scheduler: whatever the order of threads and faults, everybody ends as documented."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from mutants import mutant
from scheduled_fleets import draw, play

CHUNK, LONG_CHUNK, LONG = 25, 250, 20_000


@pytest.fixture
def one_core() -> Iterator[None]:
    """One thread runs at a time: on one core its turn passes on fastest. And garbage is soon collected where the
    collector does not look at all that was imported."""
    before = os.sched_getaffinity(0)
    gc.freeze()
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(before)[worker % len(before)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        gc.unfreeze()


def ends_well(seeds: range) -> None:
    for seed in seeds:
        verdict = play(seed)
        assert not verdict.problems, "\n".join(
            [str(draw(seed)), f"python benchmarks/schedules.py --only {seed}", *verdict.problems]
        )


@pytest.mark.slow
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("start", range(0, 500, CHUNK))
def test_fleets_end_well_whatever_the_schedule(start: int) -> None:
    ends_well(range(start, start + CHUNK))


@pytest.mark.long
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("start", range(500, LONG, LONG_CHUNK))
def test_fleets_end_well_whatever_the_schedule_in_many_more(start: int) -> None:
    ends_well(range(start, min(start + LONG_CHUNK, LONG)))


@pytest.mark.slow
def test_the_same_seed_gives_the_same_schedule() -> None:
    one, other = play(17), play(17)
    assert (one.points, one.virtual_s, one.log) == (other.points, other.virtual_s, other.log)


@pytest.mark.slow
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("lost_wake_up", 927),
        ("waits_for_itself", 2740),
        ("sums_of_the_old_size", 2740),
        ("unsettled_group", 726),
        ("waits_for_those_who_form", 678),
        ("re_enters_in_mid_call", 1890),
    ],
)
def test_a_mended_bug_is_found(name: str, seed: int) -> None:
    """With the bug put back, a schedule that shows it goes wrong again; without it, it does not."""
    with mutant(name):
        assert play(seed).problems
    assert not play(seed).problems
