"""What the parts of one training share: who is there, what is trained and tracked, and how far the script has come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch

from paceline.combine.choose import Choice
from paceline.combine.wire import PLAIN
from paceline.errors import Dropped, DroppedInCall
from paceline.loop.passes import Passes
from paceline.loop.tracking import Tracked
from paceline.machines import Machine
from paceline.machines.failures import Failures
from paceline.pace import Pacer
from paceline.records import History
from paceline.training.resume import Resume
from paceline.transport import Elastic, Transport

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from paceline.loop.steps import Steps
    from paceline.run_recorder import RunRecorder


@dataclass(eq=False)
class TrainingContext:
    """One worker's training. The parts that make loops, save, load and evaluate each hold it, and nothing of each
    other's."""

    transport: Transport
    recorder: RunRecorder
    pacer: Pacer
    combine: Choice
    device: torch.device
    machine: Machine | None
    failures: Failures | None
    nonfinite: str
    seed: int
    """A checkpoint that is loaded brings its own."""
    wire: str = PLAIN
    """The format in which what rounds sum crosses the network."""
    at_the_end: ExitStack = field(default_factory=ExitStack)
    """Closed when the fleet is left."""
    models: list[torch.nn.Module] = field(default_factory=list)
    own_buffers: set[int] = field(default_factory=set)
    """By ``id``: the models whose buffers are each worker's own."""
    history: History = field(default_factory=History)
    passes: Passes = field(default_factory=Passes)
    steps: Steps | None = None
    """The script's newest loop."""
    resume: Resume | None = None
    """A checkpoint that was loaded, until the script is where it was saved."""

    def __post_init__(self) -> None:
        self.tracking = Tracked(lambda: (p for model in self.models for p in model.parameters()))

    @property
    def shared(self) -> list[torch.nn.Module]:
        """The models whose buffers all workers share."""
        return [model for model in self.models if id(model) not in self.own_buffers]

    # -- who is here -------------------------------------------------------------------------------------------------

    @property
    def elastic(self) -> Elastic | None:
        """The transport, where workers come and go."""
        return cast(Elastic, self.transport) if self.transport.elastic else None

    @property
    def outside(self) -> bool:
        """Whether this worker waits to enter a running fleet: until its first step its calls concern itself alone."""
        return self.transport.outside

    @property
    def is_leader(self) -> bool:
        return self.leads and self.transport.shard == 0

    @property
    def leads(self) -> bool:
        """Whether this worker leads, whichever of its processes this is."""
        return self.transport.rank == 0 and not self.outside

    @property
    def state_device(self) -> torch.device:
        """Where whole states are put: they may not fit where the parts of a worker of several processes do."""
        return torch.device("cpu") if self.transport.shards > 1 else self.device

    @property
    def identity(self) -> int:
        """This worker's number for good; in a fleet of fixed size its rank."""
        return self.transport.id

    @property
    def mesh(self) -> DeviceMesh:
        """Of this worker's processes."""
        mesh: DeviceMesh = self.transport.mesh()
        return mesh

    # -- where the script is -----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The next step's index."""
        return self.steps.index if self.steps is not None else 0

    @property
    def passing(self) -> Resume | None:
        """The checkpoint that was loaded, while the script passes over loops on its way to where it was saved."""
        return self.resume if self.resume is not None and self.resume.passing else None

    @contextmanager
    def meet(self, label: str) -> Iterator[None]:
        """All workers at one point of the training, with the parameters that are to be shown."""
        try:
            with self.steps.meet(label) if self.steps is not None else nullcontext():
                yield
        except Dropped as dropped:  # the script needs the call's result, which only the others have
            raise DroppedInCall(f"{label}: {dropped}") from None

    # -- what is told of it ------------------------------------------------------------------------------------------

    def warn(self, text: str) -> None:
        """A warning that every worker has: the leader's is enough."""
        self.recorder.event("note", {"level": "warning", "text": text, "everywhere": True})

    def inform(self, text: str) -> None:
        """A note for the run's log."""
        self.recorder.event("note", {"level": "info", "text": text})
