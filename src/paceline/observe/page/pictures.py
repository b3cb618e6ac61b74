"""The pictures over the whole run: shares, speed, forecast, learning, who was there, late work. Pure: buckets in,
Plotly's plain data out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.observe.analysis.downsampling import StepBucket
from paceline.observe.analysis.evaluations import MEANS, Evaluation
from paceline.observe.page import drawing as draw
from paceline.observe.words.membership import Move, moves_text
from paceline.observe.words.numbers import capital, percent, worker_name

STATES = {1: ("sat out", draw.SKY), 2: ("at work", draw.BLUE), 3: ("missed the round", draw.RED)}
"""Who was there, by number: the highest in a bucket is drawn, but for a worker that was away, 0, which is a gap."""
MOST_ROWS = 64
MOST_MARKS = 100
"""Lines for those who left and joined, the newest: more would hide the picture."""


@dataclass(frozen=True)
class PictureData:
    """All that the pictures need of a run."""

    buckets: Sequence[StepBucket]
    workers: tuple[int, ...]
    """In the order of the buckets' arrays."""
    machines: Mapping[int, str]
    evaluations: Sequence[Evaluation] = ()
    moves: Sequence[Move] = ()
    """Who left and who joined, where the log says so."""

    @property
    def steps(self) -> list[int]:
        return [bucket.last for bucket in self.buckets]

    @property
    def grain(self) -> int:
        """Steps a point of the pictures stands for, at most."""
        return max((bucket.steps for bucket in self.buckets), default=1)

    def stuck(self) -> dict[int, float]:
        """Part of the run's time that each worker spent on micro-batches that came too late for their round."""
        whole = sum(bucket.wall_s for bucket in self.buckets)
        total = self.table(lambda b: b.stuck_s).sum(axis=0)
        return {worker: float(s) / whole for worker, s in zip(self.workers, total)} if whole > 0 else {}

    def column(self, of: Callable[[StepBucket], float]) -> list[float]:
        return [of(bucket) for bucket in self.buckets]

    def table(self, of: Callable[[StepBucket], Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array([of(bucket) for bucket in self.buckets])

    def name(self, worker: int) -> str:
        return worker_name(worker, self.machines.get(worker))


def pictures(run: PictureData) -> list[draw.Picture]:
    """Those that have something to show, in the order of the page."""
    if not run.buckets:
        return []
    drawn = [speed(run), shares(run), learning(run), forecast(run), presence(run), handed_back(run)]
    shown = [picture for picture in drawn if picture is not None]
    if len(run.buckets) <= draw.FEW:
        for picture in shown:
            picture.layout["xaxis"] |= _whole_steps(run)
    return shown


def _whole_steps(run: PictureData) -> dict[str, Any]:
    """An axis for a few steps, where the drawing's own choice would be halves of a step and a range around nothing."""
    shown = [*run.steps, *(each.step for each in run.evaluations)]
    first, last = min(shown), max(shown)
    return {"range": [first - 0.5, last + 0.5], "tick0": 0, "dtick": max(1, (last - first) // draw.FEW)}


def speed(run: PictureData) -> draw.Picture:
    """Throughput against the limit; the band holds every single step."""
    steps = run.steps
    reached = run.column(lambda b: _over(b.samples, b.wall_s))
    limit = run.column(lambda b: _over(b.samples, b.ideal_s))
    data = [draw.line(steps, limit, "the limit: the sum of the workers' own speeds", draw.GREY, line={"dash": "dash"})]
    said = "Samples a second of the fleet, step by step."
    if run.grain > 1:
        data += draw.band(
            steps, run.column(lambda b: b.speed[0]), run.column(lambda b: b.speed[1]), "reached", draw.BLUE
        )
        said += f" Each point is {run.grain} steps; the band reaches from the slowest of them to the fastest."
    data.append(draw.line(steps, reached, "reached", draw.BLUE))
    ceiling = 1.15 * float(np.nanpercentile([v for v in limit + reached if math.isfinite(v)] or [1.0], 99))
    frame = draw.layout(y="samples/s", shapes=_marks(run))
    frame["yaxis"] |= {"range": [0, ceiling]}
    said += " Dotted lines: somebody left (red), somebody joined (green)." if run.moves else ""
    return draw.Picture("speed", "Speed against the limit", said, data, frame)


def _marks(run: PictureData) -> list[dict[str, Any]]:
    """A line across the picture where somebody left or joined."""
    return [
        draw.upright(move.step, draw.RED if move.left else draw.GREEN, "dot", 1.5) for move in run.moves[-MOST_MARKS:]
    ]


def shares(run: PictureData) -> draw.Picture | None:
    """Who did which part of the samples, stacked to 100 %."""
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
    """A few steps are bars: a layer through one point has no area."""
    return {"type": "bar", "x": steps, "y": draw.small(part), "name": draw.text(name), "marker": {"color": colour}}


def learning(run: PictureData) -> draw.Picture | None:
    """Loss, and whatever was evaluated or added up, as means over samples."""
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
    said = f"The last loss was {_last(loss):.3g}." if math.isfinite(_last(loss)) else ""
    return draw.Picture("learning", "Loss and what was evaluated", said or "No loss was recorded.", data, frame)


def _around_one(values: Sequence[float]) -> dict[str, Any]:
    """An axis from 0 for a single value, around which the drawing's own choice would be a range below 0."""
    known = {value for value in values if math.isfinite(value)}
    return {"range": [0, max(1.0, *known) * 1.05]} if len(known) == 1 and min(known) >= 0 else {}


def forecast(run: PictureData) -> draw.Picture | None:
    """What the pacer expected of the last worker against what that step took."""
    if not any(bucket.expected_s > 0 for bucket in run.buckets):
        return None
    told = [bucket for bucket in run.buckets if bucket.expected_s > 0]
    steps = [bucket.last for bucket in told]
    counts = [bucket.steps for bucket in told]
    expected = [1000 * b.expected_s / n for b, n in zip(told, counts)]
    took = [1000 * b.took_s / n for b, n in zip(told, counts)]
    off = sum(abs(b.expected_s - b.took_s) for b in told) / max(1e-12, sum(b.took_s for b in told))
    data = [
        draw.line(steps, took, "took", draw.BLUE),
        draw.line(steps, expected, "expected", draw.ORANGE, line={"dash": "dot"}),
    ]
    said = f"Own compute of the last worker to finish. The forecast was off by {percent(off)} on average."
    return draw.Picture("forecast", "Forecast and what happened", said, data, draw.layout(y="ms a step"))


def presence(run: PictureData) -> draw.Picture | None:
    """A strip a worker: at work, sitting out, missing the round, away."""
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
    said = (
        f"{moved} A gap is a worker that was away." if moved else "Everybody was there from the first step to the last."
    )
    return draw.Picture("presence", "Who was there", said, data, frame)


def membership_text(run: PictureData, most: int = 6) -> str:
    """Who came and who left, in words; empty when nobody did. From the log's word for it, else from the records."""
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
    """Samples that were dealt, not counted in their step, and dealt again; nothing when there were none."""
    undone = run.column(lambda b: b.undone)
    if not any(undone):
        return None
    data = [
        {"type": "bar", "x": run.steps, "y": draw.small(undone), "name": "dealt, not counted in its step",
         "marker": {"color": draw.SKY}},
    ]  # fmt: skip
    said = (
        "With a deadline more is dealt than a step needs, so that nobody runs out of work. What was not done by then, "
        f"{sum(undone):,.0f} samples in all, stayed in its queue and was dealt again; none was lost (see the audit)."
    )
    return draw.Picture("handed-back", "Dealt and handed back", said, data, draw.layout(y="samples", bargap=0))


def _means(run: PictureData) -> dict[str, list[float]]:
    """Figures the user added up, over the samples of the same steps."""

    def mean(name: str) -> list[float]:
        return run.column(lambda bucket: _over(bucket.sums.get(name, math.nan), bucket.samples))

    return {MEANS.get(name, name): mean(name) for name in dict.fromkeys(n for b in run.buckets for n in b.sums)}


def _steps_of_colour() -> list[list[Any]]:
    """A scale without transitions: each state has its third."""
    bands = [(place / 3, (place + 1) / 3, STATES[place + 1][1]) for place in range(3)]
    return [[edge, colour] for low, high, colour in bands for edge in (low, high)]


def _over(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


def _last(values: Sequence[float]) -> float:
    return next((value for value in reversed(values) if math.isfinite(value)), math.nan)
