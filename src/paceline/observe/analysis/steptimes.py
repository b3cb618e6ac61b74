"""Seconds of steps: as they were, and as they would have been at the limit, with equal shares, or had they waited.

For step k with samples n_i and own seconds t_i of worker i, of which a stall took c_i, and s_i seconds stuck besides
(`paceline.observe.analysis.lateness`); N samples in all, wall seconds W:

- own speed v_i = n_i / (t_i - c_i); a worker that sat out or finished nothing keeps the speed it last showed (or first
  shows later)
- at best the step takes T with sum_i v_i (T - s_i - c_i) = N: nobody ever waits, nothing is cut off, the round is free,
  and time stuck is lost. Without stalls T = N / sum_i v_i. A worker that is stuck half the time is half as fast
- equal shares would take max_i ((N / n) / v_i + S_i), S_i the whole of a stall that began in the step, plus the step's
  other time: W less the time until the last worker was done or the round closed. Balanced ones would take T plus that
- a worker waits until the last is done, and the wait is charged to that one; not in a round with a deadline, which
  waits for nobody
- had a round with a deadline waited for everybody, it would have taken max_i (share_i / v_i + S_i) plus other time,
  with shares of the mean count by the speeds known before (a running mean, as adaptive keeps one): an estimate. Not of
  N: a deadline counts little in a step in which a machine is slow, and waiting would count the whole batch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.observe.analysis.lateness import LostTime
from paceline.observe.analysis.stretches import Floats, Mask, StepStretch

FOLLOWED = 0.3
"""Part of the way that the running mean of a worker's speed moves towards the newest."""


@dataclass
class Speeds:
    """The workers' samples per second, as far as the stretches read so far have shown."""

    newest: dict[int, float]
    followed: dict[int, float] = field(default_factory=dict)
    """Running means, by which shares would be dealt."""

    def shown(self, stretch: StepStretch, lost: LostTime) -> Floats:
        """Return each worker's speed in each step (NaN before its first), and keep the last for the next stretch."""
        own_s = stretch.seconds - lost.inside_s
        timed = (stretch.samples > 0) & (own_s > 0)
        before = _known(self.newest, stretch.workers)
        speed = np.vstack([before, np.divide(stretch.samples, own_s, out=np.zeros_like(own_s), where=timed)])
        row = np.where(np.vstack([np.ones_like(timed[:1]), timed]), np.arange(len(speed))[:, None], 0)
        filled: Floats = np.take_along_axis(speed, np.maximum.accumulate(row, axis=0), axis=0)
        self.newest |= _finite(stretch.workers, filled[-1])
        return filled[1:]

    def expected(self, stretch: StepStretch, speed: Floats) -> Floats:
        """Return each worker's running mean before each step."""
        mean = _known(self.followed, stretch.workers)
        means = np.empty_like(speed)
        for row, newest in enumerate(speed):
            means[row] = mean = np.where(np.isnan(mean), newest, mean)
            mean = mean + FOLLOWED * (newest - mean)
        self.followed |= _finite(stretch.workers, mean)
        return means


def _known(speeds: dict[int, float], workers: Sequence[int]) -> Floats:
    return np.array([speeds.get(worker, np.nan) for worker in workers])


def _finite(workers: Sequence[int], speeds: Floats) -> dict[int, float]:
    return {worker: float(speed) for worker, speed in zip(workers, speeds) if np.isfinite(speed)}


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a stretch's steps; by step and worker in the arrays of two dimensions."""

    wall: Floats
    closed: Floats
    """Seconds until the last worker was done, or the round closed."""
    round: Floats
    ideal: Floats
    """Seconds at the limit; 0 when no speed is known."""
    equal: Floats
    """Seconds with equal shares, without other time."""
    waited: Floats
    """Seconds had the round waited for everybody, without other time."""
    longer: Floats
    """Seconds of ``waited`` beyond what the batch would have taken had nobody waited."""
    last: Floats
    """Rank that the round would have waited for."""
    work: Floats
    stuck: Floats
    cut: Floats
    waiting: Floats
    """Seconds until the last worker was done; 0 where a worker did not take part."""
    took_part: Mask

    @property
    def other(self) -> Floats:
        return np.maximum(0.0, self.wall - self.closed)

    def mean(self, spent: Floats) -> float:
        """Return the seconds of the average worker that took part, summed over the steps."""
        return float(
            (np.where(self.took_part, spent, 0.0).sum(axis=1) / np.maximum(1, self.took_part.sum(axis=1))).sum()
        )


def step_times(stretch: StepStretch, lost: LostTime, speeds: Speeds, *, batch: float) -> StepTimes:
    """Return the times of a stretch; ``batch``: samples that a step with a deadline would have had to wait for."""
    work = np.where(stretch.samples > 0, stretch.seconds, 0.0) - lost.inside_s
    stuck, cut = lost.inside_s + lost.stuck_s, lost.cut_s
    busy = (work + stuck + cut).max(axis=1)
    wall = np.where(stretch.wall_s > 0, stretch.wall_s, busy + stretch.round_s)
    closed = np.minimum(busy, wall)
    took_part = work + stuck + cut > 0
    # A worker's times are no longer than the step.
    work = np.minimum(work, closed[:, None])
    stuck = np.minimum(stuck, closed[:, None] - work)
    cut = np.minimum(cut, closed[:, None] - work - stuck)
    speed = speeds.shown(stretch, lost)
    waited, longer, last = closed, np.zeros_like(closed), np.full_like(closed, -1)
    if stretch.bounded.any():
        would = _had_it_waited(lost, speed, speeds.expected(stretch, speed), batch)
        waited, longer, last = (np.where(stretch.bounded, a, b) for a, b in zip(would, (waited, longer, last)))
    ideal, equal = _at_best(stretch, lost, speed)
    return StepTimes(
        wall=wall,
        closed=closed,
        round=np.minimum(stretch.round_s, np.maximum(0.0, wall - busy)),
        ideal=ideal,
        equal=equal,
        waited=waited,
        longer=longer,
        last=last,
        work=work,
        stuck=stuck,
        cut=cut,
        waiting=np.where(took_part, np.maximum(0.0, closed[:, None] - work - stuck - cut), 0.0),
        took_part=took_part,
    )


def _at_best(stretch: StepStretch, lost: LostTime, speed: Floats) -> tuple[Floats, Floats]:
    """Return the seconds of each step at the limit, and with equal shares."""
    count, together = stretch.samples.sum(axis=1), np.nansum(speed, axis=1)
    idle = np.nansum(speed * (lost.stuck_s + lost.inside_s), axis=1)
    ideal = np.divide(count + idle, together, out=np.zeros_like(count), where=together > 0)
    each = count[:, None] / len(stretch.workers) / speed + lost.stall_s
    return ideal, np.where(np.isnan(each), 0.0, each).max(axis=1)


def _had_it_waited(lost: LostTime, speed: Floats, expected: Floats, batch: float) -> tuple[Floats, Floats, Floats]:
    """Return seconds, those beyond the least possible, and the rank waited for, with shares by the speeds expected."""
    together = np.nansum(expected, axis=1, keepdims=True)
    share = batch * np.divide(expected, together, out=np.zeros_like(expected), where=together > 0)
    done = share / speed + lost.stall_s
    done = np.where(np.isnan(done), 0.0, done)
    waited, at_best = done.max(axis=1), np.nansum(speed, axis=1)
    least = np.divide(batch, at_best, out=np.zeros_like(waited), where=at_best > 0)
    return waited, np.maximum(0.0, waited - least), done.argmax(axis=1).astype(np.float64)
