"""The weighted average (P2's family): what a user may set of it, its outer optimiser, and how updates merge.

Settings are plain frozen dataclasses. What can be judged by itself is checked when they are made, what depends on the
fleet in ``check(workers)``.

>>> Averaging(period_s=2).weights
'samples'
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.averaging.merge import (
    CONTRACTION,
    FACTS,
    MERGES,
    MOMENTUM,
    PRESENT,
    SAMPLES,
    STEPS,
    Merge,
    MergeSettings,
    Table,
    check_choice,
    check_count,
    copies,
)
from paceline.averaging.weights import RULES, LocalWork, Mixture, over_members, rule_of
from paceline.transport import Transport

PERIOD_S = 2.0
"""Seconds between rounds unless set otherwise."""


@dataclass(frozen=True, kw_only=True)
class Outer:
    """Settings of the outer optimiser, as DiLoCo has it by default: SGD with Nesterov momentum over the rounds."""

    lr: float = 0.7
    """Step along the averaged update; 1 without momentum is the plain average."""
    momentum: float = 0.9
    """Part of the last rounds' updates that goes on, from 0 to below 1."""
    nesterov: bool = True
    """Whether the momentum looks ahead (Nesterov) or not."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"the outer learning rate is {self.lr}: a finite number above 0 (1 is plain averaging)")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"the outer momentum is {self.momentum}: from 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class Averaging(MergeSettings):
    """Local steps, and now and then a round that averages the workers' updates since the last one.

    >>> Averaging(every_steps=16, weights="wp", outer=Outer()).every_steps
    16
    """

    every: Literal["end"] | None = None
    """``"end"``: parameters are averaged once, when all epochs of the loop are over. Rounds then only count and deal
    samples, ``every_steps`` or ``period_s`` apart. None: every round averages."""
    every_steps: int | None = None
    """Local steps between rounds: everybody does as many, and the fast wait for the slow."""
    period_s: float | None = None
    """Seconds between rounds: a fast worker does more local steps, and nobody waits. 2 when neither is given."""
    weights: str = "samples"
    """``wp`` (P2, reconstructed), ``uniform``, ``samples``, ``normalised`` (FedNova), ``mse``: averaging/weights.py."""
    weight_decay: float | None = None
    """lambda for ``wp`` and ``mse``, where it is part of the loss (SGD alone); None: the optimiser's own."""
    outer: Outer | None = None
    """An optimiser on the averaged update; None: the average itself."""
    groups: Sequence[Sequence[int]] | None = None
    """Ranks in groups, as ``[[0, 1], [2, 3]]``: gradients are combined at every step inside a group, updates are
    averaged between groups (P2's first combined form). None: everybody by itself."""
    overlap: bool = False
    """Local work goes on while a round is under way; its update lands between two local steps, once it is over."""

    name: ClassVar[str] = "average"
    """Name in ``combine=`` and the log."""

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.period_s is not None:
            raise ValueError("every_steps and period_s exclude each other: rounds come by steps or by the clock")
        if self.every_steps is None and self.period_s is None:
            object.__setattr__(self, "period_s", PERIOD_S)
        check_count("every_steps", self.every_steps, "local steps between rounds")
        if self.period_s is not None and not 0 < self.period_s < math.inf:
            raise ValueError(f"period_s is {self.period_s}: seconds between rounds, above 0")
        if self.every not in (None, "end"):
            raise ValueError(
                f'every is {self.every!r}: "end" averages once, when the loop is over; for rounds on the way give '
                "every_steps (local steps) or period_s (seconds)"
            )
        check_choice("weights", self.weights, RULES.names())
        if self.weight_decay is not None and not 0 <= self.weight_decay < math.inf:
            raise ValueError(
                f"weight_decay is {self.weight_decay}: a finite number from 0, or None for the optimiser's"
            )
        if self.outer is not None and not isinstance(self.outer, Outer):
            raise ValueError(f"outer is {self.outer!r}: give paceline.Outer(lr=0.7, momentum=0.9) or None")
        if not isinstance(self.overlap, bool):
            raise ValueError(f"overlap is {self.overlap!r}: True lets local work go on during rounds, False does not")
        if self.once and self.overlap:
            raise ValueError('every="end" averages when no local work is left, so nothing overlaps: leave overlap out')
        if self.groups is not None:
            object.__setattr__(self, "groups", _groups(self.groups))

    @property
    def once(self) -> bool:
        """Whether parameters are averaged only when the loop is over."""
        return self.every == "end"

    @property
    def steps_per_round(self) -> int:
        """Local steps between rounds, where they are not counted in seconds."""
        return self.every_steps or 1

    @property
    def overlaps_rounds(self) -> bool:
        """Whether local steps go on while a round is under way."""
        return self.overlap

    def check(self, workers: int) -> None:
        """Raise ValueError when the groups do not fit this number of workers."""
        if self.groups is None:
            return
        ranks = sorted(rank for group in self.groups for rank in group)
        if ranks != list(range(workers)):
            raise ValueError(
                f"groups {list(map(list, self.groups))} must hold each rank from 0 to {workers - 1} exactly once"
            )

    def check_elastic(self) -> None:
        """Raise ValueError for what cannot be had where workers come and go."""
        parts = {"groups": self.groups is not None, "overlap": self.overlap, "every": self.once}
        asked = [name for name, on in parts.items() if on]
        if asked:
            raise ValueError(
                f"Averaging({asked[0]}=...) needs a fleet of fixed size, and workers come and go in this one: leave "
                f"{' and '.join(asked)} out, or start it with paceline run -n WORKERS"
            )

    def check_wire(self, wire: str, *, coarse: bool) -> None:
        """Raise ValueError for a coarse format in the one round of ``every="end"``."""
        if coarse and self.once:
            raise ValueError(
                f"comm_dtype {wire!r} rounds a whole training's update, and with every='end' no later round makes that "
                "good: use comm_dtype 'bf16', or give every_steps= or period_s="
            )

    def mix(self, work: LocalWork) -> Mixture:
        """Return the round's weights from what each worker (or group) did."""
        return rule_of(self.weights).weigh(work)

    def merge(self, parameters: Sequence[torch.nn.Parameter], transport: Transport) -> WeightedAverage:
        """Return the average of these parameters, at its start."""
        return WeightedAverage(self, parameters, transport)


