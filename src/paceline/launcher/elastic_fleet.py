"""The launcher of an elastic fleet, whose workers come and go: it starts them, and restarts those that die.

A worker that dies is restarted under its number after a backoff (`WorkerSlot.retry`). A script that crashes on every
worker, or three times before its worker was ever in the fleet, ends the run with its traceback (`give_up_reason`).
Faults that the user asked for are played meanwhile (`paceline.launcher.faults`).
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline import concurrency
from paceline.errors import FLEET_FAILED
from paceline.launcher.faults import Faults
from paceline.launcher.output import WorkerFailure, joined, resume_hint
from paceline.launcher.roster import Roster, WorkerNumbers
from paceline.launcher.screen import LogFollower
from paceline.launcher.supervise import Order, Supervisor, supervise
from paceline.launcher.worker_process import LaunchedWorker, exit_code

if TYPE_CHECKING:
    from paceline.observe import RunLog
    from paceline.observe.log.reader import Event

LEAVE_S = 20.0
"""Seconds that a worker has after SIGTERM, to finish its micro-batch and take part in one more round."""
SOON_S = 1.0
"""A restart that is due within this time is announced when it happens, and not in advance."""
SHORT_S = 5.0
"""Seconds that the fleet must have waited before the launcher prints for whom."""
STEP_POLL_S = 0.05
FIRST_S, LONGEST_S = 0.5, 30.0
"""Shortest and longest pause before a restart."""
CALM_S = 60.0
"""Seconds of a process's life after which earlier failures of its worker no longer count."""
MOST_CRASHES = 3
"""Crashes of a worker that was never in the fleet after which the run is ended."""
LEFT = (143, -15)
"""Exit codes of a worker that was asked to leave: its own, or SIGTERM's when it could not handle the signal yet."""
RANKED = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    "PACELINE_STARTER",
)
"""Environment variables that other launchers set for their workers."""


def launch_elastic(order: Order, roster: Roster, *, faults: Faults, invitation: str = "") -> int:
    """Run ``order.workers`` workers, and those that faults add, to their end, and return the exit code.

    ``invitation``, the line that shows how others join, is printed first. The roster is closed in the end.
    """
    return supervise(order, ElasticPolicy(roster, faults, invitation))


