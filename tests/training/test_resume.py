"""The loops that a script makes after a checkpoint was loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.training.loading import Resume


def resumed(
    *lengths: int, over: bool, extra: Any = None, loops: str | None = None, saves: int = 0, epochs: int = 1
) -> Resume:
    """Return a resume from a checkpoint that was saved in the last of these loops, or after it."""
    steps = {
        "loop": len(lengths) - 1,
        "dealing": None if over else {},
        "epochs": epochs,
        "epoch": 0,
        "passes": {"counts": [1], "lengths": list(lengths), "told": [], "saves": saves},
    }
    return Resume(Path("c.pt"), {"steps": steps, "extra": extra, "state": {}}, loops=loops)


def test_a_checkpoint_of_the_first_loop_needs_no_word() -> None:
    resume = resumed(100, over=False)
    assert (resume.loops, resume.passing, resume.first_loop) == ("all", False, 0)


@pytest.mark.parametrize(("length", "loops", "first"), [(50, "all", 0), (80, "rest", 1)])
def test_data_of_unlike_lengths_tell_which_loops_the_script_makes(length: int, loops: str, first: int) -> None:
    resume = resumed(50, 80, over=False)
    resume.decide_loops(length, epochs=1)
    assert (resume.loops, resume.first_loop) == (loops, first)


def test_a_number_that_may_count_loops_is_asked_about() -> None:
    with pytest.raises(ValueError, match="say which loops it makes now"):
        resumed(50, 50, over=True, extra={"epoch": 2}).decide_loops(50, epochs=1)
    resume = resumed(50, 50, over=True, extra={"best": 0.5})
    resume.decide_loops(50, epochs=1)
    assert resume.loops == "all"
    assert resume.replays
    assert [resume.passes_over(loop) for loop in range(3)] == [True, False, False]


def test_other_data_are_refused() -> None:
    with pytest.raises(ValueError, match="belongs to other data"):
        resumed(50, 50, over=True).decide_loops(70, epochs=1)


def test_the_call_that_wrote_the_checkpoint_is_known_by_its_number() -> None:
    resume = resumed(50, 50, over=True, loops="all", saves=2)
    assert not resume.saved_in_the_loop
    assert [resume.is_saving_call(), resume.is_saving_call()] == [False, True]
    resume.must_have_met_saving_call()
    with pytest.raises(ValueError, match="which the script did not come by"):
        resumed(50, 50, over=True, loops="all", saves=1).must_have_met_saving_call()


def test_the_last_step_of_a_phase_belongs_to_its_data() -> None:
    last = [resumed(50, over=True, extra={"phase": phase}, loops="rest", epochs=2) for phase in (0, 1)]
    assert [(resume.first_loop, resume.same_data) for resume in last] == [(0, True), (1, False)]
