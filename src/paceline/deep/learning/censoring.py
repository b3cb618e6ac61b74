"""Teaching a model to live with cut-offs: some of what is known is hidden while it learns.

Where a worker was cut off the model reads a draw of x given x > cut-off, from its own belief and drawn anew every now
and then (a stochastic form of expectation and maximisation). A trace without cut-offs gets some: where P3's rule would
have cut with hindsight, more or less. What is hidden from the model's eyes in this way is still what it has to explain.
"""

from __future__ import annotations

import numpy as np
import torch

from paceline.deep.elbo import Series, all_of, run_guide
from paceline.deep.learning.recordings import Recording
from paceline.deep.model import DeepModel
from paceline.pace.arrivals import clairvoyant_counts
from paceline.pace.forecast.base import Floats, Mask
from paceline.pace.forecast.normal import truncated_draws

FIRST_SPREAD = 0.2
"""Spread of a worker's log time about its median before the model knows better."""
BLOCK = 50
"""Steps with one habit of cutting."""
WHOLE = 0.3
"""Part of the blocks in which everybody is waited for."""
COUNTS = (0.85, 1.02)
"""Range of a block's count over the clairvoyant one."""


class CensoredRecording:
    """A recording, of which the model reads less than is known."""

    def __init__(self, recorded: Recording, model: DeepModel, rng: np.random.Generator) -> None:
        self._logs, self._late, self._rng = np.log(recorded.seconds), recorded.late, rng
        median = np.broadcast_to(np.median(self._logs, axis=0), self._logs.shape)
        self.series = self._hide(median, np.full_like(self._logs, FIRST_SPREAD), model.shape.memory)

    def renew(self, model: DeepModel, noise: torch.Generator) -> None:
        """Cut elsewhere, and draw what is hidden from what the model believes by now."""
        steps, lag = len(self.series), model.shape.lag
        with torch.no_grad():
            belief = run_guide(model, all_of(self.series, 1, steps - 1, lag), noise=noise).belief
        level = self.series.levels.double().numpy()
        mean, spread = level.copy(), np.full_like(level, FIRST_SPREAD)
        mean[1:] = level[:-1] + belief.mean[0].double().numpy()
        spread[1:] = belief.stddev[0].double().numpy()
        self.series = self._hide(mean, spread, model.shape.memory)

    def _hide(self, mean: Floats, spread: Floats, memory: int) -> Series:
        cut = cutoffs(self._logs, self._rng)[:, None]
        hidden: Mask = self._late | (self._logs > cut)
        read = np.minimum(self._logs, cut)
        read[hidden] = truncated_draws(self._rng, mean[hidden], spread[hidden], read[hidden], 1)[0]
        return Series.of(self._logs, self._late, read=read, hidden=hidden, memory=memory)


def cutoffs(logs: Floats, rng: np.random.Generator) -> Floats:
    """A log cut-off for every step, or infinity."""
    steps, workers = logs.shape
    ordered = np.sort(logs, axis=1)
    blocks = np.arange(steps) // BLOCK
    whole = rng.random(blocks[-1] + 1) < WHOLE
    habit = rng.uniform(*COUNTS, blocks[-1] + 1)
    counts = np.clip(np.round(clairvoyant_counts(np.exp(ordered)) * habit[blocks]), 1, workers).astype(np.int64)
    return np.where(whole[blocks], np.inf, ordered[np.arange(steps), counts - 1])
