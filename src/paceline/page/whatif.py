"""The run's record, replayed through the simulator: what if the same machines had been paced otherwise?

Each worker's seconds per sample, step by step, are what happened; the paces are tried on them, with the run's own mean
time for the round and the rest. The time that a pace needs for the run's samples is ``samples / throughput``.
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
"""Most steps times workers that are replayed: one or two seconds of work."""
FEWEST_STEPS = 20
"""Fewest steps to replay: a shorter stretch shows nothing about a pace that learns."""
TRUSTED = 0.15
"""Largest error of a replay under the run's own pace for it to be a ground for advice."""
WORTH = 1.05
"""Factor by which another pace must be faster than the run to be worth a word."""
AS_GOOD = 1.05
"""Multiple of the best time up to which the default pace is advised instead: a replay is no more exact."""


@dataclass(frozen=True)
class Answer:
    """One pace on the run's own machines."""

    pace: str
    seconds: float
    """Seconds that the steps would have taken."""


@dataclass(frozen=True)
class WhatIf:
    """The outcome of a replay, or the reason why there was none."""

    answers: tuple[Answer, ...] = ()
    """Paces, the fastest first."""
    actual_s: float = 0.0
    """Seconds that the replayed steps took: all, or the longest stretch with the same workers."""
    limit_s: float = 0.0
    """Seconds had nobody ever waited; the round and the rest are included, as in every answer."""
    replayed: int = 0
    steps: int = 0
    """Number of steps that the seconds are about, of which the last ``replayed`` were replayed."""
    span: tuple[int, int] | None = None
    """First and last step of the longest stretch with the same workers; None when they never changed."""
    why_not: str = ""
    """Why there are no answers, in a sentence; empty when there are."""

    def answer_for(self, pace: str) -> Answer | None:
        return next((answer for answer in self.answers if answer.pace == pace), None)

    def off_by(self, pace: str) -> float:
        """Return the relative error of the replay under the run's own pace; 0 when it was not replayed."""
        own = self.answer_for(pace)
        return abs(own.seconds / self.actual_s - 1) if own is not None and self.actual_s > 0 else 0.0

    def trusted(self, pace: str) -> bool:
        return self.off_by(pace) < TRUSTED

    def known(self, pace: str) -> bool:
        """Return whether the run was replayed closely enough to conclude that no other pace is better."""
        return bool(self.answers) and self.trusted(pace)

    def _best(self) -> Answer | None:
        """Return the fastest pace, or the default when it is about as fast."""
        usual = self.answer_for(DEFAULT)
        fastest = self.answers[0] if self.answers else None
        return usual if usual and fastest and usual.seconds <= fastest.seconds * AS_GOOD else fastest

    def better_than(self, pace: str) -> Answer | None:
        """Return the fastest pace when it beats the run, and the run's own pace replayed, by a few per cent."""
        best, own = self._best(), self.answer_for(pace)
        if best is None or best is own or not self.trusted(pace):
            return None
        to_beat = min(self.actual_s, own.seconds) if own is not None else self.actual_s
        return best if best.seconds < to_beat / WORTH else None


def instead(seconds: float, actual_s: float) -> str:
    """Return ``6 s instead of 9 s``, with tenths where full seconds would be the same."""
    other, actual = duration(seconds), duration(actual_s)
    if other == actual and 1 <= min(seconds, actual_s) < 60:
        other, actual = f"{seconds:.1f} s", f"{actual_s:.1f} s"
    return f"{other} instead of {actual}"


def what_if(records: Sequence[StepRecord]) -> WhatIf:
    """Replay the longest stretch with the same workers (its last steps, when it is long) and scale to all of it."""
    from paceline.simulate.matrices import longest_stretch

    longest = longest_stretch(records)
    size = len(longest[0].workers) if longest else 0
    if size < 2:
        return WhatIf(why_not="There is nothing to deal out differently: one worker only." if size else "No steps.")
    stretch = longest[-max(FEWEST_STEPS, MOST_NUMBERS // size) :]
    if len(stretch) < FEWEST_STEPS:
        found = steps_text(len(stretch))
        return WhatIf(why_not=f"Too short: {found} with the same workers, {FEWEST_STEPS} are needed.")
    try:
        seconds, limit_s = _replayed(stretch)
    except ValueError as error:  # the simulator names what the record lacks
        return WhatIf(why_not=f"This record cannot be replayed: {error}.")
    factor = sum(record.total for record in longest) / max(1, sum(record.total for record in stretch))
    answers = [Answer(pace, factor * needed) for pace, needed in seconds.items() if math.isfinite(needed)]
    return WhatIf(
        answers=tuple(sorted(answers, key=lambda answer: answer.seconds)),
        actual_s=sum(record.wall_s for record in longest if math.isfinite(record.wall_s)),
        limit_s=factor * limit_s,
        replayed=len(stretch),
        steps=len(longest),
        span=(longest[0].step, longest[-1].step) if len(longest) < len(records) else None,
    )


def _replayed(stretch: Sequence[StepRecord]) -> tuple[dict[str, float], float]:
    """Return seconds for the stretch's samples: with every pace that can be chosen, and when nobody ever waits."""
    from paceline.simulate import compare
    from paceline.simulate.matrices import equal_share_seconds

    matrix = equal_share_seconds(stretch)
    shares = sum(record.total for record in stretch) / _samples_of_a_share(matrix, stretch)
    outcomes = compare(matrix, overhead_s=_other_s(stretch))
    seconds = {outcome.pace: shares / outcome.throughput for outcome in outcomes if outcome.pace}
    return seconds, shares / outcomes[-1].throughput


def _samples_of_a_share(matrix: Floats, stretch: Sequence[StepRecord]) -> float:
    """Return the samples of the equal share in the matrix: its seconds over a worker's own seconds per sample."""
    timed = (cell for row, r in zip(matrix, stretch) for cell in zip(row, r.samples, r.seconds))
    return float(np.median([equal_s * n / s for equal_s, n, s in timed if n > 0 and s > 0]))


def _other_s(stretch: Sequence[StepRecord]) -> float:
    """Return the mean seconds per step that are nobody's compute: the round, the update, the rest."""
    figures = summarise(stretch)
    return max(0.0, (figures.round + figures.rest) * figures.seconds / max(1, figures.steps))
