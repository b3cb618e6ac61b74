"""The pictures of a run: shares, speed, forecast, learning, who was there, late work; its last steps; and what if.

Pure functions from buckets of steps to plain data for Plotly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.observe.analysis.downsampling import StepBucket
from paceline.observe.analysis.generations import Move, moves_text
from paceline.observe.analysis.stretches import bounded
from paceline.observe.analysis.timeline import KINDS, TimedStep, lay_out
from paceline.observe.log.reader import MEANS, Evaluation
from paceline.observe.words.numbers import capital, duration, percent, worker_name
from paceline.observe.words.verdict import Verdict
from paceline.pace import baseline
from paceline.page import drawing as draw
from paceline.page.whatif import WhatIf, instead
from paceline.records import StepRecord

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


MOST_SLICES = 6_000
"""Most slices that are drawn: more only slow the browser."""
FEWEST, MOST_STEPS = 4, 16
NAMES = KINDS | {"waiting": "waiting for the round"}
"""Names of the slices on the picture: with a deadline nobody waits for the last worker."""
BARELY = 0.01
"""Part of the time below which waiting is not charged to a worker."""
HOVER = "step %{customdata[0]}, worker %{customdata[1]}: %{customdata[2]} ms"
COLOURS = {"compute": draw.BLUE, "late": draw.RED, "waiting": draw.ORANGE, "round": draw.PURPLE, "rest": "#BBBBBB"}


def last_steps(
    records: Sequence[StepRecord], times: Sequence[float], *, workers: int, most: int = MOST_SLICES
) -> list[TimedStep]:
    """Return as many of the last steps as ``most`` slices hold; one step more is read, for late work from it."""
    count = max(FEWEST, min(MOST_STEPS, most // (4 * max(1, workers))))
    return list(lay_out(records[-count - 1 :], times[-count - 1 :]))[-count:]


def timeline(
    steps: Sequence[TimedStep], machines: Mapping[int, str], blamed: Mapping[int, float]
) -> draw.Picture | None:
    """Return the last steps with one row per worker; of more than fit, the workers that others waited for most."""
    if not steps:
        return None
    everybody = sorted({worker for step in steps for worker in step.record.workers})
    rows = sorted(sorted(everybody, key=lambda worker: -blamed.get(worker, 0.0))[:MOST_ROWS])
    row_of = {worker: row for row, worker in enumerate(rows)}
    data = [_bars(kind, steps, row_of) for kind in KINDS]
    data = [trace for trace in data if trace["x"]] + _deadlines(steps, len(rows))
    first, last = steps[0].record.step, steps[-1].record.step
    hidden = (
        f" {len(everybody) - len(rows)} of {len(everybody)} workers are left out, those least waited for."
        if len(rows) < len(everybody)
        else ""
    )
    these = f"Steps {first} to {last}" if first != last else f"Step {first}"
    waited = f" {_waited(steps)}" if len(everybody) > 1 else ""
    caption = f"{these}, one row per worker.{waited}{hidden}"
    frame = draw.layout(x="seconds", height=min(960, 110 + max(14, min(34, 800 // len(rows))) * len(rows)))
    frame |= {"barmode": "overlay", "bargap": 0.15, "hovermode": "closest"}
    frame["yaxis"] = draw.row_axis([(worker, machines.get(worker, "")) for worker in rows])
    return draw.Picture("timeline", "The last steps", caption, data, frame, wide=True)


def _bars(kind: str, steps: Sequence[TimedStep], row_of: Mapping[int, int]) -> dict[str, Any]:
    zero = steps[0].start
    found = [(step, piece) for step in steps for piece in step.slices if piece.kind == kind and piece.worker in row_of]
    marker: dict[str, Any] = {"color": COLOURS[kind], "line": {"width": 0}}
    if kind == "late":  # distinct by more than its colour
        marker["pattern"] = {"shape": "/", "size": 5, "fillmode": "overlay", "fgcolor": "white", "fgopacity": 0.6}
    return {
        "type": "bar", "orientation": "h", "name": NAMES[kind], "marker": marker,
        "x": draw.small(piece.seconds for _, piece in found),
        "base": [round(piece.start - zero, 5) for _, piece in found],
        "y": [row_of[piece.worker] for _, piece in found],
        "customdata": [[step.record.step, piece.worker, round(1000 * piece.seconds, 2)] for step, piece in found],
        "hovertemplate": HOVER + f"<extra>{NAMES[kind]}</extra>",
    }  # fmt: skip


def _deadlines(steps: Sequence[TimedStep], rows: int) -> list[dict[str, Any]]:
    due = [step.deadline - steps[0].start for step in steps if step.deadline is not None and step.deadline <= step.stop]
    if not due:
        return []
    x = [value for moment in due for value in (round(moment, 5), round(moment, 5), None)]
    y = [-0.5, rows - 0.5, None] * len(due)
    style = {"color": draw.GREY, "width": 2, "dash": "dash"}
    return [
        {"type": "scatter", "mode": "lines", "x": x, "y": y, "line": style, "name": "deadline", "hoverinfo": "skip"}
    ]


def _waited(steps: Sequence[TimedStep]) -> str:
    """Return how much of the time was waiting, and who caused most of it."""
    total = sum((step.stop - step.start) * len(step.record.workers) for step in steps)
    waited = sum(map(_waiting_s, steps))
    if total <= 0 or waited < BARELY * total:
        return "Hardly anybody waited."
    part = percent(waited / total)
    if 2 * sum(bounded(step.record) for step in steps) > len(steps):
        return f"Rounds close at their deadline and wait for nobody; {part} of all time here was waiting until then."
    caused = _caused_s(steps)
    who = max(caused, key=lambda worker: caused[worker], default=None)
    if who is None or caused[who] <= waited / 2:
        return f"No single worker was waited for most; {part} of all time here was waiting."
    most = f"{percent(caused[who] / waited)} of the waiting"
    return f"The others waited most for worker {who}: {most}, which was {part} of all time here."


def _waiting_s(step: TimedStep) -> float:
    return sum(piece.seconds for piece in step.slices if piece.kind == "waiting")


def _caused_s(steps: Sequence[TimedStep]) -> dict[int, float]:
    """Return the seconds that all others waited for each worker; a wait is charged to the last to finish."""
    caused: dict[int, float] = {}
    for step in steps:
        if (worker := step.last) is not None:
            caused[worker] = caused.get(worker, 0.0) + _waiting_s(step)
    return caused


def what_if_picture(tried: WhatIf, judged: Verdict) -> draw.Picture | None:
    """Return the run's time beside that of every pace on the same machines; None without a replay."""
    if not tried.answers:
        return None
    rows = [(answer.pace, answer.seconds, draw.BLUE) for answer in tried.answers]
    this = "this run" if tried.span is None else "as it was"
    rows.append((f"{this}{f' ({judged.pace})' if judged.pace else ''}", tried.actual_s, draw.ORANGE))
    rows.sort(key=lambda row: -row[1])
    unit, name = (60.0, "minutes") if tried.actual_s >= 120 else (1.0, "seconds")
    data: list[dict[str, Any]] = [
        {
            "type": "bar", "orientation": "h", "showlegend": False,
            "x": draw.small(seconds / unit for _, seconds, _ in rows), "y": [draw.text(title) for title, _, _ in rows],
            "text": [duration(seconds) for _, seconds, _ in rows], "textposition": "outside", "cliponaxis": False,
            "marker": {"color": [colour for _, _, colour in rows]}, "hovertemplate": "%{y}: %{text}<extra></extra>",
        }
    ]  # fmt: skip
    frame = draw.layout(x=f"{name} for the same samples", height=130 + 30 * len(rows), hovermode="closest")
    frame["yaxis"] |= {"automargin": True}
    frame["margin"] |= {"r": 70}
    if tried.limit_s > 0:
        limit = tried.limit_s / unit
        top = {"x": limit, "y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False}
        frame |= {"shapes": [draw.upright(limit, draw.GREY, "dash")], "annotations": [top | {"text": "nobody waits"}]}
        frame["margin"] |= {"t": 28}
    return draw.Picture("what-if", "What if?", what_if_words(tried, judged), data, frame)


def what_if_words(tried: WhatIf, judged: Verdict) -> str:
    """Return the best pace against this run's, how exact the replay is, and which steps it is based on."""
    if not tried.answers:
        return tried.why_not
    sentences, this = [], "this run"
    if tried.span is not None:
        first, last = tried.span
        sentences.append(f"Steps {first} to {last}, the longest stretch with the same workers, are replayed.")
        this = "this stretch"
    best, own = tried.better_than(judged.pace), tried.answer_for(judged.pace)
    if best is not None:
        sentences.append(f"With {best.pace} {this} would have taken {instead(best.seconds, tried.actual_s)}.")
    elif tried.trusted(judged.pace):
        sentences.append(f"No other pace would have been much faster than {judged.pace or 'this one'}.")
    equal = tried.answer_for(baseline().name)
    if equal is not None and not judged.traits.equal_shares:
        sentences.append(f"With equal shares it would have taken {instead(equal.seconds, tried.actual_s)}.")
    if own is not None:
        off = percent(tried.off_by(judged.pace))
        care = "" if tried.trusted(judged.pace) else ", so take these figures with care"
        sentences.append(
            f"Replayed under its own pace it takes {duration(own.seconds)}: the replay is off by {off}{care}."
        )
    if tried.replayed < tried.steps:
        sentences.append(f"Estimated from {tried.replayed:,} of {tried.steps:,} steps.")
    return " ".join(sentences)
