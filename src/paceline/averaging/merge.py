"""What a merge is: how the workers' parameters become one in a round of the averages.

A merge is one file: its settings, which a user gives to ``combine=`` and which state when rounds come, and a `Merge`,
which holds the state. ``MERGES.add`` makes the settings known by their name.

A round has two sums. The first carries a small table of facts, one row per worker, from which everybody computes the
same weights; the second carries what each worker adds (`Merge.part`), such as its weighted update. So all hold the same
bits afterwards. Nothing changes before both sums are there (`Merge.take`): where workers come and go, a round may have
to be run again among fewer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.pace.plug_ins import Registry
from paceline.transport import Transport

if TYPE_CHECKING:
    from paceline.averaging.parameter_round import ParameterRound
    from paceline.averaging.periods import Periods
    from paceline.step.context import LoopContext

Table = NDArray[np.float64]
FACTS = ("steps", "samples", "log_contraction", "momentum", "distance", "present")
"""The first columns of a worker's row; columns of the merge's own may follow."""
STEPS, SAMPLES, CONTRACTION, MOMENTUM, DISTANCE, PRESENT = range(len(FACTS))


class MergeSettings:
    """What a user chooses of a merge, and what the loop needs to know of it. Frozen, and the same on every worker."""

    name: ClassVar[str] = ""
    """Name in ``combine=`` and the log."""
    period_s: float | None = None
    """Seconds between rounds; None: they come after `steps_per_round` local steps."""
    groups: Sequence[Sequence[int]] | None = None
    """Ranks that make their local steps together; None: everybody by itself."""

    @property
    def steps_per_round(self) -> int:
        """Local steps between rounds."""
        return 1

    @property
    def once(self) -> bool:
        """Whether parameters are merged only when the loop is over; rounds before that count and deal samples."""
        return False

    @property
    def overlaps_rounds(self) -> bool:
        """Whether local steps go on while a round is under way (`Merge.land`)."""
        return False

    @property
    def shared_part(self) -> float:
        """The part of the data that is dealt to every worker."""
        return 0.0

    def by_arrival(self, workers: int) -> bool:
        """Return whether each worker exchanges by itself, when its own local steps are done (`Merge.turns`)."""
        return False

    def check(self, workers: int) -> None:
        """Raise ValueError when the settings make no sense for this number of workers."""

    def check_elastic(self) -> None:
        """Raise ValueError for what cannot be had where workers come and go."""

    def check_wire(self, wire: str, *, coarse: bool) -> None:
        """Raise ValueError when updates cannot be rounded to the wire format of this name on the way.

        ``coarse``: the format is too coarse for single gradients.
        """

    def merge(self, parameters: Sequence[torch.nn.Parameter], transport: Transport) -> Merge:
        """Return the merge of these parameters, at its start."""
        raise NotImplementedError(f"{type(self).__name__} has no merge")


MERGES: Registry[type[MergeSettings]] = Registry()
"""Settings of all merges, by name. Each name is a combine's (``combine=``)."""


class Merge:
    """One way to merge parameters: base class, in which all but `part` and `take` has a default."""

    columns = len(FACTS)
    """Columns of the table of facts."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], transport: Transport) -> None:
        self._parameters, self._transport = list(parameters), transport
        self.rounds = 0
        self.rebase()

    # -- what it sums ----------------------------------------------------------------------------------------------

    def row(self, *, steps: int, samples: int, contraction: float, momentum: float, present: bool) -> list[float]:
        """Return this worker's row of the table: what it did since the last round, and whether its update counts."""
        return [float(steps), float(samples), contraction, momentum, self.distance(), float(present)]

    def contraction(self, optimizers: Sequence[torch.optim.Optimizer]) -> float:
        """Return ``log rho`` of the local step just made; 0 where the merge does not use it."""
        return 0.0

    def distance(self) -> float:
        """Return how far this worker's parameters are from the merge's own; 0 where it has none."""
        return 0.0

    def part(self, table: Table, update: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Return what this worker adds to the second sum, given the first. It changes nothing.

        ``update``: what `update` returned when a round beside local steps began.
        """
        raise NotImplementedError

    # -- what it makes of the sums ---------------------------------------------------------------------------------

    def take(self, table: Table, total: Sequence[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Set the parameters by the fleet's sum of all parts, which is left as it is: the round is over."""
        raise NotImplementedError

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Hold the parameters that are to be evaluated and saved."""
        yield  # after a round all replicas are equal

    # -- beside local steps, and by arrival ------------------------------------------------------------------------

    def update(self) -> list[torch.Tensor]:
        """Return how far this worker has come, before a round runs beside its local steps."""
        raise NotImplementedError

    def land(self, total: Sequence[torch.Tensor], update: Sequence[torch.Tensor]) -> None:
        """Take the fleet's sum of a round that ``update`` was this worker's part in; what it did since stays on top."""
        raise NotImplementedError

    def turns(self, periods: Periods, loop: LoopContext, *, first: int) -> Turns:
        """Return what exchanges for one worker by arrival; ``first``: its exchanges in earlier loops."""
        raise NotImplementedError

    # -- its state -------------------------------------------------------------------------------------------------

    def rebase(self) -> None:
        """Start from the parameters as they are, which are equal on all workers."""

    def members_changed(self, old_ranks: Sequence[int | None]) -> str | None:
        """Follow a change of members and return a warning if need be.

        By new rank, ``old_ranks`` holds each member's old one; None: a newcomer.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what it has learned; the parameters are saved by themselves."""
        return {"rounds": self.rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, with the parameters that were saved with it."""
        self.rounds = int(state["rounds"])
        self.rebase()


class Turns(Protocol):
    """One worker's exchanges by arrival, and what it learns of the others'."""

    number: int
    """This worker's exchanges so far."""

    def start(self) -> None:
        """Begin to exchange: all workers hold the same state."""

    def arrive(self, round: ParameterRound, call: float) -> None:
        """Exchange, and count all exchanges of the fleet until then.

        ``call``: what this worker waits to do together with the others, as a number.
        """

    def stand_still(self) -> None:
        """Wait while nothing is left for this worker to do."""

    def wait_until_met(self) -> None:
        """Count the others' exchanges until everybody has come to the same call."""

    def join(self, timeout: float) -> None:
        """Wait for the thread of the exchanges."""


def momentum_of(optimizers: Sequence[torch.optim.Optimizer]) -> float:
    """Return the local SGD's momentum, for the weights that correct for it; 0 for other optimisers."""
    return max((float(g.get("momentum", 0.0)) for o in optimizers for g in o.param_groups), default=0.0)


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return detached copies."""
    return [tensor.detach().clone() for tensor in tensors]


def check_count(name: str, value: int | None, what: str) -> None:
    """Raise ValueError unless the setting is a whole number from 1, or None."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"{name} is {value!r}: {what}, a whole number from 1")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError, with the choices, for a setting that is none of them."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: choose one of {', '.join(choices)}")


MERGES.plug_in("average", "paceline.averaging.weighted_average")
MERGES.plug_in("elastic-average", "paceline.research.elastic_average")
