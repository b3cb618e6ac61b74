"""Sums and broadcasts under way, and how they are waited for: an engine's error comes out as the transport's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline import concurrency
from paceline.transport.base import Pending
from paceline.transport.engines.contract import EngineWork
from paceline.transport.group import Group, Watch


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
