"""Figures measured from a run's log, for what a fleet file leaves out; and how far a plan was from a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.observe import RunLog
from paceline.records import StepRecord
from paceline.simulate.matrices import longest_stretch, measurements
from paceline.simulate.planning.fleet_spec import HOUR_S
from paceline.simulate.play import Floats
from paceline.transport.formats import part_of

if TYPE_CHECKING:
    from paceline.simulate.planning.choices import Choice

WARM_UP = 5
"""First steps that are left out: machines warm up, and shares are not found yet."""
STALLED = 3.0
"""Multiple of a worker's usual time per sample from which on a step counts as a stall."""


@dataclass(frozen=True)
class Measured:
    """A run's figures; tuples have one entry per worker, in rank order."""

    batch: int
    sample_s: tuple[float, ...]
    """Median seconds per sample."""
    jitter: tuple[float, ...]
    stalls_per_hour: tuple[float, ...]
    stall_s: tuple[float, ...]
    reclaimed_per_hour: float
    """Mean number of reclaims per worker and hour."""
    round_s: float
    model_bytes: int | None = None
    """Bytes of the parameters that the run's rounds summed; None where the log does not have them."""

    def kind_figures(self, ranks: Sequence[int], sample_s: float) -> dict[str, Any]:
        """Return the mean figures of these workers as fields of a `MachineKind`.

        ``sample_s`` is the reference machine's seconds per sample.
        """
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
    """Return the figures of a run's longest stretch with the same workers, without its first steps."""
    if log.run.get("combine", "gradients") != "gradients":
        raise ValueError("this run's log has one line per round, for it was averaged: take one that combined gradients")
    records = scored(log.records)
    samples, seconds, timed = measurements(records)
    each = np.where(timed, seconds / np.where(timed, samples, 1.0), np.nan)
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
        reclaimed_per_hour=_reclaims_per_hour(log) / len(records[0].workers),
        round_s=median(record.round_s for record in records),
        model_bytes=_model_bytes(log),
    )


def scored(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Return the longest stretch with the same workers, without its first steps and each epoch's short last step."""
    stretch = longest_stretch(records)
    last = {record.epoch: record.step for record in stretch}
    kept = [record for record in stretch[WARM_UP:] if record.step != last[record.epoch]]
    kept = [record for record in kept if record.wall_s > 0]
    if len(kept) < WARM_UP:
        raise ValueError(f"the run has too few steps with the same workers: a plan needs more than {3 * WARM_UP}")
    return kept


def speed(records: Sequence[StepRecord]) -> float:
    """Return samples per second, by the clock of the worker that wrote the log."""
    return sum(record.total for record in records) / sum(record.wall_s for record in records)


def compare_with_run(choices: Sequence[Choice], log: RunLog) -> dict[str, Any]:
    """Return the samples per second that the plan predicts for the run's pace and wire format, and the run's own.

    ``plan_error`` is ``|planned / real - 1|``. Where the log has the topology of sums, the plan's row has the same.
    """
    pace, wire = str(log.run.get("pace", "")), str(log.run.get("comm_dtype") or "float32")
    combine, places = str(log.run.get("combine", "gradients")), log.run.get("places")
    like = [one for one in choices if (one.combine, one.comm_dtype) == (combine, wire) and one.pace in ("", pace)]
    if isinstance(places, Mapping):
        like = [one for one in like if (one.topology == "two levels") == bool(places.get("tree"))]
    best = next((one for one in like if one.found), like[0] if like else None)
    if best is None:
        like_the_run = f"combine {combine!r}, pace {pace!r} and comm_dtype {wire!r}"
        raise ValueError(f"the plan has no row for the run's {like_the_run}")
    real = speed(scored(log.records))
    return {
        "pace": pace,
        "comm_dtype": wire,
        "topology": best.topology,
        "planned_samples_per_s": best.samples_per_s,
        "real_samples_per_s": real,
        "plan_error": abs(best.samples_per_s / real - 1),
    }


def _model_bytes(log: RunLog) -> int | None:
    """Return the model's bytes, computed from the bytes that a round sends."""
    sent = next((loop.get("round_bytes") for loop in reversed(log.loops)), None)
    part = part_of(str(log.run.get("comm_dtype") or "float32"))
    return round(sent / part) if isinstance(sent, (int, float)) and sent > 0 else None


def _jitter(ratios: Floats) -> Floats:
    """Return the standard deviation of the logarithm; 0 for a worker with too few measurements."""
    with np.errstate(invalid="ignore"):
        spread = np.nanstd(np.log(ratios), axis=0)
    return np.asarray(np.nan_to_num(spread))


def _reclaims_per_hour(log: RunLog) -> float:
    """Return the number of processes lost per hour."""
    hours = sum(record.wall_s for record in log.records) / HOUR_S
    return sum(len(change.left) for change in log.changes) / hours
