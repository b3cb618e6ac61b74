"""The page of several runs side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.observe.analysis.compared_runs import ComparedRun, Comparison
from paceline.observe.analysis.downsampling import CAPACITY
from paceline.observe.words.numbers import duration, number, percent_cell, size, times
from paceline.page.drawing import Picture, layout, line, small, text, worker_colours
from paceline.page.html import plotly_js, whole_page


def comparison_page(compared: Comparison) -> str:
    """Return one HTML file that needs nothing else. Raises ValueError without Plotly."""
    plotly = plotly_js()
    shown = [picture for picture in (_loss(compared), _done(compared), _bars(compared)) if picture is not None]
    head, rows = cells(compared)
    words = in_words(compared)
    return whole_page(
        "side_by_side.html", "Runs compared", shown, plotly, count=len(compared.runs), lead=words, head=head, rows=rows
    )


def in_words(compared: Comparison) -> str:
    """Return which run was fastest, by how much, and which learned soonest."""
    by_speed = sorted(compared.runs, key=lambda run: -run.verdict.figures.samples_per_s)
    best, worst = by_speed[0], by_speed[-1]
    fast, slow = best.verdict.figures.samples_per_s, worst.verdict.figures.samples_per_s
    sentences = []
    if slow:
        sentences.append(
            f"{best.name} was the fastest: {number(fast)} samples/s, {times(fast / slow)} times {worst.name}."
        )
    timed = [run for run in compared.runs if math.isfinite(run.time_to_loss_s)]
    if len(timed) > 1:
        first, last = (pick(timed, key=lambda run: run.time_to_loss_s) for pick in (min, max))
        least, most = duration(first.time_to_loss_s), duration(last.time_to_loss_s)
        took = f"from {least} ({first.name}) to {most} ({last.name})" if least != most else f"{least}, by each of them"
        sentences.append(f"To a loss of {compared.target:.3g} it took {took}.")
    if compared.asked and not timed:
        sentences.append(f"No run came down to a loss of {compared.target:.3g}.")
    return " ".join(sentences)


def cells(compared: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the table's head and rows, for the page and the terminal."""
    head = ["run", "pace", "workers", "steps", "time", "samples/s", "of limit", "loss"]
    timed = compared.asked or any(math.isfinite(run.time_to_loss_s) for run in compared.runs)
    head += [f"to loss {compared.target:.3g}"] if timed else []
    judged = next((run.evaluated[0] for run in compared.runs if run.evaluated), None)
    head += [judged] if judged else []
    return head, [_row(run, timed=timed, judged=judged) for run in compared.runs]


def _row(run: ComparedRun, *, timed: bool, judged: str | None) -> list[str]:
    figures = run.verdict.figures
    row = [run.name, run.verdict.pace, size(figures.fewest, figures.most), f"{len(run.log.records):,}"]
    row += [duration(run.seconds), number(figures.samples_per_s), percent_cell(figures.of_limit), _short(run.last_loss)]
    row += [duration(run.time_to_loss_s) if math.isfinite(run.time_to_loss_s) else "never"] if timed else []
    row += [_short(run.evaluated[1]) if run.evaluated and run.evaluated[0] == judged else ""] if judged else []
    return row


def _short(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else ""


def _loss(compared: Comparison) -> Picture | None:
    if not any(np.isfinite(run.loss).any() for run in compared.runs):
        return None
    data = _lines(compared.runs, lambda run: run.loss)
    caption = "Mean over the last few steps of each run."
    return Picture("loss", "Loss over time", caption, data, layout(y="loss", x="seconds"), wide=True)


def _done(compared: Comparison) -> Picture:
    data = _lines(compared.runs, lambda run: np.cumsum([record.total for record in run.log.records]).astype(np.float64))
    caption = "The steeper, the faster. A flat stretch is time between steps."
    return Picture("done", "Samples over time", caption, data, layout(y="samples", x="seconds"))


def _lines(runs: Sequence[ComparedRun], values: Callable[[ComparedRun], Any]) -> list[dict[str, Any]]:
    colours = worker_colours(len(runs))
    drawn = []
    for run, colour in zip(runs, colours):
        kept = np.unique(np.linspace(0, len(run.clock_s) - 1, min(CAPACITY, len(run.clock_s))).astype(int))
        drawn.append(line(small(run.clock_s[kept]), values(run)[kept], run.name, colour))
    return drawn


def _bars(compared: Comparison) -> Picture:
    runs, colours = compared.runs, worker_colours(len(compared.runs))
    data = [
        {
            "type": "bar", "orientation": "h", "y": [text(run.name) for run in runs], "marker": {"color": colours},
            "x": small(100 * run.verdict.figures.of_limit for run in runs), "showlegend": False,
            "text": [percent_cell(run.verdict.figures.of_limit) for run in runs],
            "textposition": "outside", "cliponaxis": False,
            "hovertemplate": "%{y}: %{text}<extra></extra>",
        }
    ]  # fmt: skip
    frame_ = layout(x="% of the limit", hovermode="closest", height=110 + 34 * len(runs))
    frame_["xaxis"] |= {"range": [0, 110]}
    frame_["yaxis"] |= {"autorange": "reversed", "automargin": True}
    caption = "The limit is what a run's own machines can do together."
    return Picture("of-limit", "How near the limit", caption, data, frame_)
