"""How a model does on steps it was not trained on, beside the simple forecasts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paceline.deep.forecast import Deep
from paceline.deep.learning.fit import one_thread
from paceline.deep.learning.recordings import Recording
from paceline.deep.model import DeepModel
from paceline.pace.forecast import Forecast, General, LastValue, Seen, Smoothed
from paceline.pace.forecast.score import score

HELD_OUT = 5
"""One step in so many, at the end of every recording, is kept from training."""
DRAWS = 64


def split(recorded: Recording) -> int:
    """The first step that is kept from training."""
    return recorded.steps - recorded.steps // HELD_OUT


def held_out_scores(model: DeepModel, recordings: Sequence[Recording]) -> dict[str, float]:
    """Mean score of the held-out steps of deep, general, smoothed and last value: the error as a part of the mean time,
    up to the cut-off where there was one (`paceline.pace.forecast.score`); the smaller the better. Every step before is
    seen, none ahead."""
    rivals: dict[str, Callable[[], Forecast]] = {
        "deep": lambda: Deep(model, always=True),
        "general": General,
        "smoothed": Smoothed,
        "last value": LastValue,
    }
    with one_thread():
        return {
            name: float(np.mean([one for recorded in recordings for one in _scores(make(), recorded)]))
            for name, make in rivals.items()
        }


def _scores(forecast: Forecast, recorded: Recording) -> list[float]:
    rng, first, scores = np.random.default_rng(0), split(recorded), []
    for step, (seconds, late) in enumerate(zip(recorded.seconds, recorded.late)):
        seen = Seen(seconds, late)
        if step >= first:
            scores.append(score(forecast.draw(DRAWS, rng), seen))
        forecast.observe(seen)
    return scores
