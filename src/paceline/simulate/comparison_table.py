"""The comparison as plain figures, as a table for the terminal, and as a page of plots (the extra `view`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.observe.words.numbers import number, percent_cell
from paceline.simulate.play import Outcome

if TYPE_CHECKING:
    from rich.table import Table

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
