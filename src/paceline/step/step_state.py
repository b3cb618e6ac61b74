"""The state of one step on one worker: what was dealt, what is finished, and what the round gave.

Under a deadline two threads share it: the user's loop works on the step, and the proxy closes its round. Everything
they share changes while the lock of the training's state is held. Each thread's part has a phase of its own, and the
phases change by the transitions below alone.

What a worker brings to the step's round is written from it (`write_header`), and from it and the summed header the
step's record is made (`record_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

from paceline.feed import total as samples_in
from paceline.gradients import Header
from paceline.gradients.scaling import is_active
from paceline.records import REPORTED, Plan, Range, StepRecord
from paceline.step.losses.loss_weights import Tally

if TYPE_CHECKING:
    from paceline.gradients.exchange import Sum
    from paceline.step.context import LoopContext


class LoopPhase(Enum):
    """The user's loop in a step: what it is doing."""

    NOT_BEGUN = "not begun"
    WORKING = "working on micro-batches"
    DONE = "has nothing more to do, until another lap, or an extension to the floor, deals more"
    WAITING = "has left the micro-batches, and waits for the round: no further lap can give it more"
    CUT_OFF = "busy with a micro-batch that does not count, because a lap ended meanwhile"


class RoundPhase(Enum):
    """A step's round on this worker: how far it is."""

    OPEN = "work can still join"
    CLOSED = "nothing can join any more"
    OVER = "its result is in this worker's training state"
    VOID = "the fleet went on without this worker: nothing of the step counts"


_L, _R = LoopPhase, RoundPhase
TRANSITIONS: dict[LoopPhase | RoundPhase, tuple[LoopPhase | RoundPhase, ...]] = {
    _L.NOT_BEGUN: (_L.WORKING, _L.WAITING, _L.CUT_OFF),  # not WORKING: the round closed, or a lap ended, first
    _L.WORKING: (_L.DONE, _L.WAITING, _L.CUT_OFF),
    _L.DONE: (_L.DONE, _L.WORKING, _L.WAITING),  # WORKING: more was dealt
    _L.WAITING: (_L.WAITING, _L.DONE, _L.WORKING),  # WORKING: it was interrupted while it waited, and begins again
    _L.CUT_OFF: (_L.CUT_OFF, _L.DONE, _L.WAITING),  # CUT_OFF again: another lap ended in the same micro-batch
    _R.OPEN: (_R.CLOSED, _R.VOID),
    _R.CLOSED: (_R.CLOSED, _R.OVER, _R.VOID),  # CLOSED again: members were lost in the round
    _R.OVER: (_R.VOID,),  # the worker was dropped just when its round was over: it has no result
    _R.VOID: (),
}
"""The phases to which each phase may change."""


@dataclass
class Work:
    """The finished part of a worker's share: one micro-batch, or the sum of several."""

    samples: int = 0
    micro_batches: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    shortfall_s: float = 0.0
    weight: Any = 0.0
    loss_sum: Any = 0.0
    added: dict[str, Any] = field(default_factory=dict)
    """The figures of ``step.add``."""
    tally: Tally = field(default_factory=Tally)
    """The origin of the weights: given, or read from the losses' graphs."""

    def add(self, done: Work) -> None:
        """Add one more micro-batch, or several."""
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
        """Return what a further process of a worker adds to the first one's work: losses and figures, not samples."""
        added = {name: float(value) for name, value in self.added.items()}
        return Work(weight=float(self.weight), loss_sum=float(self.loss_sum), added=added, tally=self.tally.plain())


