"""When a worker starts again, when a run gives up, and which number a worker has; no process is started."""

from types import SimpleNamespace
from typing import cast

from paceline.launcher.elastic_fleet import WorkerSlot, give_up_reason, pause_s
from paceline.launcher.output import OutputStream, WorkerFailure
from paceline.launcher.roster import WorkerNumbers
from paceline.launcher.worker_process import WorkerProcess


def test_the_pause_before_a_restart_doubles_except_after_a_fault_that_was_asked_for() -> None:
    slot = WorkerSlot(0)
    assert [slot.retry(100.0) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert slot.due == 130.0
    slot.faulted = True
    assert slot.retry(0.0) == 0.5
    assert pause_s(10**6) == 30


def test_a_minute_of_life_forgives_what_lies_behind() -> None:
    slot = failed(WorkerSlot(0), 1, "ValueError: no")
    slot.retry(0.0)
    slot.begin(cast(WorkerProcess, SimpleNamespace(running=True)), 100.0)
    slot.update(159.0, entered=False)
    assert (slot.deaths, slot.failure is None, slot.entered) == (1, False, False)
    slot.update(161.0, entered=False)
    assert (slot.deaths, slot.failure is None, slot.entered) == (0, True, True)


def failed(slot: WorkerSlot, code: int, *lines: str) -> WorkerSlot:
    """The slot, about to start again after a failure with these last words."""
    stderr = OutputStream(slot.number, lambda text: None, holds=True)
    stderr.held = [*lines]
    ended = {"number": slot.number, "code": code, "ended": f"ended with exit code {code}", "stderr": stderr}
    slot.failure, slot.due = WorkerFailure(cast(WorkerProcess, SimpleNamespace(**ended)), 0.0), 1.0
    return slot


def test_the_run_is_hopeless_when_all_fail_alike_and_nobody_elsewhere_trains_on() -> None:
    slots = [failed(WorkerSlot(number), 1, "ValueError: no") for number in range(3)]
    assert give_up_reason(slots[0], slots) == "every worker failed the same way"
    assert give_up_reason(slots[0], slots, outsiders=1) == ""
    assert give_up_reason(slots[0], [*slots[:2], failed(WorkerSlot(2), 1, "KeyError: 3")]) == ""
    assert give_up_reason(slots[0], [*slots[:2], WorkerSlot(2, due=5.0)]) == ""
    assert give_up_reason(slots[0], [*slots[:2], WorkerSlot(2)]) == "every worker failed the same way"  # gone for good
    assert give_up_reason(slots[0], slots[:1]) == "its only worker failed"


def test_workers_that_the_fleets_failure_ended_are_alike_in_whatever_words() -> None:
    slots = [failed(WorkerSlot(number), 75, f"paceline: worker {number} waits in vain") for number in range(2)]
    assert give_up_reason(slots[0], slots) == "every worker failed the same way"


def test_three_crashes_are_hopeless_only_for_a_worker_that_was_never_in_the_fleet() -> None:
    slot, well = failed(WorkerSlot(0), 1, "ValueError: no"), WorkerSlot(1, due=0.0)
    slot.crashes = 2
    assert give_up_reason(slot, [slot, well]) == ""
    slot.crashes = 3
    assert "worker 0 failed 3 times" in give_up_reason(slot, [slot, well])
    slot.entered = True
    assert give_up_reason(slot, [slot, well]) == ""


def test_a_number_is_held_by_one_launcher_of_a_computer() -> None:
    one, other, elsewhere = WorkerNumbers(70001), WorkerNumbers(70001), WorkerNumbers(70002)
    try:
        assert [one.acquire(), one.acquire()] == [0, 1]
        assert [other.acquire(), other.acquire()] == [2, 3]
        assert one.acquire(2) == 4
        assert elsewhere.acquire() == 0
        one.close()
        assert other.acquire() == 0
    finally:
        for numbers in (one, other, elsewhere):
            numbers.close()
