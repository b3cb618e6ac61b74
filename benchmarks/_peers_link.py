"""Computers with a slow link each, for any library: network namespaces on one switch, with a token bucket both ways.

Made and removed by the benchmark; needs root, ``ip`` and ``tc``. Each computer's name is its address, so that whoever
asks the system for it gets something that the others reach.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

RATE = "100mbit"
BUCKET = ("tbf", "rate", RATE, "burst", "32kb", "latency", "100ms")


@dataclass(frozen=True)
class Place:
    """Where a worker runs: its address, its network card, and what its command begins with."""

    address: str = "127.0.0.1"
    card: str = "lo"
    prefix: tuple[str, ...] = ()


@contextmanager
def links(count: int) -> Iterator[list[Place]]:
    """So many computers, each on a link of `RATE`."""
    mark = f"peers{os.getpid()}"
    switch, names = f"{mark}-switch", [f"{mark}-{number}" for number in range(count)]
    try:
        for name in (switch, *names):
            _run("ip", "netns", "add", name)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        places = [_connect(switch, name, number) for number, name in enumerate(names)]
        yield places
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _connect(switch: str, name: str, number: int) -> Place:
    port, address = f"port{number}", f"10.87.9.{number + 1}"
    _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _run("ip", "-n", name, "link", "set", device, "up")
    _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *BUCKET)
    _run("tc", "-n", switch, "qdisc", "add", "dev", port, "root", *BUCKET)
    named = f'hostname {address} && exec "$@"'
    return Place(address, "eth0", ("ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", named, "sh"))


def missing() -> str:
    """Why there can be no such links here; empty when there can."""
    if gone := [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]:
        return f"the link needs the programs {', '.join(gone)}"
    try:
        with links(1):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        return f"the link cannot be made here (root makes it): {said.strip()}"


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
