"""A process that has imported torch once and forks workers from itself, so that a worker starts in milliseconds.

On two cores the import alone would otherwise take longer than what is measured. Requests and answers are JSON lines on
its stdin and stdout. It does no tensor work and starts no thread, so a fork of it is as good as a fresh interpreter.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


class Nursery:
    """The benchmark's side. Use as a context manager; whoever was forked must have ended before."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "TORCHELASTIC"))}
        environment["OMP_NUM_THREADS"] = "1"
        # torch's store looks its peers' names up; where no name server answers, that must not take 5 s each time.
        environment["RES_OPTIONS"] = "timeout:1 attempts:1"
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def wait(self) -> None:
        """Until it has imported everything."""
        self._ask({})

    def start(self, call: str, order: dict[str, Any], *, env: dict[str, str], err: Path) -> int:
        """Fork a worker that calls ``module:function`` with ``order``; returns its process id."""
        return int(self._ask({"start": call, "order": order, "env": env, "err": str(err)}))

    def ended(self, pid: int) -> int | None:
        """The exit code of a worker, as subprocess gives it; None while it runs."""
        code = self._ask({"poll": pid})
        return None if code is None else int(code)

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def _become(order: dict[str, Any]) -> None:
    """In the fork: do a worker's work, and end without a word more than an error's."""
    os.setsid()
    if sys.platform == "linux":  # a benchmark that is broken off leaves nobody behind
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    words = os.open(order["err"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(words, 1)
    os.dup2(words, 2)
    os.environ.update(order["env"])
    module, function = order["start"].split(":")
    code: Any = 0
    try:
        getattr(importlib.import_module(module), function)(order["order"])
    except SystemExit as asked:
        code = asked.code or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)  # Paceline's own may end the process here
        code = 1
    sys.stderr.flush()
    os._exit(int(code))  # torch takes a second to be unloaded


def _serve() -> None:
    import torch
    import torch._dynamo  # every optimiser loads it: a second and a half, once instead of in each worker

    import paceline.fleet  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        answer: int | None
        if "start" in request:
            answer = os.fork()
            if answer == 0:
                _become(request)
        elif "poll" in request:
            done, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if done else None
        else:
            answer = None
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