class ElasticPolicy:
    """The policy for workers that find each other through a roster.

    Faults are played on them: it implements `paceline.launcher.faults.Workers`.
    """

    foreign: tuple[str, ...] = RANKED

    def __init__(self, roster: Roster, faults: Faults, invitation: str) -> None:
        self.leave_s, self.loopback, self.failing = LEAVE_S, roster.loopback, False
        self._roster, self._faults, self._invitation = roster, faults, invitation
        self._numbers = WorkerNumbers(roster.port)
        self._slots: dict[int, WorkerSlot] = {}
        self._beginning = True
        self._began = concurrency.monotonic()
        self._follower: LogFollower | None = None
        self._step = -1
        """The last step that the run has logged; read only when faults wait for a step."""
        self._shown: list[WorkerFailure] = []
        """Failures whose messages were printed lately, one per cause."""
        self._given_up: tuple[WorkerFailure, str] | None = None
        self._ended_well = False
        self._late: WorkerFailure | None = None
        """A failure after the training's end."""
        self._last_code = 0
        self._waiting_since: float | None = None
        self._announced_wait = ""

    def begin(self, supervisor: Supervisor) -> None:
        self._supervisor, self._pool, self._screen = supervisor, supervisor.pool, supervisor.screen
        if self._invitation:
            self.note(self._invitation)
        if self._faults.watches_steps:
            self._follower = LogFollower(supervisor.order.run_dir, self._follow_steps, poll_s=STEP_POLL_S)
            self._follower.start()
        if not self._faults.starts_workers:
            for _ in range(supervisor.order.workers):
                self.add(new=True)

    def environment(self, number: int) -> Mapping[str, str]:
        return {
            "PACELINE_ROSTER": self._roster.address,
            "PACELINE_TOKEN": self._roster.token,
            "PACELINE_WORKER": str(number),
            **({"PACELINE_STARTER": self._roster.starter} if self._roster.starter else {}),
        }

    def over(self, now: float) -> bool:
        if any(slot.active for slot in self._slots.values()):
            return False
        if self._pool.stopped_by or self.failing:
            return True
        return not self._roster.outsiders and (self._finished or not self._faults.coming)

    def close(self) -> None:
        if self._follower is not None:
            self._follower.close()
        self._numbers.close()
        self._roster.close()

    @property
    def _ending(self) -> bool:
        """Whether no worker is started any more."""
        return bool(self._pool.stopped_by or self.failing or self._finished)

    @property
    def _finished(self) -> bool:
        return self._roster.finished or (self._roster.maximum is None and self._ended_well)

    # -- while they run --------------------------------------------------------------------------------------------

    def ended(self, worker: LaunchedWorker, now: float) -> None:
        self._roster.died(worker.number, worker.ended)

    def act(self, now: float) -> None:
        inside = self._roster.inside
        for slot in [*self._slots.values()]:
            slot.update(now, entered=slot.number in inside)
            if slot.worker is not None and self._pool.drained(slot.worker, now):
                self._settle(slot, slot.worker, now)
            if slot.due is not None and (self._ending or slot.due <= now):
                self._start(slot, now)
        if not self._ending:
            self._faults.play(self, step=self._step, elapsed_s=now - self._began)
            self._announce_waiting(now)
        self._beginning = False

    def _start(self, slot: WorkerSlot, now: float) -> None:
        if self._ending:
            slot.due = None
            return
        if slot.note:  # only now: the others may have failed as well, and then no worker is started
            self.note(f"{slot.note}; it is started again")
            slot.note = ""
        self._roster.started(slot.number, first=self._beginning)
        slot.begin(self._supervisor.start(slot.number), now)

    def _follow_steps(self, events: Iterator[Event]) -> None:
        """Keep the last logged step up to date; runs on the follower's thread."""
        for event in events:
            step = event.get("step") if event["event"] == "step" else None
            if isinstance(step, int) and step > self._step:
                self._step = step
                self._supervisor.wake()

    def _announce_waiting(self, now: float) -> None:
        """Print for whom the fleet waits, once it has waited for `SHORT_S`."""
        text = self._roster.waiting
        self._waiting_since = None if not text else self._waiting_since or now
        if self._waiting_since is None:
            self._announced_wait = ""
        elif now - self._waiting_since > SHORT_S and text != self._announced_wait:
            self._announced_wait = text
            self.note(text)

    # -- an end, and what follows ----------------------------------------------------------------------------------

    def _settle(self, slot: WorkerSlot, worker: LaunchedWorker, now: float) -> None:
        """Decide whether a slot gets another process; the last one has ended and all its output was read."""
        slot.worker = None
        self._pool.remove(worker)
        assert worker.code is not None
        self._last_code = worker.code
        if worker.code == 0 or self._ending:
            self._ended_well = self._ended_well or worker.code == 0
            self._show_last_output(worker, now)
        elif slot.faulted:
            worker.stderr.release()
            if slot.returns:
                slot.retry(now)
        elif worker.code in LEFT:
            worker.stderr.release()
            self.note(f"worker {slot.number} left; it is not started again")
        else:
            self._failed(slot, WorkerFailure(worker, now), now)

    def _failed(self, slot: WorkerSlot, failure: WorkerFailure, now: float) -> None:
        slot.failure = failure
        if failure.code > 0:
            slot.crashes += failure.code != FLEET_FAILED
            self._show(failure)
            if why := give_up_reason(slot, self._slots.values(), outsiders=self._roster.outsiders):
                self.failing, self._given_up = True, (failure, why)
                self._pool.end_all(now, grace_s=0.0)
                return
        pause = slot.retry(now)
        slot.note = f"worker {slot.number} {failure.ended}"
        if pause > SOON_S:
            self.note(f"{slot.note}; it starts again in {pause:g} s")
            slot.note = ""

    def _show(self, failure: WorkerFailure) -> None:
        """Print a failure's message, unless another with the same cause was printed lately."""
        self._shown = [shown for shown in self._shown if failure.at - shown.at < CALM_S]
        if not any(failure.same_cause(shown) for shown in self._shown):
            self._shown.append(failure)
            self._supervisor.show(failure)

    def _show_last_output(self, worker: LaunchedWorker, now: float) -> None:
        """Print the held-back lines of a worker that ended well, or while the run was ending anyway."""
        if worker.code == 0 or (self._pool.stopped_by and not worker.interrupted):
            worker.stderr.release()
        elif not (self._pool.stopped_by or self.failing or worker.signalled or worker.code in (FLEET_FAILED, *LEFT)):
            self._late = WorkerFailure(worker, now)
            self._show(self._late)

    # -- what faults do --------------------------------------------------------------------------------------------

    @property
    def living(self) -> Sequence[int]:
        return sorted(number for number, slot in self._slots.items() if slot.running and not slot.faulted)

    @property
    def inside(self) -> frozenset[int]:
        return self._roster.inside & frozenset(self.living)

    def kill(self, number: int, *, returns: bool) -> None:
        if (worker := self._mark_faulted(number, returns=returns)) is not None:
            worker.send(signal.SIGKILL)

    def freeze(self, number: int, *, seconds: float) -> None:
        worker = self._slots[number].worker
        assert worker is not None
        worker.suspend()
        self._pool.do_in(seconds, worker.resume)

    def leave(self, number: int, *, notice_s: float | None = None) -> None:
        if (worker := self._mark_faulted(number, returns=False)) is not None:
            worker.send(signal.SIGTERM)
            worker.resume()
            if notice_s is not None:
                self._pool.do_in(notice_s, lambda: worker.send(signal.SIGKILL))

    def add(self, *, new: bool) -> int | None:
        active = [slot for slot in self._slots.values() if slot.active]
        if self._roster.maximum is not None and len(active) >= self._roster.maximum:
            return None
        free = [number for number, slot in self._slots.items() if not slot.active]
        number = min(free) if free and not new else self._numbers.acquire(max(self._slots, default=-1) + 1)
        self._slots[number] = WorkerSlot(number)
        self._start(self._slots[number], concurrency.monotonic())
        return number

    def note(self, text: str) -> None:
        self._screen.note(text)

    def _mark_faulted(self, number: int, *, returns: bool) -> LaunchedWorker | None:
        """Mark a worker as ended by a fault, and return its process, if it has one.

        Without a process, the worker gets one only if it ``returns``.
        """
        slot = self._slots[number]
        slot.faulted, slot.returns = True, returns
        if slot.worker is None and not returns:
            slot.due = None
        return slot.worker

    # -- the end ---------------------------------------------------------------------------------------------------

    def end(self) -> tuple[str, str] | None:
        """Return how the run ended (reason, text); None when it goes on elsewhere, or ended well."""
        if self._roster.maximum is None or self._roster.outsiders or self._finished:
            return None
        if self._pool.stopped_by:
            return "interrupted", ""
        return "error", self._given_up[0].summary if self._given_up is not None else "no worker was left"

    def conclude(self, log: RunLog | None) -> tuple[str, int]:
        if self._given_up is not None:
            failure, why = self._given_up
            return joined(f"{why}: the run was ended.", resume_hint(log)), exit_code(failure.code)
        if self._late is not None:
            late = self._late
            return f"worker {late.number} {late.ended} after the training had finished.", exit_code(late.code)
        if self._finished or (log is None and self._ended_well):
            return "", 0
        return joined("no worker is left and none returns.", resume_hint(log)), exit_code(self._last_code) or 1


