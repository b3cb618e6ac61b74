"""The cost of a round over the network: what its time was made of, and what fewer bytes or fewer rounds would bring.

A round of n workers that sum B bytes takes ``h L + 2 (n - 1) / n * 8 B / R`` seconds: each worker sends
``2 (n - 1) / n * B`` bytes at R bits per second, in h exchanges of a latency L, one after another. R follows from the
time measured. The sentences of the verdict about it, and about a wire's precision, are here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.observe.analysis.figures import Figures
from paceline.observe.log import sanitise
from paceline.observe.words.numbers import number, times
from paceline.transport.formats import FORMATS, PLAIN, SMALLEST, for_averages, for_gradients, part_of, planned

AVERAGE_S = 2.0
"""Seconds between rounds that ``combine="average"`` has by default."""
GRADIENTS, AVERAGE = "gradients", "average"
MATTERS = 0.20
"""Part of the time that rounds must take for fewer bytes to be advised."""
GAIN = 1.03
"""Factor of speed from which a change is worth a word."""


@dataclass(frozen=True)
class Rounds:
    """The rounds of a run, as its log describes them."""

    data: int
    """Bytes that one round sums, as they cross the network."""
    comm_dtype: str = PLAIN
    combine: str = GRADIENTS
    latency_s: float = 0.0
    """Seconds of a message between two workers; 0 when not measured."""


@dataclass(frozen=True)
class MeasuredRound:
    """One round as it was measured."""

    seconds: float
    data: int
    workers: int
    latency_s: float = 0.0

    @property
    def moved(self) -> float:
        """Return the bytes that each worker sends."""
        return 2 * (self.workers - 1) / self.workers * self.data

    @property
    def waiting_s(self) -> float:
        """Return the seconds spent on messages on their way, at least: there and back.

        Never more than half of the round, for the latency was measured when the loop began.
        """
        return min(2 * self.latency_s, self.seconds / 2)

    @property
    def bits_per_s(self) -> float:
        """Return what each worker's link carried, at least, for a part is sent during backward."""
        return 8 * self.moved / (self.seconds - self.waiting_s)

    def with_bytes(self, part: float) -> MeasuredRound:
        """Return the same round, had it summed this part of the bytes."""
        sending_s = self.seconds - self.waiting_s
        return replace(self, data=round(part * self.data), seconds=self.waiting_s + part * sending_s)


def rounds_of(run: Mapping[str, Any], loops: Sequence[Mapping[str, Any]]) -> Rounds | None:
    """Return the rounds from the ``run`` and ``steps`` events; None when a round's bytes are not logged."""
    measured = [loop for loop in loops if sanitise.count_or(loop.get("round_bytes"), 0) > 0]
    if not measured:
        return None
    latency = measured[-1].get("latency_s")
    return Rounds(
        data=sanitise.count_or(measured[-1]["round_bytes"], 0),
        comm_dtype=str(run.get("comm_dtype") or PLAIN),
        combine=str(run.get("combine") or GRADIENTS),
        latency_s=float(latency) if isinstance(latency, int | float) and 0 <= latency < 10 else 0.0,
    )


def faster_with_wire(cost: MeasuredRound, part_of_time: float, wire: str) -> float:
    """Return the factor of speed had gradients crossed this wire and not float32; rounds took ``part_of_time``.

    >>> round(faster_with_wire(MeasuredRound(1.0, 10_000_000, 2), 0.5, "bf16"), 3)
    1.333
    """
    saved = 1 - cost.with_bytes(part_of(wire)).seconds / cost.seconds
    return 1 / (1 - part_of_time * saved)


def faster_with_average(cost: MeasuredRound, part_of_time: float, *, wire: str = PLAIN) -> float:
    """Return the factor of speed with one round every `AVERAGE_S` seconds over this wire, not one per step.

    >>> round(faster_with_average(MeasuredRound(1.0, 10_000_000, 2), 0.5), 3)
    1.333
    """
    seconds = cost.seconds if wire == PLAIN else cost.with_bytes(part_of(wire)).seconds
    return AVERAGE_S / (AVERAGE_S + seconds) / (1 - part_of_time)


def precision_text(rounds: Rounds | None) -> str:
    """Return what exactness means over this wire; empty over float32."""
    if rounds is None or rounds.comm_dtype not in FORMATS:
        return ""
    what = "Gradients" if rounds.combine == GRADIENTS else "Updates"
    exact = "" if rounds.combine != GRADIENTS else "; steps are exact to the wire's precision"
    name, off = rounds.comm_dtype, FORMATS[rounds.comm_dtype].error
    return f"{what} crossed the network as {name}, each number to {off}{exact}. All workers got the same bits."


def advice_text(f: Figures, rounds: Rounds | None) -> str:
    """Return what ``comm_dtype`` and ``combine="average"`` would bring on this link, where rounds take long."""
    if rounds is None or f.round <= MATTERS or f.most < 2 or not f.steps:
        return ""
    seconds = f.round * f.seconds / f.steps
    cost = MeasuredRound(seconds, rounds.data, f.most, rounds.latency_s)
    link = f"It moved {number(cost.moved / 1e6)} MB over each worker's link, at about {_rate(cost.bits_per_s)}"
    ways = [f"{name} about {times(gain)} times" for name, gain in _ways(cost, f.round, rounds) if gain >= GAIN]
    return f"{link}. There {_listed(ways)} the speed would be in reach." if ways else f"{link}."


def _ways(cost: MeasuredRound, part: float, rounds: Rounds) -> list[tuple[str, float]]:
    """Return what could be changed, each with its factor of speed."""
    (_, half, *_), (_, quarter, *_) = planned(for_gradients()), planned(for_averages())
    plain = rounds.comm_dtype == PLAIN and rounds.data > SMALLEST
    if rounds.combine != GRADIENTS:
        return [_with_wire(cost, part, quarter)] if plain and rounds.combine == AVERAGE else []
    halved = [_with_wire(cost, part, half)] if plain else []
    every = f'combine="average" (a round every {number(AVERAGE_S)} s)'
    averaged = [(every, faster_with_average(cost, part))]
    quartered = [(f'that with comm_dtype="{quarter}"', faster_with_average(cost, part, wire=quarter))] if plain else []
    return [*halved, *averaged, *quartered]


def _with_wire(cost: MeasuredRound, part: float, wire: str) -> tuple[str, float]:
    return f'comm_dtype="{wire}"', faster_with_wire(cost, part, wire)


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _rate(bits_per_s: float) -> str:
    return f"{number(bits_per_s / 1e9)} Gbit/s" if bits_per_s >= 1e9 else f"{number(bits_per_s / 1e6)} Mbit/s"
