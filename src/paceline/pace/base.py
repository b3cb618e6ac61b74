"""What a pacer is: it observes records and answers the question "how is the next step split?".

Pacers are pure: no clock, no torch, no I/O. Every worker's pacer observes every record; only the leader's is
asked for plans, and ``plan`` changes nothing, so any worker can become the leader. The simulator asks the very
same objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from paceline.records import Plan, StepRecord


@dataclass(frozen=True)
class Ask:
    """The question put to a pacer: split ``total`` samples among ``workers``."""

    step: int
    total: int
    """Samples the step should count: the global batch (with what earlier deadlines left owing), or what the epoch has
    left. Without a deadline the shares add up to it; with one they are more, and it is what is expected."""
    workers: tuple[int, ...]
    """Stable identities in rank order. A pacer that meets a new one starts it from a prior."""
    epoch: int = 0
    generation: int = 0
    unit: int = 1
    """Shares are multiples of this many samples, but for the one remainder."""
    minimum: int | tuple[int, ...] = 0
    maximum: int | tuple[int, ...] | None = None
    last: bool = False
    """Nothing of the epoch is left after this step if all of ``total`` is done."""
    deadlines: bool = True
    """Whether the step may have a deadline. A pace that cannot do without is not asked where none may be."""


@runtime_checkable
class Pacer(Protocol):
    """Decides the shares. ``plan`` is a pure function of what was observed."""

    name: str
    """As it stands in ``pace=``, the log and checkpoints."""

    def check(self, workers: int) -> None:
        """Raise ValueError when the settings make no sense for so many workers, always the same ones. A fleet whose
        members change is not asked: settings that name workers then belong to identities."""

    def observe(self, record: StepRecord) -> None:
        """Learn from a step; every worker's pacer hears of every step, in order."""

    def plan(self, ask: Ask) -> Plan:
        """How the step that is asked about is split; changes nothing."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What it has learned, as plain data: saved with every checkpoint."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Know what another pacer of this kind knew."""


def deadlines_needed(pacer: Pacer) -> bool:
    """Whether the pacer's plans may have deadlines whatever `Ask.deadlines` says."""
    return may_set_deadlines(pacer) and not getattr(pacer, "does_without", False)


def may_set_deadlines(pacer: Pacer) -> bool:
    """Whether the pacer's plans may close rounds without everybody."""
    return bool(getattr(pacer, "deadlines", False))
