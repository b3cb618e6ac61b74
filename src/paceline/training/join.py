"""Joining: reach the others, agree with them on the settings, and begin the run's log."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import torch

from paceline import devices, machines
from paceline.combine.averaging.settings import Averaging
from paceline.combine.choose import Choice, check_combine, failures_from_env, make_combine, name_of
from paceline.errors import FleetError
from paceline.exit import end_with_one_line
from paceline.machines import Machine
from paceline.pace import Pacer, may_set_deadlines
from paceline.pace import make as make_pacer
from paceline.run_recorder import RunRecorder
from paceline.settings import must_agree
from paceline.signals import leave_on_sigterm
from paceline.training.context import TrainingContext
from paceline.transport import Alone, Elastic, FixedTransport, Transport, joins_roster, launched


def join_training(
    pace: str | Pacer,
    combine: Choice,
    *,
    device: str | torch.device | None,
    seed: int,
    nonfinite: str,
    name: str | None,
    run_dir: str | Path | None,
    quiet: bool,
) -> TrainingContext:
    """What ``paceline.join`` does, up to a training with nothing in it yet."""
    other_pace, other_combine = os.environ.get("PACELINE_PACE"), os.environ.get("PACELINE_COMBINE")
    pacer, merge = make_pacer(other_pace or pace), make_combine(other_combine or combine)
    if nonfinite not in ("stop", "skip"):
        raise ValueError(f'nonfinite must be "stop" or "skip", got {nonfinite!r}')
    here, seed = devices.choose(device), int(seed)
    try:
        machine = machines.from_env(_slot(), around=joins_roster())
        transport = _make_transport(pacer, merge, here, machine)
    except FleetError as error:
        end_with_one_line(error)
        raise
    try:
        if not transport.elastic:
            pacer.check(transport.size)
        check_combine(merge, pacer, transport.size, elastic=transport.elastic)
        failures = failures_from_env(seed)
        at_the_end = ExitStack()
        if transport.elastic:
            at_the_end.enter_context(leave_on_sigterm(transport))
        settings = {"pace": pacer.name, "combine": name_of(merge), "seed": seed, "nonfinite": nonfinite}
        must_agree(transport, "paceline.join()", {**settings, "combine": repr(merge)})
        context = TrainingContext(
            transport=transport,
            recorder=RunRecorder(
                transport,
                name=name,
                run_dir=run_dir,
                quiet=quiet,
                settings=settings,
                device=here,
                emulated=machine.describe() if machine else None,
            ),
            pacer=pacer,
            combine=merge,
            device=here,
            machine=machine,
            failures=failures,
            seed=seed,
            nonfinite=nonfinite,
            at_the_end=at_the_end,
        )
        if other_pace:
            context.inform(f"pace is {pacer.name!r} as PACELINE_PACE says, not {_pace_name(pace)!r}")
        if other_combine:
            context.inform(f"combine is {other_combine!r} as PACELINE_COMBINE says")
    except BaseException as error:
        transport.close(failure=error)
        if isinstance(error, FleetError):
            end_with_one_line(error)
        raise
    return context


def _make_transport(pacer: Pacer, combine: Choice, device: torch.device, machine: Machine | None) -> Transport:
    # Rounds with a deadline, and overlapped ones, run beside the user's kernels, which NCCL was not seen to bear.
    aside = may_set_deadlines(pacer) or (isinstance(combine, Averaging) and combine.overlap)
    backend = "gloo" if aside else None
    if joins_roster():
        return Elastic(device, emulated=machine.describe() if machine else None, backend=backend)
    return FixedTransport(device, backend=backend) if launched() else Alone()


def _slot() -> int:
    """Which of the emulated machines this worker plays."""
    text = os.environ.get("PACELINE_WORKER" if joins_roster() else "RANK", "0")
    return int(text) if text.isdigit() else 0


def _pace_name(pace: str | Pacer) -> str:
    return pace if isinstance(pace, str) else pace.name
