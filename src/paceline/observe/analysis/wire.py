"""What a round's time was made of, and what fewer bytes or fewer rounds would bring on the same link.

A round of n workers that sum B bytes takes ``h L + 2 (n - 1) / n * 8 B / R`` seconds: each worker sends as much at R
bits a second, in h exchanges of a latency L, one after another. R follows from the time measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.observe.log import sanitise

AVERAGE_S = 2.0
"""Seconds between rounds that ``combine="average"`` has unless told otherwise."""
PARTS = {"bf16": 0.5, "fp16": 0.5, "int8": 0.254}
"""Of float32, what a wire sends."""
PLAIN, GRADIENTS, AVERAGE = "float32", "gradients", "average"
FEWEST = 1 << 16
"""Bytes up to which a wire changes nothing."""


@dataclass(frozen=True)
class Rounds:
    """What a log says of its rounds."""

    data: int
    """Bytes that one sums, as they cross the network."""
    wire: str = PLAIN
    combine: str = GRADIENTS
    latency_s: float = 0.0
    """Of a message between two workers; 0: not measured."""


@dataclass(frozen=True)
class MeasuredRound:
    """One round as it was."""

    seconds: float
    data: int
    workers: int
    latency_s: float = 0.0

    @property
    def moved(self) -> float:
        """Bytes that each worker sends."""
        return 2 * (self.workers - 1) / self.workers * self.data

    @property
    def waiting_s(self) -> float:
        """For messages on their way, at least: those of a sum there and back. Never more than half of the round, for
        the latency was measured when the loop began."""
        return min(2 * self.latency_s, self.seconds / 2)

    @property
    def bits_per_s(self) -> float:
        """What each worker's link carried; at least, for some of it goes while backward does."""
        return 8 * self.moved / (self.seconds - self.waiting_s)

    def with_bytes(self, part: float) -> MeasuredRound:
        """The same round, had it summed so much of the bytes."""
        sending_s = self.seconds - self.waiting_s
        return replace(self, data=round(part * self.data), seconds=self.waiting_s + part * sending_s)


def rounds_of(run: Mapping[str, Any], loops: Sequence[Mapping[str, Any]]) -> Rounds | None:
    """From the ``run`` event and the ``steps`` events; None when the log does not say how many bytes a round sums."""
    said = [loop for loop in loops if sanitise.count_or(loop.get("round_bytes"), 0) > 0]
    if not said:
        return None
    latency = said[-1].get("latency_s")
    return Rounds(
        data=sanitise.count_or(said[-1]["round_bytes"], 0),
        wire=str(run.get("wire") or PLAIN),
        combine=str(run.get("combine") or GRADIENTS),
        latency_s=float(latency) if isinstance(latency, int | float) and 0 <= latency < 10 else 0.0,
    )


def faster_with_wire(cost: MeasuredRound, part_of_time: float, wire: str) -> float:
    """Speed over what it was, had gradients crossed this wire and not float32; rounds took ``part_of_time``.

    >>> round(faster_with_wire(MeasuredRound(1.0, 10_000_000, 2), 0.5, "bf16"), 3)
    1.333
    """
    saved = 1 - cost.with_bytes(PARTS[wire]).seconds / cost.seconds
    return 1 / (1 - part_of_time * saved)


def faster_with_average(cost: MeasuredRound, part_of_time: float, *, wire: str = PLAIN) -> float:
    """The same for rounds every `AVERAGE_S` seconds, of as many bytes or over this wire, in place of one a step.

    >>> round(faster_with_average(MeasuredRound(1.0, 10_000_000, 2), 0.5), 3)
    1.333
    """
    seconds = cost.seconds if wire == PLAIN else cost.with_bytes(PARTS[wire]).seconds
    return AVERAGE_S / (AVERAGE_S + seconds) / (1 - part_of_time)