@dataclass
class StepState:
    """One step, from its deal to its commit on this worker."""

    plan: Plan
    shares: tuple[int, ...]
    """The samples really dealt to each worker, in all laps together."""
    epoch: int
    dealt: int
    """The samples dealt to all workers when the step was opened; gradients are scaled by this number."""
    expected: int
    """The samples that the step is expected to count."""
    last: bool
    """Whether nothing of the epoch should be left after this step."""
    compare: bool
    """Whether this step waits for everybody: replicas or modes differed, or members change after it.

    Replicas are compared too.
    """
    opened: float
    """The time (perf_counter) when the step began, here or, with a deadline, anywhere in the fleet."""
    workers: tuple[int, ...] = ()
    generation: int = 0
    """The members' generation; ``workers`` are fewer than at the step's beginning when some were lost."""
    until: float | None = None
    """The time when this lap ends: the deadline, once the clock runs."""
    floor: int = 0
    """The samples below which the round does not close at its deadline: free workers go on."""
    work: Work = field(default_factory=Work)
    next_plan: Plan | None = None
    ranges: tuple[tuple[Range, ...], ...] = ()
    """The positions that each worker counted in the laps that are over."""

    # -- the user's thread ------------------------------------------------------------------------------------------
    began: float | None = None
    """The time when this worker's loop began the step."""
    fingerprint: float = 0.0
    """The fingerprint of this worker's parameters, where they are compared."""
    settings_digest: float = 0.0
    """A digest of this worker's optimiser settings as the step began."""
    buffers: float = 0.0
    """A digest of the buffers that this worker's script has set since the last round."""
    updates: float = 0.0
    """This worker's report of its updates in the step before (`UpdateGuard.reported`)."""
    busy_since: float | None = None
    """The time when the loop took the micro-batch that it is in."""
    loop_phase: LoopPhase = LoopPhase.NOT_BEGUN
    extra: int = 0
    """The samples offered to a loop that is done.

    They are a further lap's share, or what is left of the share of a step that goes on to its floor. The proxy offers
    and withdraws them; the loop alone takes them, and works again.
    """
    patience: float = 1.0
    """The factor by which further laps, and extensions to the floor, last longer than they should."""
    fleet_counted: int = -1
    """The samples that all workers together had counted when the floor was last checked."""

    # -- the round --------------------------------------------------------------------------------------------------
    decided_count: int | None = None
    """On the leader, the complete shares that close the round, as decided while the step ran; None: the plan's."""
    hurried: bool = False
    """Whether members changed: then the round does not wait until a number of workers is done."""
    round_phase: RoundPhase = RoundPhase.OPEN
    header: Header | None = None
    total: Sum | None = None
    """The fleet's sums. None after the round: this worker fell far behind, and takes over a peer's state instead."""
    record: StepRecord | None = None
    progress: float = 0.0
    """The fraction of the whole training that is done after this step."""
    ends_epoch: bool = False
    finishes: bool = False
    """Whether nothing is left of the whole training."""
    before: dict[str, Any] | None = None
    """The training's state before this step, for a loop that has yet to take the step over."""

    def enter(self, phase: LoopPhase | RoundPhase) -> None:
        """Change the phase of the loop or of the round, along `TRANSITIONS`."""
        now = self.loop_phase if isinstance(phase, LoopPhase) else self.round_phase
        assert phase in TRANSITIONS[now], f"step {self.index}: from {now} to {phase}"
        if isinstance(phase, LoopPhase):
            self.loop_phase = phase
        else:
            self.round_phase = phase

    def start(self, began: float) -> None:
        """Begin the step in this worker's loop, perhaps anew after it was left half done."""
        if self.loop_phase not in (LoopPhase.WORKING, LoopPhase.CUT_OFF):
            self.enter(LoopPhase.WORKING)
        self.began, self.work = began, Work()
        self.start_clock(began)

    def start_clock(self, since: float) -> None:
        """Start the clock of the deadline at ``since``, unless it runs already."""
        if self.until is None and self.plan.deadline_s is not None:
            self.opened, self.until = since, since + self.plan.deadline_s

    def extend_deadline(self, seconds: float) -> None:
        """Move the deadline by ``seconds``."""
        self.plan = replace(self.plan, deadline_s=(self.plan.deadline_s or 0.0) + seconds)

    @property
    def index(self) -> int:
        return self.plan.step

    @property
    def counted(self) -> tuple[int, ...]:
        """The samples of each worker that counted in the laps that are over."""
        return tuple(samples_in(ranges) for ranges in self.ranges) or (0,) * len(self.shares)

    @property
    def idle(self) -> bool:
        """Whether the loop has nothing to do in this step, for now, and was offered nothing."""
        return self.loop_phase in (LoopPhase.DONE, LoopPhase.WAITING) and not self.extra

    @property
    def closed(self) -> bool:
        """Whether nothing can join any more."""
        return self.round_phase is not RoundPhase.OPEN

    @property
    def over(self) -> bool:
        return self.round_phase is RoundPhase.OVER

    @property
    def takes_work(self) -> bool:
        """Whether this worker's work can still join."""
        return not self.closed and self.loop_phase is not LoopPhase.CUT_OFF


WORK = ("samples", "seconds", "micro_batches")
"""The facts that records of local steps, and of a period of them, have."""
SIZES = ("micro_size", "memory_bound")
"""The facts that these records have in addition with ``micro_batch="auto"``."""


