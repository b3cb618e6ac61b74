"""The pictures over the whole run: shares, speed, forecast, learning, who was there, late work.

Pure functions from buckets of steps to plain data for Plotly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.observe.analysis.downsampling import StepBucket
from paceline.observe.analysis.evaluations import MEANS, Evaluation
from paceline.observe.analysis.generations import Move, moves_text
from paceline.observe.words.numbers import capital, percent, worker_name
from paceline.page import drawing as draw

STATES = {1: ("sat out", draw.SKY), 2: ("at work", draw.BLUE), 3: ("missed the round", draw.RED)}
"""States of a worker by number: the highest in a bucket is drawn; a worker that was away, 0, is a gap."""
MOST_ROWS = 64
MOST_MARKS = 100
"""Most lines for changes of membership, the newest: more would hide the picture."""


@dataclass(frozen=True)
class PictureData:
    """The data of a run that the pictures need."""

    buckets: Sequence[StepBucket]
    workers: tuple[int, ...]
    """Workers in the order of the buckets' arrays."""
    machines: Mapping[int, str]
    evaluations: Sequence[Evaluation] = ()
    moves: Sequence[Move] = ()
    """Changes of membership, where the log has them."""

    @property
    def steps(self) -> list[int]:
        return [bucket.last for bucket in self.buckets]

    @property
    def grain(self) -> int:
        """Return the most steps that a point of the pictures stands for."""
        return max((bucket.steps for bucket in self.buckets), default=1)

    def stuck(self) -> dict[int, float]:
        """Return the part of the run's time that each worker spent on micro-batches too late for their round."""
        wall_s = sum(bucket.wall_s for bucket in self.buckets)
        stuck_s = self.table(lambda b: b.stuck_s).sum(axis=0)
        return {worker: float(s) / wall_s for worker, s in zip(self.workers, stuck_s)} if wall_s > 0 else {}

    def column(self, value: Callable[[StepBucket], float]) -> list[float]:
        return [value(bucket) for bucket in self.buckets]

    def table(self, values: Callable[[StepBucket], Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array([values(bucket) for bucket in self.buckets])

    def name(self, worker: int) -> str:
        return worker_name(worker, self.machines.get(worker))


def pictures(run: PictureData) -> list[draw.Picture]:
    """Return the pictures that have something to show, in the order of the page."""
    if not run.buckets:
        return []
    drawn = [speed(run), shares(run), learning(run), forecast(run), presence(run), handed_back(run)]
    shown = [picture for picture in drawn if picture is not None]
    if len(run.buckets) <= draw.FEW:
        for picture in shown:
            picture.layout["xaxis"] |= _whole_steps(run)
    return shown


def _whole_steps(run: PictureData) -> dict[str, Any]:
    """Return an axis for a few steps, for which Plotly would choose halves of a step and a range around nothing."""
    shown = [*run.steps, *(each.step for each in run.evaluations)]
    first, last = min(shown), max(shown)
    return {"range": [first - 0.5, last + 0.5], "tick0": 0, "dtick": max(1, (last - first) // draw.FEW)}


def speed(run: PictureData) -> draw.Picture:
    """Return throughput against the limit; the band holds every single step."""
    steps = run.steps
    reached = run.column(lambda b: _over(b.samples, b.wall_s))
    limit = run.column(lambda b: _over(b.samples, b.ideal_s))
    data = [draw.line(steps, limit, "the limit: the sum of the workers' own speeds", draw.GREY, line={"dash": "dash"})]
    caption = "Samples per second of the fleet, step by step."
    if run.grain > 1:
        data += draw.band(
            steps, run.column(lambda b: b.speed[0]), run.column(lambda b: b.speed[1]), "reached", draw.BLUE
        )
        caption += f" Each point is {run.grain} steps; the band reaches from the slowest of them to the fastest."
    data.append(draw.line(steps, reached, "reached", draw.BLUE))
    ceiling = 1.15 * float(np.nanpercentile([v for v in limit + reached if math.isfinite(v)] or [1.0], 99))
    frame = draw.layout(y="samples/s", shapes=_marks(run))
    frame["yaxis"] |= {"range": [0, ceiling]}
    caption += " Dotted lines: somebody left (red), somebody joined (green)." if run.moves else ""
    return draw.Picture("speed", "Speed against the limit", caption, data, frame)


def _marks(run: PictureData) -> list[dict[str, Any]]:
    """Return a vertical line for each change of membership."""
    return [
        draw.upright(move.step, draw.RED if move.left else draw.GREEN, "dot", 1.5) for move in run.moves[-MOST_MARKS:]
    ]


def shares(run: PictureData) -> draw.Picture | None:
    """Return each worker's part of the samples, stacked to 100 %."""
    if len(run.workers) < 2:
        return None
    done = run.table(lambda b: b.done)
    total = done.sum(axis=1, keepdims=True)
    part = 100 * np.divide(done, total, out=np.zeros_like(done), where=total > 0)
    order = list(range(len(run.workers)))
    many = len(order) > len(draw.WORKERS)
    if many:
        busy = run.table(lambda b: b.busy_s).sum(axis=0)
        own = np.divide(done.sum(axis=0), busy, out=np.zeros(len(order)), where=busy > 0)
        order.sort(key=lambda column: own[column])
    layer = _bar if len(run.buckets) <= draw.FEW else _layer
    data = [
        layer(run.steps, part[:, column], run.name(run.workers[column]).replace("emulated ", ""), colour)
        | {"showlegend": not many, "hovertemplate": "%{y:.1f} %"}
        for column, colour in zip(order, draw.worker_colours(len(order)))
    ]
    frame = draw.layout(y="% of the samples", height=340, shapes=_marks(run), barmode="stack")
    frame["yaxis"] |= {"range": [0, 100]}
    if many:
        frame["hovermode"] = "closest"
    how = "The slowest machine is at the bottom and dark, the fastest on top and bright." if many else ""
    return draw.Picture(
        "shares", "Shares of the work", f"Each worker's part of every batch. {how}".strip(), data, frame
    )


def _layer(steps: Sequence[int], part: Sequence[float], name: str, colour: str) -> dict[str, Any]:
    return draw.line(steps, part, name, colour, stackgroup="all", fillcolor=colour, line={"width": 0})


def _bar(steps: Sequence[int], part: Sequence[float], name: str, colour: str) -> dict[str, Any]:
    """Return a worker's part as bars, for a few steps: a layer through one point has no area."""
    return {"type": "bar", "x": steps, "y": draw.small(part), "name": draw.text(name), "marker": {"color": colour}}


def learning(run: PictureData) -> draw.Picture | None:
    """Return loss, evaluations, and the sums of `step.add`, as means over samples."""
    loss = run.column(lambda b: b.loss[1])
    means = _means(run)
    if not any(map(math.isfinite, loss)) and not means and not run.evaluations:
        return None
    data: list[dict[str, Any]] = []
    if run.grain > 1:
        data += draw.band(
            run.steps, run.column(lambda b: b.loss[0]), run.column(lambda b: b.loss[2]), "loss", draw.BLUE
        )
    data.append(draw.line(run.steps, loss, "loss (left)", draw.BLUE))
    frame = draw.layout(y="loss")
    on_right = [(name, run.steps, values, "lines") for name, values in means.items()]
    for name in dict.fromkeys(key for each in run.evaluations for key in each.means):
        points = [(each.step, each.means[name]) for each in run.evaluations if name in each.means]
        on_right.append((f"{name}, evaluated", [step for step, _ in points], [v for _, v in points], "lines+markers"))
    for (name, steps, values, mode), colour in zip(on_right, (draw.ORANGE, draw.GREEN, draw.PURPLE, draw.RED)):
        data.append(draw.line(steps, values, f"{name} (right)", colour, mode=mode, yaxis="y2"))
    if on_right:
        frame["yaxis2"] = {"overlaying": "y", "side": "right", "showgrid": False, "tickmode": "auto", "zeroline": False,
                           "title": {"text": "mean over samples"}}  # fmt: skip
        frame["yaxis2"] |= _around_one([value for _, _, values, _ in on_right for value in values])
        frame["margin"] |= {"r": 64}
    caption = f"The last loss was {_last(loss):.3g}." if math.isfinite(_last(loss)) else "No loss was recorded."
    return draw.Picture("learning", "Loss and what was evaluated", caption, data, frame)


def _around_one(values: Sequence[float]) -> dict[str, Any]:
    """Return an axis from 0 for a single value, around which Plotly would choose a range that goes below 0."""
    known = {value for value in values if math.isfinite(value)}
    return {"range": [0, max(1.0, *known) * 1.05]} if len(known) == 1 and min(known) >= 0 else {}


def forecast(run: PictureData) -> draw.Picture | None:
    """Return the pacer's forecast for the last worker against what that worker took."""
    if not any(bucket.expected_s > 0 for bucket in run.buckets):
        return None
    forecasts = [bucket for bucket in run.buckets if bucket.expected_s > 0]
    steps = [bucket.last for bucket in forecasts]
    expected = [1000 * bucket.expected_s / bucket.steps for bucket in forecasts]
    took = [1000 * bucket.took_s / bucket.steps for bucket in forecasts]
    off = sum(abs(b.expected_s - b.took_s) for b in forecasts) / max(1e-12, sum(b.took_s for b in forecasts))
    data = [
        draw.line(steps, took, "took", draw.BLUE),
        draw.line(steps, expected, "expected", draw.ORANGE, line={"dash": "dot"}),
    ]
    caption = f"Own compute of the last worker to finish. The forecast was off by {percent(off)} on average."
    return draw.Picture("forecast", "Forecast and what happened", caption, data, draw.layout(y="ms per step"))


def presence(run: PictureData) -> draw.Picture | None:
    """Return one strip per worker: at work, sitting out, missing the round, away."""
    if len(run.workers) < 2:
        return None
    rows = sorted(enumerate(run.workers), key=lambda row: row[1])[:MOST_ROWS]
    present, missed = run.table(lambda b: b.present), run.table(lambda b: b.missed)
    idle = run.table(lambda b: b.idle)
    state = np.where(missed > 0, 3, np.where(idle >= np.maximum(present, 1), 1, 2))
    away = present < run.table(lambda b: np.full(len(run.workers), b.steps))
    by_row = np.where(away, 0, state).T[[column for column, _ in rows]].tolist()
    z = [[value or None for value in row] for row in by_row]
    seen = sorted({value for row in z for value in row if value is not None}) or [2]
    data: list[dict[str, Any]] = [
        {
            "type": "heatmap", "x": run.steps, "y": list(range(len(rows))), "z": z, "zmin": 1, "zmax": 3,
            "colorscale": _steps_of_colour(), "showscale": False, "ygap": 2, "hoverongaps": False,
            "text": [[STATES[value][0] if value else "" for value in row] for row in z] if len(rows) <= 16 else None,
            "hovertemplate": "%{y}, step %{x}" + (": %{text}" if len(rows) <= 16 else "") + "<extra></extra>",
        }
    ]  # fmt: skip
    data += [
        {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": name,
         "marker": {"color": colour, "symbol": "square", "size": 11}}
        for value, (name, colour) in STATES.items() if value in seen
    ]  # fmt: skip
    frame = draw.layout(height=110 + min(22, max(6, 480 // len(rows))) * len(rows), hovermode="closest")
    frame["yaxis"] = draw.row_axis([(worker, run.machines.get(worker, "")) for _, worker in rows])
    moved = membership_text(run)
    caption = (
        f"{moved} A gap is a worker that was away." if moved else "Everybody was there from the first step to the last."
    )
    return draw.Picture("presence", "Who was there", caption, data, frame)


def membership_text(run: PictureData, most: int = 6) -> str:
    """Return who came and who left, from the log's generations or else from the records; empty when nobody did."""
    if run.moves:
        return moves_text(run.moves, most)
    if not run.buckets:
        return ""
    here = run.table(lambda b: b.present) > 0
    first, last = here.argmax(axis=0), len(here) - 1 - here[::-1].argmax(axis=0)
    seen: list[tuple[int, str]] = []
    for column, worker in enumerate(run.workers):
        came, left = run.buckets[first[column]].first, run.buckets[last[column]].last
        seen += [(came, f"worker {worker} came at step {came}")] if first[column] > 0 else []
        seen += [(left, f"worker {worker} left after step {left}")] if last[column] < len(here) - 1 else []
    if not seen:
        return ""
    words = [words for _, words in sorted(seen)]
    more = f" and {len(words) - most} more changes" if len(words) > most else ""
    return f"{capital('; '.join(words[:most]))}{more}."


def handed_back(run: PictureData) -> draw.Picture | None:
    """Return the samples that were dealt, not counted in their step, and dealt again; None when there were none."""
    undone = run.column(lambda b: b.undone)
    if not any(undone):
        return None
    data = [
        {"type": "bar", "x": run.steps, "y": draw.small(undone), "name": "dealt, not counted in its step",
         "marker": {"color": draw.SKY}},
    ]  # fmt: skip
    caption = (
        "With a deadline more is dealt than a step needs, so that nobody runs out of work. What was not done by then, "
        f"{sum(undone):,.0f} samples in all, stayed in its queue and was dealt again; none was lost (see the audit)."
    )
    return draw.Picture("handed-back", "Dealt and handed back", caption, data, draw.layout(y="samples", bargap=0))


def _means(run: PictureData) -> dict[str, list[float]]:
    """Return the sums of `step.add`, divided by the samples of the same steps."""

    def mean(name: str) -> list[float]:
        return run.column(lambda bucket: _over(bucket.sums.get(name, math.nan), bucket.samples))

    return {MEANS.get(name, name): mean(name) for name in dict.fromkeys(n for b in run.buckets for n in b.sums)}


def _steps_of_colour() -> list[list[Any]]:
    """Return a scale without transitions: each state has a third."""
    bands = [(index / 3, (index + 1) / 3, STATES[index + 1][1]) for index in range(3)]
    return [[edge, colour] for low, high, colour in bands for edge in (low, high)]


def _over(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


def _last(values: Sequence[float]) -> float:
    return next((value for value in reversed(values) if math.isfinite(value)), math.nan)
