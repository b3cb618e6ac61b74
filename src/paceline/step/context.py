"""The objects that the parts of one loop share, in small pieces: each part uses the pieces that it needs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paceline.checkpoint.held import Holding
from paceline.feed.dealing import Dealing
from paceline.gradients import Gradients, Header
from paceline.pace.steering import RECENT
from paceline.records import LoopSettings
from paceline.step.checks.replicas import Repair
from paceline.step.checks.sameness import Contents
from paceline.step.checks.user_code import OwnLeaves
from paceline.step.micro_batch_size import Sizing
from paceline.step.script_loops import ScriptLoop
from paceline.step.step_state import SIZES, WORK, work_fields
from paceline.step.tracking import Tracked
from paceline.step.training_state import TrainingState
from paceline.transport import Transport

if TYPE_CHECKING:
    from paceline.machines import Machine
    from paceline.step.members import Membership
    from paceline.step.step import Step
    from paceline.step.step_state import Work


@dataclass
class LoopPosition:
    """The position of this worker's loop in the training.

    The user's thread alone changes it, except ``full_shares``: the thread that delivers a change of members changes
    that too, under the lock of the training's state.
    """

    first: int = 0
    """The loop's first step."""
    step: Step | None = None
    """The last step that was given out."""
    closed: bool = False
    """Whether a later loop took this one's place, or the fleet was left."""
    compared: int | None = None
    """The step before which the contents were found equal, so that its round need not compare them."""
    finished: bool = False
    progress: float = 0.0
    """The fraction of the whole training that is done."""
    full_shares: tuple[int, ...] = ()
    """The shares of the last step of a full global batch that this worker's loop began; empty before the first."""

    def __post_init__(self) -> None:
        self.next = self.first
        """The step that comes next, or is under way."""

    def move_to(self, next: int, *, finished: bool, progress: float) -> None:
        """Go on from another position, as a checkpoint or a peer has it."""
        self.next, self.finished, self.progress = next, finished, progress

    @property
    def begun(self) -> bool:
        """Whether the first step has been given out."""
        return self.step is not None


@dataclass
class RunNotes:
    """Notes and warnings for the run's log."""

    log_event: Callable[[str, Mapping[str, Any]], None]
    """Logs an event: its kind and its fields."""
    logged_once: set[str] = field(default_factory=set)
    """The texts of notes that are logged once per run, and have been."""

    def warn(self, text: str) -> None:
        """Log a warning of this worker alone."""
        self.log_event("note", {"level": "warning", "text": text})

    def inform(self, text: str) -> None:
        """Log a note of this worker alone."""
        self.log_event("note", {"level": "info", "text": text})

    def warn_all(self, text: str) -> None:
        """Log a warning that every worker has; the leader's is kept."""
        self.log_event("note", {"level": "warning", "text": text, "everywhere": True})

    def log_once(self, text: str) -> None:
        """Log a note, unless it has been logged in this run."""
        if text not in self.logged_once:
            self.logged_once.add(text)
            self.inform(text)

    def warn_once(self, text: str) -> None:
        """Log a warning that every worker may have, unless it has been logged in this run."""
        if text not in self.logged_once:
            self.logged_once.add(text)
            self.warn_all(text)


@dataclass
class ReplicaAccess:
    """This worker's replica: its models and everything tracked."""

    repair: Callable[[], Repair]
    """Function that makes the replicas of all workers equal."""
    snapshot: Callable[[], dict[str, Any]]
    """Function that returns the replica's state."""
    restore: Callable[[Mapping[str, Any]], None]
    """Function that sets the replica to a state, whose tensors it may keep."""
    contents: Callable[[], Contents] = lambda: Contents([])
    """Function that returns what must be the same on every worker."""
    alike: bool = True
    """Whether all workers have the same kind of device; others round differently, and are compared less often."""
    holding: Holding = field(default_factory=lambda: Holding(dict, tuple))
    """The parts of the replica that steps leave as they are, with their digests."""


