"""What the verdict says of the wire: how exact a run over a narrow one was, and what one would bring."""

from __future__ import annotations

from paceline.observe.analysis.figures import Figures
from paceline.observe.analysis.wire import (
    AVERAGE,
    AVERAGE_S,
    FEWEST,
    GRADIENTS,
    PLAIN,
    MeasuredRound,
    Rounds,
    faster_with_average,
    faster_with_wire,
)
from paceline.observe.words.numbers import number, times

MATTERS = 0.20
"""Of the time, what rounds must take for fewer bytes to be advised."""
GAIN = 1.03
"""Times the speed from which it is worth a word."""
HALF_STEPS = {"bf16": "0.4 % of itself", "fp16": "0.05 % of itself", "int8": "0.4 % of its block's largest"}
"""By what a number that was rounded once is off, at most."""


def precision_text(rounds: Rounds | None) -> str:
    """What exactness means over this wire; empty over the usual one."""
    if rounds is None or rounds.wire not in HALF_STEPS:
        return ""
    what = "Gradients" if rounds.combine == GRADIENTS else "Updates"
    exact = "" if rounds.combine != GRADIENTS else "; steps are exact to the wire's precision"
    off = HALF_STEPS[rounds.wire]
    return f"{what} crossed the network as {rounds.wire}, each number to {off}{exact}. All workers got the same bits."


def advice_text(f: Figures, rounds: Rounds | None) -> str:
    """What ``wire`` and ``combine="average"`` would bring on this link, where rounds take long."""
    if rounds is None or f.round <= MATTERS or f.most < 2 or not f.steps:
        return ""
    seconds = f.round * f.seconds / f.steps
    cost = MeasuredRound(seconds, rounds.data, f.most, rounds.latency_s)
    link = f"It moved {number(cost.moved / 1e6)} MB over each worker's link, at about {_rate(cost.bits_per_s)}"
    ways = [f"{name} about {times(gain)} times" for name, gain in _ways(cost, f.round, rounds) if gain >= GAIN]
    return f"{link}. There {_listed(ways)} the speed would be in reach." if ways else f"{link}."


def _ways(cost: MeasuredRound, part: float, rounds: Rounds) -> list[tuple[str, float]]:
    """What could be changed, and the speed over what it was."""
    plain = rounds.wire == PLAIN and rounds.data > FEWEST
    if rounds.combine != GRADIENTS:
        return [('wire="int8"', faster_with_wire(cost, part, "int8"))] if plain and rounds.combine == AVERAGE else []
    halved = [('wire="bf16"', faster_with_wire(cost, part, "bf16"))] if plain else []
    every = f'combine="average" (a round every {number(AVERAGE_S)} s)'
    averaged = [(every, faster_with_average(cost, part))]
    quartered = [('that with wire="int8"', faster_with_average(cost, part, wire="int8"))] if plain else []
    return [*halved, *averaged, *quartered]


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _rate(bits_per_s: float) -> str:
    return f"{number(bits_per_s / 1e9)} Gbit/s" if bits_per_s >= 1e9 else f"{number(bits_per_s / 1e6)} Mbit/s"
