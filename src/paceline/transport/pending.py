"""Sums and broadcasts under way, and how they are waited for: an engine's error comes out as the transport's."""

from __future__ import annotations

from collections.abc import Sequence

from paceline import concurrency
from paceline.transport.base import Pending
from paceline.transport.engines.base import Carrier, EngineWork
from paceline.transport.group import Group, Watch


class Watched:
    """An engine's work, whose errors come out as the transport's.

    ``group``: the one that stood when this was begun.
    """

    def __init__(self, work: EngineWork, watch: Watch, *, group: Group) -> None:
        self._held, self._watch, self._group = [work], watch, group

    def wait(self) -> None:
        try:
            with self._group.waits.inside():
                self._held[0].wait(self._look)
        except RuntimeError as error:  # whose traceback would hold the work, and by it the engine
            raise self._watch.failed(error.with_traceback(None)) from None

    @property
    def carrier(self) -> Carrier | None:
        """What may send this work in one message with others."""
        return self._held[0].carrier if self._held else None

    def send_together(self, others: Sequence[Watched]) -> None:
        """Send these off in one message; this is the first of them."""
        carrier = self.carrier
        assert carrier is not None
        try:
            self._look()
            carrier.exchange([work for one in others for work in one._held])
        except RuntimeError as error:
            raise self._watch.failed(error) from None

    def _look(self) -> None:
        """Whether it can still end; another thread may have re-formed the group since, unseen by this one."""
        self._watch.check()
        if self._watch.group is not self._group:
            raise RuntimeError("the group was re-formed")

    def abandon(self) -> bool:
        """Its result is not wanted any more. False: it has not ended, and may still write into its tensor."""
        held, self._held = self._held, []
        ended = held[0].abandon()
        # It may be the last that holds the group, whose destructor waits for what is stuck in it.
        concurrency.Thread(target=held.clear, name="paceline-close-group", daemon=True).start()
        return ended


def wait_for_all(pendings: Sequence[Pending]) -> None:
    """Wait for sums of one round, the same on every worker: small ones go in one message, and first, for the others
    need nobody to go on."""
    small = [one for one in pendings if isinstance(one, Watched) and one.carrier is not None]
    if len(small) > 1 and all(one.carrier is small[0].carrier for one in small):
        small[0].send_together(small)
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
