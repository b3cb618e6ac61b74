"""What the switch promises: its attributes have their effect on real connections, and nothing of it stays."""

from __future__ import annotations

import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
import switch as switches
from switch import Switch, Way

pytestmark = pytest.mark.skipif(bool(switches.missing()), reason=switches.missing())


def connect(switch: Switch, a: str = "a", b: str = "b", network: str | None = None) -> tuple[socket.socket, ...]:
    """A connection from a to b, whose end at b is given too."""
    with switch.inside(b):
        server = socket.create_server((switch.address(b, network), 0))
    with server, switch.inside(a):
        near = socket.create_connection(server.getsockname(), timeout=5)
        far, _ = server.accept()
    for end in (near, far):
        end.settimeout(5)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def there_and_back(near: socket.socket, far: socket.socket) -> float:
    began = time.monotonic()
    near.send(b"?")
    far.send(far.recv(1))
    near.recv(1)
    return time.monotonic() - began


def transfer_s(near: socket.socket, far: socket.socket, size: int) -> float:
    began = time.monotonic()
    sender = threading.Thread(target=near.sendall, args=[bytes(size)])
    sender.start()
    while size:
        size -= len(far.recv(1 << 20))
    sender.join()
    return time.monotonic() - began


def test_a_delay_is_one_of_each_direction_and_can_be_changed() -> None:
    with Switch("ab") as switch:
        near, far = connect(switch)
        with near, far:
            plain = statistics.median(there_and_back(near, far) for _ in range(5))
            switch.every(delay_s=0.03)
            slow = statistics.median(there_and_back(near, far) for _ in range(3))
            switch.out["b"].delay_s = 0.0
            half = statistics.median(there_and_back(near, far) for _ in range(3))
    assert plain < 0.02
    assert 0.06 <= slow < 0.09
    assert 0.03 <= half < 0.06


def test_a_rate_is_a_cables_in_its_direction() -> None:
    with Switch("ab") as switch:
        switch.out["a"].bits_s = 50e6
        near, far = connect(switch)
        with near, far:
            out, back = transfer_s(near, far, 1_500_000), transfer_s(far, near, 1_500_000)
    assert 0.24 <= out < 0.6, "12 Mbit at 50 Mbit/s"
    assert back < 0.5 * out


def test_lost_packets_are_sent_again_by_the_system() -> None:
    with Switch("ab", mtu=1500) as switch:
        near, far = connect(switch)
        switch.every(loss=0.05)
        with near, far:
            transfer_s(near, far, 400_000)
        assert switch.out["a"].dropped > 3
        assert switch.out["a"].bytes > 400_000


def test_a_one_way_cut_leaves_the_other_direction() -> None:
    with Switch("ab") as switch, switch.inside("a"):
        a = socket.socket(type=socket.SOCK_DGRAM)
        a.bind((switch.address("a"), 0))
        with switch.inside("b"):
            b = socket.socket(type=socket.SOCK_DGRAM)
            b.bind((switch.address("b"), 0))
        with a, b:
            switch.between["a", "b"].cut = True
            a.sendto(b"lost", b.getsockname())
            b.sendto(b"heard", a.getsockname())
            a.settimeout(5)
            assert a.recv(9) == b"heard"
            b.settimeout(0.1)
            with pytest.raises(TimeoutError):
                b.recv(9)
            switch.heal()
            a.sendto(b"healed", b.getsockname())
            b.settimeout(5)
            assert b.recv(9) == b"healed"


def test_halves_hear_only_themselves_and_share_one_link() -> None:
    with Switch("abcd") as switch:
        there, _ = switch.link("ab", "cd", bits_s=1e9)
        switch.split("a", "b")
        for end in connect(switch, "a", "b"):
            end.close()
        with pytest.raises(TimeoutError), switch.inside("a"):
            socket.create_connection((switch.address("c"), 9), timeout=0.1)
        assert there.dropped == 1
        switch.heal()
        with pytest.raises(ConnectionRefusedError), switch.inside("a"):
            socket.create_connection((switch.address("c"), 9), timeout=5)
        with pytest.raises(ConnectionRefusedError), switch.inside("b"):
            socket.create_connection((switch.address("d"), 9), timeout=5)
        assert there.bytes > 0


def test_networks_do_not_meet_and_one_may_lead_nowhere() -> None:
    with Switch("abc", networks={"dead0": "abc", "eth0": "abc", "eth1": "bc"}) as switch:
        switch.dead.add("dead0")
        for end in connect(switch, "b", "c", "eth1"):
            end.close()
        for target, network in (("b", "dead0"), ("c", "eth1")):
            with switch.inside("a"), pytest.raises(OSError):
                socket.create_connection((switch.address(target, network), 9), timeout=0.1)


def test_a_computer_has_a_name_and_nothing_stays() -> None:
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    home = os.readlink("/proc/thread-self/ns/net")
    with suppress(InterruptedError), Switch(["one", "two"]) as switch, switch.inside("two"):
        assert socket.gethostname() == "two"
        assert os.readlink("/proc/thread-self/ns/net") != home
        raise InterruptedError
    assert os.readlink("/proc/thread-self/ns/net") == home
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (descriptors, threads)


def test_a_way_is_a_queue() -> None:
    way, chance = Way(bits_s=8 * 2**20, queue_s=0.25, delay_s=0.5, jitter_s=0.1), random.Random(1)
    times = [way.passes(0.0, 1024, chance) for _ in range(300)]
    through = [one for one in times if one is not None]
    assert len(through) == 256, "a 1024th of a second each, and nobody waits for more than a quarter"
    assert through == sorted(through)
    assert 0.5 < through[0] < 0.602
    with pytest.raises(TypeError, match="no speed"):
        Switch("ab").every(speed=3)


def test_no_computer_inherits_that_gloo_is_to_use_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [sys.executable, "-c", "import os; print(os.environ.get('GLOO_SOCKET_IFNAME'))"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with Switch("a") as switch, switch.inside("a"):
        assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout == "None\n"
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # a cable's interface is passed on
        assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout == "eth0\n"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with Switch("a"):
        pass
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
