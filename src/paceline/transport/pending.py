"""Sums and broadcasts under way, and how they are waited for: an engine's error comes out as the transport's."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from paceline import concurrency
from paceline.transport.base import Pending
from paceline.transport.group import Group, Watch
from paceline.transport.nccl import NcclSum
from paceline.transport.network import ENGINE_TIMEOUT
from paceline.transport.small_sums import SmallSum
from paceline.transport.tree_sums import TreeSum

LOOK = timedelta(milliseconds=500)
"""Between two looks at whether what is waited for can still come."""
ABANDON = timedelta(milliseconds=50)
"""How long an operation on connections that are shut may take to fail. Some never do."""


class Watched:
    """An engine's work, whose errors come out as the transport's.

    ``group``: the one that stood when this was begun. ``whole``: a sum or broadcast of the whole group.
    """

    def __init__(self, work: Any, watch: Watch, *, group: Group, whole: bool = True) -> None:
        self._work, self._watch, self._group, self._whole = work, watch, group, whole

    def wait(self) -> None:
        try:
            self._wait()
        except RuntimeError as error:
            raise self._watch.failed(error) from None

    def _wait(self) -> None:
        if isinstance(self._work, NcclSum):
            self._work.wait_for_host(self._look)
        elif isinstance(self._work, SmallSum):
            self._look()
            self._work.wait()
        elif self._whole:
            self._wait_and_look()
        else:  # a timeout would close the connection
            self._work.wait(ENGINE_TIMEOUT)

    @property
    def small(self) -> SmallSum | None:
        """The small sum that is yet to go."""
        work = self._work
        return work if isinstance(work, SmallSum) and work.exchange is None else None

    def send_together(self, sums: Sequence[SmallSum]) -> None:
        """Send these off in one message; this is the first of them."""
        try:
            self._look()
            sums[0].sums.exchange(sums)
        except RuntimeError as error:
            raise self._watch.failed(error) from None

    def _wait_and_look(self) -> None:
        """An operation on connections that were shut under it may never fail: see now and then whether it can end."""
        while True:
            try:
                self._work.wait(LOOK)
                return
            except RuntimeError:
                if self._work.is_completed():
                    raise
            self._look()

    def _look(self) -> None:
        """Whether it can still end; another thread may have re-formed the group since, unseen by this one."""
        self._watch.check()
        if self._watch.group is not self._group:
            raise RuntimeError("the group was re-formed")

    def abandon(self) -> bool:
        """Its result is not wanted any more. False: it has not ended, and may still write into its tensor."""
        held, ended = [self._work], True
        self._work = None
        if isinstance(held[0], TreeSum):
            held[0].abandon()
        elif not isinstance(held[0], SmallSum):  # nothing else writes into a small sum's tensor
            try:
                held[0].wait(ABANDON)
            except RuntimeError as error:
                ended = "timed out" not in str(error).lower()
        # It may be the last that holds the group, whose destructor waits for what is stuck in it.
        concurrency.Thread(target=held.clear, name="paceline-close-group", daemon=True).start()
        return ended


def wait_for_all(pendings: Sequence[Pending]) -> None:
    """Wait for sums of one round, the same on every worker: small ones go in one message, and first, for the others
    need nobody to go on."""
    small = [one for one in pendings if isinstance(one, Watched) and one.small is not None]
    sums = [one.small for one in small if one.small is not None]
    if len(sums) > 1 and all(one.sums is sums[0].sums for one in sums):
        small[0].send_together(sums)
    for pending in sorted(pendings, key=lambda one: one not in small):
        pending.wait()


class Never:
    """A sum that could not start."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error

    def abandon(self) -> bool:
        return True
