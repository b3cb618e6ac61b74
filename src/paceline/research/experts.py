"""What a fleet's last steps suggest for its next: eight simple experts for every worker, and what tells them apart.

All is read from a window of log seconds, steps x workers, the newest step last; where a worker was cut off (``hidden``)
it holds what was believed beyond the cut-off. Nothing has a unit, and nothing depends on the workers' order or number.

    last      the newest time
    recent    an exponentially weighted mean, the newest weighing 0.5
    smoothed  the same with 0.15
    rhythm    the time one period ago, the period being the worker's best of 2 to 24 steps
    rhythms   the mean of one and two periods ago
    state     the mean of the state the worker is in: *low* or *high*, well above its lower quartile
    other     the mean of the state it is not in; where it was never high, as far above as others' high state
    wide      as smoothed, with a spread that covers everything seen
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Ints = NDArray[np.intp]

EXPERTS = ("last", "recent", "smoothed", "rhythm", "rhythms", "state", "other", "wide")
LAGS = 24
"""Longest rhythm looked for, in steps."""
LEAST = 0.004
"""Least spread (natural log) that is believed."""
FORGET = 0.95
"""Weight of a step over that of the one after it."""
UNSEEN = 0.3
"""Weight of a step in which the worker was cut off over one in which it was measured."""
STATES_APART, STATES_LEAST = 4.0, 0.12
"""A high time is above the lower quartile by this many times the noise, and at least by this much."""
FIRST_EXCESS = 0.4
"""How far above the low state the high one lies, before anybody was seen there."""
POOLED = 5.0
"""Steps of its own that weigh as much as the fleet's in a worker's chance of leaving its state."""


@dataclass(frozen=True)
class Advice:
    """What the experts say about each worker's next log seconds."""

    means: Floats
    """What each expects, workers x experts."""
    spreads: Floats
    """Root mean square of its errors in the window, workers x experts."""
    features: Floats
    """What helps to choose among them, workers x features."""


def advise(logs: Floats, hidden: Mask, ahead: int = 1) -> Advice:
    """Return the experts' advice from a window of at least one step, for the step ``ahead`` after the newest."""
    steps = len(logs)
    age = np.arange(steps, dtype=np.float64)[::-1, None]
    weight: Floats = np.asarray(FORGET**age * np.where(hidden, UNSEEN, 1.0), dtype=np.float64)
    change = np.diff(logs, axis=0) if steps > 1 else np.zeros_like(logs)
    noise = _noise(change)
    states, rhythm = _States(logs, weight, noise), _Rhythm(logs, weight, ahead)
    recent, smoothed = _smoothed(logs, weight, 0.5, ahead), _smoothed(logs, weight, 0.15, ahead)
    means = [logs[-1], recent[0], smoothed[0], rhythm.once, rhythm.twice, states.state, states.other, smoothed[0]]
    over = logs[ahead:] - logs[:-ahead] if steps > ahead else change
    spreads = [_root_mean(over, weight[-len(over) :]), recent[1], smoothed[1], rhythm.spread, 0.87 * rhythm.spread]
    spreads += [states.spread, states.spread, np.maximum(np.ptp(logs, axis=0), 0.3)]
    spread = np.maximum(np.stack(spreads, axis=1), noise[:, None] if steps < 4 else LEAST)
    lone = [
        *(np.log(spread[:, :6]) / 2).T,
        np.log(noise) / 2,
        *(np.arcsinh(apart / noise) / 3 for apart in (change[-1], *_apart(means))),
        *states.features(logs, ahead),
        *rhythm.features(),
        hidden[-1],
        hidden[-8:].mean(axis=0),
    ]
    features = np.stack(lone, axis=1)
    counts = [np.log(steps) / 3, 1 / steps, np.log(logs.shape[1]) / 4]
    shared = np.concatenate([features.mean(axis=0), counts])
    together = np.concatenate([features, np.broadcast_to(shared, (len(features), len(shared)))], axis=1)
    return Advice(np.stack(means, axis=1), spread, np.clip(together, -4.0, 4.0))


def _noise(change: Floats) -> Floats:
    """Return each worker's usual step to step: the median change, drawn towards the fleet's while there are few."""
    own, steps = 1.05 * np.median(np.abs(change), axis=0), len(change)
    return np.maximum((steps * own + 6 * np.median(own)) / (steps + 6), LEAST)


def _apart(means: list[Floats]) -> tuple[Floats, ...]:
    """Return the differences between experts that matter."""
    last, _, smoothed, once, twice, state, other, _ = means
    return last - state, once - state, once - last, twice - once, other - state, smoothed - state


