"""Liveness of the workers: a heartbeat through the store, and a watch that turns endless waits into named errors.

Each worker beats twice a second with what it is doing and the number of the collective call it is in: one number per
lane, which are the calls of the user's thread, background rounds (with a deadline, or beside local steps) and the sums
of a group of `Averaging`. A worker that waits reads the others' beats. There it finds a dead worker (the launcher
reported it, or it went silent), one that left with an error, and one that waits in *another* call under the same
number, which can never end. A live worker that is merely slow is waited for, and named. The first to find a failure
publishes it, so that all raise the same error.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from paceline import concurrency
from paceline.errors import FleetError, WorkerLost
from paceline.roster.calls import CALLS, ERRORS, GROUP, Beat, Spot, passed_by, reminder_due_s, sentence, unlike_labels
from paceline.transport.call_sequences import CallPosition, CallSequences, ForeignCalls
from paceline.transport.network import Store

logger = logging.getLogger("paceline")

BEAT_S = 0.5
CHECK_S = 1.0
"""How long a wait lasts before the others' beats are read at all."""
SILENT_S = 10.0
"""A worker that has not beaten for so long is lost. A live process beats from its own thread, whatever it computes."""
SILENT_AFTER_RESET_S = 3.0
"""That limit once a connection broke: then somebody is certainly gone."""
LOOK_S = 0.1
"""Seconds between two looks at whether a failure is known, while its cause is looked for."""
QUIET_S = 5.0
"""A store that has not answered for so long is warned about."""
FOREIGN_S = 15.0
"""A worker that has been so long in a collective of the script's own, while all others wait in calls of the fleet, will
never leave it."""
ABSENT_S = 600.0
"""How long a worker may take to start at all, measured from the first that waits for it."""


@dataclass(frozen=True)
class SeenBeat:
    """A worker's last beat."""

    beat: Beat
    count: int
    at: float
    """When it was first read, on the reader's clock."""
    foreign: str = ""
    foreign_s: float = 0.0
    """A collective of the script's own that it is in, and for how long."""


