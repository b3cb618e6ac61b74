"""What a run's log has measured, for a plan that leaves it out; and how far a plan was from a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.observe import RunLog
from paceline.records import StepRecord
from paceline.simulate.outcome import Floats
from paceline.simulate.planning.fleet_spec import HOUR_S
from paceline.simulate.recorded import longest_stretch
from paceline.simulate.sites import WIRES

if TYPE_CHECKING:
    from paceline.simulate.planning.choices import Choice

WARM_UP = 5
"""First steps that say nothing: machines warm up, and shares are not found yet."""
STALLED = 3.0
"""A step that took a worker so many times its usual time a sample was a stall."""


@dataclass(frozen=True)
class Measured:
    """A run's figures; tuples have one for each worker, in rank order."""

    batch: int
    sample_s: tuple[float, ...]
    """Seconds a sample: the median."""
    jitter: tuple[float, ...]
    stalls_per_hour: tuple[float, ...]
    stall_s: tuple[float, ...]
    reclaimed_per_hour: float
    """Of each worker, on average."""
    round_s: float
    samples_per_s: float
    model_bytes: int | None = None
    """Of the parameters that its rounds summed, where the log says."""

    def of(self, ranks: Sequence[int], sample_s: float) -> dict[str, Any]:
        """What these workers were together, as figures of a `MachineKind`; ``sample_s``: the reference machine's."""
        stalls = [self.stalls_per_hour[rank] for rank in ranks]
        lost_s = sum(rate * self.stall_s[rank] for rate, rank in zip(stalls, ranks))
        return {
            "speed": sample_s * sum(1 / self.sample_s[rank] for rank in ranks) / len(ranks),
            "jitter": sum(self.jitter[rank] for rank in ranks) / len(ranks),
            "stalls_per_hour": sum(stalls) / len(ranks),
            "stall_s": lost_s / sum(stalls) if sum(stalls) else 0.0,
            "reclaimed_per_hour": self.reclaimed_per_hour,
        }


def measure(log: RunLog) -> Measured:
    """The figures of a run's longest stretch with the same workers, without its first steps."""
    if log.run.get("combine", "gradients") != "gradients":
        raise ValueError("this run's log has a line a round, for it was averaged: take one that combined gradients")
    records = scored(log.records)
    workers = records[0].workers
    samples = np.array([record.samples for record in records], dtype=np.float64)
    seconds = np.array([record.seconds for record in records], dtype=np.float64)
    told = (samples > 0) & (seconds > 0) & np.isfinite(seconds)
    if not told.any(axis=0).all():
        raise ValueError(f"worker {workers[int(np.argmin(told.any(axis=0)))]} was never measured in this run")
    each = np.where(told, seconds / np.where(told, samples, 1.0), np.nan)
    usual = np.nanmedian(each, axis=0)
    stalled = each > STALLED * usual
    hours = sum(record.wall_s for record in records) / HOUR_S
    extra = np.where(stalled, seconds - usual * samples, 0.0).sum(axis=0)
    hits = stalled.sum(axis=0)
    return Measured(
        batch=round(median(record.total for record in records)),
        sample_s=tuple(usual.tolist()),
        jitter=tuple(_jitter(np.where(stalled, np.nan, each) / usual).tolist()),
        stalls_per_hour=tuple((hits / hours).tolist()),
        stall_s=tuple((extra / np.maximum(hits, 1)).tolist()),
        reclaimed_per_hour=_reclaims_per_hour(log) / len(workers),
        round_s=median(record.round_s for record in records),
        samples_per_s=speed(records),
        model_bytes=_model_bytes(log),
    )


def scored(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """The longest stretch with the same workers, without its first steps and each epoch's last, which is short."""
    stretch = longest_stretch(records)
    last = {record.epoch: record.step for record in stretch}
    kept = [record for record in stretch[WARM_UP:] if record.step != last[record.epoch]]
    kept = [record for record in kept if record.wall_s > 0]
    if len(kept) < WARM_UP:
        raise ValueError(f"the run has too few steps with the same workers: a plan needs more than {3 * WARM_UP}")
    return kept


def speed(records: Sequence[StepRecord]) -> float:
    """Samples a second, by the clock of the one that wrote the log."""
    return sum(record.total for record in records) / sum(record.wall_s for record in records)


def compare_with_run(choices: Sequence[Choice], log: RunLog) -> dict[str, Any]:
    """What the plan foretold for the run's own pace and wire, and what the run did.

    ``plan_error`` is ``|planned / real - 1|``. Where the log says how sums went, that topology counts.
    """
    pace, wire = str(log.run.get("pace", "")), str(log.run.get("wire") or "float32")
    combine, places = str(log.run.get("combine", "gradients")), log.run.get("places")
    like = [one for one in choices if (one.combine, one.wire) == (combine, wire) and one.pace in ("", pace)]
    if isinstance(places, Mapping):
        like = [one for one in like if (one.topology == "two levels") == bool(places.get("tree"))]
    best = next((one for one in like if one.found), like[0] if like else None)
    if best is None:
        raise ValueError(f"the plan has no row for combine {combine!r}, pace {pace!r} and wire {wire!r} of the run")
    real = speed(scored(log.records))
    return {
        "pace": pace,
        "wire": wire,
        "topology": best.topology,
        "planned_samples_per_s": best.samples_per_s,
        "real_samples_per_s": real,
        "plan_error": abs(best.samples_per_s / real - 1),
    }


def _model_bytes(log: RunLog) -> int | None:
    """From the bytes that a round sums as they cross the network."""
    sent = next((loop.get("round_bytes") for loop in reversed(log.loops)), None)
    part = WIRES.get(str(log.run.get("wire") or "float32"), 1.0)
    return round(sent / part) if isinstance(sent, (int, float)) and sent > 0 else None


def _jitter(ratios: Floats) -> Floats:
    """Spread of the logarithm; 0 where a worker was seen too rarely."""
    with np.errstate(invalid="ignore"):
        spread = np.nanstd(np.log(ratios), axis=0)
    return np.asarray(np.nan_to_num(spread))


def _reclaims_per_hour(log: RunLog) -> float:
    """Processes that were lost."""
    hours = sum(record.wall_s for record in log.records) / HOUR_S
    return sum(len(change.left) for change in log.changes) / hours