def write_header(
    loop: LoopContext, step_state: StepState, more: Mapping[str, float], *, finite: bool, counts: bool = True
) -> Header:
    """Return this worker's header for the round of a step.

    ``more``: facts that only some rounds have. ``finite``: whether its gradients are finite. ``counts``: whether its
    work counts.
    """
    gradients, rank = loop.gradients, loop.transport.rank
    header, work = Header(gradients.layout), step_state.work if counts else Work()
    overflow, weight = not finite and is_active(gradients.scaler), float(work.weight)
    header.write(
        rank,
        **{**measured(work), "seconds": step_state.work.seconds},
        weight=weight,
        **work.tally.facts(weight),
        loss=float(work.loss_sum),
        squares=gradients.exchange.squares(weight) if counts else 0.0,
        overflow=overflow,
        nonfinite=not finite and not overflow,
        ended=loop.dealing.ended or step_state.shares[rank] == 0,
        fingerprint=step_state.fingerprint,
        settings_digest=step_state.settings_digest,
        updates=step_state.updates,
        modes=gradients.accumulation.modes,
        buffers=step_state.buffers,
        **loop.micro_batches.sizes,
        **more,
    )
    loop.add_figures(header, work.added)
    if step_state.next_plan is not None:
        header.write_plan(step_state.next_plan)
    if step_state.decided_count is not None and rank == 0:
        header.write_count(step_state.decided_count)
    return header


def measured(work: Any) -> dict[str, float]:
    """Return the facts of `REPORTED` that a worker's own work has measured."""
    kind: Any = type(work)
    return {name: getattr(work, name) for name in _measured_of(kind)}


@cache
def _measured_of(kind: Any) -> tuple[str, ...]:
    """Return the names of `REPORTED` that this kind of work has, as a field or as a property."""
    known = {one.name for one in fields(kind)}
    return tuple(name for name in REPORTED if name in known or hasattr(kind, name))


def work_fields(header: Header, name: Callable[[int], str], facts: Sequence[str] = WORK) -> dict[str, Any]:
    """Return everybody's work in a record's fields; ``name`` gives the name of the figure in a slot."""
    weight = header.total("weight")
    return {
        **{fact: tuple(map(REPORTED[fact].kind, header.column(fact).tolist())) for fact in facts},
        "weight": weight / header.unit(),
        "loss": header.total("loss") / weight if weight else None,
        "sums": {name(slot): value for slot, value in header.sums().items()},
    }


def record_of(
    step_state: StepState,
    header: Header,
    name: Callable[[int], str],
    *,
    round_s: float,
    emulated: bool,
    auto: bool,
    by_deadline: bool = False,
    grad_norm: float | None = None,
) -> StepRecord:
    """Return the record of a step whose round is over; ``by_deadline``: it closed without waiting for everybody."""
    return StepRecord(
        **_dealt(step_state),
        **work_fields(header, name, _reported(by_deadline, emulated, auto)),
        forecast_s=step_state.plan.forecast_s,
        deadline_s=step_state.plan.deadline_s,
        wait_for=header.count or step_state.plan.wait_for,
        round_s=round_s,
        grad_norm=grad_norm,
        applied=has_gradient(header),
    )


@cache
def _reported(by_deadline: bool, emulated: bool, auto: bool) -> tuple[str, ...]:
    """Return the names of the facts that a record has."""
    asked = {"always": True, "deadline": by_deadline, "emulated": emulated, "auto": auto}
    return tuple(fact for fact, reported in REPORTED.items() if asked[reported.when])


def void_record(step_state: StepState) -> StepRecord:
    """Return the record of a step that does not count: the fleet went on without this worker."""
    nobody = (0,) * len(step_state.shares)
    return StepRecord(**_dealt(step_state), samples=nobody, seconds=tuple(map(float, nobody)), applied=False)


def _dealt(step_state: StepState) -> dict[str, Any]:
    """Return a record's fields for which step it is, and what was dealt to whom."""
    return {
        "step": step_state.index,
        "epoch": step_state.epoch,
        "generation": step_state.generation,
        "workers": step_state.workers,
        "planned": step_state.shares,
    }


def has_gradient(header: Header) -> bool:
    """Return whether the round gave a gradient to apply."""
    return not header.total("nonfinite") and not header.total("overflow") and header.total("weight") > 0
