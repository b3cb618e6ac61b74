"""The audit: did every sample of every epoch count exactly once? Computed from the positions in the records.

A position that no record counted is missing when a higher one was counted, or when it is below the number of samples
that an epoch deals, which the ``steps`` event gives as ``dealt``.
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
    """One epoch. A position is an index into the epoch's order of samples."""

    epoch: int
    counted: int
    """Samples counted, as the records give them."""
    undone: int
    """Samples dealt and not counted in their step; they stayed in the queue and were dealt again."""
    twice: int = 0
    """Positions counted more than once."""
    missing: int = 0
    """Positions that were dealt and not counted; 0 when only a part of the epoch is recorded."""
    recorded: bool = True
    """Whether the records hold positions at all: streams have none."""
    whole: bool = True
    """Whether the records hold the epoch from its beginning to its end."""
    resumed: bool = False
    """Whether the epoch began in an earlier run, from whose checkpoint this one resumed."""

    @property
    def sound(self) -> bool:
        """Return whether every sample counted exactly once, as far as the records reach."""
        return self.recorded and not self.twice and not self.missing


def audit(log: RunLog) -> list[EpochAudit]:
    """Return the audit of every epoch of every loop in the log, in order."""
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
    """Return the samples that the loop of this step deals per epoch; 0 when not logged."""
    begun = [count for start, count in zip(starts, dealt) if start <= step]
    return begun[-1] if begun else 0


def _epochs(records: Sequence[StepRecord], starts: Sequence[int]) -> list[list[StepRecord]]:
    """Return the records, cut where an epoch or a loop begins: a second loop counts its epochs from 0 again."""
    parts: list[list[StepRecord]] = []
    for record in records:
        if not parts or record.epoch != parts[-1][-1].epoch or record.step in starts:
            parts.append([])
        parts[-1].append(record)
    return parts


def _audit(records: Sequence[StepRecord], *, whole: bool, left: bool, resumed: bool, dealt: int) -> EpochAudit:
    """Return the audit of one epoch's records.

    ``left``: the script left its loop after the last of the records, maybe in the middle of the epoch; ``resumed``: the
    run resumed from a checkpoint, maybe in the middle of the epoch.
    """
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
    """Return all ranges as rows of (start, stop); None when there are none, or a foreign log holds something else."""
    try:
        spans = np.array([piece for record in records for mine in record.ranges for piece in mine], dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        return None
    return spans if spans.ndim == 2 and spans.shape[1] == 2 and (spans >= 0).all() else None


def _overlaps(spans: NDArray[np.int64]) -> tuple[int, int]:
    """Return how many positions are in more than one range, and how many below the highest are in none.

    Starts and ends are visited in order, with a count of the ranges that are open between two of them.
    """
    at = np.concatenate((spans[:, 0], spans[:, 1]))
    change = np.repeat([1, -1], len(spans))
    order = np.argsort(at, kind="stable")
    at, open_ranges = at[order], np.cumsum(change[order])
    width = np.diff(at)
    twice = int(width[open_ranges[:-1] > 1].sum())
    missing = int(at[0] + width[open_ranges[:-1] == 0].sum())
    return twice, missing


def audit_verdict(epochs: Sequence[EpochAudit]) -> str:
    """Return the audit's outcome for the closing verdict; empty when there is nothing to audit."""
    recorded = [epoch for epoch in epochs if epoch.recorded]
    lost, doubled = sum(epoch.missing for epoch in recorded), sum(epoch.twice for epoch in recorded)
    if lost or doubled:
        return f"Audit: NOT exact: {_samples(lost)} lost, and {_samples(doubled)} counted more than once."
    complete = sum(epoch.whole for epoch in recorded)
    if complete and len(recorded) == len(epochs):
        counted_in = f"{complete:,} epoch{'' if complete == 1 else 's'}"
        return f"Audit: every sample counted once, in {counted_in}{_rest(recorded)}."
    if any(epoch.resumed for epoch in recorded):
        return "Audit: no epoch is in this run from its beginning to its end; no sample counted twice."
    return "Audit: no epoch was finished; no sample counted twice so far." if recorded else ""


def _rest(epochs: Sequence[EpochAudit]) -> str:
    """Return what is known of the epochs that are not complete."""
    rest = [epoch for epoch in epochs if not epoch.whole]
    names = ["that was resumed" if epoch.resumed else "that was not finished" for epoch in rest]
    return f"; of the epoch {' and of the one '.join(names)}, none twice" if names else ""


def _samples(count: int) -> str:
    return "1 sample was" if count == 1 else f"{count:,} samples were"


def audit_text(epochs: Sequence[EpochAudit]) -> str:
    """Return the audit's outcome for the report, in a sentence."""
    wrong = [epoch for epoch in epochs if epoch.recorded and not epoch.sound]
    recorded, again = [epoch for epoch in epochs if epoch.recorded], sum(epoch.undone for epoch in epochs)
    dealt = f" {again:,} samples were dealt again after their step had closed without them." if again else ""
    if wrong:
        return f"NOT exact in {len(wrong)} of {len(epochs)} epochs: samples counted twice, or missing.{dealt}"
    if not recorded:
        return "The record holds no positions (a stream, or an older log): nothing to audit."
    complete = sum(epoch.whole for epoch in recorded)
    part = "" if complete == len(recorded) else " Of an epoch that is not whole in this log: none twice so far."
    return f"Every sample counted exactly once in {complete} of {complete} whole epochs.{part}{dealt}"


def epoch_text(epoch: EpochAudit) -> str:
    """Return the outcome for one epoch, for a cell of a table."""
    if not epoch.recorded:
        return "positions not recorded"
    if not epoch.sound:
        return "NOT exact"
    return "each exactly once" if epoch.whole else "none twice (part of an epoch)"
