"""The page itself: answers, pictures and tables put together, every text escaped, everything in one file."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from paceline.observe.analysis.audit import EpochAudit, audit
from paceline.observe.analysis.downsampling import DownsampledRun
from paceline.observe.analysis.evaluations import evaluations
from paceline.observe.analysis.figures import Figures
from paceline.observe.log.reader import RunLog
from paceline.observe.page.answers import Tile, tiles
from paceline.observe.page.drawing import Picture
from paceline.observe.page.moments import in_words, last_steps, timeline, what_if_picture
from paceline.observe.page.pictures import PictureData, membership_text, pictures
from paceline.observe.page.whatif import what_if
from paceline.observe.words.audit import audit_text, epoch_text
from paceline.observe.words.membership import moves_text
from paceline.observe.words.places import last_places, places_text
from paceline.observe.words.progress import describe, run_words
from paceline.observe.words.verdict import Verdict, steps_text, verdict
from paceline.observe.words.worker_table import worker_table

PAGE = "report.html"
MOST_NOTES = 200
NOTE = {"info": "", "news": "news"}
"""How a note of this level looks; of any other, like a warning."""
MOST_EPOCHS = 200
"""Rows of a table; the newest are shown."""


def report_page(log: RunLog) -> str:
    """The whole report of a run as one HTML file that needs nothing else. Raises ValueError without Plotly."""
    plotly = plotly_js()
    judged, tried = verdict(log), what_if(log.records)
    run_data = picture_data(log, judged)
    steps = last_steps(log.records, log.times, workers=len(run_data.workers))
    drawn = [timeline(steps, judged.machines, _blamed(judged)), what_if_picture(tried, judged), *pictures(run_data)]
    shown = [picture for picture in drawn if picture is not None]
    why_not = f"<section class='quiet'>What if? {escape(in_words(tried, judged))}</section>"
    asked = why_not if log.records and not tried.answers else ""
    body = "".join(
        (
            heading(log.run, judged.figures, state(log)),
            verdict_part(judged, tiles(judged, tried, run_data.stuck()), moved=membership_text(run_data)),
            f"<main id='pictures'>{''.join(map(frame, shown))}</main>{asked}",
            f"<section id='workers'>{workers_table(judged)}</section>",
            _places(log),
            f"<section>{audit_table(audit(log))}</section>",
            notes(log.others, log.end),
            footer(log, judged),
        )
    )
    return whole_page(str(log.run.get("name") or "run"), body, shown, plotly)


def write_report(log: RunLog, path: Path | None = None) -> Path:
    """Write the report, by default as ``report.html`` beside the log; returns where."""
    path = path or log.path.parent / PAGE
    path.write_text(report_page(log), encoding="utf-8")
    return path


def _places(log: RunLog) -> str:
    where = places_text(last_places(log.run, log.others))
    return f"<section class='quiet'>{escape(where)}</section>" if where else ""


def picture_data(log: RunLog, judged: Verdict) -> PictureData:
    run = DownsampledRun.of(log.records, log.times)
    return PictureData(run.buckets(), run.workers, judged.machines, evaluations(log.others), moves=judged.moves)


def _blamed(judged: Verdict) -> dict[int, float]:
    return {worker.worker: worker.blamed for worker in judged.figures.workers}


def plotly_js() -> str:
    """Plotly's script, as its package brings it."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError("the page is drawn by Plotly, which is not installed: pip install 'paceline[view]'") from None
    script: str = get_plotlyjs()
    return script.replace("</script", "<\\/script")


def asset(name: str) -> str:
    return (files("paceline.observe") / "static" / name).read_text(encoding="utf-8")


def escape(value: Any) -> str:
    return html.escape(str(value), quote=True)


