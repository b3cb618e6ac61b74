"""A process that has imported torch once and forks workers from itself: a test's fleet starts in milliseconds.

Requests and answers are JSON lines on its stdin and stdout. It does no tensor work and starts no thread, so a fork of
it is as good as a fresh interpreter.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Nursery:
    """The test's side."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "TORCHELASTIC"))}
        environment["OMP_NUM_THREADS"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")])
        # torch's store looks its peers' names up; where no name server answers, that must not take 5 s each time.
        environment["RES_OPTIONS"] = "timeout:1 attempts:1"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process: subprocess.Popen[str] = subprocess.Popen([sys.executable, __file__], env=environment, **pipes)
        atexit.register(self._process.kill)

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


class Worker:
    """A forked worker, as subprocess.Popen would show it."""

    def __init__(self, nursery: Nursery, **order: Any) -> None:
        self._nursery = nursery
        self.pid: int = nursery.ask(do="start", **order)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ask(do="poll", pid=self.pid)
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


def _become(order: dict[str, Any]) -> None:
    """In the fork: take on the worker's place, run its case, and leave as an interpreter would."""
    os.setsid()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(order["env"])
    sys.argv = ["case", *order["argv"]]
    import crew

    crew.work(*order["argv"])
    if os.environ.get("QUICK_EXIT"):  # torch takes a second to be unloaded
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _serve() -> None:
    import torch
    import torch._dynamo  # every optimiser loads it: a second and a half, once instead of in each worker

    import paceline.fleet  # noqa: F401

    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))
    ended: dict[int, int] = {}
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "start":
            pid = os.fork()
            if pid == 0:
                _become(order)
                return  # through the interpreter's own exit: its hooks are part of what is tested
            answer: int | None = pid
        else:
            answer = ended.get(order["pid"])
            if answer is None:
                done, status = os.waitpid(order["pid"], os.WNOHANG)
                if done:
                    answer = ended[done] = os.waitstatus_to_exitcode(status)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
