"""How hard worker and centre pull at each other in elastic averaging, and which pulls are stable (P4).

Every tau local steps each worker measures ``d_i = x_i - c``, its way from the centre, and then, all at once,

    x_i <- x_i - h1_i * d_i          (pull: the worker towards the centre)
    c   <- c + sum_i h2_i * d_i      (push: the centre towards the worker)

EASGD has ``h1 = h2 = alpha`` for everybody. The other rules differ for workers that were away: such a worker should
come to the centre (h1 up to 1) and not drag the centre along (h2 down to 0). All are pure functions; what has to be
remembered from exchange to exchange is in `Memory`.

>>> exchange = missed(0.2, np.array([0, 0, 4]))
>>> exchange.pull.round(2).tolist(), exchange.push.round(2).tolist()
([0.2, 0.2, 0.84], [0.2, 0.2, 0.04])
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Reading = Literal["growth", "fall"]

READINGS: tuple[Reading, ...] = ("growth", "fall")
RULES = ("fixed", "dynamic", "missed", "clipped", "known")
COEFFICIENTS = (0.5, 0.25, 0.15, 0.1)
"""c_j, newest first: weights of the last changes of log-distance in the score; ours, P4's are not known to us."""
THRESHOLDS = (0.3, 0.8)
"""Scores at which the weights begin to change and have changed fully: ours, from the measurements in the docs."""
WARM_UP = len(COEFFICIENTS) + 1
"""Exchanges until the score has all its changes."""
FLOOR = 1e-12
"""At a first exchange worker and centre are equal; the logarithm of their distance stops here."""


@dataclass(frozen=True, eq=False)
class Exchange:
    """h1 (``pull``) and h2 (``push``) of each worker."""

    pull: Floats
    push: Floats


def fixed(alpha: float, workers: int) -> Exchange:
    """Pull and push alike (EASGD): ``h1 = h2 = alpha``."""
    return Exchange(np.full(workers, alpha), np.full(workers, alpha))


def known(alpha: float, failed: ArrayLike) -> Exchange:
    """Weigh by who is known to have failed since its last exchange: ``h1 = 1, h2 = 0``. P4's yardstick (EAHES-OM)."""
    return towards_centre(alpha, np.asarray(failed, dtype=np.float64))


def missed(alpha: float, rounds: ArrayLike, *, power: float = 1.0) -> Exchange:
    """Weigh by the m rounds a worker has missed: ``h2 = alpha (1 + m)^-power``, and h1 as far from alpha to 1."""
    return towards_centre(alpha, 1 - (1.0 + np.asarray(rounds, dtype=np.float64)) ** -power)


def clipped(alpha: float, distances: ArrayLike, *, radius: float) -> Exchange:
    """Clip around the centre: ``h1 = alpha``, ``h2 = alpha * min(1, radius / |d|)``: nobody moves the centre far."""
    away = np.asarray(distances, dtype=np.float64)
    return Exchange(np.full(len(away), alpha), alpha * np.minimum(1.0, radius / np.maximum(away, FLOOR)))


def clip_radius(distances: ArrayLike) -> float:
    """Return a default radius: twice the median distance of those present. Few failures do not move it."""
    return 2 * float(np.median(np.asarray(distances, dtype=np.float64)))


def dynamic(
    alpha: float, score: ArrayLike, *, thresholds: tuple[float, float] = THRESHOLDS, reading: Reading = "growth"
) -> Exchange:
    """Weigh by the score: between two thresholds h1 rises in a line from alpha to 1, and h2 falls from alpha to 0.

    The rule is reconstructed: P4 weighs by the log of the distance, but its formula is not known to us. Two readings
    are possible. ``growth``: a worker that has drifted away (its distance grew) is the one to correct. ``fall``: one
    whose distance is shrinking, because it is being pulled back, is; its score is then negative, and the thresholds are
    those of ``-score``. A score of NaN (too few exchanges) counts as 0. A low threshold of 0 corrects any growth at
    all, and in early training every distance grows.
    """
    low, high = thresholds
    signed = np.nan_to_num(np.asarray(score, dtype=np.float64)) * (1 if reading == "growth" else -1)
    return towards_centre(alpha, np.clip((signed - low) / (high - low), 0.0, 1.0))


def score(log_distances: ArrayLike, *, coefficients: Sequence[float] = COEFFICIENTS) -> Floats:
    """Return the raw score ``a = sum_j c_j (u_{t-j} - u_{t-j-1})`` with ``u = log |d|``, the newest change heaviest.

    Its form is reconstructed. ``log_distances`` has one row per exchange, the newest first, and one column per worker.
    Changes not yet seen are NaN and count as 0; a worker without any change has a score of NaN.
    """
    rows = np.asarray(log_distances, dtype=np.float64)
    changes = rows[:-1] - rows[1:]
    weights = np.asarray(coefficients, dtype=np.float64)[: len(changes), None]
    total: Floats = np.nansum(weights * changes[: len(weights)], axis=0)
    return np.where(np.isnan(changes).all(axis=0), np.nan, total)