@dataclass(eq=False)
class WorkerSlot:
    """One worker of this launcher through all its processes: when it is restarted, and when the run gives up."""

    number: int
    worker: LaunchedWorker | None = None
    """The worker's process, until all its output was read."""
    due: float | None = None
    """Time at which the next process starts; None while one runs, and when the worker does not return."""
    started_at: float = 0.0
    faulted: bool = False
    """Whether this process was ended by a fault that the user asked for."""
    returns: bool = True
    """Whether the worker is started again after such a fault."""
    deaths: int = 0
    """Deaths in a row, each after less than `CALM_S` of life."""
    entered: bool = False
    """Whether any process of this worker was ever in the fleet."""
    crashes: int = 0
    """Crashes of the script before the worker first entered the fleet."""
    note: str = ""
    """The end of the last process in words, to be printed when the next is started."""
    failure: WorkerFailure | None = None
    """The failure of the last process, until one has lived for `CALM_S`."""

    @property
    def running(self) -> bool:
        return self.worker is not None and self.worker.running

    @property
    def active(self) -> bool:
        """Whether the worker runs or will be started."""
        return self.worker is not None or self.due is not None

    def begin(self, worker: LaunchedWorker, now: float) -> None:
        self.worker, self.due, self.started_at, self.faulted = worker, None, now, False

    def update(self, now: float, *, entered: bool) -> None:
        """Forget earlier failures once the process has lived for `CALM_S`.

        ``entered`` is whether the worker is in the fleet now.
        """
        calm = self.running and now - self.started_at > CALM_S
        if calm:
            self.deaths, self.failure = 0, None
        self.entered = self.entered or entered or calm

    def retry(self, now: float) -> float:
        """Schedule a restart after a pause that doubles with each death, and return the pause in seconds."""
        self.deaths += not self.faulted
        pause = FIRST_S if self.faulted else pause_s(self.deaths)
        self.due = now + pause
        return pause


def pause_s(deaths: int) -> float:
    """Return the pause in seconds before the restart that follows death number ``deaths`` in a row.

    >>> [pause_s(n) for n in (1, 2, 3, 7, 100)]
    [0.5, 1.0, 2.0, 30.0, 30.0]
    """
    return min(FIRST_S * 2.0 ** min(deaths - 1, 10), LONGEST_S)


def give_up_reason(slot: WorkerSlot, slots: Iterable[WorkerSlot], *, outsiders: int = 0) -> str:
    """Return why the run should end after this slot's failure, in words; empty when a restart may help.

    ``outsiders`` is the number of workers that were started elsewhere and train on.
    """
    assert slot.failure is not None
    if slot.crashes >= MOST_CRASHES and not slot.entered:
        return f"worker {slot.number} failed {slot.crashes} times without ever being in the fleet"
    if outsiders:
        return ""
    others = [other.failure for other in slots if other is not slot and other.active]
    if all(failure is not None and failure.same_cause(slot.failure) for failure in others):
        return "every worker failed the same way" if others else "its only worker failed"
    return ""