class Heartbeat:
    """This worker's heartbeat, and its eye on the others.

    ``launcher`` is where a launcher notes the workers it saw die, under ``died/<rank>``; ``sequences`` says where this
    worker is. ``on_failure`` is called, on the thread that learns of a failure first, to unblock this worker's waits;
    the error is in `failure`.
    """

    def __init__(
        self,
        store: Store,
        launcher: Store,
        rank: int,
        size: int,
        *,
        names: list[str],
        sequences: CallSequences,
        on_failure: Callable[[], None],
    ) -> None:
        self.failure: FleetError | None = None
        self.group: tuple[int, ...] = ()
        """The workers that share this one's sequence of group calls."""
        self._store, self._launcher, self._rank, self._size, self._names = store, launcher, rank, size, names
        self._on_failure, self._sequences = on_failure, sequences
        self.network: Callable[[], str] = lambda: ""
        """The places where the network to other workers does not pass, in words."""
        self.refuses_foreign = True
        """Whether a collective of the script's own can only be one with the fleet's other workers."""
        self._foreign = ForeignCalls()
        self._asked: float | None = None
        """Since when the store owes this worker's heartbeat an answer."""
        self._reminded = 0
        self._seen: dict[int, SeenBeat] = {}
        self._using_store = concurrency.RLock()
        self._stop, self._wake = concurrency.Event(), concurrency.Event()
        self._thread = concurrency.Thread(target=self._run, name="paceline-heartbeat", daemon=True)
        self._thread.start()
        concurrency.Thread(target=self._watch_store, name="paceline-store-watch", daemon=True).start()

    # -- by this worker --------------------------------------------------------------------------------------------

    def enter(self, label: str, *, lane: str = CALLS) -> int:
        """Begin collective call number N; from now on this worker waits for the others."""
        call = self._sequences.enter(label, lane=lane, since=concurrency.monotonic())
        if self.failure:  # found while this worker was busy: nobody may be there to wait for
            self.leave(lane=lane)
            raise self.failure
        return call

    def leave(self, *, lane: str = CALLS) -> None:
        self._sequences.leave(lane=lane)

    def waits(self) -> set[Hashable]:
        """Return what threads of this worker wait in: calls of the fleet, and a collective of the script's own."""
        found: set[Hashable] = {at for at in self._sequences.positions.items() if at[1].since is not None}
        if foreign := self._foreign.current()[0]:
            found.add(foreign)
        return found

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=2.0)

    def publish(self, kind: str, text: str) -> FleetError:
        """Make this failure everybody's, unless another was published first; return the one that stands."""
        mine = json.dumps({"kind": kind, "text": text, "by": self._rank})
        if (known := self._take_store()) is not None:
            return known
        try:
            stands = json.loads(self._store.compare_set("failure", "", mine))
            self._store.set(f"knows/{self._rank}", "")  # the worker that holds the store may leave now
        except (RuntimeError, ValueError) as error:
            if not text:
                return _store_gone(error)
            stands = json.loads(mine)
        finally:
            self._using_store.release()
        return self._fail(ERRORS.get(stands["kind"], FleetError)(stands["text"]))

    def _take_store(self) -> FleetError | None:
        """Take the lock of the store, or return the failure that is known before.

        Another thread's request may hold the lock for minutes, where the store's computer does not answer.
        """
        while not self._using_store.acquire(timeout=LOOK_S):
            if self.failure is not None:
                return self.failure
        return None

    def await_acknowledgements(self, within_s: float) -> None:
        """Wait, not for long, until every worker that can still read the failure has done so."""
        others = [f"knows/{rank}" for rank in range(self._size) if rank != self._rank]
        until = concurrency.monotonic() + within_s
        while concurrency.monotonic() < until:
            if all(self._store.check([key]) for key in others):
                return
            concurrency.sleep(0.02)

    # -- found out about the others --------------------------------------------------------------------------------

    def diagnose(self, error: BaseException) -> FleetError:
        """Name the worker behind a connection that broke: wait until one is known dead, has left, or is silent."""
        seen: dict[int, SeenBeat] = {}
        until = concurrency.monotonic() + SILENT_S
        while concurrency.monotonic() < until:
            if (known := self._take_store()) is not None:
                return known
            try:
                found = self.failure or self._find_failure(seen, SILENT_AFTER_RESET_S)
            except RuntimeError as lost:
                return _store_gone(lost)
            finally:
                self._using_store.release()
            if found:
                return found
            concurrency.sleep(LOOK_S)
        return self.publish(
            "fleet", f"the connection between workers broke, yet all of them are alive: {_brief(error)}"
        )

    def _run(self) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            own = self._sequences
            foreign, foreign_s = self._foreign.current()
            beat = [count, f"{own.doing}, in {foreign}" if foreign else own.doing, own.begun, own.spots()]
            beat += [foreign, foreign_s]
            self._asked = concurrency.monotonic()
            with self._using_store:
                if self.failure:  # it is over, and the store may be gone any moment
                    return
                try:
                    self._store.set(f"beat/{self._rank}", json.dumps(beat))
                    self._watch()
                except RuntimeError as error:
                    self._store_lost(error)
            self._asked = None
            self._wake.wait(BEAT_S)

    def _watch_store(self) -> None:
        """End a worker whose store does not answer.

        A request to a store whose computer is cut off ends after minutes: by then nobody could say why this worker
        stands still.
        """
        began, warned = concurrency.monotonic(), False
        looked = began
        while not self._stop.wait(CHECK_S) and not self.failure:
            now, asked = concurrency.monotonic(), self._asked
            stood_still = now - looked > 2 * CHECK_S  # this process did: the store is not to blame
            began = now if asked is None or stood_still else max(began, asked)
            looked, silent_s = now, now - began
            if silent_s < QUIET_S or self._sequences.longest_wait()[1] is None:
                warned = False
            elif silent_s > SILENT_S:
                self._fail(WorkerLost(f"{self._store_silent(silent_s)}: it is frozen, or the network is cut"))
            elif not warned:
                warned = True
                logger.warning("%s", self._store_silent(silent_s))

    def _store_silent(self, silent_s: float) -> str:
        return f"{self._names[0]}'s computer, where the fleet meets, has not answered for {silent_s:.0f} s"

    def _watch(self) -> None:
        lane, since = self._sequences.longest_wait()
        if since is None or concurrency.monotonic() - since < CHECK_S:
            self._seen, self._reminded = {}, 0
            self._hear()
            return
        if found := self._find_failure(self._seen, SILENT_S):
            self._fail(found)
            return
        if concurrency.monotonic() - since > reminder_due_s(self._reminded):
            self._reminded += 1
            label = self._sequences.positions[lane].label
            logger.warning("%s: waiting for %s", label, self._whom(lane) or self.network() or "the network")

    def _hear(self) -> None:
        """Read a failure that others found while this worker works by itself, before the store is gone."""
        if self._store.check(["failure"]):
            self.publish("fleet", "")

    def _store_lost(self, error: BaseException) -> None:
        if self._stop.is_set() or self.failure or self._sequences.longest_wait()[1] is None:
            return
        self._fail(_store_gone(error))

    def _fail(self, failure: FleetError) -> FleetError:
        """Keep the first failure that this worker learns of, and free the threads that wait; return the one kept."""
        if self.failure is None:
            self.failure = failure
            if self.waits():
                self._on_failure()
        return self.failure

    def _find_failure(self, seen: dict[int, SeenBeat], silent_s: float) -> FleetError | None:
        """Return the failure that the store shows now, if any, and bring ``seen`` up to date."""
        if self._store.check(["failure"]):
            return self.publish("fleet", "")
        for rank in range(self._size):
            if self._launcher.check([f"died/{rank}"]):
                return self.publish("lost", f"{self._names[rank]} {self._launcher.get(f'died/{rank}').decode()}")
        at, since = self._sequences.positions[CALLS], self._sequences.longest_wait()[1]
        self._read(seen)
        now = concurrency.monotonic()
        absent = [name for rank, name in enumerate(self._names) if rank not in seen]
        if absent and since is not None and now - since > ABSENT_S:
            return self.publish("lost", f"{', '.join(absent)} never came, in {ABSENT_S / 60:.0f} minutes")
        silent = [rank for rank, last in seen.items() if rank != self._rank and now - last.at > silent_s]
        if silent:
            return self.publish("lost", self._lost_text(seen, silent))
        if since is not None and now - since > FOREIGN_S and (stuck := self._stuck_in_foreign_calls(seen)):
            return self.publish("fleet", stuck)
        if self._sequences.positions[GROUP].since is not None:
            return self._look_for_strays(seen, self._sequences.positions[GROUP])
        return self._look_for_mismatch(seen, at) if at.since is not None else None

    def _stuck_in_foreign_calls(self, seen: dict[int, SeenBeat]) -> str:
        """Return, in words, who is in a collective of the script's own while all others wait in calls of the fleet.

        Empty when it may still end.
        """
        stuck = {rank: last for rank, last in seen.items() if last.foreign_s > FOREIGN_S and not last.beat.waits()}
        waiting = all(last.beat.waits() or rank in stuck for rank, last in seen.items() if rank != self._rank)
        if not stuck or not waiting or len(seen) < self._size or not self.refuses_foreign:
            return ""
        rank, last = next(iter(stuck.items()))
        lane, _ = self._sequences.longest_wait()
        return (
            f"{self._names[rank]} has been in {last.foreign} for {last.foreign_s:.0f} s, and the others wait in "
            f"{self._sequences.positions[lane].label}: neither can end. Workers have unequal numbers of micro-batches, "
            "so a collective of the script's own cannot meet inside a step: sum figures with step.add(name=...), or "
            "call it behind step.commit, on every worker"
        )

    def _look_for_strays(self, seen: dict[int, SeenBeat], at: CallPosition) -> FleetError | None:
        # A member of my group that left out our call and waits in one of the whole fleet, to which I come only later.
        spots = {rank: seen[rank].beat.spots for rank in self.group if rank in seen and rank != self._rank}
        gone = {rank: spot[CALLS] for rank, spot in spots.items() if spot[GROUP].call < at.call}
        mine = self._sequences.positions[CALLS].call
        astray = {rank: spot.label for rank, spot in gone.items() if spot.waiting and spot.call > mine}
        return self.mismatch({self._rank: at.label, **astray}) if astray else None

    def _look_for_mismatch(self, seen: dict[int, SeenBeat], at: CallPosition) -> FleetError | None:
        # A worker that waits in another call under the number of mine: neither wait can ever end.
        spots = {rank: last.beat.spots[CALLS] for rank, last in seen.items()} | {self._rank: at.spot()}
        begun = {rank: last.beat.begun for rank, last in seen.items()} | {self._rank: self._sequences.begun}
        if unlike := unlike_labels(self._rank, spots):
            return self.mismatch(unlike)
        # One that has begun more steps than I have without coming here: it left my call out.
        if (passed := passed_by(self._rank, spots, begun)) and at == self._sequences.positions[CALLS]:
            return self.mismatch(passed)
        return None

    def mismatch(self, labels: Mapping[int, str]) -> FleetError:
        """Publish that these workers are in unlike calls under one number."""
        return self.publish("mismatch", sentence(labels, dict(enumerate(self._names))))

    def _read(self, seen: dict[int, SeenBeat]) -> None:
        """Note every worker's last beat, and when (on this worker's clock) it was first seen."""
        for rank in range(self._size):
            if self._store.check([f"beat/{rank}"]):
                count, doing, begun, spots, *foreign = json.loads(self._store.get(f"beat/{rank}"))
                if rank not in seen or seen[rank].count != count:
                    beat = Beat(doing=doing, begun=begun, spots={lane: Spot(*spot) for lane, spot in spots.items()})
                    seen[rank] = SeenBeat(beat, count, concurrency.monotonic(), *foreign)

    # -- in words --------------------------------------------------------------------------------------------------

    def _whom(self, lane: str) -> str:
        """Return the workers that are not yet in this worker's call, and what they do."""
        beats = {rank: self._seen[rank].beat if rank in self._seen else None for rank in range(self._size)}
        mine = self._sequences.positions[lane].call
        if lane == GROUP:
            beats = {rank: beat for rank, beat in beats.items() if rank in self.group}
        behind = [(rank, beat) for rank, beat in beats.items() if beat is None or beat.spots[lane].call < mine]
        return "; ".join(f"{self._names[rank]} ({beat.doing if beat else 'not started'})" for rank, beat in behind)

    def _lost_text(self, seen: dict[int, SeenBeat], silent: list[int]) -> str:
        return "; ".join(
            f"{self._names[rank]} went silent (killed, frozen, or its network is cut); "
            f"it was last seen at: {seen[rank].beat.doing}"
            for rank in silent
        )


def _brief(error: BaseException) -> str:
    """Return the last sentence of an engine's error, without its source paths."""
    text = str(error).strip().splitlines()
    return (text[0].split("] ", 1)[-1] if text else type(error).__name__)[:200]


def _store_gone(error: BaseException) -> WorkerLost:
    return WorkerLost(f"the leader or launcher that holds the fleet's store is gone: {_brief(error)}")