def data_script(name: str, data: Any) -> str:
    """Data for the page's script. No text in it can end the element: a < is written as an escape."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f"<script type='application/json' id='{name}'>{text}</script>"


def document(*, title: str, body: str, style: str, scripts: str) -> str:
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<meta name='color-scheme' content='light dark'><title>{escape(title)} · Paceline</title>"
        f"<link rel='icon' href='data:,'><style>{style}</style></head><body>{body}{scripts}</body></html>"
    )


def whole_page(title: str, body: str, shown: Iterable[Picture], plotly: str) -> str:
    """One file that needs nothing else: style, pictures and scripts are in it."""
    data = data_script("figures", [picture.to_json() for picture in shown])
    scripts = f"<script>{plotly}</script>{data}<script>{asset('page.js')}</script>"
    return document(title=title, body=body, style=asset("page.css"), scripts=scripts)


def heading(run: Mapping[str, Any], figures: Figures, status: tuple[str, str]) -> str:
    kind, words = status
    name, details = map(escape, run_words(run, figures))
    return (
        f"<header><h1>{name}</h1><span id='state' class='state {kind}'>{escape(words)}</span>"
        f"<p id='run'>{details}</p></header>"
    )


def state(log: RunLog) -> tuple[str, str]:
    """A class for the style sheet, and words."""
    if log.end is None:
        return "open", "no end in the log: still running, or killed"
    reason, text = str(log.end.get("reason") or "ended"), str(log.end.get("text") or "")
    return ("done" if reason == "finished" else "failed"), reason + (f": {text}" if text else "")


def verdict_part(judged: Verdict, answered: Sequence[Tile], *, moved: str = "") -> str:
    """The verdict, who came and left (``moved``), and the four answers."""
    told = moves_text(judged.moves)
    said = [line for line in judged.text.splitlines() if line != told]
    more = "".join(f"<p>{escape(line)}</p>" for line in said[2:])
    more += f"<p class='moved'>{escape(moved)}</p>" if moved else ""
    lead = f"<p class='lead'>{escape(' '.join(said[:2]))}</p>"
    return f"<section id='verdict'>{lead}{more}<div class='tiles'>{''.join(map(_tile, answered))}</div></section>"


def _tile(tile: Tile) -> str:
    bar = "" if tile.part is None else f"<div class='bar'><i style='width:{100 * tile.part:.1f}%'></i></div>"
    return (
        f"<div class='tile'><h2>{escape(tile.question)}</h2><p class='answer'>{escape(tile.answer)}</p>{bar}"
        f"<p>{escape(tile.reason)}</p></div>"
    )


def frame(picture: Picture) -> str:
    """A picture's place, with its words: those are what a screen reader gets."""
    label = escape(f"{picture.title}. {picture.caption}")
    return (
        f"<figure id='{picture.name}' class='{'wide' if picture.wide else ''}'>"
        f"<figcaption><h2>{escape(picture.title)}</h2><p>{escape(picture.caption)}</p></figcaption>"
        f"<div class='plot' role='img' aria-label=\"{label}\" style='height:{picture.height}px'></div></figure>"
    )


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> str:
    """A table whose first ``words`` columns are words; the others are figures."""
    top = "".join(f"<th scope='col'{_figure(place, words)}>{escape(name)}</th>" for place, name in enumerate(head))
    body = "".join(
        "<tr>" + "".join(f"<td{_figure(place, words)}>{escape(cell)}</td>" for place, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _figure(place: int, words: int) -> str:
    return "" if place < words else " class='figure'"


def workers_table(judged: Verdict) -> str:
    shown = worker_table(judged)
    if not shown.rows:
        return ""
    after = ", after warm-up" if judged.warm_up else ""
    return table(f"The workers{after}", shown.names, shown.rows, words=shown.words)


def audit_table(epochs: Sequence[EpochAudit]) -> str:
    if not epochs:
        return ""
    rows = [
        (f"{e.epoch + 1}", f"{e.counted:,}", f"{e.undone:,}", f"{e.twice:,}", f"{e.missing:,}", epoch_text(e))
        for e in epochs[-MOST_EPOCHS:]
    ]
    earlier = f", the last {MOST_EPOCHS} of {len(epochs):,}" if len(epochs) > MOST_EPOCHS else ""
    head = ("epoch", "counted", "dealt again", "counted twice", "missing", "audit")
    listed = table(f"Epoch by epoch{earlier}", head, rows)
    return (
        f"<h2>The audit</h2><p>{escape(audit_text(epochs))}</p><details><summary>the epochs</summary>{listed}</details>"
    )


def notes(events: Iterable[Mapping[str, Any]], end: Mapping[str, Any] | None) -> str:
    """What else was logged, newest last; warnings stand out."""
    told = [(event, said) for event in [*events, *([end] if end else [])] if (said := describe(event)) is not None]
    lines = "".join(
        f"<li class='{NOTE.get(level, 'warning')}'><time>{_clock(event.get('t'))}</time> {escape(text)}</li>"
        for event, (level, text) in told[-MOST_NOTES:]
    )
    return f"<section id='notes'><h2>Notes</h2><ul>{lines or '<li>none</li>'}</ul></section>"


def _clock(t: Any) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(t))
    except (TypeError, ValueError, OverflowError, OSError):  # not a time, or none that the calendar knows
        return ""


def footer(log: RunLog, judged: Verdict) -> str:
    samples = sum(record.total for record in log.records)
    said = [f"{steps_text(len(log.records))}, {samples:,} samples"]
    first = "the first step is" if judged.warm_up == 1 else f"the first {judged.warm_up} steps are"
    said += [f"{first} left out of the figures as warm-up"] if judged.warm_up else []
    lines = "1 line" if log.unreadable == 1 else f"{log.unreadable} lines"
    said += [f"{lines} of the log could not be read"] if log.unreadable else []
    said += [f"{key} {log.run[key]}" for key in ("torch", "paceline") if log.run.get(key)]
    return f"<footer><p>{escape('; '.join(said))}</p><p>{escape(log.path)}</p></footer>"
