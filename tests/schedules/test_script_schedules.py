"""Scripts of several loops under a scheduler: whatever is called before, in, behind and between them, all ends well."""

from __future__ import annotations

import pytest
from scheduled_scripts import draw_script, play_script

CHUNK, LONG_CHUNK, LONG = 20, 200, 5_000
FOUND = (3614, 5499, 5634, 6215)
"""Seeds that showed a bug which is mended since."""


def ends_well(seed: int) -> None:
    verdict = play_script(seed)
    command = f"python benchmarks/schedules.py --scripts --only {seed}"
    assert not verdict.problems, "\n".join([str(draw_script(seed)), command, *verdict.problems])


@pytest.mark.slow
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("start", range(0, 100, CHUNK))
def test_scripts_end_well_whatever_the_schedule(start: int) -> None:
    for seed in range(start, start + CHUNK):
        ends_well(seed)


@pytest.mark.slow
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found_is_mended(seed: int) -> None:
    ends_well(seed)


@pytest.mark.long
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("start", range(100, LONG, LONG_CHUNK))
def test_scripts_end_well_whatever_the_schedule_in_many_more(start: int) -> None:
    for seed in range(start, min(start + LONG_CHUNK, LONG)):
        ends_well(seed)
