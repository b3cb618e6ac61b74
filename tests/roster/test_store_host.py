"""The torch store beside the roster: what strangers send to its port must not end the process that hosts it."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

import pytest

from paceline.roster import persistence
from paceline.roster.wire import RosterConnection

HOST = """
import sys, threading
from paceline.roster.persistence import StoreHost

host = StoreHost("127.0.0.1")
host.start()
print(host.port, flush=True)
sys.stdin.read()
"""
TORCH_GREETING = b"\x00" + (0x3C85F7CE).to_bytes(4, "little")
"""With these bytes the store takes a connection for a worker's."""


def send(port: int, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger, suppress(ConnectionError):
        stranger.sendall(data)


@pytest.mark.fleet
def test_garbage_on_the_stores_port_does_not_end_its_host() -> None:
    chance = random.Random(0)
    with subprocess.Popen(
        [sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as host:
        assert host.stdout is not None
        port = int(host.stdout.readline())
        for _ in range(100):
            send(port, chance.randbytes(chance.randrange(300)))
            send(port, TORCH_GREETING + bytes([chance.randrange(20)]) + chance.randbytes(chance.randrange(200)))
            send(port, TORCH_GREETING + b"\x01" + (2 ** chance.randrange(63)).to_bytes(8, "little") + b"key")
        assert usable(port)
        assert host.poll() is None
        host.kill()


def usable(port: int) -> bool:
    import torch.distributed

    dist: Any = torch.distributed
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    store.set("key", "value")
    return bool(store.get("key") == b"value")


def test_a_store_that_was_never_started_gives_its_port_back() -> None:
    host = persistence.StoreHost("127.0.0.1")
    host.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", host.port), timeout=5)


def test_a_store_that_is_closed_while_it_is_made_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    host = persistence.StoreHost("127.0.0.1")

    def made_late(*_: Any, master_listen_fd: int, **__: Any) -> object:
        os.close(master_listen_fd)
        host.close()
        return object()

    monkeypatch.setattr("torch.distributed.TCPStore", made_late)
    host._run()
    assert host._store is None


def _descriptor(connection: RosterConnection, told: Any) -> None:
    told.put(connection.socket.fileno())


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="no fork here")
def test_a_forked_child_does_not_hold_its_parents_connection_open() -> None:
    ours, theirs = socket.socketpair()
    connection = RosterConnection(ours)
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()
    child = context.Process(target=_descriptor, args=(connection, told))
    child.start()
    assert told.get() == -1
    assert connection.socket.fileno() >= 0
    child.join(10)
    connection.close()
    theirs.close()


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="no fork here")
def test_a_forked_child_does_not_disturb_the_wait_of_its_parent() -> None:
    ours, theirs = socket.socketpair()
    connection = RosterConnection(ours)
    assert not connection.wait(0.0)
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()
    child = context.Process(target=_descriptor, args=(connection, told))
    child.start()
    assert told.get() == -1
    child.join(10)
    assert child.exitcode == 0
    assert not connection.wait(0.0)
    theirs.sendall(b"!")
    assert connection.wait(10.0)
    connection.close()
    theirs.close()


def test_breaking_off_from_another_thread_ends_the_wait() -> None:
    ours, theirs = socket.socketpair()
    connection = RosterConnection(ours)
    breaker = threading.Timer(0.05, connection.break_off)
    breaker.start()
    assert connection.wait(30.0)
    breaker.join()
    connection.close()
    connection.close()  # a second time does no harm
    theirs.close()
