"""The comparison of rules: each is played against the same matrix of seconds.

It is shown as plain figures, as a table for the terminal, and as a page of plots (the extra `view`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from paceline.observe.words.numbers import number, percent_cell
from paceline.pace import Simulated, baseline, registered
from paceline.pace.forecast import Forecast, best_static_count, clairvoyant_counts, static_count
from paceline.pace.forecast import make as make_forecast
from paceline.pace.pacer import Played, played, rows
from paceline.simulate import deadline_play, play
from paceline.simulate.matrices import STUCK_MICRO_BATCHES, STUCK_NOISE, stuck_limit
from paceline.simulate.play import Floats, Outcome, matrix

if TYPE_CHECKING:
    from rich.table import Table


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
    """Compare the rules that are played by micro-batches, under the stalls of `paceline.simulate.matrices`."""
    own = _checked(seconds, overhead_s, warm_up)
    return _play(_stuck_entries(own, play.costs(own, cost_s), overhead_s, seed), len(own), warm_up, progress)


def _play(entries: list[Entry], steps: int, warm_up: int, progress: Progress | None) -> list[Outcome]:
    total, played, outcomes = steps * len(entries), 0, []

    def tick() -> None:
        nonlocal played
        played += 1
        if progress is not None:
            progress(played, total)

    for entry in entries:
        outcomes.append(replace(entry.rule(tick).after(warm_up), pace=entry.pace, shown=entry.shown))
        played = len(outcomes) * steps
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


SEES = {"best static": "all steps", "clairvoyant cut-off": "this step", "limit": "-"}
"""Steps that a rule sees when it decides; rules that are not listed see the past alone."""


def figures(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return one dictionary per rule: equal shares per second, over naive (the first) and over the limit (the last)."""
    naive, limit = outcomes[0].throughput, outcomes[-1].throughput
    return [
        {
            "rule": outcome.name,
            "sees": SEES.get(outcome.name, "the past"),
            "shares_per_s": outcome.throughput,
            "over_naive": outcome.throughput / naive,
            "over_limit": outcome.throughput / limit,
            "waiting": outcome.waiting,
            "wasted": outcome.wasted,
            "count_cv": outcome.count_cv,
        }
        for outcome in outcomes
    ]


def empty_table(words: Iterable[str], numbers: Iterable[str]) -> Table:
    """Return a table for a terminal: columns of words, then columns of numbers. Needs rich."""
    from rich.table import Table

    drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in words:
        drawn.add_column(name, no_wrap=True)
    for name in numbers:
        drawn.add_column(name, justify="right", no_wrap=True)
    return drawn


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the figures as a table for a terminal. Needs rich."""
    numbers = ("shares/s", "over\nnaive", "over\nlimit", "waiting", "wasted", "batch\nvaries")
    drawn = empty_table(["rule", "sees"], numbers)
    for row in rows:
        drawn.add_row(
            row["rule"],
            row["sees"],
            number(row["shares_per_s"]),
            f"{row['over_naive']:.2f}",
            f"{row['over_limit']:.2f}",
            *(percent_cell(row[name]) for name in ("waiting", "wasted", "count_cv")),
        )
    return drawn


POINTS = 500
"""Points per line: more cannot be seen and would make the page heavy."""


def page(title: str, outcomes: Sequence[Outcome]) -> str:
    """Return one self-contained page of HTML: plotly is embedded, nothing is fetched."""
    return document(title, [_bars(outcomes), _lines(outcomes), _counts(outcomes)])


def document(title: str, figures: Sequence[Any], *, words: Sequence[str] = ()) -> str:
    """Return a page with plotly's figures below a title and paragraphs of plain words."""
    io = plotly("plotly.io")
    parts = [
        io.to_html(figure, full_html=False, include_plotlyjs=number == 0, config={"displaylogo": False})
        for number, figure in enumerate(figures)
    ]
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title></head>'
    style = '<body style="font-family: system-ui, sans-serif; max-width: 70rem; margin: 2rem auto">'
    paragraphs = "".join(f"<p>{escape(sentence)}</p>" for sentence in words)
    return f"{head}{style}<h1>{escape(title)}</h1>{paragraphs}{''.join(parts)}</body></html>"


def plotly(module: str) -> Any:
    """Import a module of plotly; raise ValueError, naming the extra, if it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise ValueError("the page is drawn by Plotly, which is not installed: pip install 'paceline[view]'") from None


def _bars(outcomes: Sequence[Outcome]) -> Any:
    naive, limit = outcomes[0].throughput, outcomes[-1].throughput
    over = [outcome.throughput / naive for outcome in outcomes]
    labels = [f"{outcome.throughput / limit:.0%} of the limit" for outcome in outcomes]
    go = plotly("plotly.graph_objects")
    figure = go.Figure(go.Bar(x=over, y=[outcome.name for outcome in outcomes], orientation="h", text=labels))
    return figure.update_layout(
        title="Throughput over naive", yaxis={"autorange": "reversed"}, height=140 + 28 * len(outcomes)
    )


def _lines(outcomes: Sequence[Outcome]) -> Any:
    """Draw work done over time: the steeper, the faster."""
    go = plotly("plotly.graph_objects")
    figure = go.Figure()
    for outcome in outcomes:
        time_s, work = np.cumsum(outcome.seconds), np.cumsum(outcome.shares)
        kept = np.unique(np.linspace(0, len(work) - 1, POINTS).astype(np.int64))
        shown = True if outcome.shown else "legendonly"
        figure.add_scatter(x=time_s[kept].tolist(), y=work[kept].tolist(), name=outcome.name, visible=shown)
    return figure.update_layout(title="Work done", xaxis_title="seconds", yaxis_title="equal shares")


def _counts(outcomes: Sequence[Outcome]) -> Any:
    """Draw how much a step's sample count varies, for the rules whose batch is not fixed."""
    go = plotly("plotly.graph_objects")
    figure = go.Figure()
    for outcome in outcomes:
        if outcome.count_cv > 1e-9:
            figure.add_box(y=(outcome.shares / outcome.workers).tolist()[-2000:], name=outcome.name)
    return figure.update_layout(title="A step's count over the global batch", showlegend=False)
