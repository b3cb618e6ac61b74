"""The workers as a table, the same for the page and the terminal: which columns, and what stands in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.observe.analysis.figures import Figures, WorkerFigures
from paceline.observe.words.deadlines import with_deadlines
from paceline.observe.words.numbers import number, percent_cell, signed
from paceline.observe.words.verdict import Verdict, unlike

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
    workers = judged.figures.workers
    columns: dict[str, Cell] = {
        "worker": lambda w: str(w.worker),
        "machine": lambda w: judged.machines.get(w.worker, ""),
    }
    columns |= {name: cell for name, cell, shown in COLUMNS if workers and shown(judged.figures)}
    rows = workers or tuple(WorkerFigures(worker) for worker in sorted(judged.machines))
    return WorkerTable(tuple(columns), tuple(tuple(cell(row) for cell in columns.values()) for row in rows))


COLUMNS: tuple[tuple[str, Cell, Callable[[Figures], bool]], ...] = (
    ("samples", lambda w: f"{w.samples:,}", lambda f: True),
    ("share", lambda w: percent_cell(w.share), lambda f: True),
    ("samples/s", lambda w: number(w.speed), lambda f: True),
    # Is a machine worth having? Where all are alike, each is worth its part.
    ("adds", lambda w: signed(w.adds), lambda f: unlike(f) and not with_deadlines(f)),
    ("waiting", lambda w: percent_cell(w.waiting), lambda f: True),
    # Who was waited for; with deadlines nobody is, and some miss the round.
    ("last in", lambda w: percent_cell(w.last), lambda f: not with_deadlines(f)),
    ("waited for", lambda w: percent_cell(w.blamed), lambda f: not with_deadlines(f)),
    ("missed", lambda w: f"{w.missed:,}", lambda f: f.deadlines > 0),
    ("stuck", lambda w: percent_cell(w.stuck), lambda f: any(w.stuck for w in f.workers)),
    ("cut off", lambda w: percent_cell(w.cut), lambda f: any(w.cut for w in f.workers)),
    ("sat out", lambda w: f"{w.sat_out:,}", lambda f: any(w.sat_out for w in f.workers)),
    ("steps", lambda w: f"{w.steps:,}", lambda f: any(w.steps < f.steps for w in f.workers)),
)
"""Name, cell, and whether there is something to show."""
