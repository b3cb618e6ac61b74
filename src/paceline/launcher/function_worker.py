"""The worker's side of `paceline.launch`: set its process up, run the function, and report how it ended."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from paceline.errors import FLEET_FAILED, FleetError
from paceline.launcher.group import GROUP_VARIABLES
from paceline.launcher.processes import end_with_parent
from paceline.launcher.rendezvous import ELASTIC_VARIABLES, loopback


@dataclass(frozen=True)
class FunctionReport:
    """How a worker's function ended."""

    rank: int
    value: bytes = b""
    """What it returned, pickled."""
    error: str | None = None
    """What it raised, with its traceback."""
    of_the_fleet: bool = False
    """Whether that was a `FleetError`: another worker's failure, as this one saw it."""


def work(
    order: Any, environment: dict[str, str], writer: Connection, parent: int, leave: Callable[[], None] | None = None
) -> None:
    """Run the function in a process of its own. ``leave`` is given to a fork, to close what belongs to its parent."""
    end_with_parent(parent)
    os.setsid()
    if leave is not None:
        leave()
        atexit._clear()
        signal.set_wakeup_fd(-1)  # a notebook's loop would get this process's signals
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for own in (*ELASTIC_VARIABLES, *GROUP_VARIABLES, "PACELINE_LAUNCHER"):
        os.environ.pop(own, None)
    os.environ.update(environment)
    if (name := loopback()) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    _limit_threads(copied=leave is not None)
    report = _run(order, int(environment["RANK"]))
    _send(writer, report)
    if leave is not None or report.error is not None:
        if report.error is None:
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # A failed round may leave the engine's threads stuck: they are not waited for.
        os._exit(0 if report.error is None else FLEET_FAILED if report.of_the_fleet else 1)


def _run(order: Any, rank: int) -> FunctionReport:
    try:
        fn, args = pickle.loads(order) if isinstance(order, bytes) else order
        value = fn(*args)
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)
    except SystemExit as end:
        if end.code:
            return FunctionReport(rank, error=f"worker {rank} ended with sys.exit({end.code!r})")
        value = None
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        return FunctionReport(
            rank, error=f"worker {rank} failed:\n\n{text}", of_the_fleet=isinstance(error, FleetError)
        )
    try:
        return FunctionReport(rank, value=pickle.dumps(value))
    except Exception as error:
        said = f"worker {rank} returned a {type(value).__name__} that cannot be handed back ({error})"
        return FunctionReport(rank, error=f"{said}: return plain values, tensors or a state_dict")


def _send(writer: Connection, report: FunctionReport) -> None:
    try:
        writer.send(report)
        writer.close()
    except OSError:  # nobody listens any more
        os._exit(1)


def _limit_threads(*, copied: bool) -> None:
    """One thread a worker, as ``paceline run`` gives; a copy must have one, for its pool of threads was not copied."""
    if copied or "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(1)
