"""A worker on Ray: the actor on its node, and the process that the actor stands for, as the driver sees it.

The actor starts the training in a child process and sends what it prints and logs. In a child, because Ray keeps
SIGTERM for itself and the training needs it, and because a crash of the training is then no crash of the actor. The
child cannot outlive the actor (`paceline.launcher.worker_process`).
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import ray
from ray.exceptions import RayActorError, RayError

from paceline import concurrency
from paceline.adapters.ray.messages import MARK, Began, Ended, Logged, Message, NodeOrder, Printed
from paceline.errors import describe_exit
from paceline.launcher.pool import LINGER_S
from paceline.launcher.worker_process import LaunchedWorker, Watchdog, WorkerProcess
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


NEVER_RAN = 1
"""Exit code of a worker that Ray could not start."""


UNFIT = ("creation task", "runtime_env", "runtime environment")
"""Parts of Ray's error for an actor that no node could start, however often it were tried."""


class RayWorker(LaunchedWorker):
    """A worker whose actor's messages a thread receives.

    ``logged`` receives the node and its part of the run's log, ``returned`` what a function has returned.
    """

    def __init__(
        self,
        number: int,
        actor: Any,
        stream: Any,
        *,
        logged: Callable[[str, int, bytes], None],
        returned: Callable[[int, bytes], None],
    ) -> None:
        super().__init__(number)
        self.node: str | None = None
        """Id of the node on which it runs; None while it waits for one."""
        self.address = ""
        self.since = concurrency.monotonic()
        self.lost = False
        """Whether its node, or at least its actor, is gone."""
        self._actor, self._stream, self._logged, self._returned = actor, stream, logged, returned
        self._outcome: int | None = None
        self._how = ""
        self._asked: Any = None
        self._asked_at = 0.0
        reads, self._writes = [], []
        for _ in range(2):
            read, write = os.pipe()
            reads.append(os.fdopen(read, "rb", buffering=0))
            self._writes.append(os.fdopen(write, "wb", buffering=0))
        self._reads: tuple[IO[bytes], IO[bytes]] = (reads[0], reads[1])
        self._thread = concurrency.Thread(target=self._follow, name="paceline-ray", daemon=True)
        self._thread.start()

    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        return self._reads

    @property
    def ended(self) -> str:
        assert self.code is not None
        return self._how or describe_exit(self.code)

    def reap(self) -> bool:
        if not self.running or self._outcome is None:
            return False
        self.code = self._outcome
        self._end_actor()
        return True

    def send(self, number: int) -> None:
        if not self.running:
            return
        self._note_signal()
        if number == signal.SIGKILL or self.node is None:  # an actor that waits for a node cannot be called
            self._end(-number)
        else:
            self._actor.send.remote(number)

    def suspend(self) -> None:
        self._actor.send.remote(int(signal.SIGSTOP))

    def resume(self) -> None:
        if self.running and self.node is not None:
            self._actor.send.remote(int(signal.SIGCONT))

    def wait(self) -> None:
        self._thread.join(timeout=5.0)

    def unanswered_s(self, now: float) -> float:
        """Return for how many seconds the actor has not answered a query; 0 when it has."""
        if self._asked is None:
            self._asked, self._asked_at = self._actor.answer.remote(), now
        if ray.wait([self._asked], timeout=0.0)[0]:
            self._asked = None
            return 0.0
        return now - self._asked_at

    def give_up(self, how: str) -> None:
        """End a worker whose node is gone, whether Ray has noticed it yet or not."""
        self.lost = True
        self._end(-signal.SIGKILL, how)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        try:
            for reference in self._stream:
                for message in ray.get(reference):
                    self._take(message)
        except RayActorError as error:
            self._lost(error)
        except RayError as error:  # not started: its environment cannot be made, or a package is missing
            self._complain(error)
        except Exception as error:  # the driver has left the cluster meanwhile
            self._settle(-signal.SIGKILL, f"was lost ({error})")
        finally:
            self._settle(-signal.SIGKILL, "was lost")
            for pipe in self._writes:
                pipe.close()

    def _take(self, message: Message) -> None:
        if isinstance(message, Began):
            self.address, self.node = message.address, message.node
        elif isinstance(message, Printed):
            with suppress(OSError):  # it was given up, and is not read any more
                data = memoryview(message.data)
                while data:
                    data = data[self._writes[message.stream].write(data) or 0 :]
        elif isinstance(message, Logged):
            self._logged(self.node or "", message.offset, message.data)
        elif isinstance(message, Ended):
            if message.value:
                self._returned(self.number, message.value)
            self._settle(message.code)

    def _lost(self, error: RayActorError) -> None:
        if self.node is None and any(cause in str(error).lower() for cause in UNFIT):
            self._complain(error)
        else:
            self.lost = self._outcome is None
            self._settle(-signal.SIGKILL, f"was lost with its node {self.address}" if self.address else "was lost")

    def _complain(self, error: RayError) -> None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = f"paceline: Ray could not start the worker ({lines[-1] if lines else type(error).__name__})\n"
        self._take(Printed(1, text.encode()))
        self._settle(NEVER_RAN)

    # -- its end ---------------------------------------------------------------------------------------------------

    def _end(self, code: int, how: str = "") -> None:
        self._settle(code, how)
        self._end_actor()

    def _settle(self, code: int, how: str = "") -> None:
        """Set how the worker ended; the first call counts."""
        if self._outcome is None:
            self._how, self._outcome = how, code

    def _end_actor(self) -> None:
        with suppress(Exception):  # gone already, or the driver has left the cluster
            ray.kill(self._actor)
