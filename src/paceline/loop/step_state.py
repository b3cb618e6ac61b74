"""One step as a worker lives it: what was dealt, what it has finished, and what the round gave.

Under a deadline two threads share a turn: the user's loop works on it, and the proxy closes it. Everything they share
changes while the books' lock is held.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paceline.feed import total as samples_in
from paceline.records import Plan, Range, StepRecord

if TYPE_CHECKING:
    from paceline.combine import Header
    from paceline.combine.gradients.gradients import Sum


@dataclass
class Work:
    """What a worker has finished of its share."""

    samples: int = 0
    micro_batches: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    shortfall_s: float = 0.0
    weight: Any = 0.0
    loss_sum: Any = 0.0
    added: dict[str, Any] = field(default_factory=dict)
    """Figures of ``step.add``."""

    def add(self, done: Work) -> None:
        """One more micro-batch."""
        self.samples += done.samples
        self.micro_batches += done.micro_batches
        self.seconds += done.seconds
        self.slowest_s = max(self.slowest_s, done.slowest_s)
        self.shortfall_s += done.shortfall_s
        self.weight = self.weight + done.weight
        self.loss_sum = self.loss_sum + done.loss_sum
        for name, value in done.added.items():
            self.added[name] = self.added.get(name, 0.0) + value


@dataclass
class Turn:
    """One step, from its deal to its commit on this worker."""

    plan: Plan
    shares: tuple[int, ...]
    """The shares really dealt; those of every lap together."""
    epoch: int
    dealt: int
    """Samples dealt to all when it was opened: what gradients are scaled by."""
    expected: int
    """Samples that the plan hopes for."""
    last: bool
    """Nothing of the epoch should be left afterwards."""
    compare: bool
    """Replicas are compared in it, because they differed: it waits for everybody."""
    opened: float
    """When the step began (perf_counter), here or, with a deadline, anywhere in the fleet."""
    workers: tuple[int, ...] = ()
    generation: int = 0
    """Who is in it; fewer than at its beginning when some were lost."""
    until: float | None = None
    """When this lap ends: the deadline, once the clock runs."""
    work: Work = field(default_factory=Work)
    next_plan: Plan | None = None
    ranges: tuple[tuple[Range, ...], ...] = ()
    """Positions that each worker counted, of all laps that are over."""

    # -- the user's thread ------------------------------------------------------------------------------------------
    began: float | None = None
    """When this worker's loop began it."""
    fingerprint: float = 0.0
    """Of its parameters, where they are compared."""
    rates: float = 0.0
    """A digest of its optimisers' settings as the step began."""
    busy_since: float | None = None
    """When it took the micro-batch it is in."""
    idle: bool = False
    """It has nothing more to do here, for now."""
    gone: bool = False
    """It has left the step's micro-batches and waits for the round: no further lap can give it more."""
    out: bool = False
    """A lap ended while it was busy: what it is busy with does not count."""
    extra: int = 0
    """A further lap's share."""
    patience: float = 1.0
    """How much longer further laps last than they should."""

    # -- the round --------------------------------------------------------------------------------------------------
    hurried: bool = False
    """Members changed: it waits for no number of workers to be done."""
    closed: bool = False
    """Nothing can join any more."""
    over: bool = False
    """The round is over, or has failed."""
    void: bool = False
    """The fleet went on without this worker: nothing of it counts."""
    header: Header | None = None
    total: Sum | None = None
    """None after a round: this worker fell too far behind to keep it, and takes over a peer's state instead."""
    record: StepRecord | None = None
    progress: float = 0.0
    """Of the whole training, after this step."""
    ends_epoch: bool = False
    finishes: bool = False
    """Nothing is left of the whole training."""
    before: dict[str, Any] | None = None
    """The books' state before this step, for a loop that has yet to take it over."""

    def start(self, began: float) -> None:
        """This worker's loop begins it, or begins it anew after it was left half done."""
        self.began, self.work = began, Work()
        self.run(began)

    def run(self, since: float) -> None:
        """The clock runs, unless it does already."""
        if self.until is None and self.plan.deadline_s is not None:
            self.opened, self.until = since, since + self.plan.deadline_s

    def follow(self, kept: Sequence[int | None], *, workers: tuple[int, ...], generation: int) -> list[Range]:
        """Members changed in the middle of the step: by new rank, ``kept`` says who they were. Returns what those who
        are gone had done in earlier laps: it was counted, and its gradients are gone with them."""
        lost = [piece for rank, mine in enumerate(self.ranges) if rank not in kept for piece in mine]
        self.workers, self.generation = workers, generation
        self.shares = tuple(0 if old is None else self.shares[old] for old in kept)
        self.ranges = tuple(() if old is None else self.ranges[old] for old in kept) if self.ranges else ()
        self.expected = min(self.expected, sum(self.shares))
        self.next_plan, self.hurried = None, True
        samples = tuple(0 if old is None else self.plan.samples[old] for old in kept)
        forecast = self.plan.forecast_s
        if forecast is not None:
            forecast = tuple(math.nan if old is None else forecast[old] for old in kept)
        self.plan = replace(self.plan, generation=generation, samples=samples, forecast_s=forecast)
        return lost

    @property
    def index(self) -> int:
        return self.plan.step

    @property
    def counted(self) -> tuple[int, ...]:
        """Samples of each worker that counted in the laps that are over."""
        return tuple(samples_in(ranges) for ranges in self.ranges) or (0,) * len(self.shares)

    @property
    def bounded(self) -> bool:
        """Whether the round closes without everybody."""
        return self.plan.deadline_s is not None or self.plan.wait_for is not None

    @property
    def open(self) -> bool:
        """Whether this worker's work can still join."""
        return not self.closed and not self.out
