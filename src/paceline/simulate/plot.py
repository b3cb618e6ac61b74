"""The comparison as one page: bars of throughput, and work done over time. Needs plotly (the extra `view`)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import import_module
from typing import Any

import numpy as np

from paceline.simulate.outcome import Outcome

POINTS = 500
"""Points of a line: more cannot be seen and would make the page heavy."""


def page(title: str, outcomes: Sequence[Outcome]) -> str:
    """One self-contained page of HTML: plotly is embedded, nothing is fetched."""
    return document(title, [_bars(outcomes), _lines(outcomes), _counts(outcomes)])


def document(title: str, figures: Sequence[Any], *, words: Sequence[str] = ()) -> str:
    """Plotly's figures below a title and paragraphs of plain words."""
    io = plotly("plotly.io")
    parts = [
        io.to_html(figure, full_html=False, include_plotlyjs=number == 0, config={"displaylogo": False})
        for number, figure in enumerate(figures)
    ]
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title></head>'
    style = '<body style="font-family: system-ui, sans-serif; max-width: 70rem; margin: 2rem auto">'
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in words)
    return f"{head}{style}<h1>{escape(title)}</h1>{said}{''.join(parts)}</body></html>"


def plotly(module: str) -> Any:
    """The module, or a ValueError that names the extra."""
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
    """Work done over time: the steeper, the faster."""
    go = plotly("plotly.graph_objects")
    figure = go.Figure()
    for outcome in outcomes:
        time_s, work = np.cumsum(outcome.seconds), np.cumsum(outcome.shares)
        kept = np.unique(np.linspace(0, len(work) - 1, POINTS).astype(np.int64))
        shown = True if outcome.shown else "legendonly"
        figure.add_scatter(x=time_s[kept].tolist(), y=work[kept].tolist(), name=outcome.name, visible=shown)
    return figure.update_layout(title="Work done", xaxis_title="seconds", yaxis_title="equal shares")


def _counts(outcomes: Sequence[Outcome]) -> Any:
    """How much the step's count varies, for the rules whose batch is not fixed."""
    go = plotly("plotly.graph_objects")
    figure = go.Figure()
    for outcome in outcomes:
        if outcome.count_cv > 1e-9:
            figure.add_box(y=(outcome.shares / outcome.workers).tolist()[-2000:], name=outcome.name)
    return figure.update_layout(title="A step's count over the global batch", showlegend=False)
