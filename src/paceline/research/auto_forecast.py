"""Auto: the general forecast, until smoothed has foretold this cluster's last steps better; and the score of forecasts.

>>> forecast = AutoForecast()
>>> forecast.observe(Seen.whole([1.0, 2.0]))
>>> forecast.speaking
'general'
>>> crps(np.array([[2.0, 3.0]]), Seen.whole([1.0, 3.0])).tolist()  # one draw: the plain error
[1.0, 0.0]
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.pace.forecast import Floats, Forecast, Seen, Smoothed, register, same_workers
from paceline.research.general import General

logger = logging.getLogger("paceline.forecast")

TRIAL = 10
"""Steps a forecast is scored before it may take over."""
RECENT = 50
"""Steps it is judged by from then on."""
MARGIN = 0.03
"""Fraction by which its score must be the better one: where both are as good, nobody takes over."""
JUDGED_BY = 32
"""Draws a forecast is scored from."""
BACKLOG = 32
"""Steps kept to be followed when a draw is asked for; older ones are taken in without a score."""


class AutoForecast(Forecast):
    """The better of `General` and `Smoothed` by their scores over the last 50 steps.

    Both follow every step, and `score` judges what both foretold of it two steps ahead, as for a plan. At first, and
    while there is little between them, the general one answers. A change is logged.

    The work is left to the next `draw`, which happens while a step computes.
    """

    name = "auto"

    def __init__(self) -> None:
        self._general, self._smoothed, self._earlier = General(), Smoothed(), Smoothed()
        self._scores: deque[list[float]] = deque(maxlen=RECENT)
        self._backlog: deque[Seen] = deque()
        self._speaks = self._steps = 0

    @property
    def speaking(self) -> str:
        """Name of the forecast that answers `draw` at present: ``"general"`` or ``"smoothed"``."""
        self._catch_up()
        return self._forecasts[self._speaks].name

    @property
    def steps(self) -> int:
        """Steps observed."""
        return self._steps + len(self._backlog)

    @property
    def ahead(self) -> int:
        """Which step is drawn: 1 the next, 2 the one after it."""
        return self._general.ahead

    def look_ahead(self, steps: int) -> None:
        """Draw the step that comes this many steps after the last observed one."""
        self._general.look_ahead(steps)

    @property
    def _forecasts(self) -> tuple[Forecast, ...]:
        return self._general, self._smoothed

    def observe(self, seen: Seen) -> None:
        same_workers(self._backlog[-1].seconds if self._backlog else self._general.newest, seen)
        self._backlog.append(seen)
        if len(self._backlog) > BACKLOG:
            self._take_in(self._backlog.popleft())

    def draw(self, rows: int, rng: np.random.Generator) -> Floats:
        self._catch_up()
        return self._forecasts[self._speaks].draw(rows, rng)

    def rearrange(self, sources: Sequence[int], seconds: Floats) -> None:
        self._catch_up()
        for forecast in (*self._forecasts, self._earlier):
            forecast.rearrange(sources, seconds)

    def state_dict(self) -> dict[str, Any]:
        self._catch_up()
        return {
            "general": self._general.state_dict(),
            "smoothed": self._smoothed.state_dict(),
            "earlier": self._earlier.state_dict(),
            "scores": list(self._scores),
            "speaks": self._speaks,
            "steps": self._steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._backlog.clear()
        self._scores.clear()
        if "general" not in state:
            self._go_on_from(state)
            return
        self._general.load_state_dict(state["general"])
        self._smoothed.load_state_dict(state["smoothed"])
        self._earlier.load_state_dict(state["earlier"])
        self._scores.extend([float(each) for each in scores] for scores in state["scores"])
        self._speaks, self._steps = int(state["speaks"]), int(state["steps"])

    def _go_on_from(self, smoothed: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of the smoothed forecast: with one step as that expected it."""
        self._smoothed.load_state_dict(smoothed)
        self._earlier.load_state_dict(smoothed)
        self._general, self._speaks, self._steps = General(), 0, 0
        if smoothed["mean"] is not None:
            self._general.observe(Seen.whole(smoothed["mean"]))
            self._steps = 1

    def _catch_up(self) -> None:
        while self._backlog:
            seen = self._backlog.popleft()
            if self._steps:
                rng = np.random.default_rng(self._steps)
                self._scores.append([score(drawn, seen) for drawn in self._foretold(rng)])
                self._choose()
            self._take_in(seen)

    def _foretold(self, rng: np.random.Generator) -> list[Floats]:
        """Draw what each foretold of the step about to be seen without the one before it: plans are made that early."""
        plain = self._earlier if self._steps > 1 else self._smoothed
        return [self._general.draw_early(JUDGED_BY, rng), plain.draw(JUDGED_BY, rng)]

    def _take_in(self, seen: Seen) -> None:
        self._earlier.load_state_dict(self._smoothed.state_dict())
        for forecast in self._forecasts:
            forecast.observe(seen)
        self._steps += 1

    def _choose(self) -> None:
        if len(self._scores) < TRIAL:
            return
        scores = np.mean(self._scores, axis=0)
        best, present = int(np.argmin(scores)), self._speaks
        if scores[best] < (1 - MARGIN) * scores[present]:
            self._speaks = best
            errors = [f"{each.name} {100 * its:.2f} %" for each, its in zip(self._forecasts, scores)]
            logger.info(
                "step %d: forecasts are %s's now; errors over the last %d steps: %s",
                self._steps,
                self._forecasts[best].name,
                len(self._scores),
                ", ".join(errors),
            )


def crps(draws: Floats, seen: Seen) -> Floats:
    """Return each worker's score in seconds, the smaller the better; ``draws`` are joint samples, one per row.

        E|min(X, t) - min(x, t)| - E|min(X, t) - min(X', t)| / 2

    with X, X' independent draws, x what happened and t the step's cut-off. Nothing beyond t was seen, so nothing
    beyond t is judged: a worker cut off scores 0 for a forecast that had it beyond t for certain.
    """
    ordered = np.sort(np.minimum(draws, _cutoffs(seen)), axis=0)
    error = np.abs(ordered - seen.seconds).mean(axis=0)
    rows = len(ordered)
    if rows == 1:
        return np.asarray(error)
    rank = 2.0 * np.arange(1, rows + 1) - rows - 1
    return np.asarray(error - rank @ ordered / (rows * (rows - 1)))


def _cutoffs(seen: Seen) -> Floats:
    """Return what each is judged up to: who was late by its own bound, others by the step's cut-off if it had one."""
    everybody = float(np.max(seen.seconds, where=seen.late, initial=0.0))
    in_time = float(np.max(seen.seconds, where=~seen.late, initial=0.0))
    return np.where(seen.late, seen.seconds, everybody if everybody >= in_time and seen.late.any() else np.inf)


def score(draws: Floats, seen: Seen) -> float:
    """Return the fleet's mean score over the mean time seen: no unit, so steps of any length weigh the same."""
    return float(crps(draws, seen).mean() / seen.seconds.mean())


register(AutoForecast.name, AutoForecast)
