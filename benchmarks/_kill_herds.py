"""The three ways in which kill.py has its workers started: Paceline's launcher, torchft, and torchrun.

Each kills a worker when told to. Paceline's launcher and torchrun start it again by themselves.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from _kill_job import LIGHTHOUSE, SAMPLE_MS, SLOT, STAMPS
from _kill_stamps import Process
from _smoke import smoke

from paceline.launcher.elastic_fleet import launch_elastic
from paceline.launcher.faults import Faults, Workers
from paceline.launcher.roster import OwnRoster
from paceline.launcher.supervise import Order, loopback

WORKERS = 4
globals().update(smoke(WORKERS=2))
JOB = str(Path(__file__).with_name("_kill_job.py"))
LIGHTHOUSE_CODE = """
import json, sys
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="[::]:0", min_replicas=1, **json.loads(sys.argv[1]))
print(server.address(), flush=True)
sys.stdin.read()
"""
T = TypeVar("T")


class Herd(Protocol):
    """Workers that are about to be killed."""

    name: str
    goes_on: bool
    """Whether the others go on when one is killed; else all of them start again."""

    def kill(self, process: Process) -> float:
        """Kill one; the moment of it."""

    def replace(self, slot: int) -> None:
        """The others have gone on: start it again, if nobody else does."""


class Launched(Faults):
    """Workers under Paceline's launcher; they are killed where ``paceline run --failures`` does it for users."""

    name, goes_on = "paceline", True

    def __init__(self) -> None:
        super().__init__()
        self._asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._killed: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._done = False

    def run(self, folder: Path, hunt: Callable[[Herd], T]) -> T:
        """Launch the workers, have ``hunt`` done on a thread beside (signals need the main one), and end them."""
        settings = {"PACELINE_RUN_DIR": str(folder / "run"), **job_settings(folder)}
        order = Order((sys.executable, JOB, self.name), WORKERS, settings, folder / "run", quiet=True)
        results: list[Any] = []

        def beside() -> None:
            try:
                results.append(hunt(self))
            except BaseException as error:
                results.append(error)
            self._done = True

        threading.Thread(target=beside, daemon=True).start()
        launch_elastic(order, OwnRoster(minimum=1, maximum=WORKERS, token="of the benchmark"), faults=self)
        if not results:
            raise SystemExit("the workers ended before the benchmark did")
        if isinstance(results[0], BaseException):
            raise results[0]
        return results[0]  # type: ignore[no-any-return]

    def kill(self, process: Process) -> float:
        self._asked.put(process.slot)
        return self._killed.get(timeout=10.0)

    def replace(self, slot: int) -> None:
        pass

    def play(self, workers: Workers, *, step: int, elapsed_s: float) -> None:
        """Called by the launcher's loop, ten times a second."""
        if self._done:
            signal.raise_signal(signal.SIGTERM)
        while not self._asked.empty():
            slot = self._asked.get()
            time.sleep(random.uniform(0, 0.1))  # so that it is any phase of a step, whatever the loop's
            self._killed.put(time.monotonic())
            workers.kill(slot, returns=True)


class Torchft:
    """One replica group a worker; ``silence_ms`` is how long it waits for somebody silent."""

    name, goes_on = "torchft", True

    def __init__(self, folder: Path, *, silence_ms: int) -> None:
        timeouts = {"join_timeout_ms": silence_ms, "heartbeat_timeout_ms": silence_ms, "quorum_tick_ms": 10}
        self._lighthouse = subprocess.Popen(
            [sys.executable, "-c", LIGHTHOUSE_CODE, json.dumps(timeouts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._lighthouse.stdout is not None
        address = self._lighthouse.stdout.readline().decode().strip()
        self._settings = {**job_settings(folder), LIGHTHOUSE: address}
        self._log = (folder / "torchft.log").open("ab")
        self._workers = {slot: self._start(slot) for slot in range(WORKERS)}

    def kill(self, process: Process) -> float:
        at = time.monotonic()
        self._workers[process.slot].kill()
        self._workers[process.slot].wait()
        return at

    def replace(self, slot: int) -> None:
        self._workers[slot] = self._start(slot)

    def close(self) -> None:
        end(*self._workers.values(), self._lighthouse)

    def _start(self, slot: int) -> subprocess.Popen[bytes]:
        return start([JOB, self.name], {**self._settings, SLOT: str(slot)}, log=self._log)


class Torchrun:
    """One agent that starts all workers again, from the last checkpoint."""

    name, goes_on = "torchrun", False

    def __init__(self, folder: Path) -> None:
        options = ["--standalone", f"--nproc-per-node={WORKERS}", "--max-restarts=100", "--monitor-interval=0.01"]
        settings = {**job_settings(folder), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._log = (folder / "torchrun.log").open("ab")
        self._agent = start(["-m", "torch.distributed.run", *options, JOB, self.name], settings, log=self._log)

    def kill(self, process: Process) -> float:
        at = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)
        return at

    def replace(self, slot: int) -> None:
        pass

    def close(self) -> None:
        self._agent.terminate()  # it ends its workers
        self._agent.wait()


def missing_torchft() -> str:
    """Why torchft cannot be compared with, in words; empty: it can."""
    if importlib.util.find_spec("torchft") is None:
        return "torchft is not installed: pip install -c constraints.txt '.[peers]'"
    return ""


def job_settings(folder: Path) -> dict[str, str]:
    """What every worker is told."""
    stamps = folder / "stamps"
    stamps.mkdir(parents=True, exist_ok=True)
    return {
        STAMPS: str(stamps),
        "PACELINE_EMULATE": ",".join(["1"] * WORKERS),
        "PACELINE_SAMPLE_MS": f"{SAMPLE_MS:g}",
        "OMP_NUM_THREADS": "1",
    }


def start(args: list[str], settings: Mapping[str, str], *, log: Any) -> subprocess.Popen[bytes]:
    here = {"GLOO_SOCKET_IFNAME": name} if (name := loopback()) else {}
    return subprocess.Popen([sys.executable, *args], env={**os.environ, **here, **settings}, stdout=log, stderr=log)


def end(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
