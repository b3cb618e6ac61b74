"""The contest: every rule against the same matrix of seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from paceline.pace import Adaptive, Cutoff, Epoch, Equal, Joint, Pacer
from paceline.pace.cutoff import best_static_count, clairvoyant_counts
from paceline.pace.forecast import Forecast, LastValue, OrderStatistics, Smoothed, Window
from paceline.pace.forecast import make as make_forecast
from paceline.simulate import play, rounds
from paceline.simulate.outcome import Floats, Outcome, matrix
from paceline.simulate.stuck import MICRO_BATCHES, NOISE, alone

STATIC = 0.9
"""Fraction of the workers the static cut-off waits for."""
WHOLE = "joint, whole"

Contestant = Callable[[play.Tick], Outcome]
Progress = Callable[[int, int], None]
"""Called with the steps played so far, of all contestants, and their total."""


def compare(
    seconds: ArrayLike,
    *,
    overhead_s: float = 0.0,
    warm_up: int = 0,
    seed: int = 0,
    model: str | Path | None = None,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Play everybody; the first outcome is naive (wait for all, equal shares), the last one the limit.

    The first ``warm_up`` steps are played and seen, but not scored. Hindsight is over the scored steps alone. With a
    ``model`` (a file of ``paceline learn``), P3's decision is played with the deep forecast as well.
    """
    own = _checked(seconds, overhead_s, warm_up)
    return _play(_contestants(own, overhead_s, warm_up, seed, model), len(own), warm_up, progress)


def compare_stuck(
    seconds: ArrayLike,
    *,
    overhead_s: float = 0.0,
    warm_up: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Outcome]:
    """The same under stalls inside micro-batches (`stuck`), for the rules played micro-batch by micro-batch."""
    own = _checked(seconds, overhead_s, warm_up)
    return _play(_stuck_contestants(own, overhead_s, seed), len(own), warm_up, progress)


def _play(entries: list[Contestant], steps: int, warm_up: int, progress: Progress | None) -> list[Outcome]:
    total, played, outcomes = steps * len(entries), 0, []

    def tick() -> None:
        nonlocal played
        played += 1
        if progress is not None:
            progress(played, total)

    for number, entry in enumerate(entries, start=1):
        outcomes.append(entry(tick).after(warm_up))
        played = number * steps
        if progress is not None:
            progress(played, total)
    return outcomes


def _checked(seconds: ArrayLike, overhead_s: float, warm_up: int) -> Floats:
    own = matrix(seconds)
    if not (np.isfinite(overhead_s) and overhead_s >= 0):
        raise ValueError(f"the round's own cost is finite and at least 0 seconds, not {overhead_s}")
    if not 0 <= warm_up < len(own):
        raise ValueError(f"a warm-up of {warm_up} steps leaves nothing to score of {len(own)}")
    return own


def _contestants(own: Floats, overhead_s: float, warm_up: int, seed: int, model: str | Path | None) -> list[Contestant]:
    scored = np.sort(own[warm_up:], axis=1)

    def fixed(name: str, first: play.Ints | int) -> Contestant:
        return lambda tick: play.counts(name, own, first, overhead_s=overhead_s)

    def cutoff(rule: Cutoff, name: str = "") -> Contestant:
        return lambda tick: play.cutoff(own, rule, name=name, overhead_s=overhead_s, tick=tick)

    def forecast(by: Forecast) -> Contestant:
        return cutoff(Cutoff(by, seed=seed))

    def joint(name: str, cut_to_fit: bool) -> Contestant:
        settings = {"name": name, "overhead_s": overhead_s, "cut_to_fit": cut_to_fit, "seed": seed}
        return lambda tick: rounds.play(own, Joint(seed=seed), **settings, tick=tick)  # type: ignore[arg-type]

    return [
        fixed("naive", own.shape[1]),
        cutoff(Cutoff(static=STATIC), f"static {STATIC}"),
        fixed("best static", best_static_count(scored, overhead_s=overhead_s)),
        forecast(OrderStatistics()),
        forecast(LastValue()),
        forecast(Smoothed()),
        forecast(Window(seed=seed)),
        *([] if model is None else [forecast(make_forecast(f"deep:{model}"))]),
        lambda tick: play.drop_compute(own, overhead_s=overhead_s),
        lambda tick: play.shares(own, Epoch(), overhead_s=overhead_s, tick=tick),
        lambda tick: play.shares(own, Adaptive(), overhead_s=overhead_s, tick=tick),
        lambda tick: play.smoothed_shares(own, overhead_s=overhead_s, tick=tick),
        joint(WHOLE, False),
        joint("joint", True),
        fixed("clairvoyant cut-off", clairvoyant_counts(np.sort(own, axis=1), overhead_s=overhead_s)),
        lambda tick: play.limit(own, overhead_s=overhead_s),
    ]


def _stuck_contestants(own: Floats, overhead_s: float, seed: int) -> list[Contestant]:
    def played(name: str, pacer: Pacer, cut_to_fit: bool = True) -> Contestant:
        return lambda tick: rounds.play(
            own,
            pacer,
            name=name,
            overhead_s=overhead_s,
            cut_to_fit=cut_to_fit,
            micro_batches=MICRO_BATCHES,
            noise=NOISE,
            seed=seed,
            tick=tick,
        )

    return [
        played("naive", Equal()),
        played("epoch", Epoch()),
        played("adaptive", Adaptive()),
        played(WHOLE, Joint(seed=seed), cut_to_fit=False),
        played("joint", Joint(seed=seed)),
        lambda tick: alone(own, overhead_s=overhead_s),
    ]
