"""Random small programs in the style of users: each is right, as one process is, or refused. There is no third end."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from crew import nursery
from habits import LOOPS, Habits, accelerate_habits, habits, may_refuse, must_refuse, script
from hypothesis import HealthCheck, Phase, given, seed, settings
from judge import judge, ledger_and_audit_agree, replayed
from programs import results

from paceline.observe import RunLog, read_log

pytestmark = pytest.mark.fleet

PROGRAMS = settings(
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # a program that fails is printed whole: to make it smaller takes long
)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Every worker with Accelerate's loop would take seconds to import it."""
    if "accelerate" in LOOPS:
        nursery().load("paceline.adapters.accelerate")


def look_at(one: Habits) -> None:
    with TemporaryDirectory() as folder:
        judge(one, Path(folder) / "program")


def programs(number: int) -> Callable[[], None]:
    """Judges so many of them."""
    return settings(PROGRAMS, max_examples=number)(given(habits())(look_at))


def drawn(part: int, judges: Callable[[], None]) -> Callable[[], None]:
    """Judge other programs every time, and the same ones in CI: there a failure shows what a change has broken."""
    return seed(100 + part)(judges) if os.environ.get("CI") else judges


@pytest.mark.parametrize("part", range(3))
def test_a_program_of_natural_habits_is_right_or_refused(part: int) -> None:
    seed(part)(programs(10))()


@pytest.mark.skipif("accelerate" not in LOOPS, reason="needs pip install 'paceline[accelerate]'")
def test_a_program_with_accelerates_loop_is_right_or_refused() -> None:
    seed(1)(settings(PROGRAMS, max_examples=6)(given(accelerate_habits())(look_at)))()


@pytest.mark.skipif("accelerate" not in LOOPS, reason="needs pip install 'paceline[accelerate]'")
@pytest.mark.long
@pytest.mark.parametrize("part", range(5))
def test_a_hundred_programs_with_accelerates_loop_are_right_or_refused(part: int) -> None:
    drawn(part, settings(PROGRAMS, max_examples=20)(given(accelerate_habits())(look_at)))()


@pytest.mark.long
@pytest.mark.parametrize("part", range(15))
def test_three_hundred_programs_are_right_or_refused(part: int) -> None:
    """A failure prints how to have the same again."""
    drawn(part, programs(20))()


# -- the judge is judged ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunLog, list[list[float]]]:
    """A plain training of two workers: its log, and what its ledger counted."""
    folder = tmp_path_factory.mktemp("plain")
    value = results(folder, script(Habits()), before="", args=[str(folder / "saved.pt"), ""])[0]
    return read_log(folder / "run"), value["counted"]


def without(log: RunLog, step: int) -> RunLog:
    records = tuple(record for record in log.records if record.step != step)
    return replace(log, records=records, times=(0.0,) * len(records))


def twice(log: RunLog, step: int) -> RunLog:
    records = tuple(sorted((*log.records, log.records[step]), key=lambda record: record.step))
    return replace(log, records=records, times=(0.0,) * len(records))


def with_figures(log: RunLog, step: int, **figures: Any) -> RunLog:
    changed = [replace(record, **figures) if record.step == step else record for record in log.records]
    return replace(log, records=tuple(changed))


def test_the_ledger_counts_every_sample_of_every_epoch_once_as_the_audit_says(plain: Any) -> None:
    log, ledger = plain
    ledger_and_audit_agree(log, ledger)
    assert [count for row in ledger for count in row] == pytest.approx([1.0] * 3 * 48, abs=1e-9)


@pytest.mark.parametrize(
    "doctored",
    [
        lambda log: without(log, 5),
        lambda log: twice(log, 5),
        lambda log: with_figures(log, 5, samples=(6, 5)),
        lambda log: with_figures(log, 5, ranges=log.records[4].ranges),
    ],
    ids=["a step is missing", "a step is there twice", "a step has fewer samples", "a step has another's samples"],
)
def test_a_log_that_tells_otherwise_than_was_applied_is_found_out(
    plain: Any, doctored: Callable[[RunLog], RunLog]
) -> None:
    log, ledger = plain
    with pytest.raises(AssertionError, match="the audit"):
        ledger_and_audit_agree(doctored(log), ledger)


@pytest.mark.parametrize("change", [1.0, -1.0, 0.5])
def test_a_gradient_applied_twice_not_at_all_or_in_part_is_found_out_though_the_log_is_sound(
    plain: Any, change: float
) -> None:
    log, ledger = plain
    wrong = [list(row) for row in ledger]
    wrong[1][7] += change
    with pytest.raises(AssertionError, match="the audit has"):
        ledger_and_audit_agree(log, wrong)


def test_a_replay_on_the_logs_batches_is_the_training_itself(plain: Any, tmp_path: Path) -> None:
    log, ledger = plain
    (tmp_path / "train.py").write_text(script(Habits()))
    again = replayed(tmp_path, "again", log)
    assert [sum(row) for row in again["counted"]] == pytest.approx([sum(row) for row in ledger])
    shuffled = with_figures(with_figures(log, 4, ranges=log.records[5].ranges), 5, ranges=log.records[4].ranges)
    assert replayed(tmp_path, "other", shuffled)["weights"] != again["weights"]


ALWAYS = Habits(optimizer="adam", tracked=False, saving="inside")


def test_the_oracle_asks_for_a_refusal_only_where_something_is_wrong() -> None:
    assert must_refuse(ALWAYS, loads=True)
    assert not may_refuse(ALWAYS, loads=False)
    assert not may_refuse(replace(ALWAYS, tracked=True), loads=True)


def test_the_judge_finds_replicas_that_part_and_a_wrong_that_all_workers_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_text = script(Habits())
    for number, (wrong, found) in enumerate(
        [
            ("optimizer.param_groups[0]['params'][0].data.add_(1e-6 * fleet.rank)", "replicas are not equal"),
            ("model[0].weight.data.add_(1e-6 * (fleet.world_size - 1))", "weights differ from one process's"),
            ("raise ValueError('the user knows why')", "not Paceline's own"),
        ]
    ):
        text = plain_text.replace("    result =", f"    {wrong}\n    result =")
        monkeypatch.setattr("judge.script", lambda _, text=text: text)
        with pytest.raises(AssertionError, match=found):
            judge(Habits(), tmp_path / str(number))
