"""Strangers on every open port of a running fleet, and peers that send what they should not: the training goes on."""

from __future__ import annotations

import os
import random
import resource
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from flock import Flock
from test_elastic import must_be_sound

pytestmark = pytest.mark.fleet

CASE = "network_cases.py:train"
LISTENING = "0A"
TORCH_GREETING = b"\x00" + (0x3C85F7CE).to_bytes(4, "little")
"""With these bytes torch's store takes a connection for a worker's."""

Port = tuple[str, int]


def open_ports(pid: int) -> list[Port]:
    """Where this process listens."""
    mine = {name.removeprefix("socket:[").removesuffix("]") for name in _descriptors(pid)}
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    found = [(fields[1], fields[9]) for line in lines if (fields := line.split())[3] == LISTENING]
    return [_written(address) for address, inode in found if inode in mine]


def _descriptors(pid: int) -> Iterator[str]:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            yield os.readlink(entry)


def _written(address: str) -> Port:
    host, port = address.split(":")
    return socket.inet_ntoa(struct.pack("<I", int(host, 16))), int(port, 16)


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


class Stranger:
    """Opens connections and sends what it likes. What it was not let in to is no matter."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.kept: list[socket.socket] = []

    def assault(self, port: Port) -> None:
        chance = self._chance
        for _ in range(20):
            self.send(port, chance.randbytes(chance.randrange(1, 400)))
            self.send(port, TORCH_GREETING + bytes([chance.randrange(20)]) + chance.randbytes(chance.randrange(200)))
            self.send(port, b'{"hello": {"name": "half a li', keep=True)
            self.send(port, b"", keep=True)
        for number in range(20):
            self.send(port, struct.pack("<q", number), keep=True)  # as Gloo counts its connections
        for _ in range(3):
            self.send(port, b"x" * (8 << 20))

    def send(self, port: Port, data: bytes, *, keep: bool = False) -> None:
        with suppress(OSError):
            connection = socket.create_connection(port, timeout=0.3)
            self.kept.append(connection)
            connection.sendall(data)
            if not keep:
                self.kept.pop().close()


def test_strangers_on_every_open_port_disturb_nobody(tmp_path: Path) -> None:
    with Flock(CASE, 3, tmp_path, args={"epochs": 30}) as flock:
        flock.wait_for_step(8)
        pids = [worker.pid for worker in flock.workers.values()]
        ports = [port for pid in (*pids, os.getpid()) for port in open_ports(pid)]
        assert len(ports) >= 5, "a Gloo port of each worker, the roster's and its store's"
        before = [resident_mb(pid) for pid in pids]
        stranger = Stranger(seed=5)
        for port in ports:
            stranger.assault(port)
        grown = [now - then for now, then in zip(map(resident_mb, pids), before, strict=True)]
        assert max(grown) < 30, f"MB: {grown}"
        outcomes = flock.wait()
        for connection in stranger.kept:
            connection.close()
    run = must_be_sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=30)
    assert {record.generation for record in run.records} == {1}, "nobody fell out of the fleet over it"


def test_a_stranger_cannot_use_up_a_workers_file_descriptors(tmp_path: Path) -> None:
    with Flock(CASE, 2, tmp_path, args={"epochs": 12}) as flock:
        flock.wait_for_step(8)
        pid, stranger = flock.workers[1].pid, Stranger(seed=6)
        held = len(list(_descriptors(pid)))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (held + 20, held + 20))
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            for port in open_ports(pid):
                stranger.send(port, b"")
        outcomes = flock.wait()
    must_be_sound(tmp_path, outcomes, ended={0, 1}, epochs=12)


def test_a_worker_with_another_token_is_refused_and_the_fleet_goes_on(tmp_path: Path) -> None:
    refused: list[dict[str, Any]] = []
    with Flock(CASE, 2, tmp_path, args={"epochs": 12}) as flock:
        flock.server._on_event = lambda kind, said: refused.append(said) if kind == "refused" else None
        flock.wait_for_step(5)
        flock.start(2, PACELINE_TOKEN="another run's token")
        flock.wait_for_end(2)
        outcomes = flock.hurry()
    run = must_be_sound(tmp_path, outcomes, ended={0, 1}, epochs=12)
    assert outcomes[2].code == 75
    assert "does not know this run's token" in outcomes[2].err
    assert [one["kind"] for one in refused] == ["token"]
    assert {record.generation for record in run.records} == {1}


def test_code_in_a_peers_state_is_not_executed(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    with Flock(CASE, 2, tmp_path, args={"epochs": 12, "trap": str(trap)}) as flock:
        flock.wait_for_step(5)
        flock.start(2)
        flock.wait_for_end(2)
        outcomes = flock.hurry()
    must_be_sound(tmp_path, outcomes, ended={0, 1}, epochs=12)
    assert outcomes[2].code not in (0, 999)
    assert "in unpack" in outcomes[2].err, "it came as far as to read it"
    assert not trap.exists()
