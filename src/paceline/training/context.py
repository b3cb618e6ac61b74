"""What the parts of one training share: its members, models and tracked objects, and the script's progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch

from paceline.errors import Dropped, DroppedInCall
from paceline.machines import Machine
from paceline.machines.failures import Failures
from paceline.pace import Pacer
from paceline.records import History
from paceline.step.script_loops import Passes
from paceline.step.tracking import Tracked
from paceline.training.combines import Choice
from paceline.training.loading import Resume
from paceline.transport import Elastic, Transport
from paceline.transport.formats import PLAIN

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from paceline.run_recorder import RunRecorder
    from paceline.step.steps import StepLoop


@dataclass(eq=False)
class TrainingContext:
    """One worker's training. The parts that make loops, save, load and evaluate hold it, and not each other."""

    transport: Transport
    recorder: RunRecorder
    pacer: Pacer
    combine: Choice
    device: torch.device
    machine: Machine | None
    failures: Failures | None
    nonfinite: str
    seed: int
    """Seed of the run; a checkpoint that is loaded brings its own."""
    comm_dtype: str = PLAIN
    """Format in which rounds send sums over the network."""
    at_the_end: ExitStack = field(default_factory=ExitStack)
    """Exit stack that is closed when the fleet is left."""
    models: list[torch.nn.Module] = field(default_factory=list)
    own_buffers: set[int] = field(default_factory=set)
    """``id`` of the models whose buffers are each worker's own."""
    history: History = field(default_factory=History)
    passes: Passes = field(default_factory=Passes)
    steps: StepLoop | None = None
    """The script's newest loop."""
    resume: Resume | None = None
    """A checkpoint that was loaded, until the script reaches the point where it was saved."""

    def __post_init__(self) -> None:
        self.tracking = Tracked(lambda: (p for model in self.models for p in model.parameters()))

    @property
    def shared(self) -> list[torch.nn.Module]:
        """Return the models whose buffers all workers share."""
        return [model for model in self.models if id(model) not in self.own_buffers]

    # -- who is here -------------------------------------------------------------------------------------------------

    @property
    def elastic(self) -> Elastic | None:
        """Return the transport, where workers come and go."""
        return cast(Elastic, self.transport) if self.transport.elastic else None

    @property
    def outside(self) -> bool:
        """Return whether this worker waits to enter a running fleet: until then its calls concern itself alone."""
        return self.transport.outside

    @property
    def is_leader(self) -> bool:
        return self.leads and self.transport.shard == 0

    @property
    def leads(self) -> bool:
        """Return whether this worker leads, whichever of its processes this is."""
        return self.transport.rank == 0 and not self.outside

    @property
    def state_device(self) -> torch.device:
        """Return the device of complete states: they may not fit where the parts of a divided model do."""
        return torch.device("cpu") if self.transport.shards > 1 else self.device

    @property
    def identity(self) -> int:
        """Return this worker's permanent number; in a fleet of fixed size its rank."""
        return self.transport.id

    @property
    def mesh(self) -> DeviceMesh:
        """Return the device mesh of this worker's processes."""
        mesh: DeviceMesh = self.transport.mesh()
        return mesh

    # -- where the script is -----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Return the next step's index."""
        return self.steps.index if self.steps is not None else 0

    @property
    def passing(self) -> Resume | None:
        """Return the loaded checkpoint while the script passes over loops on its way to where it was saved."""
        return self.resume if self.resume is not None and self.resume.passing else None

    @contextmanager
    def meet(self, label: str) -> Iterator[None]:
        """Bring all workers to one point of the training, with the parameters that are to be shown."""
        try:
            with self.steps.meet(label) if self.steps is not None else nullcontext():
                yield
        except Dropped as dropped:  # the script needs the call's result, which only the others have
            raise DroppedInCall(f"{label}: {dropped}") from None

    # -- what is told of it ------------------------------------------------------------------------------------------

    def warn(self, text: str) -> None:
        """Record a warning that every worker has: the leader's is enough."""
        self.recorder.event("note", {"level": "warning", "text": text, "everywhere": True})

    def inform(self, text: str) -> None:
        """Record a note in the run's log."""
        self.recorder.event("note", {"level": "info", "text": text})
