"""Some workers, connected: an engine carries their sums, and a store small facts.

A group never changes: where workers come and go, each generation has its own. Its sums are waited for in `Watched`,
from which an engine's error comes out as the transport's.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch

from paceline import concurrency
from paceline.errors import FLEET_FAILED
from paceline.transport.base import Pending
from paceline.transport.engines.contract import CLOSED, Check, Closer, Engine, EngineWork
from paceline.transport.engines.small_sums import SmallSums
from paceline.transport.engines.tree_sums import TreeSums
from paceline.transport.formats import Format
from paceline.transport.network import Store, read_json
from paceline.transport.topology import Branch, Topology, one_place

logger = logging.getLogger("paceline")

MakeEngine = Callable[[int, int], tuple[Engine, str]]
"""Connects an engine, from this worker's rank in it and the size; returns a description for the log beside it."""


class Watch(Protocol):
    """Knows what becomes of a call that cannot end: each transport's own."""

    @property
    def group(self) -> Group:
        """The group as it stands."""

    def check(self) -> None:
        """Raise when what this worker waits for can never come."""

    def check_group(self, group: Group) -> None:
        """Raise when what is awaited in this group is asked for in another by now."""

    def failed(self, error: BaseException, group: Group | None = None) -> Exception:
        """Return what to raise for an engine's error, in this ``group`` or in the one that stands."""

    def unlike_calls(self, labels: dict[int, str]) -> Exception | None:
        """Return what to raise when workers met in unlike calls; None where that is decided elsewhere, for each."""


# -- threads that wait in an engine --------------------------------------------------------------------------------

# On a connection that breaks at the wrong moment Gloo may forget to wake a thread that waits for a message. Nothing in
# the process can free that thread. The worker then ends. In an elastic fleet the roster sees that, and the worker can
# come back; in a fixed one all workers end.

LEAVE_S = 5.0
"""How long a thread may stay in the engine after its connections were shut."""
SLICE_S = 0.1
"""How often that is looked at: a process that was stopped for long has had no time to leave."""
DECIDE_S = 0.05
"""Between two looks at whether it is decided whose calls are the fleet's."""
STUCK = "paceline: a thread of this worker is stuck in Gloo after its connections were shut; it ends, and can come back"


