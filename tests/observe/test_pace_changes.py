"""Sentences on when the pace began deadlines or ended them."""

from __future__ import annotations

import pytest

from paceline.observe.log.reader import RunLog
from paceline.observe.words.deadlines import Switch, parse_switch, switches_text
from paceline.observe.words.lines import describe
from paceline.observe.words.verdict import verdict

BEGAN = {"event": "pace", "t": 1.0, "step": 12, "deadlines": True, "saves": 0.09, "worker": 3}
ENDED = {"event": "pace", "t": 2.0, "step": 30, "deadlines": False, "saves": 0.004, "worker": None}


def test_a_change_has_a_line_of_its_own() -> None:
    text = "after step 12 rounds have a deadline, for worker 3 kept the others waiting: a deadline saves 9 %"
    assert describe(BEGAN) == ("news", text)
    assert describe(ENDED) == ("news", "after step 30 everybody is waited for again: a deadline no longer pays")
    many = describe(BEGAN | {"worker": None})
    assert many is not None
    assert "for now this worker and now that one kept the others waiting" in many[1]


@pytest.mark.parametrize(
    "absurd",
    [{"step": -1}, {"deadlines": "yes"}, {"saves": None}, {"saves": 9.0}, {"saves": True}, {"event": "x"}],
)  # fmt: skip
def test_what_tells_no_change_is_passed_over(absurd: dict[str, object]) -> None:
    assert parse_switch(BEGAN | absurd) is None


def test_a_worker_that_cannot_be_is_not_named() -> None:
    assert parse_switch(BEGAN | {"worker": "three"}) == Switch(12, True, 0.09, None)


def test_the_verdict_says_when_and_why(make_record, run_event, tmp_path) -> None:
    records = tuple(make_record(k, (100.0, 100.0, 50.0, 25.0), (96, 96, 48, 24)) for k in range(40))
    judged = verdict(RunLog(tmp_path, run_event | {"pace": "auto"}, records=records, others=(BEGAN, ENDED)))
    assert "Rounds had a deadline from step 12 to step 30, for worker 3 kept the others waiting" in judged.text
    assert [switch["step"] for switch in judged.to_json()["switches"]] == [12, 30]
    assert "deadline" not in verdict(RunLog(tmp_path, run_event, records=records)).text


def test_many_changes_are_counted() -> None:
    began, ended = Switch(12, True, 0.09, 3), Switch(30, False, 0.0, None)
    said = switches_text([began, ended, began, ended])
    assert said.endswith("Deadlines ended and began again, 3 changes in all.")
    assert switches_text([ended]).startswith("Everybody was waited for again after step 30")
    assert switches_text([]) == ""
