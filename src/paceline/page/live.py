"""The live page's state: events go in one by one, messages for the browsers and Prometheus come out.

Memory is bounded whatever the run's length: the whole run is down-sampled, the last steps are kept unchanged. There are
two kinds of messages: a *quick* one with the run's state, and a *full* one with every picture. The live page's server
serves Prometheus's text format, with HELP and TYPE lines, at ``/metrics``.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline import concurrency
from paceline.observe.analysis.downsampling import DownsampledRun
from paceline.observe.analysis.generations import RecordFilter, Timed, parse_generation
from paceline.observe.analysis.progress import Progress, ProgressSnapshot
from paceline.observe.log import sanitise
from paceline.observe.log.reader import Evaluation, RunLog, evaluations, parse_step
from paceline.observe.words.lines import now_line
from paceline.observe.words.numbers import machines
from paceline.observe.words.verdict import verdict
from paceline.page import html
from paceline.page.answers import tiles
from paceline.page.drawing import Picture
from paceline.page.pictures import PictureData, last_steps, membership_text, pictures, timeline
from paceline.page.whatif import WhatIf
from paceline.records import StepRecord

BUCKETS = 300
"""Points per picture: browsers draw them again and again."""
RECENT = 300
"""Steps that the live verdict is about."""
MOST_SLICES = 1500
"""Most slices of the timeline, which is drawn anew with every step."""
MOST_NOTES, MOST_EVALUATIONS = 100, 1000
MOST_CHANGES = 200
NOT_YET = WhatIf(why_not="known when the run has ended: paceline report")
ENDED = WhatIf(why_not="a replay of the run tells, in the whole report: paceline report")
"""No replay here: it takes a second or two of a processor, too much for every message, and needs all records."""
LIVE_S = 0.1
TAIL = 8
"""Newest steps of an elastic run that may still turn out to be void: by its rules it is one, so this is plenty."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Sample = tuple[Mapping[str, Any], float | None]
"""Labels and a value; a sample with None is left out."""


