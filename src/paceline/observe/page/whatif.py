"""What if the same machines had been paced otherwise? The run's record, replayed through the simulator.

Each worker's seconds a sample, step by step, are what happened; the rules of pace are tried on them, with the run's own
mean time for the round and the rest. The time a rule needs for the run's samples is ``samples / throughput``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.observe.analysis.figures import summarise
from paceline.observe.analysis.stretches import Floats
from paceline.observe.words.numbers import duration
from paceline.observe.words.verdict import steps_text
from paceline.pace import DEFAULT
from paceline.records import StepRecord

MOST_NUMBERS = 16_000
"""Steps times workers that are replayed at most: one or two seconds of work."""
FEWEST_STEPS = 20
"""A shorter stretch says nothing about a rule that learns."""
TRUSTED = 0.15
"""A replay of the run under its own pace that is further off than this is no ground for advice."""
WORTH = 1.05
"""Times as fast as the run that another pace must be to be worth a word."""
AS_GOOD = 1.05
"""How many times the best time still counts as good, so that the default pace is advised: a replay is no more exact."""


@dataclass(frozen=True)
class Answer:
    """One rule of pace on the run's own machines."""

    pace: str
    seconds: float
    """What the steps would have taken."""


@dataclass(frozen=True)
class WhatIf:
    answers: tuple[Answer, ...] = ()
    """The fastest first."""
    actual_s: float = 0.0
    """What the steps of the run took; of one whose members changed, those of the longest stretch with the same ones."""
    limit_s: float = 0.0
    """What they would have taken had nobody ever waited; the round and the rest are in it, as in every answer."""
    replayed: int = 0
    steps: int = 0
    """Steps that the seconds are about; of these so many were ``replayed``."""
    span: tuple[int, int] | None = None
    """Workers came or left: the first and last step of the longest stretch with the same ones."""
    why_not: str = ""
    """Why there are no answers, in a sentence; empty when there are."""

    def of(self, pace: str) -> Answer | None:
        return next((answer for answer in self.answers if answer.pace == pace), None)

    def off_by(self, pace: str) -> float:
        """How far the replay under the run's own pace is from the run, as a ratio; 0 when it was not replayed."""
        own = self.of(pace)
        return abs(own.seconds / self.actual_s - 1) if own is not None and self.actual_s > 0 else 0.0

    def trusted(self, pace: str) -> bool:
        return self.off_by(pace) < TRUSTED

    def known(self, pace: str) -> bool:
        """Whether the run was replayed, and closely enough to say that no other pace is better."""
        return bool(self.answers) and self.trusted(pace)

    def _best(self) -> Answer | None:
        """The fastest; of those that are as good as the fastest, the default."""
        usual = self.of(DEFAULT)
        fastest = self.answers[0] if self.answers else None
        return usual if usual and fastest and usual.seconds <= fastest.seconds * AS_GOOD else fastest

    def better_than(self, pace: str) -> Answer | None:
        """The fastest, when it beats the run, and its own pace replayed, by a few per cent."""
        best, own = self._best(), self.of(pace)
        if best is None or best is own or not self.trusted(pace):
            return None
        to_beat = min(self.actual_s, own.seconds) if own is not None else self.actual_s
        return best if best.seconds < to_beat / WORTH else None


def instead(seconds: float, actual_s: float) -> str:
    """``6 s instead of 9 s``; with a tenth where whole seconds would be the same."""
    told, actual = duration(seconds), duration(actual_s)
    if told == actual and 1 <= min(seconds, actual_s) < 60:
        told, actual = f"{seconds:.1f} s", f"{actual_s:.1f} s"
    return f"{told} instead of {actual}"


def what_if(records: Sequence[StepRecord]) -> WhatIf:
    """Replay the longest stretch with the same workers (its last steps, when it is long) and scale to all of it."""
    from paceline.simulate.recorded import longest_stretch

    whole = longest_stretch(records)
    size = len(whole[0].workers) if whole else 0
    if size < 2:
        return WhatIf(why_not="There is nothing to deal out differently: one worker only." if size else "No steps.")
    stretch = whole[-max(FEWEST_STEPS, MOST_NUMBERS // size) :]
    if len(stretch) < FEWEST_STEPS:
        found = steps_text(len(stretch))
        return WhatIf(why_not=f"Too short: {found} with the same workers, {FEWEST_STEPS} are needed.")
    try:
        seconds, limit_s = _replayed(stretch)
    except ValueError as error:  # the simulator says what the record lacks
        return WhatIf(why_not=f"This record cannot be replayed: {error}.")
    factor = sum(record.total for record in whole) / max(1, sum(record.total for record in stretch))
    answers = [Answer(pace, factor * needed) for pace, needed in seconds.items() if math.isfinite(needed)]
    return WhatIf(
        answers=tuple(sorted(answers, key=lambda answer: answer.seconds)),
        actual_s=sum(record.wall_s for record in whole if math.isfinite(record.wall_s)),
        limit_s=factor * limit_s,
        replayed=len(stretch),
        steps=len(whole),
        span=(whole[0].step, whole[-1].step) if len(whole) < len(records) else None,
    )


def _replayed(stretch: Sequence[StepRecord]) -> tuple[dict[str, float], float]:
    """Seconds for the stretch's samples: of every pace that can be chosen, and when nobody ever waits."""
    from paceline.simulate import compare
    from paceline.simulate.recorded import equal_share_seconds

    matrix = equal_share_seconds(stretch)
    shares = sum(record.total for record in stretch) / _samples_of_a_share(matrix, stretch)
    outcomes = compare(matrix, overhead_s=_other_s(stretch))
    seconds = {outcome.pace: shares / outcome.throughput for outcome in outcomes if outcome.pace}
    return seconds, shares / outcomes[-1].throughput


def _samples_of_a_share(matrix: Floats, stretch: Sequence[StepRecord]) -> float:
    """Samples of the equal share that the matrix is about: its seconds over a worker's own seconds a sample."""
    timed = (told for row, r in zip(matrix, stretch) for told in zip(row, r.samples, r.seconds))
    return float(np.median([equal_s * n / s for equal_s, n, s in timed if n > 0 and s > 0]))


def _other_s(stretch: Sequence[StepRecord]) -> float:
    """Mean seconds of a step that are nobody's compute: the round, the update, the rest."""
    figures = summarise(stretch)
    return max(0.0, (figures.round + figures.rest) * figures.seconds / max(1, figures.steps))
