"""Joining: reach the others, agree with them on the settings, and begin the run's log."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from paceline import machines
from paceline.errors import FleetError, MisuseError
from paceline.pace import MinimalPacer, Pacer, deadlines_needed, may_set_deadlines
from paceline.pace import make as make_pacer
from paceline.renamed import check_variables
from paceline.run_recorder import RunRecorder
from paceline.settings import choose_device, must_agree
from paceline.training.combines import (
    Choice,
    check_backend,
    check_combine,
    check_groups,
    check_wire,
    failures_from_env,
    kind_of,
    make_combine,
    merge_settings,
    name_of,
)
from paceline.training.context import TrainingContext
from paceline.transport import MPI_SIZES, Alone, Elastic, FixedTransport, Transport, joins_roster, launched, refuse_mpi
from paceline.transport.inside import leave_group, meet, position_from_env
from paceline.worker_exit import end_with_one_line, leave_on_sigterm

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *MPI_SIZES)
"""Variables of the launcher by which Accelerate would find other processes, and make a group of its own."""
_hidden: dict[str, str] = {}
"""Variables of the launcher, in this process, that the script hides from other libraries."""


def hide_variables(names: Iterable[str]) -> None:
    """Remove these variables from the environment; `join_training` still sees them."""
    _hidden.update({name: os.environ.pop(name) for name in names if name in os.environ})


_ended: set[tuple[str, str]] = set()
"""Address and token of each roster whose run this process has come to the end of."""


@contextmanager
def _launcher_shown() -> Iterator[None]:
    """Restore the launcher's environment meanwhile: a script that joins again joins the same workers."""
    shown = {name: value for name, value in _hidden.items() if name not in os.environ}
    os.environ.update(shown)
    try:
        yield
    finally:
        for name in shown:
            os.environ.pop(name, None)


