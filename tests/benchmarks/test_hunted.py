"""What hunted.py plays and how it counts; and that a bug that is put back is reported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from crew import run_program

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import _hunted_bugs
import hunted
from _trials import Ended

SCRIPT = Path(hunted.__file__)
CASE = hunted.CASES[0]


def found(kind: str, bug: str = "") -> hunted.Found:
    case = hunted.Case("x", "", lambda *_: None, {"y": {"bug": bug}})
    return hunted.Found(hunted.Trial(case, "y", 0), kind, "", 1.0)


def test_each_variant_names_a_bug_that_there_is_or_none_and_each_case_but_one_shows_one() -> None:
    named = [{setting["bug"] for setting in case.variants.values()} for case in hunted.CASES]
    assert set().union(*named) - {""} <= _hunted_bugs.BUGS.keys()
    assert all(bugs - {""} for bugs in named)
    own = _hunted_bugs.BUGS.keys() - _hunted_bugs.MUTANTS.keys()
    assert own <= set().union(*named)


def test_trials_have_names_of_their_own_that_are_names_of_folders() -> None:
    trials = [hunted.Trial(case, variant, 0) for case in hunted.CASES for variant in case.variants]
    names = [trial.name for trial in trials]
    assert len(names) == len(set(names))
    assert all(Path(name).with_suffix(".err").stem == name for name in names)


def test_what_ended_how_is_counted_as_a_whole_and_by_case() -> None:
    one = hunted.Found(hunted.Trial(CASE, next(iter(CASE.variants)), 3), "hangs", "", 2.0)
    two = hunted.Found(hunted.Trial(CASE, next(iter(CASE.variants)), 4), "missed", "", 9.0)
    counted = hunted.figures([one, two], seconds=11.0, skipped={"h3": "no network"}, rounds=5)
    assert (counted["trials"], counted["hangs"], counted["missed"], counted["crashes"]) == (2, 1, 1, 0)
    assert counted["cases"] == {CASE.name: {"trials": 2, "hangs": 1, "crashes": 0, "unsound": 0, "missed": 1}}
    assert counted["failed"] == [one.trial.name]
    assert counted["skipped_cases"] == {"h3": "no network"}
    assert counted["slowest_s"] == 9.0


def test_an_error_of_a_trial_s_own_process_is_a_crash_with_its_text() -> None:
    trial = hunted.Trial(CASE, next(iter(CASE.variants)), 0)
    crash = hunted.found_in(trial, Ended(trial.name, None, "Traceback\nKeyError: 3"))
    assert crash.kind == "crashes"
    assert "KeyError: 3" in crash.text.splitlines()[0]
    sound = hunted.found_in(trial, Ended(trial.name, {"kind": "sound", "text": "", "seconds": 1.0}, ""))
    assert sound.kind == hunted.SOUND


def test_a_bug_with_which_nothing_went_wrong_is_named() -> None:
    told = hunted.shown([found("hangs", "a"), found("sound", "a"), found("sound", "b"), found("missed", "b")])
    assert told["shown"] == {"a in x": [1, 2], "b in x": [0, 2]}
    assert told["hidden"] == ["b"]


@pytest.mark.fleet
def test_a_bug_that_is_put_back_is_reported(tmp_path: Path) -> None:
    options = ("--bugs", "--only", "h2,h8", "--out", str(tmp_path / "trials"))
    done = run_program(SCRIPT, tmp_path, *options, within=150)
    assert done.code == 0, done.err[-3000:]
    assert done.value["cases"]["h8"]["crashes"] == 1, done.err[-3000:]
    assert done.value["shown"]["sums_of_the_old_size in h2"][0] >= 1
    assert "TypeError" in done.err
    assert done.value["hidden"] == []
