"""The comparison of rules: each is played against the same matrix of seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from paceline.pace import Simulated, baseline, registered
from paceline.pace.forecast import Forecast, best_static_count, clairvoyant_counts, static_count
from paceline.pace.forecast import make as make_forecast
from paceline.pace.pacer import Played, played, rows
from paceline.simulate import deadline_play, play
from paceline.simulate.play import Floats, Outcome, matrix
from paceline.simulate.scenarios import STUCK_MICRO_BATCHES, STUCK_NOISE, stuck_limit

STATIC = 0.9
"""Fraction of the workers that the static cut-off waits for."""

Rule = Callable[[play.Tick], Outcome]
Progress = Callable[[int, int], None]
"""Function called with the steps played so far, of all rules, and their total."""


@dataclass(frozen=True)
class Entry:
    """A rule to be played, and the fields of its outcome that describe it."""

    rule: Rule
    pace: str = ""
    shown: bool = False


def compare(
    seconds: ArrayLike,
    *,
    overhead_s: float = 0.0,
    cost_s: ArrayLike = 0.0,
    warm_up: int = 0,
    seed: int = 0,
    model: str | Path | None = None,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Play every rule; the first outcome is naive (wait for all, equal shares), the last one the limit.

    ``cost_s`` is a constant cost per step on top of ``seconds``: one for all, one per worker, or a matrix like
    ``seconds``. The first ``warm_up`` steps are played and observed, but not scored. Rules with hindsight see the
    scored steps alone. With a ``model`` (a file of ``paceline learn``), P3's decision is played with the deep forecast
    as well.
    """
    own = _checked(seconds, overhead_s, warm_up)
    cost = play.costs(own, cost_s)
    return _play(_entries(own, cost, overhead_s, warm_up, seed, model), len(own), warm_up, progress)


def compare_stuck(
    seconds: ArrayLike,
    *,
    overhead_s: float = 0.0,
    cost_s: ArrayLike = 0.0,
    warm_up: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Compare the rules that are played by micro-batches, under the stalls of `paceline.simulate.scenarios`."""
    own = _checked(seconds, overhead_s, warm_up)
    return _play(_stuck_entries(own, play.costs(own, cost_s), overhead_s, seed), len(own), warm_up, progress)


def _play(entries: list[Entry], steps: int, warm_up: int, progress: Progress | None) -> list[Outcome]:
    total, played, outcomes = steps * len(entries), 0, []

    def tick() -> None:
        nonlocal played
        played += 1
        if progress is not None:
            progress(played, total)

    for number, entry in enumerate(entries, start=1):
        outcomes.append(replace(entry.rule(tick).after(warm_up), pace=entry.pace, shown=entry.shown))
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


def _entries(
    own: Floats, cost: Floats, overhead_s: float, warm_up: int, seed: int, model: str | Path | None
) -> list[Entry]:
    """Return every registered pace, grouped by how it is played, among yardsticks that nobody can choose."""
    total, size = own + cost, own.shape[1]
    scored, costs = np.sort(total[warm_up:], axis=1), _costs(overhead_s, cost)
    extra = None if model is None else make_forecast(f"deep:{model}")

    def first(name: str, count: play.Ints | int, pace: str = "", shown: bool = False) -> Entry:
        return Entry(lambda tick: play.counts(name, total, count, overhead_s=overhead_s), pace, shown)

    def row_rule(how: Played) -> Callable[[Simulated], Rule]:
        return lambda row: lambda tick: play_row(how, row, own, **costs, seed=seed, tick=tick)

    return [
        first("naive", size, pace=baseline().name, shown=True),
        first(f"static {STATIC}", static_count(STATIC, size)),
        first("best static", best_static_count(scored, overhead_s=overhead_s)),
        *_paces(row_rule("arrivals"), seed, "arrivals", forecast=extra),
        Entry(lambda tick: play.drop_compute(own, **costs)),
        *_paces(row_rule("shares"), seed, "shares"),
        Entry(lambda tick: play.smoothed_shares(own, **costs, tick=tick)),
        *_paces(row_rule("rounds"), seed, "rounds"),
        first("clairvoyant cut-off", clairvoyant_counts(np.sort(total, axis=1), overhead_s=overhead_s), shown=True),
        Entry(lambda tick: play.limit(own, **costs), shown=True),
    ]


def play_row(
    how: Played,
    row: Simulated,
    own: Floats,
    *,
    overhead_s: float,
    cost_s: Floats,
    seed: int = 0,
    share: int = play.SHARE,
    tick: play.Tick = lambda: None,
) -> Outcome:
    """Play one row of a pace in the way that its plans need (`Played`), with equal shares of ``share`` samples."""
    if how == "arrivals":
        return play.arrivals(own + cost_s, row.pacer, name=row.name, overhead_s=overhead_s, tick=tick)
    costs = _costs(overhead_s, cost_s)
    if how == "shares":
        return play.shares(own, row.pacer, name=row.name, **costs, share=share, tick=tick)
    pieces = {"share": share, "micro_batches": min(play.MICRO_BATCHES, share)}
    settings = {"name": row.name, **costs, "cut_to_fit": row.cut_to_fit, "seed": seed, **pieces}
    return deadline_play.play(own, row.pacer, **settings, tick=tick)


def _costs(overhead_s: float, cost: Floats) -> dict[str, Any]:
    return {"overhead_s": overhead_s, "cost_s": cost}


def _stuck_entries(own: Floats, cost: Floats, overhead_s: float, seed: int) -> list[Entry]:
    def stuck(row: Simulated) -> Rule:
        return lambda tick: deadline_play.play(
            own,
            row.pacer,
            name=row.name,
            overhead_s=overhead_s,
            cost_s=cost,
            cut_to_fit=row.cut_to_fit,
            micro_batches=STUCK_MICRO_BATCHES,
            noise=STUCK_NOISE,
            seed=seed,
            tick=tick,
        )

    return [
        Entry(stuck(Simulated("naive", baseline()())), pace=baseline().name, shown=True),
        *_paces(stuck, seed, "shares", "rounds"),
        Entry(lambda tick: stuck_limit(own, overhead_s=overhead_s, cost_s=cost), shown=True),
    ]


def _paces(
    play_row: Callable[[Simulated], Rule], seed: int, *how: Played, forecast: Forecast | None = None
) -> list[Entry]:
    """Return the rows of all registered paces that are played in one of these ways, without the baseline (naive)."""
    return [
        Entry(play_row(row), pace=kind.name if row.as_chosen else "", shown=row.as_chosen and kind.traits.shown)
        for kind in registered().values()
        if kind is not baseline() and played(kind) in how
        for row in rows(kind, seed=seed, forecast=forecast)
    ]