@contextmanager
def as_if_alone(**variables: str) -> Iterator[None]:
    """Hide other processes from the environment meanwhile, and set these variables."""
    hidden = {*LAUNCHER, *variables}
    before = {name: os.environ.pop(name) for name in hidden if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in hidden:
            os.environ.pop(name, None)
        os.environ.update(before)


@_launcher_shown()
def join_training(
    pace: str | MinimalPacer,
    combine: Choice,
    *,
    device: str | torch.device | None,
    seed: int,
    nonfinite: str,
    comm_dtype: str,
    name: str | None,
    run_dir: str | Path | None,
    quiet: bool,
) -> TrainingContext:
    """Do the work of ``paceline.join``, up to a training with nothing in it yet."""
    check_variables()
    other_pace, other_combine = os.environ.get("PACELINE_PACE"), os.environ.get("PACELINE_COMBINE")
    other_dtype = os.environ.get("PACELINE_COMM_DTYPE")
    pacer, merge = make_pacer(other_pace or pace), make_combine(other_combine or combine)
    check_wire(comm_dtype := other_dtype or comm_dtype, merge)
    if nonfinite not in ("stop", "skip"):
        raise ValueError(f'nonfinite must be "stop" or "skip", got {nonfinite!r}')
    here = choose_device(device)
    with _fleet_errors_in_one_line():
        machine = machines.from_env(_slot(), around=joins_roster())
        emulated = machine.describe() if machine else None
        at_the_end = ExitStack()
        with at_the_end:  # undone where joining fails
            transport = _make_transport(pacer, merge, here, emulated, at_the_end)
            at_the_end = at_the_end.pop_all()
        try:
            failures = failures_from_env(int(seed))
            asked: dict[str, Any] = {"seed": int(seed), "nonfinite": nonfinite, "comm_dtype": comm_dtype}
            settings = _agree(transport, pacer, merge, at_the_end, **asked)
            recorder = RunRecorder(
                transport, name=name, run_dir=run_dir, quiet=quiet, settings=settings, device=here, emulated=emulated
            )
            context = TrainingContext(
                transport, recorder, pacer, merge, here, machine, failures, nonfinite, int(seed), comm_dtype, at_the_end
            )
            if other_pace and pacer.name != _pace_name(pace):
                context.inform(f"pace is {pacer.name!r} as PACELINE_PACE says, not {_pace_name(pace)!r}")
            if kind_of(merge).local and may_set_deadlines(pacer):
                context.inform(f"pace {pacer.name} stays adaptive: combine {name_of(merge)!r} has no deadlines")
            if other_combine:
                context.inform(f"combine is {other_combine!r} as PACELINE_COMBINE says")
            if other_dtype:
                context.inform(f"comm_dtype is {other_dtype!r} as PACELINE_COMM_DTYPE says")
        except BaseException as error:
            transport.close(failure=error)
            at_the_end.close()
            raise
    return context


def _agree(transport: Transport, pacer: Pacer, combine: Choice, at_the_end: ExitStack, **asked: Any) -> dict[str, Any]:
    """Check what was asked for, against the others' and by itself; return the settings for the run's log.

    What is to be undone when the fleet is left goes to ``at_the_end``.
    """
    if transport.elastic and transport.shard == 0:
        at_the_end.enter_context(leave_on_sigterm(transport))
    settings = {"pace": pacer.name, "combine": name_of(combine), **asked}
    facts = {**settings, "combine": repr(combine), "started with --procs-per-worker": transport.grouped}
    must_agree(transport, "paceline.join()", facts)  # all are connected then, and see the same error below
    if transport.grouped:
        check_groups(combine, pacer)
    if not transport.elastic:
        pacer.check(transport.size)
    check_combine(combine, pacer, transport.size, elastic=transport.elastic)
    check_backend(asked["comm_dtype"], transport.backend)
    return settings


@contextmanager
def _fleet_errors_in_one_line() -> Iterator[None]:
    """End the script with one line at an error of the fleet."""
    try:
        yield
    except FleetError as error:
        end_with_one_line(error)
        raise


def _make_transport(
    pacer: Pacer, combine: Choice, device: torch.device, emulated: str | None, at_the_end: ExitStack
) -> Transport:
    """Return this process's transport: to a running fleet, to workers that a launcher started, or to nobody."""
    position = position_from_env(at_the_end)
    # Sums of a worker of several processes start in host memory, where its parts meet; those beside the user's kernels
    # do not hold over NCCL, except rounds with a deadline in a fleet of fixed size.
    beside = merge_settings(combine).overlaps_rounds or (deadlines_needed(pacer) and joins_roster())
    cpu_engine = position is not None or beside

    def join() -> Transport:
        if joins_roster():
            return _join_roster(device, emulated, at_the_end, cpu_engine=cpu_engine)
        if not launched():
            refuse_mpi()
            return Alone()
        ranked = None if position is None else position.ranked
        return FixedTransport(device, cpu_engine=cpu_engine, ranked=ranked)

    if position is None:
        return join()
    at_the_end.callback(leave_group)
    return meet(position, device, elastic=joins_roster(), join=join)


def _join_roster(device: torch.device, emulated: str | None, at_the_end: ExitStack, *, cpu_engine: bool) -> Elastic:
    """Return the transport to a fleet whose workers come and go, once per process and run."""
    run = (os.environ["PACELINE_ROSTER"], os.environ.get("PACELINE_TOKEN", ""))
    if run in _ended:
        raise MisuseError(
            "a second paceline.join() in one script, where workers come and go: the run ended with the first, and a "
            "worker that joined later would begin with that; make several loops (fleet.steps) in one paceline.join(), "
            "or write one script per training"
        )
    transport = Elastic(device, emulated=emulated, cpu_engine=cpu_engine)
    at_the_end.callback(lambda: _ended.add(run) if transport.finished else None)
    return transport


def _slot() -> int:
    """Return the number of the emulated machine that this worker plays."""
    text = os.environ.get("PACELINE_WORKER" if joins_roster() else "RANK", "0")
    return int(text) if text.isdigit() else 0


def _pace_name(pace: str | MinimalPacer) -> str:
    return pace if isinstance(pace, str) else pace.name
