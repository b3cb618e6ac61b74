"""The launcher of a fleet whose workers come and go: starts them, and starts them again.

A worker that dies is started again in its place after a pause that grows. A script that crashes everywhere, or three
times before it was ever in the fleet, ends the run with its traceback. Faults that the user asked for are played on
the way (`paceline.launcher.faults`).
"""

from __future__ import annotations

import heapq
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import count

from paceline.launcher.failures import Failure, checkpoint_hint, resume_hint
from paceline.launcher.faults import Faults
from paceline.launcher.fixed import Order, without
from paceline.launcher.last_step import Steps
from paceline.launcher.numbers import Places
from paceline.launcher.processes import Crew
from paceline.launcher.rendezvous import loopback
from paceline.launcher.restarts import CALM_S, LEFT, Slot, alike, hopeless
from paceline.launcher.roster import Roster
from paceline.launcher.screen import Watching
from paceline.launcher.signals import Signals
from paceline.launcher.workers import FLEET_FAILED, Worker, exit_code

LEAVE_S = 20.0
"""After SIGTERM a worker finishes its micro-batch and takes part in one more round."""
SOON_S = 1.0
"""A restart that is so near is told when it happens."""
SHORT_S = 5.0
"""How long the fleet must have waited before the launcher says for whom."""
RANKED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What other launchers tell their workers: not true of those started here."""


def supervise(order: Order, roster: Roster, *, faults: Faults, invitation: str = "") -> int:
    """Run ``order.workers`` workers, and those that faults add, to their end; returns the exit code.

    ``invitation`` is said first: how others join. The roster is closed in the end.
    """
    with (
        closing(roster),
        Signals() as signals,
        Watching(order.run_dir, quiet=order.quiet) as watching,
        Steps(order.run_dir, wake=signals.wake, active=faults.watches_steps) as steps,
    ):
        crew = Crew(order.command, signals=signals, watching=watching, leave_s=LEAVE_S)
        try:
            if invitation:
                watching.note(invitation)
            return Supervisor(order, crew, roster, watching, faults, steps).run()
        finally:
            crew.abandon()


class Supervisor:
    """The loop of `supervise`. Faults are played on it (`paceline.launcher.faults.Workers`)."""

    def __init__(
        self, order: Order, crew: Crew, roster: Roster, watching: Watching, faults: Faults, steps: Steps
    ) -> None:
        self._order, self._crew, self._roster, self._watching = order, crew, roster, watching
        self._faults, self._steps = faults, steps
        self._places = Places(roster.port)
        self._slots: dict[int, Slot] = {}
        self._beginning = True
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        """What is to be done when, soonest first; the number only breaks ties."""
        self._numbers = count()
        self._shown: list[Failure] = []
        """Whose last words were printed lately, each unlike the others."""
        self._hopeless: tuple[Failure, str] | None = None
        self._ended_well = False
        self._late: Failure | None = None
        """A failure after the training's end."""
        self._last_code = 0
        self._short_since: float | None = None
        self._told = ""

    def run(self) -> int:
        began = time.monotonic()
        if not self._faults.starts_workers:
            for _ in range(self._order.workers):
                self.add(new=True)
        self._tick(began, began)
        self._beginning = False
        while not self._over():
            self._crew.listen()
            self._tick(time.monotonic(), began)
        self._places.close()
        return self._finish()

    def _over(self) -> bool:
        if any(slot.active for slot in self._slots.values()):
            return False
        if self._crew.stopped_by or self._hopeless:
            return True
        return not self._roster.outsiders and (self._finished or not self._faults.coming)

    @property
    def _ending(self) -> bool:
        """Whether nobody is started any more."""
        return bool(self._crew.stopped_by or self._hopeless or self._finished)

    @property
    def _finished(self) -> bool:
        return self._roster.finished or (self._roster.maximum is None and self._ended_well)

    # -- while they run --------------------------------------------------------------------------------------------

    def _tick(self, now: float, began: float) -> None:
        self._crew.heed(now)
        for worker in self._crew.reap(now):
            self._roster.died(worker.rank, worker.ended)
        self._crew.tick(now, failing=self._hopeless is not None)
        inside = self._roster.inside
        for slot in [*self._slots.values()]:
            slot.aged(now, entered=slot.number in inside)
            if slot.worker is not None and self._crew.settled(slot.worker, now):
                self._settle(slot, slot.worker, now)
            if slot.due is not None and (self._ending or slot.due <= now):
                self._start(slot, now)
        while self._later and self._later[0][0] <= now:
            heapq.heappop(self._later)[2]()
        if not self._ending:
            self._faults.play(self, step=self._steps.latest, elapsed_s=now - began)
            self._tell_of_waiting(now)

    def _start(self, slot: Slot, now: float) -> None:
        if self._ending:
            slot.due = None
            return
        if slot.news:  # only now: the others may have failed as well, and then nobody is started
            self._watching.note(f"{slot.news}; it is started again")
            slot.news = ""
        self._roster.started(slot.number, first=self._beginning)
        slot.begin(self._crew.start(slot.number, self._environment(slot.number)), now)

    def _environment(self, number: int) -> dict[str, str]:
        devices, here = self._order.devices, loopback() if self._roster.loopback else None
        return {
            "OMP_NUM_THREADS": "1",
            **({"GLOO_SOCKET_IFNAME": here} if here else {}),
            **without(os.environ, RANKED),
            **self._order.settings,
            **({"PACELINE_DEVICE": devices[number % len(devices)]} if devices else {}),
            "PACELINE_ROSTER": self._roster.address,
            "PACELINE_TOKEN": self._roster.token,
            "PACELINE_WORKER": str(number),
            "PACELINE_LAUNCHER": "1",
        }

    def _tell_of_waiting(self, now: float) -> None:
        """Say for whom the fleet waits, once it has for a while."""
        text = self._roster.waiting
        self._short_since = None if not text else self._short_since or now
        if self._short_since is None:
            self._told = ""
        elif now - self._short_since > SHORT_S and text != self._told:
            self._told = text
            self._watching.note(text)

    # -- an end, and what follows ----------------------------------------------------------------------------------

    def _settle(self, slot: Slot, worker: Worker, now: float) -> None:
        """A process has ended and said all it had to: decide what becomes of its place."""
        slot.worker = None
        self._crew.dismiss(worker)
        assert worker.code is not None
        self._last_code = worker.code
        if worker.code == 0 or self._ending:
            self._ended_well = self._ended_well or worker.code == 0
            self._last_words(worker, now)
        elif slot.struck:
            worker.words.release()
            if slot.returns:
                slot.retry(now)
        elif worker.code in LEFT:
            worker.words.release()
            self._watching.note(f"worker {slot.number} left; it is not started again")
        else:
            self._failed(slot, Failure(worker, now, worker.words), now)

    def _failed(self, slot: Slot, failure: Failure, now: float) -> None:
        slot.failure = failure
        if failure.code > 0:
            slot.crashes += failure.code != FLEET_FAILED
            self._show(failure)
            if why := hopeless(slot, self._slots.values(), outsiders=self._roster.outsiders):
                self._hopeless = (failure, why)
                self._crew.end_all(now, grace_s=0.0)
                return
        pause = slot.retry(now)
        slot.news = f"worker {slot.number} {failure.ended}"
        if pause > SOON_S:
            self._watching.note(f"{slot.news}; it starts again in {pause:g} s")
            slot.news = ""

    def _show(self, failure: Failure) -> None:
        """Print its last words, unless the like of them were printed lately."""
        self._shown = [shown for shown in self._shown if failure.at - shown.at < CALM_S]
        if any(alike(failure, shown) for shown in self._shown):
            return
        self._shown.append(failure)
        if not any(failure.said_by(slot.worker.words) for slot in self._slots.values() if slot.worker is not None):
            for line in failure.words:
                self._watching.err(line)

    def _last_words(self, worker: Worker, now: float) -> None:
        """Of a worker that ended well, or when the run was ending anyway."""
        if worker.code == 0:
            worker.words.release()
        elif self._crew.stopped_by:
            if worker.code != FLEET_FAILED and not any("KeyboardInterrupt" in line for line in worker.words.held):
                worker.words.release()
        elif not (self._hopeless or worker.stopped or worker.code in (FLEET_FAILED, *LEFT)):
            self._late = Failure(worker, now, worker.words)
            self._show(self._late)

    # -- what faults do --------------------------------------------------------------------------------------------

    @property
    def living(self) -> Sequence[int]:
        return sorted(number for number, slot in self._slots.items() if slot.running and not slot.struck)

    @property
    def inside(self) -> frozenset[int]:
        return self._roster.inside & frozenset(self.living)

    def kill(self, number: int, *, returns: bool) -> None:
        if (worker := self._strike(number, returns=returns)) is not None:
            worker.send(signal.SIGKILL)

    def freeze(self, number: int, *, seconds: float) -> None:
        worker = self._slots[number].worker
        assert worker is not None
        worker.freeze()
        self._do_in(seconds, worker.thaw)

    def leave(self, number: int, *, notice_s: float | None = None) -> None:
        if (worker := self._strike(number, returns=False)) is not None:
            worker.send(signal.SIGTERM)
            worker.thaw()
            if notice_s is not None:
                self._do_in(notice_s, lambda: worker.send(signal.SIGKILL))

    def add(self, *, new: bool) -> int | None:
        active = [slot for slot in self._slots.values() if slot.active]
        if self._roster.maximum is not None and len(active) >= self._roster.maximum:
            return None
        free = [number for number, slot in self._slots.items() if not slot.active]
        number = min(free) if free and not new else self._places.take(max(self._slots, default=-1) + 1)
        self._slots[number] = Slot(number)
        self._start(self._slots[number], time.monotonic())
        return number

    def note(self, text: str) -> None:
        self._watching.note(text)

    def _strike(self, number: int, *, returns: bool) -> Worker | None:
        """Its process, marked as struck; None when it has none, and then it gets one only if it returns."""
        slot = self._slots[number]
        slot.struck, slot.returns = True, returns
        if slot.worker is None and not returns:
            slot.due = None
        return slot.worker

    def _do_in(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._numbers), what))

    # -- the end ---------------------------------------------------------------------------------------------------

    def _end(self) -> tuple[str, str] | None:
        """How the run ended, for its log; None when it goes on elsewhere, or ended well."""
        if self._roster.maximum is None or self._roster.outsiders or self._finished:
            return None
        if self._crew.stopped_by:
            return "interrupted", ""
        return "error", self._hopeless[0].told if self._hopeless is not None else "no worker was left"

    def _finish(self) -> int:
        log = self._watching.close(self._end())
        if self._crew.stopped_by:
            if hint := checkpoint_hint(log):
                self._watching.say(hint)
            return 128 + self._crew.stopped_by
        if self._hopeless is not None:
            failure, why = self._hopeless
            self._watching.say(" ".join(filter(None, [f"{why}: the run was ended.", resume_hint(log)])))
            return exit_code(failure.code)
        if self._late is not None:
            self._watching.say(f"worker {self._late.rank} {self._late.ended} after the training had finished.")
            return exit_code(self._late.code)
        if self._finished or (log is None and self._ended_well):
            return 0
        self._watching.say(" ".join(filter(None, ["no worker is left and none returns.", resume_hint(log)])))
        return exit_code(self._last_code) or 1
