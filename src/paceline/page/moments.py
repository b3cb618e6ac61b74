"""Two pictures more: the timeline of the last steps, and what if the pace had been another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.observe.analysis.stretches import bounded
from paceline.observe.analysis.timeline import KINDS, TimedStep, lay_out
from paceline.observe.words.numbers import duration, percent
from paceline.observe.words.verdict import Verdict
from paceline.pace import baseline
from paceline.page import drawing as draw
from paceline.page.whatif import WhatIf, instead
from paceline.records import StepRecord

MOST_SLICES = 6_000
"""Most slices that are drawn: more only slow the browser."""
MOST_ROWS = 64
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
    return draw.Picture("what-if", "What if?", in_words(tried, judged), data, frame)


def in_words(tried: WhatIf, judged: Verdict) -> str:
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
