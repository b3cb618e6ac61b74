"""The pages of a run: the templates of this folder, filled with plain data, everything in one file.

The functions here prepare the data. Only the templates contain HTML, and they escape every value that they print.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.observe.analysis.audit import EpochAudit, audit, audit_text, epoch_text
from paceline.observe.analysis.downsampling import DownsampledRun
from paceline.observe.analysis.figures import Figures
from paceline.observe.analysis.generations import moves_text
from paceline.observe.log.reader import RunLog, evaluations
from paceline.observe.words.lines import describe, last_places, places_text, run_words
from paceline.observe.words.verdict import Verdict, steps_text, verdict, worker_table
from paceline.page.answers import Tile, tiles
from paceline.page.drawing import Picture
from paceline.page.pictures import (
    PictureData,
    last_steps,
    membership_text,
    pictures,
    timeline,
    what_if_picture,
    what_if_words,
)
from paceline.page.whatif import what_if

if TYPE_CHECKING:
    from jinja2 import Environment

Data = dict[str, Any]
"""The arguments of a template, or of one of its macros."""
PAGE = "report.html"
MOST_NOTES = 200
NOTE_CLASSES = {"info": "", "news": "news"}
"""Style class of a note by its level; any other level looks like a warning."""
MOST_EPOCHS = 200
"""Rows of the audit's table; the newest are shown."""


@cache
def templates() -> Environment:
    """Return the one environment of the page's templates; it escapes values and refuses names that nobody set."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # imported once a page is made, not before

    environment = Environment(
        loader=PackageLoader("paceline.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def part(name: str, /, **data: Any) -> str:
    """Return one part of a page as HTML: the macro ``name`` of ``parts.html``, called with the data."""
    return str(getattr(templates().get_template("parts.html").module, name)(**data))


def whole_page(template: str, title: str, shown: Sequence[Picture], plotly: str, **data: Any) -> str:
    """Return a page as one file that needs nothing else: style, pictures and scripts are in it."""
    return (
        templates()
        .get_template(template)
        .render(
            title=title,
            pictures=shown,
            figures=[picture.to_json() for picture in shown],
            style=asset("page.css"),
            script=asset("page.js"),
            plotly=plotly,
            **data,
        )
    )


def report_page(log: RunLog) -> str:
    """Return the report of a run as one HTML file that needs nothing else. Raises ValueError without Plotly."""
    plotly = plotly_js()
    judged, tried = verdict(log), what_if(log.records)
    run_data = picture_data(log, judged)
    steps = last_steps(log.records, log.times, workers=len(run_data.workers))
    blamed = {worker.worker: worker.blamed for worker in judged.figures.workers}
    drawn = [timeline(steps, judged.machines, blamed), what_if_picture(tried, judged), *pictures(run_data)]
    return whole_page(
        "report.html",
        str(log.run.get("name") or "run"),
        [picture for picture in drawn if picture is not None],
        plotly,
        heading=heading(log.run, judged.figures, state(log)),
        verdict=verdict_data(judged, tiles(judged, tried, run_data.stuck()), moved=membership_text(run_data)),
        no_replay=what_if_words(tried, judged) if log.records and not tried.answers else "",
        workers=workers(judged),
        places=places_text(last_places(log.run, log.others)),
        audit=audit_data(audit(log)),
        notes=notes(log.others, log.end),
        footer=footer(log, judged),
    )


def write_report(log: RunLog, path: Path | None = None) -> Path:
    """Write the report, by default as ``report.html`` beside the log, and return its path."""
    path = path or log.path.parent / PAGE
    path.write_text(report_page(log), encoding="utf-8")
    return path


def picture_data(log: RunLog, judged: Verdict) -> PictureData:
    run = DownsampledRun.from_records(log.records, log.times)
    return PictureData(run.buckets(), run.workers, judged.machines, evaluations(log.others), moves=judged.moves)


def plotly_js() -> str:
    """Return Plotly's script from its package. Raises ValueError where the package is missing."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError("the page is drawn by Plotly, which is not installed: pip install 'paceline[view]'") from None
    script: str = get_plotlyjs()
    return script.replace("</script", "<\\/script")


