"""The header that a worker brings to a step's round, and the record that is made from the summed header."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any

from paceline.gradients import Header
from paceline.gradients.scaling import is_active
from paceline.records import REPORTED, StepRecord
from paceline.step.step_state import StepState, Work

if TYPE_CHECKING:
    from paceline.step.context import LoopContext


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