def log_distance(distances: ArrayLike) -> Floats:
    """Return ``log |d|``, floored."""
    return np.log(np.maximum(np.asarray(distances, dtype=np.float64), FLOOR))


def towards_centre(alpha: float, part: Floats) -> Exchange:
    """Return the weights between an ordinary exchange (``part`` 0) and a copy of the centre (1), which then stays."""
    return Exchange(alpha + (1 - alpha) * part, alpha * (1 - part))


def momentum_kept(alpha: float, pull: ArrayLike) -> Floats:
    """Return the part of its momentum a worker keeps: 1 at an ordinary pull, in a line down to 0 at ``h1 = 1``.

    Momentum belongs to the place where it was gathered; a worker that was put on the centre starts with none.
    """
    left = 1 - np.asarray(pull, dtype=np.float64)
    return np.clip(left / (1 - alpha), 0.0, 1.0) if alpha < 1 else np.ones_like(left)


def largest_alpha(workers: int, *, step_curvature: float = 0.0) -> float:
    """Return the stability bound on alpha for this number of workers that exchange at once.

    On a quadratic with ``eta * curvature = step_curvature`` per exchange the mean of the workers and the centre follow
    a linear map with stable eigenvalues as long as

        alpha <= (4 - 2 eta h) / (2 + k (2 - eta h)),      0 <= eta h <= 2.

    One worker gives EASGD's ``(4 - 2 eta) / (4 - eta)``; small steps give ``2 / (1 + k)``. Above ``1 / k`` the centre
    overshoots the workers' mean and swings back, but it settles.

    >>> largest_alpha(1, step_curvature=1.0) == 2 / 3, largest_alpha(4)
    (True, 0.4)
    """
    if not 0 <= step_curvature <= 2:
        raise ValueError(
            f"learning rate times curvature is {step_curvature:g}: between 0 and 2, or local training itself diverges"
        )
    return (4 - 2 * step_curvature) / (2 + workers * (2 - step_curvature))


def check_alpha(alpha: float, workers: int, *, step_curvature: float = 0.0) -> None:
    """Raise ValueError, with the bound, when exchanges with this alpha would not settle."""
    bound = largest_alpha(workers, step_curvature=step_curvature)
    if not 0 < alpha <= min(bound, 1.0):
        raise ValueError(
            f"alpha is {alpha:g}: elastic averaging among {workers} workers is stable for 0 < alpha <= "
            f"{min(bound, 1.0):.4g} (the bound is (4 - 2h) / (2 + k(2 - h)) with k workers and h = {step_curvature:g}, "
            f"learning rate times curvature); try {0.9 / workers:.3g}"
        )


class Memory:
    """What the rules remember of each worker: its last log-distances, its exchanges, and the rounds it has missed.

    ``weigh`` is called once a round with everybody's distances (anything for those absent) and who was present; all
    who see the same rounds hold the same memory. Where workers come one by one, it also hears whose turn it was.
    """

    def __init__(self, workers: int, *, lags: int = len(COEFFICIENTS)) -> None:
        self.log_distances = np.full((lags + 1, workers), np.nan)
        self.exchanges = np.zeros(workers, dtype=np.int64)
        self.missed = np.zeros(workers, dtype=np.int64)

    def arrive(self, distances: ArrayLike, present: ArrayLike, expected: ArrayLike | None = None) -> Floats:
        """Note a round's distances, and return the rounds each worker had missed before it.

        ``expected``: whose turn it was, everybody's when left out; others have missed nothing.
        """
        there = np.asarray(present, dtype=bool)
        turn = np.ones_like(there) if expected is None else np.asarray(expected, dtype=bool)
        pushed = np.vstack([log_distance(distances)[None], self.log_distances[:-1]])
        self.log_distances = np.where(there, pushed, self.log_distances)
        self.exchanges += there
        before = self.missed.astype(np.float64)
        self.missed = np.where(there, 0, self.missed + turn)
        return before

    def forget(self, worker: int) -> None:
        """Forget the worker of this rank: a new one has its position."""
        self.log_distances[:, worker] = np.nan
        self.exchanges[worker] = self.missed[worker] = 0

    def members_changed(self, old_ranks: Sequence[int | None]) -> None:
        """Follow a change of members: by new rank, ``old_ranks`` holds each one's old rank; None: a newcomer."""
        places = [0 if old is None else old for old in old_ranks]
        self.log_distances = self.log_distances[:, places]
        self.exchanges, self.missed = self.exchanges[places], self.missed[places]
        for worker in [new for new, old in enumerate(old_ranks) if old is None]:
            self.forget(worker)

    def state_dict(self) -> dict[str, Any]:
        rows = [[None if math.isnan(u) else u for u in row] for row in self.log_distances.tolist()]
        return {"log_distances": rows, "exchanges": self.exchanges.tolist(), "missed": self.missed.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.log_distances = np.array(state["log_distances"], dtype=np.float64)  # None becomes NaN
        self.exchanges = np.array(state["exchanges"], dtype=np.int64)
        self.missed = np.array(state["missed"], dtype=np.int64)
