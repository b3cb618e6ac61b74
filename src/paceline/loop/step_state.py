"""The state of one step on one worker: what was dealt, what is finished, and what the round gave.

Under a deadline two threads share it: the user's loop works on the step, and the proxy closes its round. Everything
they share changes while the lock of the training's state is held. Each thread's part has a phase of its own, and the
phases change by the transitions below alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from paceline.feed import total as samples_in
from paceline.loop.loss_weights import Tally
from paceline.records import Plan, Range, StepRecord

if TYPE_CHECKING:
    from paceline.combine import Header
    from paceline.combine.gradients.exchange import Sum


class LoopPhase(Enum):
    """Where the user's loop is in a step."""

    NOT_BEGUN = "not begun"
    WORKING = "working on micro-batches"
    DONE = "has nothing more to do, until another lap, or an extension to the floor, deals more"
    WAITING = "has left the micro-batches, and waits for the round: no further lap can give it more"
    CUT_OFF = "busy with a micro-batch that does not count, because a lap ended meanwhile"


class RoundPhase(Enum):
    """How far a step's round is, on this worker."""

    OPEN = "work can still join"
    CLOSED = "nothing can join any more"
    OVER = "everybody has the result"
    VOID = "the fleet went on without this worker: nothing of the step counts"


_L, _R = LoopPhase, RoundPhase
TRANSITIONS: dict[LoopPhase | RoundPhase, tuple[LoopPhase | RoundPhase, ...]] = {
    _L.NOT_BEGUN: (_L.WORKING, _L.WAITING, _L.CUT_OFF),
    _L.WORKING: (_L.DONE, _L.WAITING, _L.CUT_OFF),
    _L.DONE: (_L.DONE, _L.WORKING, _L.WAITING),
    _L.WAITING: (_L.WAITING, _L.DONE),
    _L.CUT_OFF: (_L.CUT_OFF, _L.DONE, _L.WAITING),
    _R.OPEN: (_R.CLOSED, _R.VOID),
    _R.CLOSED: (_R.CLOSED, _R.OVER, _R.VOID),
    _R.OVER: (_R.VOID,),
    _R.VOID: (),
}
"""To which phases each may change. A round that members were lost in is closed again. A loop that was interrupted while
it waited may begin the step again. A worker that was dropped just when its round was over does not know the result."""


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
    tally: Tally = field(default_factory=Tally)
    """What the weights are made of."""

    def add(self, done: Work) -> None:
        """One more micro-batch."""
        self.samples += done.samples
        self.micro_batches += done.micro_batches
        self.seconds += done.seconds
        self.slowest_s = max(self.slowest_s, done.slowest_s)
        self.shortfall_s += done.shortfall_s
        self.weight = self.weight + done.weight
        self.loss_sum = self.loss_sum + done.loss_sum
        self.tally.add(done.tally)
        for name, value in done.added.items():
            self.added[name] = self.added.get(name, 0.0) + value

    def sums(self) -> Work:
        """What a further process of a worker adds to its first one's: losses and figures; the samples are the same."""
        added = {name: float(value) for name, value in self.added.items()}
        return Work(weight=float(self.weight), loss_sum=float(self.loss_sum), added=added, tally=self.tally.plain())


@dataclass
class StepState:
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
    least: int = 0
    """Samples without which the round does not close at its deadline: those that are free go on instead."""
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
    updates: float = 0.0
    """What it tells of its updates in the step before: `UpdateGuard.reported`."""
    busy_since: float | None = None
    """When it took the micro-batch it is in."""
    loop_phase: LoopPhase = LoopPhase.NOT_BEGUN
    extra: int = 0
    """Samples offered to a loop that is done: a further lap's share, or what is left of the share of a step that goes
    on to its floor. The proxy offers and withdraws them; the loop alone takes them, and works again."""
    patience: float = 1.0
    """How much longer further laps, and extensions to the floor, last than they should."""

    told: int = -1
    """Samples that all together had counted when the floor was last looked at."""

    # -- the round --------------------------------------------------------------------------------------------------
    hurried: bool = False
    """Members changed: it waits for no number of workers to be done."""
    round_phase: RoundPhase = RoundPhase.OPEN
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
    """The training's state before this step, for a loop that has yet to take it over."""

    def enter(self, phase: LoopPhase | RoundPhase) -> None:
        """Change the phase of the loop or of the round; AssertionError for a change that cannot be."""
        now = self.loop_phase if isinstance(phase, LoopPhase) else self.round_phase
        assert phase in TRANSITIONS[now], f"step {self.index}: from {now} to {phase}"
        if isinstance(phase, LoopPhase):
            self.loop_phase = phase
        else:
            self.round_phase = phase

    def start(self, began: float) -> None:
        """This worker's loop begins it, or begins it anew after it was left half done."""
        if self.loop_phase is LoopPhase.NOT_BEGUN:
            self.enter(LoopPhase.WORKING)
        self.began, self.work = began, Work()
        self.run(began)

    def run(self, since: float) -> None:
        """The clock runs, unless it does already."""
        if self.until is None and self.plan.deadline_s is not None:
            self.opened, self.until = since, since + self.plan.deadline_s

    def extended(self, seconds: float) -> None:
        """The deadline was moved by so much."""
        self.plan = replace(self.plan, deadline_s=(self.plan.deadline_s or 0.0) + seconds)

    def members_changed(self, kept: Sequence[int | None], *, workers: tuple[int, ...], generation: int) -> list[Range]:
        """In the middle of the step: by new rank, ``kept`` says who they were. Returns what those who
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
    def idle(self) -> bool:
        """Whether the loop has nothing more to do in it, for now, and was offered nothing."""
        return self.loop_phase in (LoopPhase.DONE, LoopPhase.WAITING) and not self.extra

    @property
    def closed(self) -> bool:
        """Whether nothing can join any more."""
        return self.round_phase is not RoundPhase.OPEN

    @property
    def over(self) -> bool:
        return self.round_phase is RoundPhase.OVER

    @property
    def open(self) -> bool:
        """Whether this worker's work can still join."""
        return not self.closed and self.loop_phase is not LoopPhase.CUT_OFF
