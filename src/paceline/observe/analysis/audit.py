"""The audit: did every sample of every epoch count exactly once? Read from the positions in the records.

A position that no record counted is missing when a higher one was counted, or when the ``steps`` event says how many an
epoch deals (``dealt``) and it is below that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.observe.log import sanitise
from paceline.observe.log.reader import RunLog
from paceline.records import StepRecord


@dataclass(frozen=True)
class EpochAudit:
    """One epoch. A position is a place in the epoch's order of samples."""

    epoch: int
    counted: int
    """Samples counted, by the records' own figures."""
    undone: int
    """Samples dealt and not counted in their step; they stayed in the queue and were dealt again."""
    twice: int = 0
    """Positions counted more than once."""
    missing: int = 0
    """Positions that were dealt and not counted; 0 where only a part of the epoch is recorded."""
    recorded: bool = True
    """Whether the records hold positions at all: streams have none."""
    whole: bool = True
    """Whether the records hold the epoch from its beginning to its end."""
    resumed: bool = False
    """Whether its beginning is in an earlier run, whose checkpoint this one went on from."""

    @property
    def sound(self) -> bool:
        """Every sample exactly once, as far as the records reach."""
        return self.recorded and not self.twice and not self.missing


def audit(log: RunLog) -> list[EpochAudit]:
    """Every epoch of every loop in the log, in order."""
    finished = log.end is not None and log.end.get("reason") == "finished"
    starts = [sanitise.count_or(loop.get("first_step"), 0) for loop in log.loops]
    dealt = [sanitise.count_or(loop.get("dealt"), 0) for loop in log.loops]
    left = {sanitise.count_or(event.get("step"), -1) for event in log.others if event.get("event") == "left"}
    parts = _epochs(log.records, starts)
    return [
        _audit(
            part,
            whole=finished or number < len(parts) - 1,
            left=part[-1].step + 1 in left,
            resumed=number == 0 and part[0].step > 0,
            dealt=_in_force(part[0].step, starts, dealt),
        )
        for number, part in enumerate(parts)
    ]


def _in_force(step: int, starts: Sequence[int], dealt: Sequence[int]) -> int:
    """What the loop that this step is of deals in an epoch; 0 when the log does not say."""
    said = [count for start, count in zip(starts, dealt) if start <= step]
    return said[-1] if said else 0


def _epochs(records: Sequence[StepRecord], starts: Sequence[int]) -> list[list[StepRecord]]:
    """The records cut where an epoch or a loop begins: a second loop counts its epochs from 0 again."""
    parts: list[list[StepRecord]] = []
    for record in records:
        if not parts or record.epoch != parts[-1][-1].epoch or record.step in starts:
            parts.append([])
        parts[-1].append(record)
    return parts


def _audit(records: Sequence[StepRecord], *, whole: bool, left: bool, resumed: bool, dealt: int) -> EpochAudit:
    """``left``: the script left its loop after the last of them, which may have been in the middle of the epoch;
    ``resumed``: the run went on from a checkpoint, and may have begun in the middle."""
    counted = sum(record.total for record in records)
    cut_off = [record for record in records if record.planned != record.samples]
    undone = sum(max(0, p - s) for record in cut_off for p, s in zip(record.planned, record.samples))
    ranges = _positions(records)
    if ranges is None:
        return EpochAudit(records[0].epoch, counted, undone, recorded=False, whole=whole and not resumed)
    twice, missing = _overlaps(ranges)
    missing += max(0, dealt - int(ranges[:, 1].max()))
    partly = bool(missing or not dealt)
    whole = whole and not (partly and (left or resumed))
    missing = missing if whole else 0
    return EpochAudit(records[0].epoch, counted, undone, twice, missing, whole=whole, resumed=resumed and partly)


def _positions(records: Sequence[StepRecord]) -> NDArray[np.int64] | None:
    """All ranges as rows of (start, stop); None when there are none, or a foreign log holds something else."""
    try:
        spans = np.array([piece for record in records for mine in record.ranges for piece in mine], dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        return None
    return spans if spans.ndim == 2 and spans.shape[1] == 2 and (spans >= 0).all() else None


def _overlaps(spans: NDArray[np.int64]) -> tuple[int, int]:
    """How many positions are in more than one range, and how many below the highest in none.

    Ends and starts are walked in order, with a count of the ranges that are open between two of them.
    """
    at = np.concatenate((spans[:, 0], spans[:, 1]))
    change = np.repeat([1, -1], len(spans))
    order = np.argsort(at, kind="stable")
    at, open_ranges = at[order], np.cumsum(change[order])
    width = np.diff(at)
    twice = int(width[open_ranges[:-1] > 1].sum())
    missing = int(at[0] + width[open_ranges[:-1] == 0].sum())
    return twice, missing
