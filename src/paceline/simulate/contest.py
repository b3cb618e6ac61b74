"""The contest: every rule against the same matrix of seconds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from paceline.pace import Adaptive, Epoch
from paceline.pace.cutoff import Cutoff, best_static_count, clairvoyant_counts, static_count
from paceline.pace.forecast import Forecast, LastValue, OrderStatistics, Smoothed, Window
from paceline.simulate import play
from paceline.simulate.outcome import Floats, Outcome, matrix

STATIC = 0.9
"""Fraction of the workers the static cut-off waits for."""

Contestant = Callable[[play.Tick], Outcome]
Progress = Callable[[int, int], None]
"""Called with the steps played so far, of all contestants, and their total."""


def compare(
    seconds: ArrayLike, *, overhead_s: float = 0.0, warm_up: int = 0, seed: int = 0, progress: Progress | None = None
) -> list[Outcome]:
    """Play everybody; the first outcome is naive (wait for all, equal shares), the last one the limit.

    The first ``warm_up`` steps are played and seen, but not scored. Hindsight is over the scored steps alone.
    """
    own = matrix(seconds)
    if not (np.isfinite(overhead_s) and overhead_s >= 0):
        raise ValueError(f"the round's own cost is finite and at least 0 seconds, not {overhead_s}")
    if not 0 <= warm_up < len(own):
        raise ValueError(f"a warm-up of {warm_up} steps leaves nothing to score of {len(own)}")
    entries = _contestants(own, overhead_s, warm_up, seed)
    total, played, outcomes = len(own) * len(entries), 0, []

    def tick() -> None:
        nonlocal played
        played += 1
        if progress is not None:
            progress(played, total)

    for number, entry in enumerate(entries, start=1):
        outcomes.append(entry(tick).after(warm_up))
        played = number * len(own)
        if progress is not None:
            progress(played, total)
    return outcomes


def _contestants(own: Floats, overhead_s: float, warm_up: int, seed: int) -> list[Contestant]:
    workers = own.shape[1]
    scored = np.sort(own[warm_up:], axis=1)

    def fixed(name: str, first: play.Ints | int) -> Contestant:
        return lambda tick: play.counts(name, own, first, overhead_s=overhead_s)

    def forecast(by: Forecast) -> Contestant:
        return lambda tick: play.cutoff(own, Cutoff(by, overhead_s=overhead_s, seed=seed), tick=tick)

    return [
        fixed("naive", workers),
        fixed(f"static {STATIC}", static_count(STATIC, workers)),
        fixed("best static", best_static_count(scored, overhead_s=overhead_s)),
        forecast(OrderStatistics()),
        forecast(LastValue()),
        forecast(Smoothed()),
        forecast(Window(seed=seed)),
        lambda tick: play.drop_compute(own, overhead_s=overhead_s),
        lambda tick: play.shares(own, Epoch(), overhead_s=overhead_s, tick=tick),
        lambda tick: play.shares(own, Adaptive(), overhead_s=overhead_s, tick=tick),
        lambda tick: play.smoothed_shares(own, overhead_s=overhead_s, tick=tick),
        fixed("clairvoyant cut-off", clairvoyant_counts(np.sort(own, axis=1), overhead_s=overhead_s)),
        lambda tick: play.limit(own, overhead_s=overhead_s),
    ]