@dataclass
class MicroBatching:
    """The size of this worker's micro-batches, and where they come from."""

    dealing: Dealing
    auto: bool = False
    """Whether micro-batches are sized by measuring, and halved when they do not fit into memory."""
    uncut: bool = False
    """Whether micro-batches are never cut."""
    sizing: Sizing | None = None
    """The search for the size, where ``micro_batch="auto"`` may change it."""
    own_device: str = ""
    """The name of this worker's device."""
    devices: tuple[str, ...] = ()
    """The names of everybody's devices, by rank."""
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Seconds per sample of this worker's last micro-batches."""

    @property
    def sizes(self) -> dict[str, float]:
        """The header's facts about the size of this worker's micro-batches (`SIZES`); empty where it was given."""
        if not self.auto:
            return {}
        found = self.dealing.micro_batch if self.sizing is None else self.sizing.search.settled
        bound = self.sizing is not None and self.sizing.search.by_memory
        return {"micro_size": found, "memory_bound": bool(found and bound)}

    @property
    def source(self) -> Dealing | Sizing:
        """The object from which this worker takes its micro-batches."""
        return self.dealing if self.sizing is None else self.sizing

    def timed(self, work: Work) -> None:
        """Note that a micro-batch is used; one that was left out shows nothing of its size."""
        if self.sizing is not None:
            counts = isinstance(work.weight, torch.Tensor) or work.weight > 0
            self.sizing.done(work.samples if counts else 0)


@dataclass
class ScriptHabits:
    """The observed behaviour of the script's own code."""

    copyable: bool = True
    """Whether a copy of a peer's state would hold everything in the script that has state."""
    plain: bool = True
    """Whether all that is tracked has a state that a peer can be given."""
    own_updates: bool = False
    """Whether the script makes updates of its own, from the gradient that ``step.reduce()`` leaves."""
    looked_at: set[int] = field(default_factory=set)
    """Shapes of losses' graphs in which samples that are coupled were looked for."""
    own_leaves: OwnLeaves = field(default_factory=OwnLeaves)
    empty_steps: int = 0
    """Steps in a row in which no micro-batch of the fleet had a gradient."""
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    """The optimisers that the last commit was given."""
    checked_optimizers: set[int] = field(default_factory=set)
    """The ``id`` of each optimiser that a commit may be given."""


class EpochLength(NamedTuple):
    """The length of an epoch, by two ways to count."""

    batches: int
    """The length of the script's own loader."""
    updates: int


@dataclass
class LoopContext:
    """The parts of one call of ``fleet.steps``."""

    transport: Transport
    training: TrainingState
    gradients: Gradients
    dealing: Dealing
    settings: LoopSettings
    script_loop: ScriptLoop
    device: torch.device
    machine: Machine | None
    seed: int
    nonfinite: str
    tracking: Tracked
    notes: RunNotes
    replica: ReplicaAccess
    micro_batches: MicroBatching
    position: LoopPosition
    script: ScriptHabits = field(default_factory=ScriptHabits)
    epoch_length: EpochLength | None = None
    """The length of an epoch, where the script gave a loader and both ways to count are known."""
    singles: bool = False
    """Whether every worker's micro-batches are single samples of several in a step."""
    membership: Membership | None = None
    """The loop's part in an elastic fleet; None where the workers stay the same."""
    save_if_due: Callable[[], None] = lambda: None
    """Function that is called between two steps, and after the last."""

    @property
    def leaving(self) -> bool:
        """Whether this worker was asked to leave: it takes no further micro-batch, and its rest is dealt to others.

        A worker of several processes, of which only the first was asked, does its share.
        """
        return self.membership is not None and self.membership.leaving and self.transport.shards == 1

    def size_micro_batches(self, share: int, *, deadline: bool = False) -> None:
        """Choose the size of the micro-batches for a step whose share is yet to be cut; it may have a ``deadline``."""
        sizing = self.micro_batches.sizing
        if sizing is not None:
            if (found := sizing.news()) is not None:
                self.notes.inform(f"worker {self.transport.id}: {found}")
            sizing.begin(share, deadline=deadline)

    def add_figures(self, header: Header, added: Mapping[str, Any]) -> None:
        """Add the figures of ``step.add`` to a header, under the numbers that the fleet has for their names."""
        for name, value in added.items():
            header.add(self.transport.slot(name), float(value))

    def work_fields(self, header: Header) -> dict[str, Any]:
        """Return everybody's work, in a record's fields."""
        return work_fields(header, self.transport.slot_name, (*WORK, *SIZES) if self.micro_batches.auto else WORK)
