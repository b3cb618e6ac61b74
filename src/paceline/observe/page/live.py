"""The live page's state: events go in one by one, messages for the browsers come out.

Memory is bounded whatever the run's length: the whole run is down-sampled, the last steps are kept as they are. There
are two kinds of messages: a *quick* one with where the run stands, and a *full* one with every picture.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline import concurrency
from paceline.observe.analysis.downsampling import DownsampledRun
from paceline.observe.analysis.evaluations import Evaluation, evaluations
from paceline.observe.analysis.membership import RecordFilter, Timed, parse_generation
from paceline.observe.analysis.progress import Progress, ProgressSnapshot
from paceline.observe.log import sanitise
from paceline.observe.log.reader import RunLog, parse_step
from paceline.observe.page import html
from paceline.observe.page.answers import tiles
from paceline.observe.page.drawing import Picture
from paceline.observe.page.moments import last_steps, timeline
from paceline.observe.page.pictures import PictureData, membership_text, pictures
from paceline.observe.page.whatif import WhatIf
from paceline.observe.words.numbers import machines
from paceline.observe.words.progress import now_line
from paceline.observe.words.verdict import verdict
from paceline.records import StepRecord

BUCKETS = 300
"""Points a picture: browsers draw them again and again."""
RECENT = 300
"""Steps over which the live verdict is taken."""
MOST_SLICES = 1500
"""Of the timeline, which is drawn anew with every step."""
MOST_NOTES, MOST_EVALUATIONS = 100, 1000
MOST_CHANGES = 200
NOT_YET = WhatIf(why_not="known when the run has ended: paceline report")
ENDED = WhatIf(why_not="a replay of the run tells, in the whole report: paceline report")
"""A replay takes a second or two of a processor: too much for every message, and it needs the whole record."""
LIVE_S = 0.1
TAIL = 8
"""Of an elastic run, the steps that may still turn out to be void: by its rules it is one, so this is plenty."""


class LiveRun:
    """A run being watched. ``add`` and the messages may be called from different threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = concurrency.Lock()
        self.revision = 0
        """Grows with every event."""
        self._begin({})

    def _begin(self, run: Mapping[str, Any]) -> None:
        self.run = run
        self.steps = self.samples = 0
        self.end: Mapping[str, Any] | None = None
        self.newest: StepRecord | None = None
        self.last_t: float | None = None
        self._read_before, self._skew = math.inf, 0.0
        self.elastic = run.get("transport") == "elastic"
        self.generations = 1
        """Memberships so far."""
        self._downsampled = DownsampledRun(capacity=BUCKETS, tail=TAIL if self.elastic else 0)
        self._recent: deque[Timed] = deque(maxlen=RECENT)
        self._changes: deque[Mapping[str, Any]] = deque(maxlen=MOST_CHANGES)
        self._filter = RecordFilter()
        self._machines = machines(run)
        self._notes: deque[Mapping[str, Any]] = deque(maxlen=MOST_NOTES)
        self._evaluations: deque[Evaluation] = deque(maxlen=MOST_EVALUATIONS)
        self._progress = Progress()

    def add(self, event: Mapping[str, Any]) -> None:
        """One event of the log, in order. A second ``run`` event is a restart: the page begins anew."""
        with self._lock:
            self.revision += 1
            kind = event.get("event")
            if kind == "run":
                self._begin(event)
            self._progress.add(event)
            if kind == "step":
                self._add_step(event)
            elif kind == "generation":
                self._add_generation(event)
            elif kind == "end":
                self.end = event
            elif kind not in ("run", "steps"):
                self._notes.append(event)
                self._evaluations.extend(evaluations((event,)))

    def _add_step(self, event: Mapping[str, Any]) -> None:
        record = parse_step(event)
        if record is None or not self._filter.stands(record, self._recent):
            return
        self._take_back(self._filter.take_note(record, self._recent))
        t = sanitise.timestamp(event.get("t"))
        self._note_skew(t)
        self.last_t = t if t == t else concurrency.time()
        self.newest = record
        self.steps += 1
        self.samples += record.total
        self._downsampled.add(record, self.last_t)
        self._recent.append((record, self.last_t))

    def _add_generation(self, event: Mapping[str, Any]) -> None:
        self._notes.append(event)
        change = parse_generation(event)
        if change is None or change.number < self._filter.number:  # an earlier leader wakes up and writes it late
            return
        self._take_back(self._filter.begin_generation(change, self._recent))
        self.newest = self._recent[-1][0] if self._recent else None
        self.generations += change.number > 1
        self._changes.append(event)
        self._machines |= machines({}, change.machines)

    def _take_back(self, voided: Sequence[Timed]) -> None:
        """Records that were counted, the newest, are void."""
        self._downsampled.drop(len(voided))
        self.steps -= len(voided)
        self.samples -= sum(record.total for record, _ in voided)

    def snapshot(self) -> ProgressSnapshot:
        with self._lock:
            return self._progress.snapshot()

    def quick(self) -> dict[str, Any]:
        """Where the run stands: a line of figures, the last steps, the notes."""
        with self._lock:
            picture = self._timeline()
            return self._message(self._newest_parts(), [picture] if picture else [])

    def full(self) -> dict[str, Any]:
        """Everything."""
        with self._lock:
            log = self._log()
            judged, tried = verdict(log, whole=False), ENDED if self.end else NOT_YET
            data = PictureData(
                self._downsampled.buckets(),
                self._downsampled.workers,
                judged.machines,
                tuple(self._evaluations),
                moves=judged.moves,
            )
            parts = self._newest_parts() | {
                "heading": html.heading(self.run, judged.figures, html.state(log) if self.end else ("live", "running")),
                "verdict": html.verdict_part(judged, tiles(judged, tried, data.stuck()), moved=membership_text(data)),
                "workers": html.workers_table(judged),
            }
            drawn = [self._timeline(), *pictures(data)]
            return self._message(parts, [picture for picture in drawn if picture is not None])

    def _note_skew(self, t: float) -> None:
        """A step that comes a moment after the one before was made just now, whatever the clock of its computer says;
        those that come at once were in the log already."""
        now = concurrency.monotonic()
        if now - self._read_before > LIVE_S and t == t:
            self._skew = concurrency.time() - t
        self._read_before = now

    def _newest_parts(self) -> dict[str, str]:
        now = html.escape(now_line(self._progress.snapshot()))
        return {"now": now, "notes": html.notes(self._notes, self.end)}

    def _message(self, parts: Mapping[str, str], drawn: list[Picture]) -> dict[str, Any]:
        return {
            "revision": self.revision,
            "now": concurrency.time(),
            "last": None if self.last_t is None else self.last_t + self._skew,
            "ended": self.end is not None,
            "parts": parts,
            "pictures": [picture.to_json() | {"frame": html.frame(picture)} for picture in drawn],
        }

    def _timeline(self) -> Picture | None:
        if self.newest is None:
            return None
        size = len(self.newest.workers)
        tail = list(self._recent)[-20:]
        steps = last_steps([record for record, _ in tail], [t for _, t in tail], workers=size, most=MOST_SLICES)
        return timeline(steps, self._machines, {})

    def _log(self) -> RunLog:
        records, times = tuple(r for r, _ in self._recent), tuple(t for _, t in self._recent)
        return RunLog(self.path, self.run, records=records, times=times, others=tuple(self._changes), end=self.end)


def server_sent_event(message: Mapping[str, Any]) -> bytes:
    """A server-sent event: one line of JSON."""
    return b"data: " + json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


def live_page(*, query: str = "") -> str:
    """The page that the messages fill; ``query`` (such as ``?token=…``) is added to every address it fetches."""
    body = (
        "<div id='live-heading'><header><h1>…</h1></header></div>"
        "<p><span id='link' class='state open'>connecting</span> <strong id='live-now'></strong></p>"
        "<div id='live-verdict'></div><main id='pictures'></main>"
        "<section id='live-workers'></section><div id='live-notes'></div>"
        f"<footer><p>Live. <a href='report{html.escape(query)}'>The whole report</a> can be read at any time.</p>"
        "</footer>"
    )
    static = {name: html.escape(f"static/{name}{query}") for name in ("plotly.js", "page.js", "live.js", "page.css")}
    style = f"<link rel='stylesheet' href='{static.pop('page.css')}'>"
    scripts = "".join(f"<script src='{address}'></script>" for address in static.values())
    return html.document(title="watching", body=style + body, style="", scripts=scripts)
