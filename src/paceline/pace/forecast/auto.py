"""Auto: the general forecast, until one that knows nothing but this cluster has foretold its last steps better.

>>> forecast = AutoForecast()
>>> forecast.observe(Seen.whole([1.0, 2.0]))
>>> forecast.speaking
'general'
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.pace.forecast.base import Floats, Forecast, Seen, same_workers
from paceline.pace.forecast.general import General
from paceline.pace.forecast.score import score
from paceline.pace.forecast.smoothed import Smoothed

logger = logging.getLogger("paceline.forecast")

TRIAL = 10
"""Steps a forecast is scored before it may take over."""
RECENT = 50
"""Steps it is judged by from then on."""
MARGIN = 0.03
"""By how much (a fraction) its score must be the better one: where both are as good, nobody takes over."""
JUDGED_BY = 32
"""Draws a forecast is scored from."""
BACKLOG = 32
"""Steps kept to be followed when a draw is asked for; older ones are taken in without a score."""


class AutoForecast:
    """Follows every step with `General` and with `Smoothed`, scores what both foretold of it two steps ahead, as for a
    plan (`paceline.pace.forecast.score`), and answers with the one whose mean score over the last 50 steps is better:
    at first, and while there is little between them, with the general one. A change is logged.

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
        """Who answers `draw` at present: ``"general"`` or ``"smoothed"``."""
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

    @ahead.setter
    def ahead(self, steps: int) -> None:
        self._general.ahead = steps

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
        """From a checkpoint of the time when the smoothed forecast was the default: a step as it expected."""
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
        """What each foretold of the step about to be seen, without the one before it: plans are made so early."""
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
            told = [f"{each.name} {100 * its:.2f} %" for each, its in zip(self._forecasts, scores)]
            logger.info(
                "step %d: forecasts are %s's now; errors over the last %d steps: %s",
                self._steps,
                self._forecasts[best].name,
                len(self._scores),
                ", ".join(told),
            )