def _smoothed(logs: Floats, weight: Floats, rate: float, ahead: int) -> tuple[Floats, Floats]:
    """Return the exponentially weighted mean after the window, and the root mean square of its errors so far ahead."""
    means, errors = [logs[0]], np.zeros_like(logs)
    for step in range(1, len(logs)):
        errors[step] = logs[step] - means[max(step - ahead, 0)]
        means.append(means[-1] + max(rate, 1 / (step + 1)) * (logs[step] - means[-1]))
    mean = means[-1]
    return mean, _root_mean(errors[1:], weight[1:]) if len(logs) > 1 else errors[0]


def _root_mean(errors: Floats, weight: Floats) -> Floats:
    return np.asarray(np.sqrt((weight * errors**2).sum(axis=0) / weight.sum(axis=0)))


class _States:
    """Low and high: which one a worker is in, what either takes, how it moves between them."""

    def __init__(self, logs: Floats, weight: Floats, noise: Floats) -> None:
        low = np.partition(logs, len(logs) // 4, axis=0)[len(logs) // 4]
        self.high = logs > low + np.maximum(STATES_APART * noise, STATES_LEAST)
        self.now = self.high[-1]
        ever = self.high.any(axis=0)
        mean_low = _mean(logs, weight * ~self.high)
        own = _mean(logs, weight * self.high) - mean_low
        self.excess = np.where(ever, own, np.median(own[ever]) if ever.any() else FIRST_EXCESS)
        mean_high = mean_low + self.excess
        self.state, self.other = np.where(self.now, mean_high, mean_low), np.where(self.now, mean_low, mean_high)
        self.within = (logs - np.where(self.high, mean_high, mean_low)) / noise
        self.spread = noise * _root_mean(self.within, weight)

    def features(self, logs: Floats, ahead: int) -> list[Floats]:
        run = np.logical_and.accumulate((self.high == self.now)[::-1], axis=0).sum(axis=0)
        furthest = max(1, len(logs) // 10)
        tail = np.partition(np.abs(self.within), -furthest, axis=0)[-furthest:].mean(axis=0)
        own, fleet = (p if ahead == 1 else 1 - (1 - p) ** ahead for p in self._leaving())
        return [
            self.excess,
            self.now.astype(np.float64),
            self.high.mean(axis=0),
            np.log(run) / 2,
            np.log(tail + 0.1) / 2,
            _logit(own) / 3,
            _logit(fleet) / 3,
        ]

    def _leaving(self) -> tuple[Floats, Floats]:
        """Return the chance to leave the present state, by the worker's own past and by the fleet's."""
        before, after = self.high[:-1], self.high[1:]
        up, at_low = (~before & after).sum(axis=0), (~before).sum(axis=0)
        down, at_high = (before & ~after).sum(axis=0), before.sum(axis=0)
        fleet_up, fleet_down = (up.sum() + 0.5) / (at_low.sum() + 20), (down.sum() + 0.5) / (at_high.sum() + 2)
        left, stayed = np.where(self.now, down, up), np.where(self.now, at_high, at_low)
        fleet = np.where(self.now, fleet_down, fleet_up)
        return (left + POOLED * fleet) / (stayed + POOLED), fleet


class _Rhythm:
    """Each worker's best period: the lag at which its times, and the fleet's, repeat best."""

    def __init__(self, logs: Floats, weight: Floats, ahead: int) -> None:
        steps, workers = logs.shape
        most = max(min(LAGS, 2 * steps // 3), 1)
        errors, squares = np.zeros((most, workers)), np.zeros((most, workers))
        for lag in range(1, most + 1) if steps > 1 else ():
            off = np.abs(logs[lag:] - logs[:-lag])
            errors[lag - 1] = off.mean(axis=0)
            squares[lag - 1] = _root_mean(off, weight[lag:])
        score = errors + errors.mean(axis=1, keepdims=True)
        best: Ints = np.argmin(score[1:], axis=0) + 1 if most > 1 else np.zeros(workers, dtype=np.intp)
        column = np.arange(workers)
        self.spread, self.once = squares[best, column], logs[np.minimum(-1 - best + ahead - 1, -1), column]
        second = np.minimum(2 * (best + 1), steps) - (ahead - 1)
        self.twice = np.where(2 * (best + 1) <= steps, (self.once + logs[-second, column]) / 2, self.once)
        self._lag, self._turns = best + 1, steps / (best + 1) / 3
        self._gain = np.log((np.median(errors, axis=0) + 1e-3) / (errors[best, column] + 1e-3))

    def features(self) -> list[Floats]:
        return [self._gain, self._turns, np.log(self._lag) / 3]


def _mean(logs: Floats, weight: Floats) -> Floats:
    return np.asarray((weight * logs).sum(axis=0) / np.maximum(weight.sum(axis=0), 1e-12))


def _logit(p: Floats) -> Floats:
    bounded = np.clip(p, 1e-3, 1 - 1e-3)
    return np.asarray(np.log(bounded / (1 - bounded)))
