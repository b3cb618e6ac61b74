"""How parameters merge in a round of the averages: what each worker says of itself, and what comes of it.

A round has two sums. The first carries a small table of facts, a row a worker, from which everybody works out the same
weights; the second carries every worker's weighted update. So all hold the same bits afterwards.

Nothing changes before both sums are there: where workers come and go, a round may have to be run again among fewer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.combine.averaging.elastic_weights import Exchange, Memory
from paceline.combine.averaging.outer import OuterSGD
from paceline.combine.averaging.settings import Averaging, ElasticAverage
from paceline.combine.averaging.sketch import SIZE, sketch
from paceline.combine.averaging.weights import BY_CONTRACTION, BY_SKETCH, LocalWork, over_members, spread
from paceline.transport import Transport

Table = NDArray[np.float64]
FACTS = ("steps", "samples", "log_contraction", "momentum", "distance", "present")
"""What a worker's row begins with; a sketch of its update may follow."""
STEPS, SAMPLES, CONTRACTION, MOMENTUM, DISTANCE, PRESENT = range(len(FACTS))
TURN = len(FACTS)
"""A column that follows where workers meet the centre one by one: whose turn it is."""


class Merging(Protocol):
    """A way to merge parameters."""

    columns: int
    """Of the table of facts."""
    decays: bool
    """Whether it wants to know by how much local steps contract."""

    def row(self, *, steps: int, samples: int, contraction: float, momentum: float, present: bool) -> list[float]: ...

    def part(self, table: Table) -> list[torch.Tensor]:
        """After the table's sum: what this worker adds to the second. It changes nothing."""

    def take(self, table: Table, total: Sequence[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """The round is over: set the parameters by the fleet's sum of all parts, which is left as it is."""

    def members_changed(self, kept: Sequence[int | None]) -> None:
        """By new rank, ``kept`` says who they were; None: a newcomer."""

    def shown(self) -> Any:
        """A context in which the parameters are those to evaluate and save."""

    def rebase(self) -> None:
        """The parameters were set from outside, on every worker alike."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Averages:
    """Updates since a common start, averaged with the weights of `paceline.combine.averaging.weights`."""

    def __init__(self, settings: Averaging, parameters: Sequence[torch.nn.Parameter], transport: Transport) -> None:
        self._settings, self._parameters, self._transport = settings, list(parameters), transport
        self._outer = OuterSGD(settings.outer) if settings.outer is not None else None
        self.decays = settings.weights in BY_CONTRACTION
        self._sketched = settings.weights in BY_SKETCH
        self.columns = len(FACTS) + (SIZE if self._sketched else 0)
        self.rounds = 0
        self.rebase()

    def rebase(self) -> None:
        self._start = copies(self._parameters)

    def row(self, *, steps: int, samples: int, contraction: float, momentum: float, present: bool) -> list[float]:
        own = [float(steps), float(samples), contraction, momentum, 0.0, float(present)]
        if not self._sketched:
            return own
        return [*own, *sketch(self.update(), seed=self.rounds).tolist()]

    @torch.no_grad()
    def update(self) -> list[torch.Tensor]:
        """How far this worker has come from the common start."""
        return list(torch._foreach_sub([p.detach() for p in self._parameters], self._start))

    @torch.no_grad()
    def part(self, table: Table, update: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """This worker's update, weighted. ``update``: as it was when a round beside local work began."""
        present = table[:, PRESENT] > 0
        coefficients = self._coefficients(np.where(present[:, None], table, 0.0))
        rank = self._transport.rank
        weight = float(coefficients[rank]) if present[rank] else 0.0
        return list(torch._foreach_mul(self.update() if update is None else list(update), weight))

    @torch.no_grad()
    def take(self, table: Table, total: Sequence[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._move_start(total)
        if table[self._transport.rank, PRESENT] > 0:
            torch._foreach_copy_([p.data for p in self._parameters], self._start)

    def members_changed(self, kept: Sequence[int | None]) -> None:
        """The start, and the outer optimiser's velocity, are everybody's."""

    @torch.no_grad()
    def land(self, total: Sequence[torch.Tensor], update: Sequence[torch.Tensor]) -> None:
        """A round is over that ``update`` was this worker's part in; what it has done since stands on top.

        ``x <- x + (average - update)``, written as the new start plus the way gone since, so that workers that have not
        moved since hold the same bits.
        """
        own = [p.data for p in self._parameters]
        since = torch._foreach_sub(torch._foreach_sub(own, self._start), list(update))
        self._move_start(total)
        torch._foreach_copy_(own, torch._foreach_add(self._start, since))

    def _move_start(self, total: Sequence[torch.Tensor]) -> None:
        self.rounds += 1
        if self._outer is None:
            torch._foreach_add_(self._start, list(total))
        else:
            self._outer.step(self._start, total)

    def _coefficients(self, table: Table) -> NDArray[np.float64]:
        """Each worker's part in the round; with groups, the members of one share its part."""
        groups = self._settings.groups
        rows = table if groups is None else np.stack([_group_row(table[list(group)]) for group in groups])
        facts: dict[str, Any] = {
            "steps": rows[:, STEPS],
            "samples": rows[:, SAMPLES],
            "log_contraction": rows[:, CONTRACTION],
            "momentum": float(rows[:, MOMENTUM].max(initial=0.0)),
        }
        work = LocalWork(**facts)
        if self._sketched:
            distance, noise = spread(rows[:, len(FACTS) :], work)
            work = LocalWork(**facts, distance=distance, noise=noise)
        mixture = self._settings.mix(work)
        return (mixture if groups is None else over_members(mixture, groups)).coefficients

    @contextmanager
    def shown(self) -> Iterator[None]:
        yield  # after a round all replicas are equal

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self.rounds, "outer": None if self._outer is None else self._outer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rounds = int(state["rounds"])
        if self._outer is not None and state["outer"] is not None:
            self._outer.load_state_dict(state["outer"])
        self.rebase()


class Springs:
    """Every worker tied to a replicated centre (EASGD), with the weights of elastic_weights.py."""

    decays = False
    columns = len(FACTS)

    def __init__(
        self, settings: ElasticAverage, parameters: Sequence[torch.nn.Parameter], transport: Transport
    ) -> None:
        self._settings, self._parameters, self._transport = settings, list(parameters), transport
        self._memory = settings.memory(transport.size)
        self.rounds = 0
        self.rebase()

    def rebase(self) -> None:
        self.centre = copies(self._parameters)

    def row(self, *, steps: int, samples: int, contraction: float, momentum: float, present: bool) -> list[float]:
        return [float(steps), float(samples), contraction, momentum, self.distance(), float(present)]

    def distance(self) -> float:
        """From the centre as it is now."""
        return math.sqrt(sum(float(norm) ** 2 for norm in torch._foreach_norm(self._apart())))

    @torch.no_grad()
    def part(self, table: Table) -> list[torch.Tensor]:
        """The way from the centre, as hard as this worker pushes."""
        push = float(self._weigh(deepcopy(self._memory), table).push[self._transport.rank])
        return list(torch._foreach_mul(self._apart(), push))

    @torch.no_grad()
    def take(self, table: Table, total: Sequence[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        rank, pull = self._transport.rank, self._weigh(self._memory, table).pull
        if pull[rank]:  # a worker that is absent may be training
            torch._foreach_add_([p.data for p in self._parameters], self._apart(), alpha=-float(pull[rank]))
        torch._foreach_add_(self.centre, list(total))
        self.rounds += 1
        self._fade(optimizers, float(self._settings.momentum_kept(pull, len(table))[rank]))

    def _apart(self) -> list[torch.Tensor]:
        return list(torch._foreach_sub([p.detach() for p in self._parameters], self.centre))

    def _weigh(self, memory: Memory, table: Table) -> Exchange:
        turn = table[:, TURN] > 0 if table.shape[1] > TURN else None
        return self._settings.weigh(memory, table[:, DISTANCE], table[:, PRESENT] > 0, turn)

    def members_changed(self, kept: Sequence[int | None]) -> None:
        self._memory.members_changed(kept)

    def _fade(self, optimizers: Sequence[torch.optim.Optimizer], kept: float) -> None:
        """After a hard pull the momentum points where the worker no longer is."""
        if kept == 1.0:
            return
        for optimizer in optimizers:
            for state in optimizer.state.values():
                for name in ("momentum_buffer", "exp_avg"):
                    if isinstance(state.get(name), torch.Tensor):
                        state[name].mul_(kept)

    @contextmanager
    def shown(self) -> Iterator[None]:
        own = copies(self._parameters)
        torch._foreach_copy_([p.data for p in self._parameters], self.centre)
        try:
            yield
        finally:
            torch._foreach_copy_([p.data for p in self._parameters], own)

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self.rounds, "memory": self._memory.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The parameters are the centre's: that is what was saved, and every worker starts from it."""
        self.rounds = int(state["rounds"])
        if len(state["memory"]["missed"]) == self._transport.size:
            self._memory.load_state_dict(state["memory"])
        self.rebase()


def make_merging(
    settings: Averaging | ElasticAverage, parameters: Sequence[torch.nn.Parameter], transport: Transport
) -> Averages | Springs:
    kind: Any = Averages if isinstance(settings, Averaging) else Springs
    made: Averages | Springs = kind(settings, parameters, transport)
    return made


def momentum_of(optimizers: Sequence[torch.optim.Optimizer]) -> float:
    """The local SGD's momentum, for the weights that correct for it; 0 for other optimisers."""
    return max((float(g.get("momentum", 0.0)) for o in optimizers for g in o.param_groups), default=0.0)


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _group_row(members: Table) -> Table:
    """What a group did: its members step together, so their steps are one another's and their samples add up."""
    row: Table = members.mean(axis=0)
    row[SAMPLES] = members[:, SAMPLES].sum()
    return row
