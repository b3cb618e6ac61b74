"""A worker on its node: an actor that starts the training in a child process and sends what it prints and logs.

In a child, because Ray keeps SIGTERM for itself and the training needs it, and because a crash of the training is then
no crash of the actor. The child cannot outlive the actor (`paceline.launcher.worker_process`).
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from paceline import concurrency
from paceline.adapters.ray.messages import MARK, Began, Ended, Logged, Message, NodeOrder, Printed
from paceline.launcher.pool import LINGER_S
from paceline.launcher.worker_process import Watchdog, WorkerProcess
from paceline.observe.log.run_folder import LOG_NAME

CHECK_S = 0.1
"""Seconds between two checks of the child and of the log."""
GATHER_S = 0.02
"""Seconds for which output is gathered before it is sent."""
MOST_BYTES = 1 << 20
"""Bytes of the log in one message at most."""
NOT_FOUND = 2
CALL = """
import sys
from ray import cloudpickle
with open(sys.argv[1], "rb") as file:
    function = cloudpickle.load(file)
value = function()
with open(sys.argv[1], "wb") as file:
    cloudpickle.dump(value, file)
"""
"""Program that runs a pickled function, and writes what it returned to the same file."""


class NodeWorker:
    """The actor: `work` runs the process to its end, the other methods are called meanwhile."""

    def __init__(self) -> None:
        self._child: WorkerProcess | None = None
        self._signals: list[int] = []
        """Signals that came before there was a child."""

    def work(self, order: NodeOrder) -> Iterator[list[Message]]:
        """Start the process; yield its messages, `Ended` last."""
        context = ray.get_runtime_context()
        yield [Began(context.get_node_id(), ray.util.get_node_ip_address())]
        brought = bool((context.runtime_env or {}).get("working_dir"))
        folder = order.folder if not brought and os.path.isdir(order.folder) else os.getcwd()
        if order.function is None and (missing := not_there(order.called, folder)):
            yield [Printed(1, f"paceline: {missing}\n".encode()), Ended(NOT_FOUND)]
            return
        with tempfile.TemporaryDirectory(prefix="paceline-") as temporary:
            yield from self._run(order, folder, Path(temporary) / "function")

    def send(self, number: int) -> None:
        """Send the process a signal; SIGSTOP and SIGCONT go to all it started as well."""
        if self._child is None:
            self._signals.append(number)
        elif number in (signal.SIGSTOP, signal.SIGCONT):
            self._child.suspend() if number == signal.SIGSTOP else self._child.resume()
        else:
            self._child.send(number)

    def answer(self) -> bool:
        """Return True, which shows that the node is reached."""
        return True

    def _run(self, order: NodeOrder, folder: str, function: Path) -> Iterator[list[Message]]:
        log, variables = _find_log(order)
        command, paths = [sys.executable, "-u", *order.called], {}
        if order.function is not None:
            function.write_bytes(order.function)
            command, paths = (
                [sys.executable, "-u", "-c", CALL, str(function)],
                {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
        environment = {**_device(), **os.environ, **paths, **order.environment, **variables}
        watchdog = Watchdog()
        child = self._child = WorkerProcess(order.number, command, environment, watchdog=watchdog, cwd=folder)
        for number in self._signals:
            child.send(number)
        try:
            for printed in _read(child):
                if messages := [*printed, *log.news()]:
                    yield messages
        finally:
            child.send(signal.SIGKILL)
            child.wait()
            watchdog.close()
        assert child.code is not None
        value = function.read_bytes() if order.function is not None and child.code == 0 else b""
        yield [*log.news(), Ended(child.code, value)]


def not_there(called: tuple[str, ...], folder: str) -> str:
    """Return what is wrong with the script, seen from ``folder``; Python itself finds a module."""
    if called[0] == "-m" or os.path.exists(os.path.join(folder, called[0])):
        return ""
    return (
        f"the script {called[0]!r} is not on the node (looked in {folder}): put it there, or have Ray bring it with "
        """--runtime-env '{"working_dir": "."}'"""
    )


def _read(child: WorkerProcess) -> Iterator[list[Message]]:
    """Yield what the process prints, until it has ended and all was read; an empty list now and then."""
    ended_at = None
    with selectors.DefaultSelector() as selector:
        for stream, pipe in enumerate(child.pipes):
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ, stream)
        while ended_at is None or (selector.get_map() and concurrency.monotonic() - ended_at < LINGER_S):
            if selector.select(CHECK_S if ended_at is None else 0.0):
                concurrency.sleep(GATHER_S)
            printed: list[Message] = []
            for key, _ in selector.select(0.0):
                data = os.read(key.fd, MOST_BYTES)
                if data:
                    printed.append(Printed(key.data, data))
                else:
                    selector.unregister(key.fileobj)
            if not selector.get_map() and ended_at is None:
                concurrency.sleep(GATHER_S)  # both are closed: it ends in a moment
            yield printed
            if child.reap():
                ended_at = concurrency.monotonic()


def _device() -> dict[str, str]:
    """Return the worker's device: Ray shows an actor its own GPUs alone, so the first is this worker's."""
    return {"PACELINE_DEVICE": "cuda:0" if ray.get_gpu_ids() else "cpu"}


class NodeLog:
    """The run's log as this node's workers write it, read on from where it was read before."""

    def __init__(self, file: Path) -> None:
        self._file, self._offset = file, 0

    def news(self) -> list[Message]:
        try:
            with self._file.open("rb") as stream:
                stream.seek(self._offset)
                data = stream.read(MOST_BYTES)
        except OSError:
            return []
        data = data[: data.rfind(b"\n") + 1]
        if not data:
            return []
        self._offset += len(data)
        return [Logged(self._offset - len(data), data), *self.news()]


class SharedLog(NodeLog):
    """A log that lies on the driver's disk: there is nothing to send."""

    def news(self) -> list[Message]:
        return []


def _find_log(order: NodeOrder) -> tuple[NodeLog, dict[str, Any]]:
    """Return the run's log on this node, and the variables with which the worker writes it.

    Without the driver's disk it goes to a folder for temporary files, the same one for all workers of the node.
    """
    try:
        shared = (Path(order.run_dir) / MARK).read_text() == order.mark
    except OSError:
        shared = False
    if shared:
        return SharedLog(Path(order.run_dir)), {}
    folder = Path(tempfile.gettempdir()) / f"paceline-{order.mark}" / Path(order.run_dir).name
    return NodeLog(folder / LOG_NAME), {"PACELINE_RUN_DIR": str(folder)}
