"""The workers as a table, the same for the page and the terminal: which columns, and what stands in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.observe.analysis.figures import WorkerFigures
from paceline.observe.words.deadlines import with_deadlines
from paceline.observe.words.numbers import number, percent_cell
from paceline.observe.words.verdict import Verdict

Cell = Callable[[WorkerFigures], str]


@dataclass(frozen=True)
class WorkerTable:
    names: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 2
    """The first columns, which are words; the others are figures."""

    def without(self, left_out: Sequence[str]) -> WorkerTable:
        kept = [place for place, name in enumerate(self.names) if name not in left_out]
        rows = (tuple(row[place] for place in kept) for row in self.rows)
        return WorkerTable(tuple(self.names[place] for place in kept), tuple(rows), self.words)


def worker_table(judged: Verdict) -> WorkerTable:
    """All columns that have something to say. Of a run without steps, who was there to begin with."""
    columns: dict[str, Cell] = {
        "worker": lambda w: str(w.worker),
        "machine": lambda w: judged.machines.get(w.worker, ""),
    }
    workers = judged.figures.workers
    if workers:
        columns |= _work() | _delays(judged) | _absences(judged)
    rows = workers or tuple(WorkerFigures(worker) for worker in sorted(judged.machines))
    return WorkerTable(tuple(columns), tuple(tuple(cell(row) for cell in columns.values()) for row in rows))


def _work() -> dict[str, Cell]:
    return {
        "samples": lambda w: f"{w.samples:,}",
        "share": lambda w: percent_cell(w.share),
        "samples/s": lambda w: number(w.speed),
        "waiting": lambda w: percent_cell(w.waiting),
    }


def _delays(judged: Verdict) -> dict[str, Cell]:
    """Who was waited for; with deadlines nobody is, and some miss the round."""
    f = judged.figures
    columns: dict[str, Cell] = {}
    if not with_deadlines(f):
        columns["last in"] = lambda w: percent_cell(w.last)
        columns["waited for"] = lambda w: percent_cell(w.blamed)
    if f.deadlines:
        columns["missed"] = lambda w: f"{w.missed:,}"
    if any(worker.stuck for worker in f.workers):
        columns["stuck"] = lambda w: percent_cell(w.stuck)
    if any(worker.cut for worker in f.workers):
        columns["cut off"] = lambda w: percent_cell(w.cut)
    return columns


def _absences(judged: Verdict) -> dict[str, Cell]:
    columns: dict[str, Cell] = {}
    if any(worker.sat_out for worker in judged.figures.workers):
        columns["sat out"] = lambda w: f"{w.sat_out:,}"
    if any(worker.steps < judged.figures.steps for worker in judged.figures.workers):
        columns["steps"] = lambda w: f"{w.steps:,}"
    return columns
