"""What the parts of one loop share: who is there, what is trained and dealt, and how far this worker's loop is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from paceline.combine import Gradients, Header
from paceline.feed.dealing import Dealing
from paceline.loop.passes import LoopPlace
from paceline.loop.replicas import Repair
from paceline.loop.sameness import Contents
from paceline.loop.sizing import Sizing
from paceline.loop.step_recording import SIZES, WORK, said
from paceline.loop.tracking import Tracked
from paceline.loop.training_state import TrainingState
from paceline.pace.fitting import RECENT
from paceline.settings import LoopSettings
from paceline.transport import Transport

if TYPE_CHECKING:
    from paceline.loop.membership import Membership
    from paceline.loop.step import Step
    from paceline.loop.step_state import Work
    from paceline.machines import Machine


@dataclass
class LoopContext:
    """Of one call of ``fleet.steps``."""

    transport: Transport
    training: TrainingState
    gradients: Gradients
    dealing: Dealing
    settings: LoopSettings
    place: LoopPlace
    device: torch.device
    machine: Machine | None
    seed: int
    nonfinite: str
    tracking: Tracked
    observe: Callable[[str, Mapping[str, Any]], None]
    repair: Callable[[], Repair]
    """Makes the replicas equal."""
    snapshot: Callable[[], dict[str, Any]]
    restore: Callable[[Mapping[str, Any]], None]
    """This worker's models and everything tracked: their state, and setting it."""
    contents: Callable[[], Contents] = lambda: Contents([])
    """What must be the same on every worker."""
    whole: bool = False
    """Micro-batches are not cut."""
    alike: bool = True
    """Whether all workers have the same kind of device; others round differently, and are compared less often."""
    membership: Membership | None = None
    """Follows who is there, where workers come and go."""
    copyable: bool = True
    """Whether a copy of a peer's state would hold everything that has state."""
    own_updates: bool = False
    """Whether the script makes updates of its own, from the gradient that ``step.combine()`` leaves."""
    looks_for_coupling: bool = True
    """Whether a loss is still to be looked at: it may couple the samples of a batch."""
    coupling: Any = 0.0
    """By how much one was found to, until a round is over."""
    told: set[str] = field(default_factory=set)
    """What this run's log has been told once."""
    at_boundary: Callable[[], None] = lambda: None
    """Called between two steps, and after the last: the state is whole then."""
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    """What the last commit was given."""
    checked_optimizers: set[int] = field(default_factory=set)
    """By ``id``: those that a commit may be given."""
    sizing: Sizing | None = None
    """Where ``micro_batch="auto"`` looks for a size."""
    own_device: str = ""
    """This worker's, by name."""
    devices: tuple[str, ...] = ()
    """Everybody's, by rank."""
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Seconds a sample of this worker's last micro-batches."""

    # -- how far this worker's loop is -----------------------------------------------------------------------------
    step: Step | None = None
    """The last one that was given out."""
    closed: bool = False
    """A later loop took its place, or the fleet was left."""
    first: int = 0
    """The loop's first step."""
    next: int = 0
    """The step that comes next, or is under way."""
    compared: int | None = None
    """The step before which the contents were found equal, so that its round need not compare them."""
    finished: bool = False
    progress: float = 0.0
    """The part of the whole training that is done."""
    full_shares: tuple[int, ...] = ()
    """The shares of the last step of a whole global batch that this worker's loop began; empty before the first."""

    def __post_init__(self) -> None:
        self.next = self.first

    @property
    def begun(self) -> bool:
        """Whether the first step has been given out."""
        return self.step is not None

    @property
    def auto(self) -> bool:
        """Whether micro-batches are halved when they do not fit into memory."""
        return self.settings.auto

    def size_micro_batches(self, share: int) -> None:
        """A step begins, and its share is yet to be cut."""
        if self.sizing is not None:
            if (found := self.sizing.news()) is not None:
                self.observe("note", {"level": "info", "text": f"worker {self.transport.id}: {found}"})
            self.sizing.begin(share)

    @property
    def sizes(self) -> dict[str, float]:
        """What this worker reports of the size of its micro-batches: `SIZES`; nothing where it was given."""
        if not self.auto:
            return {}
        found = self.dealing.micro_batch if self.sizing is None else self.sizing.search.settled
        bound = self.sizing is not None and self.sizing.search.by_memory
        return {"micro_size": found, "memory_bound": bool(found and bound)}

    @property
    def source(self) -> Dealing | Sizing:
        """Where this worker takes its micro-batches from."""
        return self.dealing if self.sizing is None else self.sizing

    def timed(self, work: Work) -> None:
        """A micro-batch is used; one that was left out tells nothing of its size."""
        if self.sizing is not None:
            counts = isinstance(work.weight, torch.Tensor) or work.weight > 0
            self.sizing.done(work.samples if counts else 0)

    @property
    def leaving(self) -> bool:
        """This worker was asked to leave: it takes no further micro-batch, and what it has left is dealt to others. One
        of several processes, of which only the first was asked, does its share."""
        return self.membership is not None and self.membership.leaving and self.transport.shards == 1

    def warn_all(self, text: str) -> None:
        """A warning that every worker has: the leader's is enough."""
        self.observe("note", {"level": "warning", "text": text, "everywhere": True})

    def say_once(self, text: str) -> None:
        """A note for the run's log, unless it has it."""
        if text not in self.told:
            self.told.add(text)
            self.observe("note", {"level": "info", "text": text})

    def warn_once(self, text: str) -> None:
        """A warning that every worker may have, unless the run's log has it."""
        if text not in self.told:
            self.told.add(text)
            self.warn_all(text)

    def add_figures(self, header: Header, added: Mapping[str, Any]) -> None:
        """Figures of ``step.add``, under the numbers that the fleet knows their names by."""
        for name, value in added.items():
            header.add(self.transport.slot(name), float(value))

    def said(self, header: Header) -> dict[str, Any]:
        """Everybody's work, as a record has it."""
        return said(header, self.transport.slot_name, (*WORK, *SIZES) if self.auto else WORK)
