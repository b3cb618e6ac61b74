"""A scheduler for programs of many threads: one thread runs at a time, in an order drawn from a seed.

`Scheduler` takes the place of threads, locks, waits and clocks (`paceline.concurrency.use`). Each thread is a real one
that holds a baton while it runs; whenever it locks, waits, sleeps, notifies or starts another thread, the baton may
pass on. Time is virtual: it moves to the next timer when nobody can run, or, as on a busy computer, a little before
that. The same seed gives the same schedule.

Two ways to draw a schedule: a random walk (the baton passes on with some probability at every point), and changing
priorities (the thread of the highest priority runs, and at a few random points the running thread falls to the lowest:
probabilistic concurrency testing, Burckhardt et al., ASPLOS 2010). The clock is a thread among them.
"""

from __future__ import annotations

import math
import random
import sys
import threading
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from queue import Empty
from typing import Any

TICK_S = 1e-6
"""Seconds that pass at every point, so that a loop that reads the clock comes to its end."""


class Reaped(BaseException):
    """Unwinds a thread whose process was killed, or that was left when the run was over."""


class Hang(AssertionError):
    """Somebody waits for ever; the text holds every thread's stack."""


class Task:
    """One thread of the program. ``process``: the emulated process that it belongs to."""

    def __init__(self, scheduler: Scheduler, run: Callable[[], None], name: str, process: Hashable) -> None:
        self.name, self.process, self.run = name, process, run
        self.baton = threading.Lock()
        self.baton.acquire()
        self.runnable, self.done, self.timed_out = True, False, False
        self.wake_at: float | None = None
        self.since = scheduler.now
        """When it could run first, since it last did."""
        self.priority = scheduler.rng.random()
        self.joiners: list[Task] = []
        self.error: BaseException | None = None
        self.raises: BaseException | None = None
        """What a signal's handler raises in this thread, at its next point or in its wait."""
        self.handle: Any = self
        """What `current_thread` gives."""
        self.number = len(scheduler.tasks)
        self.points, self.events = 0, scheduler._own_events.setdefault((process, name), [])
        """Points it came to while something waited for one of them, and what waits."""
        self.thread = threading.Thread(target=scheduler._live, args=(self,), name=name, daemon=True)


