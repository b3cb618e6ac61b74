"""The learned part of the general forecast: a small network that weighs the experts by what is known of a worker.

``benchmarks/make_forecaster.py`` makes its weights, ``general.npz``, from simulated clusters; NumPy alone reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np

from paceline.pace.forecast import Floats, Mask, log_tail, quantile
from paceline.research.experts import EXPERTS, Advice, advise

FILE = Path(__file__).with_name("general.npz")
WEIGHTS = ("centre", "scale", "w1", "b1", "w2", "b2", "w3", "b3")
MOST_STRETCH = 2.5
"""The most (natural log) by which a spread is more or less than the expert's own errors."""
HALVINGS = 14


class LogMixture:
    """Each worker's next log seconds, a mixture of normals ``sum_k w_k N(m_k, s_k^2)``, in the order of the means."""

    def __init__(self, weights: Floats, means: Floats, spreads: Floats) -> None:
        order = np.argsort(means, axis=1)
        self.weights, self.means, self.spreads = (
            np.take_along_axis(each, order, axis=1) for each in (weights, means, spreads)
        )

    def beyond(self, bounds: Floats, late: Mask) -> Floats:
        """Return the median of x given x > bound, for each of those late: the middle of all truncated draws.

        Draws would do as well for one step, but over many, where nothing is measured, they would wander upwards.
        """
        w, m, s, low = self.weights[late], self.means[late], self.spreads[late], bounds[late, None]

        def tail(x: Floats) -> Floats:
            # The last term keeps a bound that the belief thought impossible from being 0 / 0.
            likely = (w * np.exp(log_tail((x - m) / s))).sum(axis=1, keepdims=True)
            return np.asarray(likely + 1e-12 * np.exp((bounds[late, None] - x) / 0.1))

        half, high = tail(low) / 2, np.maximum(low, (m + 3 * s).max(axis=1, keepdims=True)) + 0.1
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            above = tail(middle) > half
            low, high = np.where(above, middle, low), np.where(above, high, middle)
        return np.asarray((low + high)[:, 0] / 2)

    def draw(self, chosen: Floats, rng: np.random.Generator) -> Floats:
        """Draw log seconds, draws x workers.

        ``chosen`` are uniform numbers of that shape and choose the component; then comes its normal noise, every
        worker's spread evenly over the draws.
        """
        bounds = self.weights.cumsum(axis=1)[:, :-1]
        part = (chosen[:, :, None] > bounds).sum(axis=2)
        worker = np.arange(len(self.means))
        noise = quantile(np.clip(spread_evenly(rng.random(chosen.shape), rng), 1e-9, 1 - 1e-9))
        return np.asarray(self.means[worker, part] + self.spreads[worker, part] * noise)


def spread_evenly(luck: Floats, rng: np.random.Generator) -> Floats:
    """Draw uniform numbers in the order of ``luck``, which has one row per draw.

    Every column has one number in each of as many equal parts of 0 to 1 as there are rows.
    """
    rank = np.argsort(np.argsort(luck, axis=0), axis=0)
    return np.asarray((rank + rng.random(luck.shape)) / len(luck))


class Gate:
    """Two hidden layers, from a worker's features to the experts' weights and to how much wider each is believed.

    The width is over the expert's own errors.
    """

    def __init__(self, arrays: Mapping[str, Floats]) -> None:
        self._arrays = {name: np.asarray(arrays[name], dtype=np.float64) for name in WEIGHTS}

    def believe(self, logs: Floats, hidden: Mask, ahead: int = 1) -> LogMixture:
        """Return what is believed of the step that comes ``ahead`` steps after the window's newest."""
        return self.mix(advise(logs, hidden, ahead))

    def mix(self, advice: Advice) -> LogMixture:
        a = self._arrays
        layer = np.tanh((advice.features - a["centre"]) / a["scale"] @ a["w1"] + a["b1"])
        out = np.tanh(layer @ a["w2"] + a["b2"]) @ a["w3"] + a["b3"]
        odds, stretch = out[:, : len(EXPERTS)], np.clip(out[:, len(EXPERTS) :], -MOST_STRETCH, MOST_STRETCH)
        weights = np.exp(odds - odds.max(axis=1, keepdims=True))
        return LogMixture(weights / weights.sum(axis=1, keepdims=True), advice.means, advice.spreads * np.exp(stretch))


@lru_cache(maxsize=1)
def shipped() -> Gate:
    """Return the gate that comes with the package."""
    with np.load(FILE, allow_pickle=False) as arrays:
        return Gate({name: arrays[name] for name in WEIGHTS})
