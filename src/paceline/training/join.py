"""Joining: reach the others, agree with them on the settings, and begin the run's log."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from paceline import devices, machines
from paceline.combine.averaging.settings import Averaging
from paceline.combine.choose import (
    Choice,
    check_backend,
    check_combine,
    check_groups,
    check_wire,
    failures_from_env,
    kind_of,
    make_combine,
    name_of,
)
from paceline.errors import FleetError
from paceline.exit import end_with_one_line
from paceline.pace import Pacer, deadlines_needed, may_set_deadlines
from paceline.pace import make as make_pacer
from paceline.run_recorder import RunRecorder
from paceline.settings import must_agree
from paceline.signals import leave_on_sigterm
from paceline.training.context import TrainingContext
from paceline.transport import Alone, Elastic, FixedTransport, Transport, joins_roster, launched
from paceline.transport.inside.meet import GroupPlace, leave_group, meet, place_from_env

_hidden: dict[str, str] = {}
"""Variables of the launcher that the script hides from other libraries: of this process, as the environment is."""


def hide_variables(names: Iterable[str]) -> None:
    """Take these variables out of the environment; `join_training` still sees them."""
    _hidden.update({name: os.environ.pop(name) for name in names if name in os.environ})


@contextmanager
def _launcher_shown() -> Iterator[None]:
    """Inside, the environment is as the launcher made it: a script that joins again joins the same workers."""
    shown = {name: value for name, value in _hidden.items() if name not in os.environ}
    os.environ.update(shown)
    try:
        yield
    finally:
        for name in shown:
            os.environ.pop(name, None)


@_launcher_shown()
def join_training(
    pace: str | Pacer,
    combine: Choice,
    *,
    device: str | torch.device | None,
    seed: int,
    nonfinite: str,
    wire: str,
    name: str | None,
    run_dir: str | Path | None,
    quiet: bool,
) -> TrainingContext:
    """What ``paceline.join`` does, up to a training with nothing in it yet."""
    other_pace, other_combine = os.environ.get("PACELINE_PACE"), os.environ.get("PACELINE_COMBINE")
    other_wire = os.environ.get("PACELINE_WIRE")
    pacer, merge = make_pacer(other_pace or pace), make_combine(other_combine or combine)
    check_wire(wire := other_wire or wire, merge)
    if nonfinite not in ("stop", "skip"):
        raise ValueError(f'nonfinite must be "stop" or "skip", got {nonfinite!r}')
    here = devices.choose(device)
    with _said_in_one_line():
        machine = machines.from_env(_slot(), around=joins_roster())
        emulated = machine.describe() if machine else None
        at_the_end = ExitStack()
        with at_the_end:  # undone where joining fails
            transport = _make_transport(pacer, merge, here, emulated, at_the_end)
            at_the_end = at_the_end.pop_all()
        try:
            failures = failures_from_env(int(seed))
            asked: dict[str, Any] = {"seed": int(seed), "nonfinite": nonfinite, "wire": wire}
            settings = _agree(transport, pacer, merge, at_the_end, **asked)
            recorder = RunRecorder(
                transport, name=name, run_dir=run_dir, quiet=quiet, settings=settings, device=here, emulated=emulated
            )
            context = TrainingContext(
                transport, recorder, pacer, merge, here, machine, failures, nonfinite, int(seed), wire, at_the_end
            )
            if other_pace:
                context.inform(f"pace is {pacer.name!r} as PACELINE_PACE says, not {_pace_name(pace)!r}")
            if kind_of(merge).local and may_set_deadlines(pacer):
                context.inform(f"pace {pacer.name} stays adaptive: combine {name_of(merge)!r} has no deadlines")
            if other_combine:
                context.inform(f"combine is {other_combine!r} as PACELINE_COMBINE says")
            if other_wire:
                context.inform(f"wire is {other_wire!r} as PACELINE_WIRE says")
        except BaseException as error:
            transport.close(failure=error)
            at_the_end.close()
            raise
    return context


def _agree(transport: Transport, pacer: Pacer, combine: Choice, at_the_end: ExitStack, **asked: Any) -> dict[str, Any]:
    """Check what was asked for, by itself and against the others'. Returns the settings for the run's log; what is to
    be undone when the fleet is left goes to ``at_the_end``."""
    if transport.grouped:
        check_groups(combine, pacer)
    if not transport.elastic:
        pacer.check(transport.size)
    check_combine(combine, pacer, transport.size, elastic=transport.elastic)
    check_backend(asked["wire"], transport.backend)
    if transport.elastic and transport.shard == 0:
        at_the_end.enter_context(leave_on_sigterm(transport))
    settings = {"pace": pacer.name, "combine": name_of(combine), **asked}
    facts = {**settings, "combine": repr(combine), "started with --group": transport.grouped}
    must_agree(transport, "paceline.join()", facts)
    return settings


@contextmanager
def _said_in_one_line() -> Iterator[None]:
    """An error of the fleet ends the script with one line."""
    try:
        yield
    except FleetError as error:
        end_with_one_line(error)
        raise


def _make_transport(
    pacer: Pacer, combine: Choice, device: torch.device, emulated: str | None, at_the_end: ExitStack
) -> Transport:
    if (place := place_from_env(at_the_end)) is not None:
        at_the_end.callback(leave_group)
        return meet(place, device, elastic=joins_roster(), join=lambda: _join_as_group(place, device, emulated))
    # Rounds beside the user's kernels: over NCCL those with a deadline held in fixed fleets alone.
    overlaps = isinstance(combine, Averaging) and combine.overlap
    backend = "gloo" if overlaps or (deadlines_needed(pacer) and joins_roster()) else None
    if joins_roster():
        return Elastic(device, emulated=emulated, backend=backend)
    return FixedTransport(device, backend=backend) if launched() else Alone()


def _join_as_group(place: GroupPlace, device: torch.device, emulated: str | None) -> Transport:
    """The parts of a group come together in the computer's own memory, so Gloo sums them."""
    if joins_roster():
        return Elastic(device, emulated=emulated, backend="gloo")
    return FixedTransport(device, backend="gloo", ranked=place.ranked) if launched() else Alone()


def _slot() -> int:
    """Which of the emulated machines this worker plays."""
    text = os.environ.get("PACELINE_WORKER" if joins_roster() else "RANK", "0")
    return int(text) if text.isdigit() else 0


def _pace_name(pace: str | Pacer) -> str:
    return pace if isinstance(pace, str) else pace.name