class Scheduler:
    """Owns the threads and the time of one run.

    Args:
        seed: of the schedule.
        limit_s: virtual seconds after which a run that has not ended hangs.
        limit_points: the same in points at which the baton may pass on.
    """

    def __init__(self, seed: Hashable, *, limit_s: float = 600.0, limit_points: int = 600_000) -> None:
        self.rng = random.Random(str(seed))
        self.now = 1000.0
        self.points = 0
        self.tasks: list[Task] = []
        self.frozen: set[Hashable] = set()
        self.dead: set[Hashable] = set()
        self.over = False
        self.hang: str | None = None
        self._end_s, self._end_points = self.now + limit_s, limit_points
        self._finished = threading.Event()
        self._alive: list[Task] = []
        self._current: Task | None = None
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        """Sorted by point: what happens there."""
        self._alarms: list[tuple[float, int, Callable[[], None]]] = []
        self._own_events: dict[tuple[Hashable, str], list[tuple[int, Callable[[], None]]]] = {}
        """By process and thread: what happens when it comes to a point of its own."""
        self._until: Callable[[], bool] = lambda: False
        self._atomic = 0
        self._woken = True
        """Whether somebody can run who could not when the running thread was chosen."""
        self.by_priority = self.rng.random() < 0.5
        self.switch = self.rng.choice((0.02, 0.1, 0.4))
        """In a random walk: how likely the baton passes on at a point."""
        self._switch_at = self._draw_gap()
        self.hurry = self.rng.choice((0.0, 0.02, 0.2))
        """In a random walk: how likely time goes on while somebody could run."""
        self.patience_s = self.rng.choice((0.0, 0.01, 0.2, 2.0))
        """How long somebody who can run may be kept from it, in virtual seconds."""
        self._clock_priority = self.rng.random()
        self._changes = {self.rng.randrange(1, 20_000) for _ in range(self.rng.choice((0, 3, 10)))}
        self.install(self)

    def install(self, world: Scheduler) -> None:
        """Make the names of `paceline.concurrency` that tests replace, bound to this scheduler."""
        for kind in (Lock, RLock, Condition, Event, SimpleQueue):
            setattr(self, kind.__name__, partial(kind, world))
        self.Thread = _bound(Thread, world)  # a class: the library asks what is an instance of it
        self.local = threading.local

    # -- a run -----------------------------------------------------------------------------------------------------

    def spawn(self, run: Callable[[], None], *, name: str, process: Hashable) -> Task:
        """Add a thread; it runs when the scheduler chooses it."""
        task = Task(self, run, name, process)
        self.tasks.append(task)
        self._alive.append(task)
        self._woken = True
        task.thread.start()
        return task

    def run(self, until: Callable[[], bool]) -> None:
        """Run the threads that were spawned until this holds; raises `Hang` when it never will."""
        self._until = until
        first = self._pick(None)
        if first is not None:
            self._current = first
            first.baton.release()
            self._finished.wait()
        self._reap()
        if self.hang is not None:
            raise Hang(self.hang)

    def _finish(self, hang: str | None = None) -> None:
        if not self.over:
            self.over, self.hang = True, f"{hang}\n{self.stacks()}" if hang else None
            self._finished.set()

    def _reap(self) -> None:
        """Let every thread that is left unwind, one after another."""
        self.over = True
        for task in self.tasks:
            if not task.done:
                self._current = task
                task.baton.release()
                task.thread.join(10.0)
        left = [task for task in self.tasks if not task.done]
        if left and self.hang is None:
            self.hang = f"threads that do not unwind: {[task.name for task in left]}\n{self.stacks()}"

    def stacks(self) -> str:
        """Every thread's place in the program."""
        frames, said = sys._current_frames(), []
        for task in self.tasks:
            frame = frames.get(task.thread.ident or 0)
            if task.done or frame is None:
                continue
            lines = [
                f"    {one.filename.rpartition('/src/')[2]}:{one.lineno} {one.name}: {one.line}"
                for one in traceback.extract_stack(frame)
                if "harness/scheduler.py" not in one.filename and "threading.py" not in one.filename
            ]
            state = "dead" if task.process in self.dead else "frozen" if task.process in self.frozen else ""
            wait = "runnable" if task.runnable else f"waits{f' until {task.wake_at:.3f}' if task.wake_at else ''}"
            said.append(f"  {task.process} {task.name} [{state or wait}]\n" + "\n".join(lines[-14:]))
        return f"virtual time {self.now:.3f}, point {self.points}\n" + "\n".join(said)

    def _live(self, task: Task) -> None:
        task.baton.acquire()
        if not self.over:
            try:
                task.run()
            except Reaped:
                pass
            except BaseException as error:
                task.error = error
        task.done = True
        if self.over:
            return
        if task in self._alive:
            self._alive.remove(task)
        for joiner in task.joiners:
            self._wake(joiner)
        task.runnable = False
        self._pass_on(task)

    # -- what happens meanwhile ------------------------------------------------------------------------------------

    def at_point(self, point: int, happens: Callable[[], None]) -> None:
        """At this point of the schedule something happens, whichever thread runs."""
        self._events.append((point, len(self._events), happens))
        self._events.sort(key=lambda event: event[:2])

    def at_point_of(self, process: Hashable, thread: str, point: int, happens: Callable[[], None]) -> None:
        """When this thread of this process comes to this point of its own something happens."""
        self._own_events.setdefault((process, thread), []).append((point, happens))

    def count_from_here(self, thread: str) -> None:
        """Count, from here on, the running thread's points for what waits for those of ``thread`` of its process."""
        me = self.current()
        me.events += [(me.points + point, happens) for point, happens in self._own_events.pop((me.process, thread), [])]

    def _count_own(self, me: Task) -> bool:
        """Count a point of a thread for which something waits, and whether it is due: then it happens next."""
        me.points += 1
        due = [event for event in me.events if event[0] <= me.points]
        for event in due:
            me.events.remove(event)
            self.at_point(self.points, event[1])
        return bool(due)

    def after(self, seconds: float, happens: Callable[[], None]) -> None:
        """After this virtual time something happens, whether or not anybody can run."""
        self._alarms.append((self.now + seconds, len(self._alarms), happens))
        self._alarms.sort(key=lambda alarm: alarm[:2])

    def freeze(self, process: Hashable) -> None:
        self.frozen.add(process)

    def thaw(self, process: Hashable) -> None:
        self.frozen.discard(process)
        for task in self._alive:
            if task.process == process:
                task.since = self.now

    def kill(self, process: Hashable) -> None:
        """None of its threads runs again; what others see of that is up to the caller."""
        self.dead.add(process)
        for task in [task for task in self._alive if task.process == process]:
            self._alive.remove(task)

    def interrupt(self, task: Task, error: BaseException) -> None:
        """Raise this in a thread, as the handler of a signal does in the main one, at its next point or in its wait."""
        task.raises = error
        self._wake(task)

    def _raise(self, me: Task) -> None:
        error, me.raises = me.raises, None
        assert error is not None
        raise error

    # -- the baton -------------------------------------------------------------------------------------------------

    def current(self) -> Task:
        assert self._current is not None
        return self._current

    def point(self) -> None:
        """A place where the baton may pass on."""
        if self._atomic:
            return
        me = self._current
        if self.over or me is None or me.process in self.dead:
            raise Reaped
        if me.raises is not None:
            self._raise(me)
        points = self.points = self.points + 1
        self.now += TICK_S
        if (me.events and self._count_own(me)) or (self._events and self._events[0][0] <= points):
            self._happen()
        elif self.by_priority:
            if points in self._changes:
                me.priority = -self.rng.random()
            elif not self._woken and points % 32:
                return
        elif points < self._switch_at:
            return
        else:
            self._switch_at = points + self._draw_gap()
        self._pass_on(me)

    def _draw_gap(self) -> int:
        """Points until the baton passes on: as many as if each were drawn by itself."""
        return 1 + int(math.log(1.0 - self.rng.random()) / math.log(1.0 - self.switch))

    def block(self, until: float | None) -> bool:
        """Wait until somebody wakes this thread: True; or for this time: False."""
        assert not self._atomic, "an atomic block waits"
        me = self._current
        if self.over or me is None or me.process in self.dead:
            raise Reaped
        if me.raises is not None:
            self._raise(me)
        self.points += 1
        me.runnable, me.wake_at, me.timed_out = False, until, False
        if self._events and self._events[0][0] <= self.points:
            self._happen()
        self._pass_on(me)
        me.wake_at = None
        if me.raises is not None:
            self._raise(me)
        return not me.timed_out

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """Keep the baton in the block, which must not wait."""
        self._atomic += 1
        try:
            yield
        finally:
            self._atomic -= 1

    def _happen(self) -> None:
        with self.atomic():
            while self._events and self._events[0][0] <= self.points:
                self._events.pop(0)[2]()

    def _wake(self, task: Task) -> None:
        if not task.runnable and not task.done:
            task.runnable, task.since, task.timed_out = True, self.now, False
            self._woken = True

    def _pass_on(self, me: Task) -> None:
        """Let the next thread run; returns when this one's turn comes again."""
        chosen = None if self.over else self._pick(me)
        if chosen is me and not me.done:
            return
        if chosen is not None:
            self._current = chosen
            chosen.baton.release()
        else:
            self._finished.set()
        if me.done:
            return
        me.baton.acquire()
        if self.over or me.process in self.dead:
            raise Reaped

    def _pick(self, me: Task | None) -> Task | None:
        """The thread to run next; None when the run is over."""
        self._woken = False
        while True:
            if self._until():
                self._finish()
                return None
            if self.now > self._end_s or self.points > self._end_points:
                self._finish("the run does not end")
                return None
            frozen = self.frozen
            able = [task for task in self._alive if task.runnable and task.process not in frozen]
            if not able:
                timer = self._next_timer()
                if timer is None:
                    self._finish("nobody can run, and no timer is set")
                    return None
                self._advance(timer)
                continue
            if self.by_priority:
                chosen = able[0] if len(able) == 1 else max(able, key=_priority)
                clock_goes = self._clock_priority > chosen.priority
            else:
                chosen = able[int(self.rng.random() * len(able))]
                clock_goes = self.rng.random() < self.hurry
            if clock_goes:
                timer = self._next_timer()
                if timer is not None and timer <= min(task.since for task in able) + self.patience_s:
                    self._advance(timer)
                    continue
            return chosen

    def _next_timer(self) -> float | None:
        times = [
            task.wake_at
            for task in self._alive
            if task.wake_at is not None and not task.runnable and task.process not in self.frozen
        ]
        if self._alarms:
            times.append(self._alarms[0][0])
        return min(times, default=None)

    def _advance(self, to: float) -> None:
        self.now = max(self.now, to)
        if self.by_priority and self.rng.random() < 0.1:
            self._clock_priority = self.rng.random()
        with self.atomic():
            while self._alarms and self._alarms[0][0] <= self.now:
                self._alarms.pop(0)[2]()
        for task in self._alive:
            if task.wake_at is not None and not task.runnable and task.wake_at <= self.now:
                task.runnable, task.since, task.timed_out = True, self.now, True

    # -- clocks ----------------------------------------------------------------------------------------------------

    def monotonic(self) -> float:
        self.now += TICK_S / 10
        return self.now

    perf_counter = monotonic

    def time(self) -> float:
        return 1.7e9 + self.monotonic()

    def sleep(self, seconds: float) -> None:
        self.block(self.now + max(seconds, TICK_S))

    def current_thread(self) -> Any:
        return self.current().handle

    def main_thread(self) -> Any:
        return None

    def end_process(self, code: int) -> None:
        """Replaced by whoever knows what a process is."""
        raise AssertionError(f"a process ended with {code}")