class LiveRun:
    """A run being watched. ``add`` and the messages may be called from different threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = concurrency.Lock()
        self.revision = 0
        """Number of events so far."""
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
        """Number of memberships so far."""
        self._downsampled = DownsampledRun(capacity=BUCKETS, tail=TAIL if self.elastic else 0)
        self._recent: deque[Timed] = deque(maxlen=RECENT)
        self._changes: deque[Mapping[str, Any]] = deque(maxlen=MOST_CHANGES)
        self._filter = RecordFilter()
        self._machines = machines(run)
        self._notes: deque[Mapping[str, Any]] = deque(maxlen=MOST_NOTES)
        self._evaluations: deque[Evaluation] = deque(maxlen=MOST_EVALUATIONS)
        self._progress = Progress()

    def add(self, event: Mapping[str, Any]) -> None:
        """Add the next event of the log. A second ``run`` event is a restart: the page begins anew."""
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
        if change is None or change.number < self._filter.number:  # an earlier leader woke up and wrote its event late
            return
        self._take_back(self._filter.begin_generation(change, self._recent))
        self.newest = self._recent[-1][0] if self._recent else None
        self.generations += change.number > 1
        self._changes.append(event)
        self._machines |= machines({}, change.machines)

    def _take_back(self, voided: Sequence[Timed]) -> None:
        """Subtract the newest records, which were counted and are void."""
        self._downsampled.drop(len(voided))
        self.steps -= len(voided)
        self.samples -= sum(record.total for record, _ in voided)

    def snapshot(self) -> ProgressSnapshot:
        with self._lock:
            return self._progress.snapshot()

    def quick(self) -> dict[str, Any]:
        """Return a message with the run's state: a line of figures, the last steps, the notes."""
        with self._lock:
            picture = self._timeline()
            return self._message(self._newest_parts(), [picture] if picture else [])

    def full(self) -> dict[str, Any]:
        """Return a message with everything."""
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
            status = html.state(log) if self.end else ("live", "running")
            answers = tiles(judged, tried, data.stuck())
            parts = self._newest_parts() | {
                "heading": html.part("heading", **html.heading(self.run, judged.figures, status)),
                "verdict": html.part("verdict", **html.verdict_data(judged, answers, moved=membership_text(data))),
                "workers": html.part("workers", **html.workers(judged)),
            }
            drawn = [self._timeline(), *pictures(data)]
            return self._message(parts, [picture for picture in drawn if picture is not None])

    def _note_skew(self, t: float) -> None:
        """Compare the clock of the step's computer with ours, if the step was made just now.

        It was when it came a moment after the one before; steps that come at once were in the log already.
        """
        now = concurrency.monotonic()
        if now - self._read_before > LIVE_S and t == t:
            self._skew = concurrency.time() - t
        self._read_before = now

    def _newest_parts(self) -> dict[str, str]:
        now = html.part("now", line=now_line(self._progress.snapshot()))
        return {"now": now, "notes": html.part("notes", lines=html.notes(self._notes, self.end))}

    def _message(self, parts: Mapping[str, str], drawn: list[Picture]) -> dict[str, Any]:
        return {
            "revision": self.revision,
            "now": concurrency.time(),
            "last": None if self.last_t is None else self.last_t + self._skew,
            "ended": self.end is not None,
            "parts": parts,
            "pictures": [picture.to_json() | {"frame": html.part("figure", picture=picture)} for picture in drawn],
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
    """Return a message as a server-sent event: one line of JSON."""
    return b"data: " + json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


def live_page(*, query: str = "") -> str:
    """Return the page that the messages fill; ``query`` (such as ``?token=…``) is added to every address it fetches."""
    return html.templates().get_template("live.html").render(title="watching", query=query)


def metrics(live: LiveRun) -> str:
    """Return the newest figures for Prometheus; speeds and waiting are over the last 20 steps."""
    now, run = live.snapshot(), live.run
    info = {key: run.get(key, "") for key in ("name", "run_id", "pace", "combine", "transport", "backend")}

    def each(figure: str) -> list[Sample]:
        return [({"worker": row.worker, "machine": row.machine}, float(getattr(row, figure))) for row in now.present]

    families: list[tuple[str, str, str, list[Sample]]] = [
        ("run_info", "gauge", "The run; always 1.", [(info, 1.0)]),
        ("run_ended", "gauge", "Whether the log holds the run's end.", [({}, float(live.end is not None))]),
        ("steps_total", "counter", "Steps committed since the run's start.", [({}, float(live.steps))]),
        ("samples_total", "counter", "Samples counted since the run's start.", [({}, float(live.samples))]),
        ("last_step_timestamp_seconds", "gauge", "When the newest step was logged.", [({}, live.last_t)]),
        ("samples_per_second", "gauge", "Samples per second of the fleet.", [({}, now.samples_per_s)]),
        ("limit_samples_per_second", "gauge", "The sum of the workers' own speeds.", [({}, now.limit or None)]),
        ("of_limit_ratio", "gauge", "Part of the limit that was reached.", [({}, now.of_limit or None)]),
        ("loss", "gauge", "The fleet's weighted mean loss in the newest step.", [({}, now.loss)]),
        ("workers", "gauge", "Workers present.", [({}, float(len(now.present)))]),
        ("worker_share_samples", "gauge", "The worker's samples in the newest step.", each("samples")),
        ("worker_samples_per_second", "gauge", "The worker's own speed.", each("speed")),
        ("worker_waiting_ratio", "gauge", "Part of a step the worker waits.", each("waiting")),
    ]  # fmt: skip
    if live.elastic:
        help_ = "Memberships of the fleet since the run's start."
        families.append(("generations_total", "counter", help_, [({}, float(live.generations))]))
    return "".join(_family(f"paceline_{name}", kind, text, samples) for name, kind, text, samples in families)


def _family(name: str, kind: str, text: str, samples: Iterable[Sample]) -> str:
    known = [(labels, value) for labels, value in samples if value is not None and math.isfinite(value)]
    lines = [f"{name}{_labels(labels)} {float(value)!r}" for labels, value in known]
    return "\n".join([f"# HELP {name} {text}", f"# TYPE {name} {kind}", *lines]) + "\n"


def _labels(labels: Mapping[str, Any]) -> str:
    inside = ",".join(f'{key}="{_escaped(str(value))}"' for key, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
