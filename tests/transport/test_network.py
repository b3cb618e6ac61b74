"""The machine's side: which address, which sockets, and how a stuck connection is broken off."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import switch

from paceline.transport.network import Sockets, address_towards, break_off, gloo_device, open_sockets, unanswered

Connection = tuple[socket.socket, socket.socket, socket.socket]


def named(*sockets: socket.socket) -> Sockets:
    wanted = {made.fileno() for made in sockets}
    return frozenset(entry for entry in open_sockets() if entry[0] in wanted)


@pytest.fixture
def connection() -> Iterator[Connection]:
    """(listener, one end, other end) of a TCP connection over loopback."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
        listener.accept()[0] as other,
    ):
        yield listener, one, other


def test_the_address_towards_this_machine_is_loopback() -> None:
    assert address_towards("127.0.0.1", 29500) == "127.0.0.1"
    assert address_towards("localhost", 0) in ("127.0.0.1", "::1")


def test_an_unknown_host_is_an_os_error() -> None:
    with pytest.raises(OSError):
        address_towards("no.such.host.invalid", 1)


def test_the_named_interface_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert gloo_device("198.51.100.1", 1)[1] == "interface lo"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert gloo_device("127.0.0.1", 1)[1] == "address 127.0.0.1"


def test_open_sockets_sees_them_come_and_go() -> None:
    before = open_sockets()
    with socket.socket() as made:
        assert [number for number, _ in open_sockets() - before] == [made.fileno()]
        number = made.fileno()
    assert number not in {number for number, _ in open_sockets()}


def test_breaking_off_frees_a_reader_and_spares_the_listener(connection: Connection) -> None:
    listener, one, other = connection
    freed = threading.Event()

    def read() -> None:
        with contextlib.suppress(OSError):
            assert one.recv(1) == b""
        freed.set()

    threading.Thread(target=read, daemon=True).start()
    break_off(named(listener, one), spare_port=1)
    assert freed.wait(5)
    with socket.create_connection(listener.getsockname(), timeout=5):
        pass
    assert other.recv(1) == b""


@pytest.mark.parametrize("end", [1, 2])
def test_connections_of_the_store_are_spared(connection: Connection, end: int) -> None:
    listener, one, other = connection
    break_off(named(connection[end]), spare_port=listener.getsockname()[1])
    one.sendall(b"x")
    assert other.recv(1) == b"x"


def test_what_is_no_socket_any_more_is_ignored() -> None:
    with socket.socket() as unconnected:
        break_off(named(unconnected) | {(10**6, "socket:[1]")}, spare_port=1)
        assert unconnected.fileno() >= 0, "it is still this test's to close"


def test_a_descriptor_that_was_given_out_anew_is_spared(connection: Connection) -> None:
    _, one, other = connection
    break_off(frozenset({(one.fileno(), "socket:[1]")}), spare_port=1)
    one.sendall(b"x")
    assert other.recv(1) == b"x"


@pytest.mark.slow
@pytest.mark.skipif(bool(switch.missing()), reason=switch.missing())
def test_a_peer_that_acknowledges_nothing_is_found_and_no_other() -> None:
    with switch.Switch("abc") as net, contextlib.ExitStack() as stack:
        ends = {}
        for other in "bc":
            with net.inside(other):
                listener = stack.enter_context(socket.create_server((net.address(other), 0)))
            with net.inside("a"):
                ends[other] = stack.enter_context(socket.create_connection(listener.getsockname()))
        where = ends["b"].getpeername()
        net.between["a", "b"].cut = True
        assert unanswered(named(*ends.values())) == {}, "nothing was sent"
        until = time.monotonic() + 10
        while not (found := unanswered(named(*ends.values()))) and time.monotonic() < until:
            for end in ends.values():
                end.sendall(b"?")
            time.sleep(0.05)
        assert list(found) == [where]
        assert 0.3 < found[where] < 10
