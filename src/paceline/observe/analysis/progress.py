"""A run in progress, for both views: events go in, a `ProgressSnapshot` of the last few steps comes out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.observe.analysis.figures import Figures, own_speeds, summarise
from paceline.observe.analysis.generations import Departure, GenerationEvent, RecordFilter, Timed, parse_generation
from paceline.observe.analysis.stretches import missed
from paceline.observe.log import sanitise
from paceline.observe.log.reader import parse_step
from paceline.observe.words.numbers import machines, rounds_behind
from paceline.records import StepRecord

WINDOW = 20
"""Steps over which speeds and waiting are taken."""
BACKLOG = 64
"""Steps kept between two snapshots: more than the window, so that the speed of a worker seldom used is not missed."""
SHOWN_S = 20.0
"""Seconds for which a worker that left is still shown, and one that joined is marked."""


@dataclass(frozen=True)
class WorkerRow:
    """One worker in the window."""

    worker: int
    machine: str
    samples: int
    """Share of the newest step."""
    speed: float
    """Samples per second of its own; 0 when not known."""
    waiting: float
    mark: str
    """``late, 3 rounds behind``, ``waited for``, ``slowest``, ``sits out``, ``joined``, ``left: …`` or nothing."""
    late: bool = False
    """Whether the newest round closed without anything from the worker."""
    behind: int = 0
    """Number of earlier rounds that the worker had yet to take over then."""
    left: bool = False
    """Whether the worker is no longer there."""


@dataclass(frozen=True)
class ProgressSnapshot:
    """The state of a run. Numbers that are not known are None."""

    name: str
    pace: str
    step: int | None = None
    steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    samples_per_s: float = 0.0
    limit: float = 0.0
    of_limit: float = 0.0
    loss: float | None = None
    left_s: float | None = None
    rows: tuple[WorkerRow, ...] = ()
    """Workers by identity, with those that left a moment ago."""
    deadlines: bool = False
    """Whether any of the last steps could close without everybody."""
    deadline_s: float | None = None
    """Deadline of the newest step."""
    count: int = 0
    """Samples that the newest step counted."""
    global_batch: int | None = None

    @property
    def late(self) -> tuple[WorkerRow, ...]:
        return tuple(row for row in self.rows if row.late)

    @property
    def present(self) -> tuple[WorkerRow, ...]:
        return tuple(row for row in self.rows if not row.left)


class Progress:
    """The last steps of a run. Adding an event is cheap; `snapshot` does the arithmetic. For one thread at a time."""

    def __init__(self) -> None:
        self._begin({})

    def _begin(self, run: Mapping[str, Any]) -> None:
        self._run = run
        self._loop: Mapping[str, Any] = {}
        self._new: deque[Mapping[str, Any]] = deque(maxlen=BACKLOG)
        self._window: deque[Timed] = deque(maxlen=WINDOW)
        self._known: dict[int, float] = {}
        self._filter = RecordFilter()
        self._newest_change: GenerationEvent | None = None
        self._moved: dict[int, tuple[float, Departure | None]] = {}
        """Unix seconds at which each worker left (and why) or joined last."""
        self._machines = machines(run)

    def add(self, event: Mapping[str, Any]) -> None:
        kind = event.get("event")
        if kind == "step":
            self._new.append(event)
        elif kind == "generation" and (change := parse_generation(event)) is not None:
            self._absorb()  # the event voids steps before it
            self._change(change)
        elif kind == "run":
            self._begin(event)
        elif kind == "steps":
            self._loop = event

    def snapshot(self) -> ProgressSnapshot:
        self._absorb()
        name, pace = str(self._run.get("name") or "run"), str(self._run.get("pace") or "")
        if not self._window:
            return ProgressSnapshot(name=name, pace=pace)
        newest = self._window[-1][0]
        figures = summarise([record for record, _ in self._window], known=self._known)
        steps = self._last_step(newest.step)
        return ProgressSnapshot(
            name=name,
            pace=pace,
            step=newest.step + 1,
            steps=steps,
            epoch=newest.epoch + 1,
            epochs=_positive_count(self._loop.get("epochs")),
            samples_per_s=figures.samples_per_s,
            limit=figures.limit,
            of_limit=figures.of_limit,
            loss=newest.loss,
            left_s=None if steps is None else self._left(steps - newest.step - 1),
            rows=self._rows(newest, figures),
            deadlines=figures.deadlines > 0,
            deadline_s=newest.deadline_s,
            count=newest.total,
            global_batch=_positive_count(self._loop.get("global_batch")),
        )

    def _absorb(self) -> None:
        while self._new:
            event = self._new.popleft()
            if (record := parse_step(event)) is not None and self._filter.stands(record, self._window):
                self._filter.take_note(record, self._window)
                if len(self._window) == WINDOW:  # of a record that leaves the window the speeds are kept
                    self._known = own_speeds((self._window[0][0],), self._known)
                self._window.append((record, sanitise.timestamp(event.get("t"))))

    def _change(self, change: GenerationEvent) -> None:
        if change.number < self._filter.number:  # an earlier leader woke up and wrote its event late
            return
        self._filter.begin_generation(change, self._window)
        self._newest_change = change
        self._machines |= machines({}, change.machines)
        if change.number > 1:  # the first generation is no news
            self._moved |= dict.fromkeys(change.joined, (change.t, None))
        self._moved |= {each.worker: (change.t, each) for each in change.left}

    def _rows(self, newest: StepRecord, figures: Figures) -> tuple[WorkerRow, ...]:
        """Return the workers of the newest step, those that joined after it, and those that left a moment ago."""
        now = max((t for t in (self._window[-1][1], *(t for t, _ in self._moved.values())) if t == t), default=0.0)
        recent = {worker: gone for worker, (t, gone) in self._moved.items() if now - t < SHOWN_S}
        rows = {row.worker: row for row in _rows(newest, figures, self._machines)}
        if self._newest_change is not None and self._newest_change.number > newest.generation:
            here = self._newest_change.workers
            rows = {worker: rows.get(worker) or self._row(worker) for worker in here}
        for worker, gone in recent.items():
            if gone is not None and worker not in rows:
                rows[worker] = self._row(worker, mark=gone.short, left=True)
            elif gone is None and worker in rows and not rows[worker].mark:
                rows[worker] = replace(rows[worker], mark="joined")
        return tuple(rows[worker] for worker in sorted(rows))

    def _row(self, worker: int, *, mark: str = "", left: bool = False) -> WorkerRow:
        return WorkerRow(worker, self._machines.get(worker, ""), 0, 0.0, 0.0, mark, left=left)

    def _last_step(self, step: int) -> int | None:
        """Return one past the last step of the loop; a loop that starts where another ended counts on from there."""
        steps, first = _positive_count(self._loop.get("steps")), _positive_count(self._loop.get("first_step")) or 0
        if steps is None:
            return None
        end = steps if first < steps else first + steps
        return end if step < end else None

    def _left(self, steps: int) -> float | None:
        """Return the seconds that these steps will take, time between steps included: from when steps were logged."""
        if steps <= 0:
            return 0.0
        stamps = [t for _, t in self._window if math.isfinite(t)]
        each = (stamps[-1] - stamps[0]) / (len(stamps) - 1) if len(stamps) > 1 else self._window[-1][0].wall_s
        return steps * each if each > 0 else None


def _rows(newest: StepRecord, figures: Figures, names: Mapping[int, str]) -> tuple[WorkerRow, ...]:
    by_worker = {worker.worker: worker for worker in figures.workers}
    marks = _marks(newest, figures)
    return tuple(
        WorkerRow(
            worker=worker,
            machine=names.get(worker, ""),
            samples=samples,
            speed=by_worker[worker].speed if worker in by_worker else 0.0,
            waiting=by_worker[worker].waiting if worker in by_worker else 0.0,
            mark=marks.get(worker, ""),
            late=missed(newest, rank),
            behind=_behind(newest, rank),
        )
        for rank, (worker, samples) in enumerate(zip(newest.workers, newest.samples))
    )


def _marks(newest: StepRecord, figures: Figures) -> dict[int, str]:
    """Return marks by worker: ``late`` and ``waited for`` are news, ``slowest`` is a lasting fact about the machine."""
    marks = {worker: _absent(newest, rank) for rank, worker in enumerate(newest.workers) if newest.samples[rank] == 0}
    busy = [w for w in figures.workers if w.samples and w.worker not in marks and w.worker in newest.workers]
    if len(busy) < 2:
        return marks
    blamed, slowest = max(busy, key=lambda w: w.blamed), min(busy, key=lambda w: w.speed)
    if blamed.blamed > 0.05 and blamed.blamed > sum(w.blamed for w in busy) / 2:
        marks[blamed.worker] = "waited for"
    elif 0 < slowest.speed < max(w.speed for w in busy) / 1.25:
        marks[slowest.worker] = "slowest"
    return marks


def _absent(newest: StepRecord, rank: int) -> str:
    """Return why the newest step has nothing from this worker."""
    if not missed(newest, rank):
        return "sits out"
    behind = _behind(newest, rank)
    return f"late, {rounds_behind(behind)}" if behind else "late"


def _behind(newest: StepRecord, rank: int) -> int:
    return newest.behind[rank] if rank < len(newest.behind) else 0


def _positive_count(value: Any) -> int | None:
    return sanitise.count_or(value, 0) or None