_priority = attrgetter("priority")


def _bound(kind: type, scheduler: Scheduler) -> Any:
    class Bound(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(scheduler, *args, **kwargs)

    Bound.__name__ = kind.__name__
    return Bound


# -- primitives --------------------------------------------------------------------------------------------------------


class Lock:
    """A lock, and with ``reentrant`` one that its owner may take again."""

    reentrant = False
    yields = True
    """Whether another thread may run right after a release."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: Task | None = None
        self._count = 0
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        me = scheduler._current
        assert me is not None
        if self._owner is me and self.reentrant:
            self._count += 1
            return True
        scheduler.point()
        if self._owner is None:
            self._owner, self._count = me, 1
            return True
        until = None if timeout < 0 else scheduler.now + timeout
        while self._owner is not None and self._owner.process not in scheduler.dead:
            if not blocking:
                return False
            self._waiting.append(me)
            try:
                woken = scheduler.block(until)
            finally:
                if me in self._waiting:
                    self._waiting.remove(me)
            if not woken and self._owner is not None:
                return False
        self._owner, self._count = me, 1
        return True

    def release(self) -> None:
        scheduler = self._scheduler
        if scheduler.over:
            return
        self._count -= 1
        if self._count:
            return
        self._owner = None
        if self._waiting:
            _wake_all(scheduler, self._waiting)
        if self.yields:
            scheduler.point()

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """A lock that its owner may take again."""

    reentrant = True


class Condition:
    """As `threading.Condition`."""

    def __init__(self, scheduler: Scheduler, lock: Any = None) -> None:
        self._scheduler = scheduler
        self._lock: Lock = lock if lock is not None else RLock(scheduler)
        self._waiting: list[Task] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        scheduler, me = self._scheduler, self._scheduler.current()
        assert self._lock._owner is me or scheduler.over, "wait without the lock"
        count, self._lock._count = self._lock._count, 1
        self._waiting.append(me)
        self._lock.yields = False
        self._lock.release()
        self._lock.yields = True
        try:
            woken = scheduler.block(None if timeout is None else scheduler.now + max(timeout, TICK_S))
        finally:
            if me in self._waiting:
                self._waiting.remove(me)
            self._lock.acquire()  # also where a signal ends the wait
            self._lock._count = count
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else self._scheduler.now + timeout
        result = predicate()
        while not result:
            left = None if end is None else end - self._scheduler.now
            if left is not None and left <= 0:
                break
            self.wait(left)
            result = predicate()
        return result

    def notify(self, n: int = 1) -> None:
        for task in self._waiting[:n]:
            self._scheduler._wake(task)
        del self._waiting[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    """As `threading.Event`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._set = scheduler, False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        _wake_all(self._scheduler, self._waiting)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        scheduler, me = self._scheduler, self._scheduler.current()
        scheduler.point()
        until = None if timeout is None else scheduler.now + max(timeout, TICK_S)
        while not self._set:
            self._waiting.append(me)
            try:
                if not scheduler.block(until):
                    break
            finally:
                if me in self._waiting:
                    self._waiting.remove(me)
        return self._set


class SimpleQueue:
    """As `queue.SimpleQueue`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._items = scheduler, list[Any]()
        self._waiting: list[Task] = []

    def put(self, item: Any) -> None:
        self._items.append(item)
        _wake_all(self._scheduler, self._waiting)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        scheduler, me = self._scheduler, self._scheduler.current()
        scheduler.point()
        until = None if timeout is None else scheduler.now + max(timeout, TICK_S)
        while not self._items:
            if not block:
                raise Empty
            self._waiting.append(me)
            try:
                if not scheduler.block(until) and not self._items:
                    raise Empty
            finally:
                if me in self._waiting:
                    self._waiting.remove(me)
        return self._items.pop(0)

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items


class Thread:
    """As `threading.Thread`, in the process of the thread that makes it."""

    def __init__(
        self,
        scheduler: Scheduler,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._scheduler, self.name, self.daemon = scheduler, name or "thread", daemon
        self._target, self._args, self._kwargs = target, tuple(args), kwargs or {}
        self._task: Task | None = None

    def start(self) -> None:
        process = self._scheduler.current().process
        self._task = self._scheduler.spawn(self.run, name=self.name, process=process)
        self._task.handle = self
        self._scheduler.point()

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    @property
    def ident(self) -> int | None:
        return self._task.number if self._task is not None else None

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        scheduler = self._scheduler
        scheduler.point()
        until = None if timeout is None else scheduler.now + max(timeout, TICK_S)
        while self._task is not None and not self._task.done:
            me = scheduler.current()
            self._task.joiners.append(me)
            try:
                if not scheduler.block(until):
                    return
            finally:
                self._task.joiners.remove(me)


def _wake_all(scheduler: Scheduler, waiting: list[Task]) -> None:
    for task in waiting:
        scheduler._wake(task)
    waiting.clear()
