"""Whole elastic fleets under a scheduler: whatever the order of threads and faults, everybody ends as documented."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from mutants import MUTANTS, mutant
from scheduled_fleets import draw, play

CHUNK, LONG_CHUNK, LONG = 25, 250, 20_000


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


SHOWN_BY: dict[str, tuple[int, dict[str, Any], int]] = {
    "lost_wake_up": (1278, {"size": 2, "faults": (), "calls": {}, "stalls": 0.2, "epochs": 8}, 12),
    "waits_for_itself": (2740, {}, 0),
    "unsettled_group": (726, {}, 38),
    "waits_for_those_who_form": (678, {}, 0),
    "trusts_old_digests": (183, {}, 183),
    "re_enters_in_mid_call": (
        1890,
        {
            "pace": "count",
            "order": False,
            "calls": dict(
                enumerate(["evaluate", "evaluate", "predict", "evaluate", "save", "save", *["evaluate"] * 2])
            ),
            "slow": (0.02,) * 4,
            "faults": ((115, "freeze", 1, "call"),),
        },
        1,
    ),
}
"""By mended bug: the case in which it shows, as the seed of a case and what is otherwise in it, and the schedule that
showed it last. Any change of the library moves schedules; others of the same case then show it."""
SEARCHED = 300
BY_PROCESSES = {"sums_of_the_old_size"}
"""Mended bugs that no schedule is known to show now: hunted.py shows them with real processes (test_hunted.py)."""


def test_each_mended_bug_has_what_shows_it() -> None:
    assert SHOWN_BY.keys() | BY_PROCESSES == MUTANTS.keys()


@pytest.mark.slow
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("name", sorted(SHOWN_BY))
def test_a_mended_bug_is_found(name: str) -> None:
    """With the bug put back, a schedule of its case goes wrong; without it, the same schedule does not."""
    seed, changes, first = SHOWN_BY[name]
    case = replace(draw(seed), **changes)
    with mutant(name):
        shown = next((schedule for schedule in (first, *range(SEARCHED)) if play(schedule, case=case).problems), None)
    assert shown is not None
    assert not play(shown, case=case).problems
