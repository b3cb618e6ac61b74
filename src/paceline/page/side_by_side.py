"""Several runs side by side: how fast each was, how near its limit, how soon it reached a loss; and their page.

A step's loss is noisy, so a run has reached a loss when the mean over its last few steps has: a twentieth of the run, 5
steps at least and 50 at most. Time is wall-clock time from the start of the first step, time between steps included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.observe.analysis.downsampling import CAPACITY
from paceline.observe.analysis.stretches import Floats
from paceline.observe.analysis.timeline import lay_out
from paceline.observe.log.reader import RunLog, evaluations
from paceline.observe.words.numbers import duration, number, percent_cell, size, times
from paceline.observe.words.verdict import Verdict, verdict
from paceline.page.drawing import Picture, layout, line, small, text, worker_colours
from paceline.page.html import plotly_js, whole_page


@dataclass(frozen=True)
class ComparedRun:
    """One run. Numbers that are not known are NaN."""

    name: str
    log: RunLog
    verdict: Verdict
    clock_s: Floats
    """Seconds from the start of the first step to the end of each step."""
    loss: Floats
    """Mean loss over the last few steps, at each step."""
    time_to_loss_s: float = math.nan
    """Seconds until the loss had come down to the target."""

    @property
    def seconds(self) -> float:
        return float(self.clock_s[-1]) if len(self.clock_s) else math.nan

    @property
    def last_loss(self) -> float:
        return float(self.loss[-1]) if len(self.loss) else math.nan

    @property
    def evaluated(self) -> tuple[str, float] | None:
        """Return name and mean of the last figure that was evaluated."""
        found = [pair for each in evaluations(self.log.others) for pair in each.means.items()]
        return found[-1] if found else None


@dataclass(frozen=True)
class Comparison:
    """Runs, and the loss that they are compared at."""

    runs: tuple[ComparedRun, ...]
    target: float
    """Loss for ``time_to_loss_s``: by default the lowest that every run reached; NaN when a run has no loss."""
    asked: bool = False
    """Whether the target was given, so that a run that never reached it is worth a word."""


def compare(logs: Sequence[RunLog], *, target: float | None = None) -> Comparison:
    """Compare runs, in the order given. ``target`` is the loss to reach."""
    if target is not None and not 0 < target < math.inf:
        raise ValueError(f"the loss to reach must be a number above 0, not {target:g}")
    if len(logs) < 2:
        raise ValueError("name at least two runs to compare")
    if empty := next((log for log in logs if not log.records), None):
        raise ValueError(f"{empty.path} holds no steps, so there is nothing to compare")
    runs = [_read(log, name) for log, name in zip(logs, _names(logs))]
    goal = target if target is not None else max(_lowest(run) for run in runs)
    return Comparison(tuple(_timed(run, goal) for run in runs), goal, asked=target is not None)


def _read(log: RunLog, name: str) -> ComparedRun:
    steps = list(lay_out(log.records, log.times))
    zero = steps[0].start
    losses = np.array([math.nan if record.loss is None else record.loss for record in log.records])
    window = min(50, max(5, len(losses) // 20))
    return ComparedRun(
        name, log, verdict(log), np.array([step.stop - zero for step in steps]), smoothed(losses, window)
    )


def smoothed(values: Floats, window: int) -> Floats:
    """Return, at each index, the mean over the numbers among the last ``window`` values; fewer at the start."""
    good = np.isfinite(values)
    total = np.concatenate(([0.0], np.cumsum(np.where(good, values, 0.0))))
    count = np.concatenate(([0], np.cumsum(good)))
    stop = np.arange(1, len(values) + 1)
    start = np.maximum(0, stop - window)
    number = count[stop] - count[start]
    means: Floats = np.divide(total[stop] - total[start], number, out=np.full(len(values), math.nan), where=number > 0)
    return means


def _lowest(run: ComparedRun) -> float:
    good = run.loss[np.isfinite(run.loss)]
    return float(good.min()) if len(good) else math.nan


def _timed(run: ComparedRun, goal: float) -> ComparedRun:
    there = np.flatnonzero(run.loss <= goal)
    when = float(run.clock_s[there[0]]) if len(there) else math.nan
    return replace(run, time_to_loss_s=when)


def _names(logs: Sequence[RunLog]) -> list[str]:
    """Return the shortest names that are distinct: name, pace and name, folder, or a number in front."""
    plain = [str(log.run.get("name") or log.path.parent.name or "run") for log in logs]
    paced = [f"{log.run.get('pace') or 'pace unknown'} ({name})" for name, log in zip(plain, logs)]
    folders = [log.path.parent.name for log in logs]
    located = _without_common_front(folders)
    numbered = [f"{index}: {name} ({folder})" for index, (name, folder) in enumerate(zip(plain, folders), start=1)]
    return next(names for names in (plain, paced, located, numbered) if len(set(names)) == len(names))


def _without_common_front(folders: Sequence[str]) -> list[str]:
    """Return folder names without the parts that all share: ``20261115-195719-digits`` as ``195719-digits``."""
    parts = [folder.split("-") for folder in folders]
    while all(len(each) > 1 and each[0] == parts[0][0] for each in parts):
        parts = [each[1:] for each in parts]
    return ["-".join(each) for each in parts]


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
