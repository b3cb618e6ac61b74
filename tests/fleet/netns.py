"""Computers with cables between them, for tests: each is a network namespace, and a cable can be cut and healed.

All hang on one switch, which lies in a namespace of its own: nothing of it is seen outside, and networks of several
tests do not meet. Needs root and ``ip``.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import count
from pathlib import Path

from switch import forget_loopback, without_loopback

CLONE_NEWNET = 0x40000000
_numbers = count()


class Network:
    """So many computers on one switch. Use as a context manager: nothing of it stays."""

    def __init__(self, computers: Sequence[str]) -> None:
        self._prefix = f"pl{os.getpid()}x{next(_numbers)}"
        self._switch = f"{self._prefix}-switch"
        self._numbers = {computer: number for number, computer in enumerate(computers, start=1)}
        self._stack = ExitStack()

    def __enter__(self) -> Network:
        self._stack.enter_context(without_loopback())
        ip("netns", "add", self._switch)
        for bridge in ("bridge", "apart"):
            ip("-n", self._switch, "link", "add", bridge, "type", "bridge")
            ip("-n", self._switch, "link", "set", bridge, "up")
        for computer in self._numbers:
            self._connect(computer)
        return self

    def _connect(self, computer: str) -> None:
        place, port = self.namespace(computer), self._port(computer)
        ip("netns", "add", place)
        ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", place)
        ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
        ip("-n", place, "addr", "add", f"{self.address(computer)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", place, "link", "set", device, "up")

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        for place in (*map(self.namespace, self._numbers), self._switch):
            subprocess.run(["ip", "netns", "del", place], check=False)

    def namespace(self, computer: str) -> str:
        return f"{self._prefix}-{computer}"

    def address(self, computer: str) -> str:
        return f"10.87.3.{self._numbers[computer]}"

    def _port(self, computer: str) -> str:
        return f"port{self._numbers[computer]}"

    def cut(self, computer: str) -> None:
        """Pull the cable: nothing goes in or out, and nobody is told."""
        ip(*self.cutting(computer))

    def cutting(self, computer: str) -> list[str]:
        """The words with which ``ip`` does so."""
        return ["-n", self._switch, "link", "set", self._port(computer), "down"]

    def heal(self, computer: str) -> None:
        """Plug the cable in again, where the others are."""
        ip("-n", self._switch, "link", "set", self._port(computer), "master", "bridge", "up")

    def split(self, *computers: str) -> None:
        """These reach one another, and nobody else."""
        for computer in computers:
            ip("-n", self._switch, "link", "set", self._port(computer), "master", "apart")

    def estrange(self, *computers: str) -> None:
        """These reach everybody but one another."""
        for computer in computers:
            ip("-n", self._switch, "link", "set", self._port(computer), "type", "bridge_slave", "isolated", "on")

    def reconcile(self, *computers: str) -> None:
        for computer in computers:
            ip("-n", self._switch, "link", "set", self._port(computer), "type", "bridge_slave", "isolated", "off")

    @contextmanager
    def inside(self, computer: str) -> Iterator[None]:
        """This thread, and those that it starts, open their sockets on that computer."""
        with open("/proc/thread-self/ns/net") as home:
            enter(self.namespace(computer))
            try:
                yield
            finally:
                _set_namespace(home.fileno())


def enter(namespace: str) -> None:
    """This thread lives on that computer from now on, and so do the threads that it starts."""
    forget_loopback()
    with Path("/run/netns", namespace).open() as file:
        _set_namespace(file.fileno())


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@cache
def missing() -> str:
    """Why there can be no such networks here; empty when there can."""
    if shutil.which("ip") is None:
        return "network namespaces need the program ip (iproute2)"
    try:
        with Network(["a"]) as network, network.inside("a"):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        return f"network namespaces are not to be had here (root makes them): {said.strip()}"