def asset(name: str) -> str:
    """Return the text of a file of the ``static`` folder."""
    return (files("paceline.page") / "static" / name).read_text(encoding="utf-8")


def heading(run: Mapping[str, Any], figures: Figures, status: tuple[str, str]) -> Data:
    name, details = run_words(run, figures)
    kind, words = status
    return {"name": name, "details": details, "kind": kind, "status": words}


def state(log: RunLog) -> tuple[str, str]:
    """Return a class for the style sheet and words for the state of a run that is not being watched."""
    if log.end is None:
        return "open", "no end in the log: still running, or killed"
    reason, text = str(log.end.get("reason") or "ended"), str(log.end.get("text") or "")
    return ("done" if reason == "finished" else "failed"), reason + (f": {text}" if text else "")


def verdict_data(judged: Verdict, answers: Sequence[Tile], *, moved: str = "") -> Data:
    """Return the verdict's sentences, who came and left (``moved``), and the four answers."""
    repeated = moves_text(judged.moves)
    lines = [line for line in judged.text.splitlines() if line != repeated]
    return {"lead": " ".join(lines[:2]), "lines": lines[2:], "moved": moved, "tiles": answers}


def workers(judged: Verdict) -> Data:
    shown = worker_table(judged)
    after = ", after warm-up" if judged.warm_up else ""
    return {"caption": f"The workers{after}", "head": shown.names, "rows": shown.rows, "words": shown.words}


def audit_data(epochs: Sequence[EpochAudit]) -> Data | None:
    """Return the audit's sentence and its table of epochs; None when there are no epochs."""
    if not epochs:
        return None
    rows = [
        (f"{e.epoch + 1}", f"{e.counted:,}", f"{e.undone:,}", f"{e.twice:,}", f"{e.missing:,}", epoch_text(e))
        for e in epochs[-MOST_EPOCHS:]
    ]
    earlier = f", the last {MOST_EPOCHS} of {len(epochs):,}" if len(epochs) > MOST_EPOCHS else ""
    head = ("epoch", "counted", "dealt again", "counted twice", "missing", "audit")
    return {"text": audit_text(epochs), "caption": f"Epoch by epoch{earlier}", "head": head, "rows": rows}


def notes(events: Iterable[Mapping[str, Any]], end: Mapping[str, Any] | None) -> list[Data]:
    """Return the other events that are worth a line, newest last; warnings stand out."""
    described = [(event, line) for event in [*events, *([end] if end else [])] if (line := describe(event)) is not None]
    return [
        {"kind": NOTE_CLASSES.get(level, "warning"), "clock": _clock(event.get("t")), "text": text}
        for event, (level, text) in described[-MOST_NOTES:]
    ]


def _clock(t: Any) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(t))
    except (TypeError, ValueError, OverflowError, OSError):  # not a time, or none that the calendar has
        return ""


def footer(log: RunLog, judged: Verdict) -> tuple[str, str]:
    """Return what the figures are based on, and the path of the log."""
    samples = sum(record.total for record in log.records)
    facts = [f"{steps_text(len(log.records))}, {samples:,} samples"]
    first = "the first step is" if judged.warm_up == 1 else f"the first {judged.warm_up} steps are"
    facts += [f"{first} left out of the figures as warm-up"] if judged.warm_up else []
    lines = "1 line" if log.unreadable == 1 else f"{log.unreadable} lines"
    facts += [f"{lines} of the log could not be read"] if log.unreadable else []
    facts += [f"{key} {log.run[key]}" for key in ("torch", "paceline") if log.run.get(key)]
    return "; ".join(facts), str(log.path)
