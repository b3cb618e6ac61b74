"""A process that has imported torch once and forks workers from itself: a fleet starts in milliseconds.

Tests and benchmarks share it: on two cores the import alone would take longer than what is tested or measured. Requests
and answers are JSON lines on its stdin and stdout. It does no tensor work and starts no thread, so a fork of it is as
good as a fresh interpreter.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

PR_SET_PDEATHSIG = 1


class Nursery:
    """The side of the test or benchmark. Workers can import from the folders ``path``.

    ``fork``: the process is a fork of this one, which must not have started a thread or computed with tensors; its
    workers are started ``quick``.
    """

    def __init__(self, *path: Path, fork: bool = False) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "TORCHELASTIC"))}
        environment["OMP_NUM_THREADS"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join([*map(str, path), environment.get("PYTHONPATH", "")])
        # torch's store looks its peers' names up; where no name server answers, that must not take 5 s each time.
        environment["RES_OPTIONS"] = "timeout:1 attempts:1"
        if fork:
            self._orders, self._answers = _fork(path, environment)
            return
        process = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._orders, self._answers = process.stdin, process.stdout
        atexit.register(process.kill)

    def start(self, call: str, *args: Any, env: Mapping[str, str], out: Path, err: Path, quick: bool = False) -> Worker:
        """Fork a worker that calls ``module:function`` with ``args``, which are plain data.

        ``quick``: it ends without unloading torch, which takes a second, whatever it ends of. Otherwise only if its
        variable QUICK_EXIT is set, and not after an error.
        """
        files = {"out": str(out), "err": str(err)}
        return Worker(self, int(self.ask(start=call, args=args, env=dict(env), quick=quick, **files)))

    def load(self, module: str) -> None:
        """Have it imported for all workers to come."""
        self.ask(load=module)

    def ask(self, **request: Any) -> Any:
        """Without a request: wait until everything is imported."""
        self._orders.write(json.dumps(request) + "\n")
        self._orders.flush()
        return json.loads(self._answers.readline())


class Worker:
    """A forked worker, as subprocess.Popen would show it."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery, self.pid = nursery, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ask(poll=self.pid)
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def kill_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(self.pid, signal.SIGKILL)


def end_all(workers: Iterable[Worker]) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.kill_group()
            worker.wait()


def elastic_variables(slot: int, *, run_dir: Path, address: str, token: str) -> dict[str, str]:
    """What a launcher tells a worker of an elastic fleet."""
    return {
        "PACELINE_RUN_DIR": str(run_dir),
        "PACELINE_ROSTER": address,
        "PACELINE_TOKEN": token,
        "PACELINE_WORKER": str(slot),
        "PACELINE_LAUNCHER": "1",
    }


# -- the process of its own -----------------------------------------------------------------------------------------


def _fork(path: Iterable[Path], environment: Mapping[str, str]) -> tuple[TextIO, TextIO]:
    """Where a fork of this process reads its orders and answers; it ends when the orders do."""
    orders, answers = os.pipe(), os.pipe()
    if os.fork():
        os.close(orders[0])
        os.close(answers[1])
        return open(orders[1], "w"), open(answers[0])
    try:
        os.close(orders[1])
        os.close(answers[0])
        os.dup2(orders[0], 0)
        os.dup2(answers[1], 1)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:0] = map(str, path)
        sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
        _serve()
    finally:
        os._exit(1)


def _become(order: dict[str, Any]) -> None:
    """In the fork: set the worker's process up, make its call, and leave as an interpreter would."""
    os.setsid()
    if sys.platform == "linux":  # a test or benchmark that is broken off leaves nobody behind
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(order["env"])
    sys.argv = [order["start"]]
    module, function = order["start"].split(":")
    code = 0
    try:
        getattr(importlib.import_module(module), function)(*order["args"])
    except BaseException as error:
        if not order["quick"]:
            raise
        code = _exit_code(error)
    if order["quick"] or os.environ.get("QUICK_EXIT"):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return int(error.code or 0)
    sys.excepthook(type(error), error, error.__traceback__)  # Paceline's own may end the process here
    return 1


def _serve() -> None:
    import torch
    import torch._dynamo  # every optimiser loads it: a second and a half, once instead of in each worker

    import paceline.fleet  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what imports have left need not be copied for a worker's collections of garbage, its last one least
    for line in sys.stdin:
        order, answer = json.loads(line), None
        if "start" in order:
            answer = os.fork()
            if answer == 0:
                _become(order)
                return  # through the interpreter's own exit: its hooks are part of what is tested
        elif "load" in order:
            importlib.import_module(order["load"])
            gc.freeze()
        elif "poll" in order:
            done, status = os.waitpid(order["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if done else None
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
