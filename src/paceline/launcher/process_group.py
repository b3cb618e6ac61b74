"""A worker that is a group of processes.

``python -m paceline.launcher.process_group COMMAND...`` starts them and ends as they do. The launcher sees only this
wrapper, and starts it in a session of its own. The group's processes stay in that session, so a signal to the session
reaches them too. The first of them is the head, which alone is the fleet's member.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from paceline import concurrency
from paceline.errors import FLEET_FAILED
from paceline.launcher.worker_process import Signals, end_with_parent, exit_code

GROUP_VARIABLES = (
    *("PACELINE_PROCS_PER_WORKER", "PACELINE_GROUP_FIRST", "PACELINE_GROUP_DEVICES"),
    *("PACELINE_SHARD", "PACELINE_GROUP_DIR"),
)
"""Variables that the launcher sets for this wrapper, and the wrapper for its group; other launches must drop them."""
WRAPPER = (sys.executable, "-P", "-u", "-m", "paceline.launcher.process_group")
"""The prefix that turns a worker's command into a group. -P: Python does not import files of the user's folder."""

FAIL_S = 1.0
"""Time that the others have after a failure to end by themselves and to print why."""
FOLLOW_S = 5.0
"""Time that the others have to end after the head has ended well."""

REMOVER = """
import shutil, sys, time
sys.stdin.read()
for _ in range(50):
    try:
        shutil.rmtree(sys.argv[1])
    except FileNotFoundError:
        break
    except OSError:  # a process that is being killed still writes
        time.sleep(0.1)
"""
"""Program that removes the group's folder when stdin ends, which happens even when this wrapper is killed."""


def processes(sizes: Sequence[int], workers: int) -> int:
    """Return the number of processes of the first ``workers`` workers, whose ``sizes`` repeat after the last one.

    >>> [processes((1, 2), workers) for workers in range(5)]
    [0, 1, 3, 4, 6]
    """
    rounds, rest = divmod(workers, len(sizes))
    return rounds * sum(sizes) + sum(sizes[:rest])


def shard_environment(shard: int, folder: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of one process of the group, made from those that the launcher has ``given``."""
    position = int(given["PACELINE_GROUP_FIRST"]) + shard
    devices = given["PACELINE_GROUP_DEVICES"].split(",") if "PACELINE_GROUP_DEVICES" in given else []
    return {
        **{name: value for name, value in given.items() if name not in GROUP_VARIABLES},
        "PACELINE_PROCS_PER_WORKER": given["PACELINE_PROCS_PER_WORKER"],
        "PACELINE_SHARD": str(shard),
        "PACELINE_GROUP_DIR": folder,
        "LOCAL_RANK": str(position),
        **({"PACELINE_DEVICE": devices[position % len(devices)]} if devices else {}),
    }


def outcome(ended: Sequence[tuple[int, int]]) -> int:
    """Return the group's exit code, from the (shard, code) of processes that ended by themselves, in that order.

    The head's code counts, unless a signal ended a follower before it. A failure that another one has caused
    (`FLEET_FAILED`) counts only if there is no other. Followers do not count after the head has ended well.

    >>> outcome([(1, 1), (0, 3)]), outcome([(1, -9), (0, 3)]), outcome([(1, 1), (0, 75)]), outcome([(0, 0), (1, 1)])
    (3, -9, 1, 0)
    """
    codes = dict(ended)
    until = list(codes).index(0) if 0 in codes else len(ended)
    before = [code for _, code in ended[:until] if code]
    after = [code for _, code in ended[until:] if code and codes[0]]
    signalled = [code for code in before if code < 0]
    return min([*signalled, *after[:1], *before, *after], key=lambda code: code == FLEET_FAILED, default=0)


class ProcessGroup:
    """The processes of one worker, by shard."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended: dict[int, int] = {}
        """Exit codes of processes that ended by themselves, in the order of their ends."""
        self._until = float("inf")
        """Time at which the processes that still run are killed, on the clock of `concurrency.monotonic`."""

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        parent = os.getpid()
        self._processes.append(
            subprocess.Popen(command, env=dict(environment), preexec_fn=lambda: end_with_parent(parent))
        )

    def wait(self, signals: Signals) -> int:
        """Wait until all have ended or their time is over, and return the `outcome`; stop signals go to the head."""
        with selectors.DefaultSelector() as selector:
            selector.register(signals.waker, selectors.EVENT_READ)
            while self._reap(concurrency.monotonic()):
                for number in signals.take():
                    self._processes[0].send_signal(number)
                left = self._until - concurrency.monotonic()
                selector.select(None if left == float("inf") else max(0.0, left))
                signals.drain()
        return outcome([*self._ended.items()])

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def _reap(self, now: float) -> bool:
        """Record which processes have ended, and return whether to go on waiting for the others."""
        for shard, process in enumerate(self._processes):
            if shard not in self._ended and (code := process.poll()) is not None:
                self._ended[shard] = code
                self._until = min(self._until, now + self._patience(shard, code))
        return len(self._ended) < len(self._processes) and now < self._until

    def _patience(self, shard: int, code: int) -> float:
        """Return how long the others may run on after this end; 0 after a SIGKILL, which no message explains."""
        if self._ended.get(0) == 0:
            return FOLLOW_S
        return float("inf") if code == 0 else 0.0 if code == -signal.SIGKILL else FAIL_S


def run_group(command: Sequence[str], given: Mapping[str, str]) -> int:
    """Run the group that the variables describe to its end, and return its exit code as `subprocess` gives it."""
    group = ProcessGroup()
    with Signals() as signals, _private_folder() as folder:
        try:
            for shard in range(int(given["PACELINE_PROCS_PER_WORKER"])):
                group.start(command, shard_environment(shard, folder, given))
            return group.wait(signals)
        finally:
            group.kill()


@contextlib.contextmanager
def _private_folder() -> Iterator[str]:
    """Yield a folder that only this user can read; it is removed when this process ends, even by SIGKILL."""
    folder = tempfile.mkdtemp(prefix="paceline-group-")
    remover = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", REMOVER, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        remover.communicate()


def _end_as(code: int) -> NoReturn:
    """End this process with the same exit code or by the same signal, without another core dump."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(exit_code(code))


if __name__ == "__main__":
    if len(sys.argv) < 2 or not {"PACELINE_PROCS_PER_WORKER", "PACELINE_GROUP_FIRST"} <= set(os.environ):
        sys.exit("paceline: groups are started by paceline run --procs-per-worker 2 train.py")
    _end_as(run_group(sys.argv[1:], os.environ))