class EngineWait:
    """One wait of one thread, while it is entered."""

    __slots__ = ("_waits", "since")

    def __init__(self, waits: set[EngineWait]) -> None:
        self._waits, self.since = waits, 0.0

    def __enter__(self) -> None:
        self.since = concurrency.monotonic()
        self._waits.add(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._waits.discard(self)


class EngineWaits:
    """The waits of one group's threads inside its engine."""

    def __init__(self) -> None:
        self._waits: set[EngineWait] = set()

    def inside(self) -> EngineWait:
        """Return a context in which this thread counts as waiting."""
        return EngineWait(self._waits)

    def longest_s(self) -> float:
        """Return the seconds for which a thread has been in one wait; 0 when none waits."""
        now = concurrency.monotonic()
        return max((now - wait.since for wait in self._waits.copy()), default=0.0)

    def now(self) -> set[Any]:
        """Return the waits that threads are in now."""
        return set(self._waits.copy())


def end_if_stuck(waits: Callable[[], set[Any]], text: str) -> None:
    """End the process when a thread that waits now is in the same wait after `LEAVE_S`; returns at once.

    ``waits`` returns the waits that threads are in; ``text`` is printed before the end.
    """
    if stuck := waits():
        concurrency.Thread(target=_watch, args=(stuck, waits, text), name="paceline-stuck", daemon=True).start()


def _watch(stuck: set[Any], waits: Callable[[], set[Any]], text: str) -> None:
    for _ in range(round(LEAVE_S / SLICE_S)):
        concurrency.sleep(SLICE_S)
        stuck &= waits()
        if not stuck:
            return
    print(text, file=sys.stderr, flush=True)
    concurrency.end_process(FLEET_FAILED)


# -- the group -----------------------------------------------------------------------------------------------------


class Already(EngineWork):
    """A sum over one worker."""

    done = True

    def wait(self, check: Check) -> None:
        return

    def abandon(self) -> bool:
        return True


class Group:
    """Workers that one engine connects, with a store beside it."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        generation: int = 0,
        store: Store = None,
        signals: Store = None,
        board: Store = None,
    ) -> None:
        """Begin without an engine.

        ``store`` holds this group's facts, ``signals`` what its workers signal; ``board`` holds the same signals, over
        a connection of its own for another thread. ``generation``: of the members, where workers come and go.
        """
        self.rank, self.size, self.generation = rank, size, generation
        self.store, self.signals, self.board = store, signals, board
        self._engine: Engine | None = None
        self._over = False
        self.waits = EngineWaits()
        self._arrange(one_place(size))
        self._spent: list[str] = []

    def _arrange(self, topology: Topology) -> None:
        self.topology = topology
        self._seats = {rank: seat for seat, rank in enumerate(topology.order)}

    @property
    def engine(self) -> Engine:
        """What carries the sums."""
        if self._engine is None:
            raise RuntimeError(CLOSED)
        return self._engine

    def connect(self, make: MakeEngine, *, topology: Topology | None = None) -> None:
        """Connect the engine; all workers of the group come here.

        The engine's ranks are in the order of ``topology``, the same for all.
        """
        self._arrange(topology or self.topology)
        engine, how = make(self._seats[self.rank], self.size)
        self._engine = SmallSums(engine, self._seats[self.rank], self.size)
        if self._over:  # broken off by another thread meanwhile, which found no engine
            self._engine.abort()
        logger.info("worker %d of %d reaches the others over %s", self.rank, self.size, how)

    # -- sums ------------------------------------------------------------------------------------------------------

    def start_sum(self, tensor: torch.Tensor) -> EngineWork:
        """Start to sum ``tensor`` in place."""
        return Already() if self.size == 1 else self.engine.sum(tensor)

    @property
    def crosses(self) -> bool:
        """Whether sums cross between distant places by one worker of each, so that `start_sum_in` is there."""
        return self.topology.tree

    def start_sum_in(self, tensor: torch.Tensor, wire_format: Format) -> EngineWork:
        """Start a sum that crosses between distant places in a format."""
        work = self.engine.sum_in(tensor, wire_format)
        if work is None:  # the group was re-formed meanwhile
            raise RuntimeError("sums of this group cross no places")
        return work

    def start_all_to_all(self, sent: torch.Tensor, got: torch.Tensor) -> EngineWork:
        """Start to exchange rows of bytes."""
        if len(sent) != self.size:
            raise RuntimeError(f"rows for {len(sent)} workers in a group of {self.size}")
        return self.engine.all_to_all(sent, got)

    def start_broadcast(self, part: torch.Tensor) -> EngineWork:
        """Start to overwrite ``part`` with the leader's."""
        return self.engine.broadcast(part, self._seats[0])

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> EngineWork:
        """Start to send to the worker of that rank."""
        return self.engine.send(tensor, self._seats[to], tag).leavable()

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> EngineWork:
        """Start to receive from the worker of that rank."""
        return self.engine.receive(tensor, self._seats[source], tag).leavable()

    def sum_over(self, topology: Topology) -> None:
        """Sum from now on as the topology says, in whose order the group was connected."""
        self.topology = topology
        if topology.tree:
            branch, seats = topology.branch(self.rank), self._seats
            seated = Branch(
                children=tuple(seats[rank] for rank in branch.children),
                parent=None if branch.parent is None else seats[branch.parent],
                tops=tuple(seats[rank] for rank in branch.tops),
            )
            self._engine = TreeSums(self.engine, seated, seats[self.rank])

    def round_is_over(self) -> None:
        """Note that the sums of a round are done, so that everybody has entered it and has what was sent before."""
        if self._engine is not None:
            self._engine.round_is_over()

    # -- small facts -----------------------------------------------------------------------------------------------

    def gather(self, key: str, label: str, value: Any, *, watch: Watch) -> list[Any]:
        """Return all values: workers put theirs, the leader puts the list."""
        store = self.store
        if self.rank:
            store.set(f"{key}/{self.rank}", json.dumps([label, value]))
            self.wait_for([f"{key}/all"], watch=watch)
            return list(read_json(store, f"{key}/all"))
        others = [f"{key}/{rank}" for rank in range(1, self.size)]
        if others:
            self.wait_for(others, watch=watch)
        answers = [[label, json.loads(json.dumps(value))], *(read_json(store, other) for other in others)]
        if any(theirs != label for theirs, _ in answers):
            raise self._unlike({rank: theirs for rank, (theirs, _) in enumerate(answers)}, watch)
        values = [theirs for _, theirs in answers]
        store.set(f"{key}/all", json.dumps(values))
        for old in (*others, *self._spent):  # everybody has read the list before this one
            store.delete_key(old)
        self._spent = [f"{key}/all"]
        return values

    def _unlike(self, labels: dict[int, str], watch: Watch) -> Exception:
        """Return the error of unlike calls; the watch raises it where that is decided elsewhere, for each worker."""
        while (error := watch.unlike_calls(labels)) is None:
            watch.check()
            watch.check_group(self)
            concurrency.sleep(DECIDE_S)
        return error

    def wait_for(self, keys: list[str], *, watch: Watch) -> None:
        """Return when all these keys are in the store."""
        pause = 0.0002
        while not self.store.check(keys):
            watch.check()
            watch.check_group(self)
            concurrency.sleep(pause)
            pause = min(pause * 1.5, 0.01)

    # -- the network -----------------------------------------------------------------------------------------------

    def unanswered(self) -> list[tuple[list[int], str, float]]:
        """Return where the network between this worker and others does not pass.

        Their ranks, their address, and the seconds since anything sent to it was last acknowledged. All workers of a
        computer share its address.
        """
        if self._engine is None:
            return []
        seats = self.topology.order
        return [
            (sorted(seats[seat] for seat in found), address, silent_s)
            for found, address, silent_s in self._engine.unanswered()
        ]

    # -- the end ---------------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the group was broken off or closed."""
        return self._over

    def check_open(self) -> None:
        """Raise when the group was broken off or closed: for a thread that waits in it and has no watch."""
        if self._over:
            raise RuntimeError("the group is over")

    def break_off(self) -> None:
        """Break off what is under way: it fails within milliseconds."""
        self._over = True
        if self._engine is not None:
            self._engine.abort()

    @property
    def hopeless(self) -> bool:
        """Whether a thread has waited in the engine for long though a connection of this group is broken.

        Nothing is bound to wake it: on a connection that breaks at the wrong moment Gloo may forget to.
        """
        engine = self._engine
        return not self._over and engine is not None and self.waits.longest_s() > LEAVE_S and engine.lost()

    def end_if_stuck(self) -> None:
        """End the process, some seconds from now, if a thread is still in a wait of this broken-off group."""
        end_if_stuck(self.waits.now, STUCK)

    def close(self) -> list[Closer]:
        """Give up the engine; returns, once, what frees it and its last messages, for `let_go`."""
        self._over = True
        return self._engine.close() if self._engine is not None else []


def let_go(held: list[Closer]) -> None:
    """Free what a group has given up, in order. The interpreter must not end while a thread is inside the engine."""
    while held:
        held.pop(0)()


class Watched(Pending):
    """An engine's work, whose errors come out as the transport's.

    ``group``: the one that stood when this was begun.
    """

    @classmethod
    def started(cls, start: Callable[[Group], EngineWork], watch: Watch, *, group: Group) -> Watched:
        """Start a work. A start counts as a wait: it is as much inside the engine."""
        try:
            with group.waits.inside():
                return cls(start(group), watch, group=group)
        except RuntimeError as error:  # on a connection that broke, even the start fails
            raise watch.failed(error, group) from None

    def __init__(self, work: EngineWork, watch: Watch, *, group: Group) -> None:
        self._held, self._watch, self._group = [work], watch, group

    def wait(self) -> None:
        try:
            with self._group.waits.inside():
                self._watch.check_group(self._group)  # a sum that is done counts for its own group's members alone
                if self._group.is_over and not self._held[0].done:  # else whoever breaks it off sees this wait
                    self._group.check_open()
                self._held[0].wait(self._check)
        except RuntimeError as error:  # whose traceback would hold the work, and by it the engine
            raise self._watch.failed(error.with_traceback(None), self._group) from None

    def unsent(self) -> EngineWork | None:
        work = self._held[0] if self._held else None
        return work if work is not None and work.carrier is not None else None

    def send_together(self, works: Sequence[EngineWork]) -> None:
        carrier = works[0].carrier
        assert carrier is not None
        try:
            self._check()
            carrier.exchange(works)
        except RuntimeError as error:
            raise self._watch.failed(error, self._group) from None

    def _check(self) -> None:
        """Raise when the work can no longer end: another thread may have re-formed the group, unseen by this one."""
        self._watch.check_group(self._group)
        self._watch.check()
        self._group.check_open()

    def abandon(self) -> bool:
        """Give the work up. False: it has not ended, and may still write into its tensor."""
        held, self._held = self._held, []
        ended = held[0].abandon()
        # It may be the last that holds the group, whose destructor waits for what is stuck in it.
        concurrency.Thread(target=held.clear, name="paceline-close-group", daemon=True).start()
        return ended


def wait_for_all(pendings: Sequence[Pending]) -> None:
    """Wait for the sums of one round, the same on every worker.

    Small sums go in one message and are waited for before large ones, which go on by themselves.
    """
    for one in pendings:
        one.forward()
    unsent = {one: work for one in pendings if (work := one.unsent()) is not None}
    works = list(unsent.values())
    if len(works) > 1 and all(work.carrier is works[0].carrier for work in works):
        next(iter(unsent)).send_together(works)
    for pending in sorted(pendings, key=lambda one: one not in unsent):
        pending.wait()


class Over(Pending):
    """A sum of a worker that is alone."""

    def wait(self) -> None:
        return

    def abandon(self) -> bool:
        return True


class Never(Pending):
    """A sum that could not start."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error

    def abandon(self) -> bool:
        return True