class OuterSGD:
    """The outer optimiser of one model; its velocity is all its state.

    The averaged update U of a round is taken for a step against a gradient ``-U``:

        v <- momentum * v + U
        x <- x + lr * (U + momentum * v)        (Nesterov; without it: x + lr * v)

    With ``lr=1, momentum=0`` the round is the plain average. Each worker applies the same step to the same averaged
    update, so the outer state is replicated and nothing more is sent.
    """

    def __init__(self, settings: Outer) -> None:
        self.settings = settings
        self.velocity: list[torch.Tensor] | None = None

    @torch.no_grad()
    def step(self, start: Sequence[torch.Tensor], update: Sequence[torch.Tensor]) -> None:
        """Move ``start`` (the round's common start, changed in place) by the fleet's averaged ``update``."""
        points, moves = list(start), list(update)
        lr, momentum = self.settings.lr, self.settings.momentum
        if momentum == 0:
            torch._foreach_add_(points, moves, alpha=lr)
            return
        if self.velocity is None:
            self.velocity = [torch.zeros_like(move) for move in moves]
        torch._foreach_mul_(self.velocity, momentum)
        torch._foreach_add_(self.velocity, moves)
        if self.settings.nesterov:
            torch._foreach_add_(points, moves, alpha=lr)
            torch._foreach_add_(points, self.velocity, alpha=lr * momentum)
        else:
            torch._foreach_add_(points, self.velocity, alpha=lr)

    def state_dict(self) -> dict[str, Any]:
        return {"velocity": None if self.velocity is None else [v.clone() for v in self.velocity]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        velocity = state["velocity"]
        self.velocity = None if velocity is None else [v.clone() for v in velocity]


class WeightedAverage(Merge):
    """Updates since a common start, averaged with the weights of `paceline.averaging.weights`."""

    def __init__(self, settings: Averaging, parameters: Sequence[torch.nn.Parameter], transport: Transport) -> None:
        self._settings, self._rule = settings, rule_of(settings.weights)
        self._outer = OuterSGD(settings.outer) if settings.outer is not None else None
        self.columns = len(FACTS) + self._rule.sketch_size
        super().__init__(parameters, transport)

    def rebase(self) -> None:
        self._start = copies(self._parameters)

    def row(self, *, steps: int, samples: int, contraction: float, momentum: float, present: bool) -> list[float]:
        own = super().row(steps=steps, samples=samples, contraction=contraction, momentum=momentum, present=present)
        sketch = self._rule.sketch
        return own if sketch is None else [*own, *sketch(self.update(), self.rounds).tolist()]

    def contraction(self, optimizers: Sequence[torch.optim.Optimizer]) -> float:
        contraction = self._rule.contraction
        return 0.0 if contraction is None else contraction(optimizers, self._settings.weight_decay)

    @torch.no_grad()
    def update(self) -> list[torch.Tensor]:
        """Return how far this worker has come from the common start."""
        return list(torch._foreach_sub([p.detach() for p in self._parameters], self._start))

    @torch.no_grad()
    def part(self, table: Table, update: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Return this worker's update, weighted."""
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

    @torch.no_grad()
    def land(self, total: Sequence[torch.Tensor], update: Sequence[torch.Tensor]) -> None:
        """Take the fleet's sum of a round that ``update`` was this worker's part in; what it did since stays on top.

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
        """Return each worker's part in the round; with groups, the members of one share its part."""
        groups = self._settings.groups
        rows = table if groups is None else np.stack([_group_row(table[list(group)]) for group in groups])
        work = LocalWork(
            steps=rows[:, STEPS],
            samples=rows[:, SAMPLES],
            log_contraction=rows[:, CONTRACTION],
            momentum=float(rows[:, MOMENTUM].max(initial=0.0)),
            sketches=rows[:, len(FACTS) :] if self._rule.sketch_size else None,
        )
        mixture = self._settings.mix(work)
        return (mixture if groups is None else over_members(mixture, groups)).coefficients

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "outer": None if self._outer is None else self._outer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._outer is not None and state["outer"] is not None:
            self._outer.load_state_dict(state["outer"])


def _group_row(members: Table) -> Table:
    """Return what a group did: its members step together, so their steps are one another's and their samples add up."""
    row: Table = members.mean(axis=0)
    row[SAMPLES] = members[:, SAMPLES].sum()
    return row


def _groups(groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    try:
        tuples = tuple(tuple(int(rank) for rank in group) for group in groups)
    except TypeError:
        raise ValueError(f"groups is {groups!r}: lists of ranks, such as [[0, 1], [2, 3]]") from None
    if not tuples or not all(tuples):
        raise ValueError(f"groups is {groups!r}: at least one group, and none of them empty")
    return tuples


MERGES.add(Averaging.name, Averaging)
