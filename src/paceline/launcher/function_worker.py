"""The worker's side of `paceline.launch`: take its place, run the function, and say how it went."""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from paceline.errors import FleetError

PR_SET_PDEATHSIG = 1
FLEET_FAILED = 75
ELASTIC = ("PACELINE_ROSTER", "PACELINE_TOKEN", "PACELINE_WORKER", "PACELINE_LAUNCHER")


@dataclass(frozen=True)
class Report:
    """How a worker's function ended."""

    rank: int
    value: bytes = b""
    """What it returned, pickled."""
    error: str | None = None
    """What it raised, with its traceback."""
    of_the_fleet: bool = False
    """Whether that was another worker's failure, as this one saw it."""


def work(
    order: Any, environment: dict[str, str], writer: Connection, parent: int, leave: Callable[[], None] | None = None
) -> None:
    """Run the function in a process of its own. ``leave``: this one is a copy, and closes what is the original's."""
    _die_with(parent)
    os.setsid()
    if leave is not None:
        leave()
        atexit._clear()
        signal.set_wakeup_fd(-1)  # a notebook's loop would hear this process's signals
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for name in ELASTIC:
        os.environ.pop(name, None)
    os.environ.update(environment)
    _use_loopback()
    _limit_threads(copied=leave is not None)
    report = _run(order, int(environment["RANK"]))
    _say(writer, report)
    if leave is not None or report.error is not None:
        if report.error is None:
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # A failed round may leave the engine's threads stuck: they are not waited for.
        os._exit(0 if report.error is None else FLEET_FAILED if report.of_the_fleet else 1)


def _run(order: Any, rank: int) -> Report:
    try:
        fn, args = pickle.loads(order) if isinstance(order, bytes) else order
        value = fn(*args)
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)
    except SystemExit as end:
        if end.code:
            return Report(rank, error=f"worker {rank} ended with sys.exit({end.code!r})")
        value = None
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        return Report(rank, error=f"worker {rank} failed:\n\n{text}", of_the_fleet=isinstance(error, FleetError))
    try:
        return Report(rank, value=pickle.dumps(value))
    except Exception as error:
        said = f"worker {rank} returned a {type(value).__name__} that cannot be handed back ({error})"
        return Report(rank, error=f"{said}: return plain values, tensors or a state_dict")


def _say(writer: Connection, report: Report) -> None:
    try:
        writer.send(report)
        writer.close()
    except OSError:  # nobody listens any more
        os._exit(1)


def _die_with(parent: int) -> None:
    """Linux kills this process when the one that launched it dies, whatever it dies of."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the request
            os._exit(1)


def _use_loopback() -> None:
    from paceline.launcher.rendezvous import loopback

    if (name := loopback()) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _limit_threads(*, copied: bool) -> None:
    """One thread a worker, as ``paceline run`` gives; a copy must have one, for its pool of threads was not copied."""
    if copied or "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(1)
