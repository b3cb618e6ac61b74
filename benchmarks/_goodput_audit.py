"""What became of a training under faults: nothing lost, nothing doubled, equal replicas, and how much of the machines.

``goodput`` is samples committed over samples that the living could have done::

    goodput = sum of the records' samples / sum over workers of (seconds alive / seconds a sample)

A worker is alive from when it has said that it is ready until its process ends, except while it is stopped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _flock import Flock, Life, left_behind
from _goodput_training import BATCH, LENGTH, replay

from paceline.machines import parse_fleet
from paceline.observe import read_log
from paceline.observe.analysis.audit import audit
from paceline.observe.log.reader import RunLog

SKIP = 5
"""Steps before what is measured begins: nothing is known of the machines yet."""
Span = tuple[float, float]


@dataclass(frozen=True)
class Findings:
    """The audit of one training."""

    goodput: float
    lost: int
    doubled: int
    epochs: int
    """Finished ones."""
    steps: int
    generations: int
    ended: int
    """Workers that were there at the end."""
    replicas_equal: bool
    replay_off: float
    """The largest difference of a weight or momentum from those of one machine that did the same steps."""
    loss_off: float
    """The largest difference of a step's loss."""
    files_growth: int | None
    """Open files of a worker that lived through it, between two generations of one size; None: no size came twice."""
    threads_growth: int | None
    left_running: int
    host_short: float
    """Part of the machines' time by which this computer was too slow to play them."""
    restarts: int
    """Workers that could not go on with the fleet and were started again."""

    @property
    def sound(self) -> bool:
        """Whether all is well but for speed."""
        exact = self.replicas_equal and self.replay_off < 1e-9 and self.loss_off < 1e-9
        grown = max(self.files_growth or 0, self.threads_growth or 0) > 0
        return exact and self.epochs > 0 and not (self.lost or self.doubled or self.left_running or grown)


def examine(flock: Flock, *, machines: str, sample_ms: float) -> Findings:
    """The findings of a flock whose training has ended by itself."""
    log = read_log(flock.run_dir)
    epochs = [epoch for epoch in audit(log) if epoch.whole]
    reference, loss_off = replay(log)
    replicas = [torch.load(life.replica, weights_only=True) for life in flock.lives if life.replica.exists()]
    return Findings(
        goodput=goodput(log, flock.lives, speeds(machines, sample_ms)),
        lost=sum(max(epoch.missing, LENGTH - epoch.counted + epoch.twice) for epoch in epochs),
        doubled=sum(epoch.twice for epoch in audit(log)),
        epochs=len(epochs),
        steps=len(log.records),
        generations=len({record.generation for record in log.records}),
        ended=len(replicas),
        replicas_equal=bool(replicas) and all(torch.equal(replicas[0], other) for other in replicas[1:]),
        replay_off=max((float((one - reference).abs().max()) for one in replicas), default=math.inf),
        loss_off=loss_off,
        files_growth=growth(flock.lives, "files"),
        threads_growth=growth(flock.lives, "threads"),
        left_running=left_behind(flock.lives),
        host_short=host_short(log),
        restarts=flock.restarts,
    )


# -- speed -----------------------------------------------------------------------------------------------------------


def speeds(machines: str, sample_ms: float) -> list[float]:
    """Samples a second of each slot's machine; beyond the list it begins again."""
    return [1 / machine.seconds(0, 1) for machine in parse_fleet(machines, sample_ms=sample_ms)]


def goodput(log: RunLog, lives: Iterable[Life], machine_speeds: Sequence[float]) -> float:
    """From the end of the first steps to the last commit."""
    begin, end = log.times[SKIP - 1], log.times[-1]
    committed = sum(record.total for record in log.records[SKIP:])
    could = sum(alive_s(life, (begin, end)) * machine_speeds[life.slot % len(machine_speeds)] for life in lives)
    return committed / could


def host_short(log: RunLog) -> float:
    """Seconds that emulated machines took too long, over all their seconds."""
    return sum(sum(r.shortfall_s) for r in log.records) / sum(sum(r.seconds) for r in log.records)


def alive_s(life: Life, within: Span) -> float:
    """Seconds of ``within`` in which the process was ready and ran."""
    if (ready := life.ready) is None:
        return 0.0
    span = common((ready, life.ended if life.ended is not None else math.inf), within)
    return length(span) - sum(length(common(stop, span)) for stop in life.stops)


def common(one: Span, other: Span) -> Span:
    """
    >>> common((0, 5), (3, 9)), length(common((0, 1), (2, 3)))
    ((3, 5), 0.0)
    """
    return max(one[0], other[0]), min(one[1], other[1])


def length(span: Span) -> float:
    return max(0.0, span[1] - span[0])


# -- what must not grow ----------------------------------------------------------------------------------------------


def growth(lives: Iterable[Life], what: str) -> int | None:
    """The most that any worker which was there at the end holds more than earlier, in a fleet of the same size."""
    found = [grown for life in lives if life.code == 0 for grown in _grown(life.notes, what)]
    return max(found, default=None)


def _grown(notes: Sequence[Mapping[str, Any]], what: str) -> list[int]:
    """By fleet size: the last generation's count less the first one's. A worker has connections to all the others and
    the leader writes the log, so only like places compare; in a generation the least counts, since what is left of the
    one before goes in a moment.
    """
    least: dict[tuple[tuple[int, bool], int], int] = {}
    for note in notes:
        if note["what"] == "epoch":
            key = ((note["size"], note["leads"]), note["generation"])
            least[key] = min(note[what], least.get(key, note[what]))
    rows = [[least[key] for key in sorted(least) if key[0] == place] for place in {place for place, _ in least}]
    return [row[-1] - row[0] for row in rows if len(row) > 1]


assert LENGTH % BATCH, "an epoch ends with a batch that is not whole, as real ones do"
