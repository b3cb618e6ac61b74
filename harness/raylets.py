"""A Ray cluster on one computer, for tests and benchmarks: each node has a network, a disk, a name and processes of its
own (Linux namespaces), so that it can be lost as a whole. Needs root, ``ip``, ``unshare`` and ``nsenter``.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fleet"))
import netns

from paceline.launcher.worker_process import end_with_parent

HEAD = "head"
PORT = 6379
RAY = [sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.exit(main())"]
UP_S = 150.0


class Raylets:
    """A head and further nodes, in ``folder``. Use as a context manager: nothing of it stays.

    Every node sees the computer's files, but has its own ``folder/disk`` and, unless it is the head, its own of
    ``own`` folders.
    """

    def __init__(self, folder: Path, nodes: Sequence[str], *, own: Sequence[Path] = ()) -> None:
        self.folder, self._disk, self._own = folder, folder / "disk", own
        self.network = netns.Network([HEAD, *nodes])
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: list[subprocess.Popen[str]] = []
        for place in (self._disk, *own):
            place.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Raylets:
        self.network.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for command in self._commands:
                self.end(command)
        finally:
            try:
                self.kill(*self._nodes)
            finally:
                self.network.__exit__()

    @property
    def address(self) -> str:
        return f"{self.network.address(HEAD)}:{PORT}"

    @property
    def alive(self) -> set[str]:
        return {*self._nodes} - {HEAD}

    def start(self, name: str, *options: str, cpus: int = 1) -> None:
        """Begin to start a node; `await_nodes` waits for it."""
        head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={self._disk}/ray"]
        place = [f"--node-ip-address={self.network.address(name)}", f"--num-cpus={cpus}"]
        fixed = ["--block", "--disable-usage-stats", "--include-log-monitor=false", "--object-store-memory=80000000"]
        which = head if name == HEAD else [f"--address={self.address}"]
        command = shlex.join([*RAY, "start", *which, *place, *fixed, *options])
        mounts = [self._disk, *(self._own if name != HEAD else ())]
        script = [f"hostname {name}", *(f"mount -t tmpfs none {shlex.quote(str(mount))}" for mount in mounts)]
        script += [f"mkdir {self._disk}/tmp", f"({command} || {command} || {command}); exit 1"]  # 30 s may be too short
        apart = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        parent = os.getpid()
        with (self.folder / f"{name}.out").open("wb") as out:
            self._nodes[name] = subprocess.Popen(
                ["ip", "netns", "exec", self.network.namespace(name), *apart, "sh", "-c", " && ".join(script)],
                env=self._environment({}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: end_with_parent(parent),
            )

    def kill(self, *names: str) -> None:
        """All processes of these nodes are gone at once."""
        nodes = [self._nodes.pop(name) for name in names]
        firsts = [Path(f"/proc/{first}") for node in nodes if (first := _first(node)) is not None]
        for node in nodes:
            node.kill()
        for node in nodes:
            node.wait()
        wait_until(lambda: not any(first.exists() for first in firsts), f"the end of {names}", 20.0)

    def command(self, words: Sequence[str], *, folder: Path, node: str = HEAD, **env: str) -> subprocess.Popen[str]:
        """A process of a user on a node."""
        first = _first(self._nodes[node])
        parent = os.getpid()
        process = subprocess.Popen(
            ["nsenter", f"--target={first}", "--mount", "--uts", "--net", "--pid", f"--wd={folder}", *words],
            env=self._environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: end_with_parent(parent),
        )
        self._commands.append(process)
        return process

    @staticmethod
    def send(command: subprocess.Popen[str], number: int) -> None:
        """A signal to a `command`."""
        with suppress(ProcessLookupError):
            os.kill(int(_first(command) or command.pid), number)

    def end(self, command: subprocess.Popen[str]) -> None:
        if command.poll() is None:
            self.send(command, signal.SIGKILL)
        command.communicate()

    def processes(self, *words: str) -> list[str]:
        """Command lines, on any node, in which one of ``words`` stands."""
        found = []
        for name in self._nodes:
            listed = ["ip", "netns", "pids", self.network.namespace(name)]
            for pid in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split():
                with suppress(OSError):
                    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found += [f"{name}: {line}"] if any(word in line for word in words) else []
        return found

    def await_head(self) -> None:
        self._await(lambda: "Ray runtime started" in self.said(HEAD), "the head")

    def await_nodes(self, *names: str) -> None:
        self._await(lambda: all("Ray runtime started" in self.said(name) for name in names), "the nodes")

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text(errors="replace")

    def _await(self, what: Callable[[], bool], name: str) -> None:
        def looked() -> bool:
            ended = [node for node, process in self._nodes.items() if process.poll() is not None]
            assert not ended, f"node {ended[0]} has ended: {self.said(ended[0])[-2000:]}"
            return what()

        wait_until(looked, name, UP_S)

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PACELINE_"))}
        return {
            **kept,
            "RAY_ADDRESS": self.address,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
            "TMPDIR": f"{self._disk}/tmp",
            "RES_OPTIONS": "timeout:1 attempts:1",
            **more,
        }


def wait_until(what: Callable[[], object], name: str, within_s: float) -> None:
    until = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < until, f"{name} did not come within {within_s:g} s"
        time.sleep(0.05)


def missing() -> str:
    """Why there can be no such cluster here; empty when there can."""
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed (pip install 'paceline[ray]')"
    if tools := [tool for tool in ("unshare", "nsenter") if shutil.which(tool) is None]:
        return f"nodes of their own need the program {tools[0]} (util-linux)"
    return netns.missing()


def _first(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> str | None:
    """The only child of ``unshare`` or ``nsenter``."""
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    except OSError:
        return None
    return children[0] if children else None
