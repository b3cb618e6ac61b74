"""Dealing from a stream: a worker draws the samples of its share until the stream ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.feed.micro_batches import MicroBatch
from paceline.feed.source import Source
from paceline.records import Range, StepRecord


class StreamDealing:
    """Micro-batches of an iterable dataset: each worker draws from its own stream, and the epoch ends with the last.

    Exactly-once is not promised here: the content of the streams is unknown. ``identity`` keys the random numbers of
    this worker's micro-batches; unlike a rank, no other worker ever has the same.

    A stream that the source divides is divided when a pass begins, among the members of that moment. A worker that
    enters later has no part in that pass, and what a lost worker had not read of its part is not read in it: no sample
    is read twice.
    """

    length = None
    next_length = None
    unit = "samples"

    def __init__(
        self, source: Source, *, identity: int, micro_batch: int, rank: int = 0, size: int = 1, epoch: int = 0
    ) -> None:
        self.micro_batch, self.smallest = micro_batch, 1
        self.epoch = epoch
        self.ended = False
        self._part = (rank, size)
        """Pair (rank, size) with which the next pass is divided."""
        self._pass: tuple[int, tuple[int, int]] | None = (epoch, self._part)
        """Pass that is open and not begun; it begins with its first sample, when the script has seen the last pass end.
        """
        self._source, self._identity = source, identity
        self._share = self._drawn = 0
        self._all_ended = False

    @property
    def at_once(self) -> int:
        return self.micro_batch

    def in_samples(self, record: StepRecord) -> StepRecord:
        return record

    @property
    def remaining(self) -> int | None:
        return 0 if self._all_ended else None

    @property
    def progress(self) -> float:
        return float(self._all_ended)

    def look(self, indices: Sequence[int]) -> dict[str, Any]:
        return self._source.look(indices)

    def order_digest(self) -> None:
        return None

    def drawn(self) -> NDArray[np.int64]:
        return np.empty(0, dtype=np.int64)

    def deal(self, samples: Sequence[int]) -> tuple[int, ...]:
        """Return the shares; where the stream is divided every worker has one, since no other would read its part."""
        fewest = self.smallest if self._source.split else 0
        return tuple(max(share, fewest) for share in samples)

    def begin_share(self, share: int, *, done: int = 0) -> None:
        self._share = share

    def take(self, largest: int | None = None) -> MicroBatch | None:
        size = min(self.micro_batch, self._share)
        if size and self._pass is not None and not self.ended:
            self._source.restart(*self._pass)
            self._pass = None
        drawn = None if self.ended or not size else self._source.draw(size)
        if drawn is None:
            self.ended = self.ended or size > 0
            return None
        batch, samples = drawn
        position, self._drawn = self._drawn, self._drawn + samples
        self._share -= samples
        key = (self._identity << 40) + position  # keys random numbers that no other worker draws
        return MicroBatch(batch, samples, self.epoch, key, last=False)

    @property
    def left(self) -> int:
        return 0 if self.ended else self._share

    def resize(self, size: int) -> None:
        self.micro_batch = size

    def shrink(self, size: int, *, again: bool) -> bool:
        if size < 1 or again:  # a stream cannot give its samples again
            return False
        self.micro_batch = min(self.micro_batch, size)
        return True

    def commit(self, done: Sequence[int], ended: bool) -> tuple[tuple[Range, ...], ...]:
        self._all_ended = ended
        return ()

    def open(self, epoch: int) -> None:
        self.epoch, self.ended, self._all_ended, self._drawn = epoch, False, False, 0
        self._pass = (epoch, self._part)

    def renew(self) -> None:
        self._source.renew()

    def close(self) -> None:
        self._source.close()

    def members_changed(self, old_ranks: Sequence[int | None], *, rank: int, ahead: Sequence[int]) -> None:
        """Divide the next pass among the new members; until then each worker keeps its stream."""
        self._part = (rank, len(old_ranks))

    def give_back(self, ranges: Sequence[Range]) -> None:
        """Do nothing: a stream has no positions."""

    def take_over(self, state: Mapping[str, Any], *, rank: int, ahead: Sequence[int]) -> None:
        self._part = (rank, len(ahead))
        self.load_state_dict(state)
        self.ended = self._source.split  # the pass under way was divided before this worker came

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.open(state["epoch"])
