"""``--smoke``: any benchmark in a few seconds, to see that it still runs and prints its figures; they mean nothing.

A benchmark says, below its constants, what they are in a smoke run; the processes it starts read the same.

    globals().update(smoke(STEPS=3, SAMPLE_MS=0.1))
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ASKED = "BENCHMARK_SMOKE"
"""Variable by which the benchmark's own processes know."""
TOGETHER_S = 0.5
"""Seconds between a fork's failure and the end of the others."""


def smoking() -> bool:
    """Whether a smoke run was asked for; the option is taken off the command line."""
    if "--smoke" in sys.argv:
        sys.argv.remove("--smoke")
        os.environ[ASKED] = "1"
    return bool(os.environ.get(ASKED))


def goes_without(what: str, *, here: bool) -> bool:
    """Whether to leave a benchmark that needs ``what``, which is not ``here``: a smoke run says that it was skipped,
    any other ends with an error."""
    if here:
        return False
    if not smoking():
        raise SystemExit(f"this benchmark needs {what}")
    print(json.dumps({"skipped": f"this benchmark needs {what}"}))
    return True


def smoke(**smaller: Any) -> dict[str, Any]:
    """What a smoke run has in place of these constants; nothing in any other run."""
    return smaller if smoking() else {}


def pool_context() -> multiprocessing.context.BaseContext:
    """For a pool of processes: fresh ones, and in a smoke run forks, which have torch loaded."""
    return multiprocessing.get_context("fork" if smoking() else "spawn")


def forked(
    work: Callable[[], Any], count: int, *, begin: Callable[[], None] = lambda: None, **shared: str
) -> list[Any]:
    """What ``work`` gives (as JSON) in so many forks of this process, with the variables of a launched fleet's workers:
    torch is loaded once for all of them, which takes longer than the rest of a smoke run. ``begin``, called once they
    are forked, may start threads, whose locks a fork could inherit locked."""
    import torch._dynamo  # every optimiser loads it

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        fleet = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | shared
        places = [
            fleet | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PACELINE_WORKER": str(rank)} for rank in range(count)
        ]
        files = [Path(folder) / str(rank) for rank in range(count)]
        children = [_fork(work, place, file) for place, file in zip(places, files, strict=True)]
        begin()
        failed = _await(children)
        if failed is not None:
            rank, how = failed
            error = files[rank].with_suffix(".error")
            why = error.read_text() if error.exists() else "it wrote no error of Python's"
            raise SystemExit(f"worker {rank} of {count} {how}, and the others were ended:\n{why}")
        return [json.loads(file.read_text()) for file in files]


def _await(children: list[int]) -> tuple[int, str] | None:
    """Wait for these forks. The first that fails, with how, ends the others, which would wait for it for long."""
    from paceline.errors import describe_exit

    left, failed = dict(zip(children, range(len(children)), strict=True)), None
    try:
        while left:
            for child, rank in list(left.items()):
                done, status = os.waitpid(child, os.WNOHANG)
                if not done:
                    continue
                del left[child]
                if (code := os.waitstatus_to_exitcode(status)) and failed is None:
                    failed = rank, describe_exit(code)
                    time.sleep(TOGETHER_S)  # for whoever fails of the same cause
                    for other in left:
                        os.kill(other, signal.SIGKILL)
            time.sleep(0.005)
    finally:
        for child in left:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return failed


def _fork(work: Callable[[], Any], place: Mapping[str, str], file: Path) -> int:
    import torch

    sys.stdout.flush()
    if child := os.fork():
        return child
    code = 1
    try:
        os.environ.update(place)
        torch.seed()  # a fresh process has random numbers of its own: a seed that is missing is noticed here too
        file.write_text(json.dumps(work()))
        code = 0
    except BaseException:
        file.with_suffix(".error").write_text(traceback.format_exc())
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
