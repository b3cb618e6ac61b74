"""The normal distribution beyond a bound, for whole arrays: its tail, its moments and draws from it.

With ``Q(z) = P(Z > z)`` for a standard normal Z, everything is done in ``log Q``, so a bound thirty deviations out is
as good as one at the middle. NumPy has no error function: ``log Q`` is tabulated once and read by linear interpolation
(error under 1e-6).

>>> float(round(quantile(np.array([0.975]))[0], 4))
1.96
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

LOWEST, HIGHEST, STEP = -9.0, 37.0, 0.002
"""The table's range in deviations; beyond it lies less than 1e-18 on one side, and no floating point on the other."""


@lru_cache(maxsize=1)
def _table() -> tuple[Floats, Floats]:
    z = np.arange(LOWEST, HIGHEST, STEP)
    return z, np.array([math.log(0.5 * math.erfc(value / math.sqrt(2.0))) for value in z.tolist()])


def log_tail(z: ArrayLike) -> Floats:
    """Return ``log P(Z > z)``."""
    grid, tail = _table()
    z = np.asarray(z, dtype=np.float64)
    return np.asarray(np.where(z > grid[-1], _far_tail(np.maximum(z, grid[-1])), np.interp(z, grid, tail)))


def _far_tail(z: Floats) -> Floats:
    """Return the tail past the table by its first two terms, ``Q = phi(z) / z * (1 - 1 / z^2)``."""
    return np.asarray(-z * z / 2 - np.log(z * math.sqrt(2 * math.pi)) + np.log1p(-1 / (z * z)))


def quantile(p: ArrayLike) -> Floats:
    """Return ``Phi^-1(p)`` for p strictly between 0 and 1."""
    p = np.asarray(p, dtype=np.float64)
    if not np.all((p > 0) & (p < 1)):
        raise ValueError("a quantile is asked for probabilities strictly between 0 and 1")
    return -_beyond(np.log(p))


def _beyond(log_q: Floats) -> Floats:
    """Return the z with ``log P(Z > z) = log_q``."""
    grid, tail = _table()
    twice = -2 * np.minimum(log_q, tail[-1])
    far = np.sqrt(twice - np.log(2 * math.pi * twice))
    far += (_far_tail(far) + twice / 2) / far  # one step of Newton's
    return np.where(log_q < tail[-1], far, np.interp(-log_q, -tail, grid))


def truncated_draws(rng: np.random.Generator, mean: ArrayLike, sigma: ArrayLike, above: ArrayLike, rows: int) -> Floats:
    """Draw ``rows`` times x | x > above for every ``N(mean, sigma^2)``: the inverse of the tail at ``U * Q(a)``."""
    mean, sigma, above = (np.asarray(v, dtype=np.float64) for v in (mean, sigma, above))
    bound = (above - mean) / sigma
    uniform = 1.0 - rng.random((rows, *np.broadcast_shapes(bound.shape, mean.shape)))
    return np.maximum(mean + sigma * np.maximum(_beyond(log_tail(bound) + np.log(uniform)), bound), above)


def truncated_moments(mean: ArrayLike, sigma: ArrayLike, above: ArrayLike) -> tuple[Floats, Floats]:
    """Return mean and variance of x | x > above: the limit of infinitely many truncated draws.

    With ``a = (above - mean) / sigma`` and the hazard ``h = phi(a) / Q(a)``: ``mean + sigma * h`` and
    ``sigma^2 * (1 + a h - h^2)``.
    """
    mean, sigma, above = (np.asarray(v, dtype=np.float64) for v in (mean, sigma, above))
    a = (above - mean) / sigma
    hazard = np.exp(np.minimum(-a * a / 2 - math.log(2 * math.pi) / 2 - log_tail(a), 700.0))
    shrunk = 1 + a * hazard - hazard * hazard
    # Far out the difference cancels to noise; there the tail is nearly exponential with rate a.
    variance = np.where(a > 30, 1 / np.maximum(a, 1.0) ** 2, np.clip(shrunk, 0.0, 1.0))
    return np.maximum(mean + sigma * hazard, above), sigma * sigma * variance
