"""The machine's side of a process group: which address to use, and how to break off a sum that will never end."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed

ENGINE_TIMEOUT = timedelta(days=7)
"""The engine's own timeout never decides: those who watch do, and say who. Given to every wait, for a send or receive
would else have the short one with which its group was formed."""

dist: Any = torch.distributed  # its type stubs leave out half of what it exports
Store = Any
"""A torch.distributed store."""


def read_json(store: Store, key: str) -> Any:
    """Return a value of the store; RuntimeError where it is no JSON, as around the restart of a roster."""
    text = store.get(key)
    try:
        return json.loads(text)
    except ValueError:
        raise RuntimeError(f"the store's value of {key} cannot be read: {text[:40]!r}") from None


def address_towards(host: str, port: int) -> str:
    """Return the local address that packets to ``host`` leave from: the interface the fleet can be reached on.

    >>> address_towards("127.0.0.1", 9)
    '127.0.0.1'
    """
    family, kind, proto, _, target = socket.getaddrinfo(host, port or 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(target)  # a datagram socket: sends nothing, only chooses the route
        return str(probe.getsockname()[0])


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each network interface that has one (Linux and where its requests are known)."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(asker, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def place() -> str:
    """Return a name of this computer as far as its network goes: with the same name, loopback is the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/thread-self/ns/net')}"
    except OSError:
        return socket.gethostname()


def gloo_device(host: str, port: int) -> tuple[object, str]:
    """Return Gloo's network device and a description for the log; GLOO_SOCKET_IFNAME decides when it is set."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface), f"interface {interface}"
    address = address_towards(host, port)
    return dist.ProcessGroupGloo.create_device(hostname=address), f"address {address}"


Sockets = frozenset[tuple[int, str]]
"""Sockets of this process: descriptors, and what the system calls them, for a descriptor may be given out again."""


@contextmanager
def loopback_only() -> Iterator[None]:
    """Keep Gloo groups that are formed in the block on this computer."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    own = next((name for name, address in interfaces().items() if address.startswith("127.")), None)
    if own is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = own
    try:
        yield
    finally:
        if before is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = before
        else:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)


def open_sockets() -> Sockets:
    """Return this process's sockets (none where /proc is missing)."""
    found = set()
    for entry in Path("/proc/self/fd").glob("*"):
        try:
            if (name := os.readlink(entry)).startswith("socket:"):
                found.add((int(entry.name), name))
        except OSError:
            continue
    return frozenset(found)


def break_off(sockets: Sockets, *, spare_port: int) -> None:
    """Shut the connected ones among ``sockets``: operations blocked on them fail within milliseconds.

    Gloo's own abort does nothing. The listening socket has no peer and is left alone: shutting it ends the process.
    So are connections to ``spare_port``, the store's, some of which may have been made while the group was built.
    """
    for descriptor, name in sockets:
        with suppress(OSError, IndexError), _same(descriptor, name) as connection:
            ports = (connection.getsockname()[1], connection.getpeername()[1])
            if spare_port not in ports:
                connection.shutdown(socket.SHUT_RDWR)


SIOCGIFADDR = 0x8915
RETRIED = 3
"""A packet that was sent so often again, each time after a longer pause, is not merely late."""
SO_ATTACH_FILTER = 26
DROP_ALL = (6, 0, 0, 0)
"""Linux's socket filter of one instruction: return 0, let nothing through."""


def listening(sockets: Sockets) -> list[tuple[str, int]]:
    """Return addresses and ports of the listening ones among ``sockets``."""
    found = []
    for descriptor, name in sockets:
        with suppress(OSError, IndexError), _same(descriptor, name) as listener:
            if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                address, port = listener.getsockname()[:2]
                found.append((str(address), int(port)))
    return found


def unanswered(sockets: Sockets) -> dict[tuple[str, int], float]:
    """Return the peers of ``sockets`` that have acknowledged nothing that was sent to them, again and again.

    By address and port, the number of seconds. Linux shows it; elsewhere nothing is found.
    """
    found = {}
    for descriptor, name in sockets:
        with suppress(OSError, IndexError, AttributeError, struct.error), _same(descriptor, name) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
            again, waiting, silent_ms = info[2], *struct.unpack_from("=I28xI", info, 24)
            if again >= RETRIED and waiting:
                address, port = connection.getpeername()[:2]
                found[str(address), int(port)] = silent_ms / 1000
    return found


ESTABLISHED = 1
"""Linux's number for the state of a connection that stands."""


def any_closed(sockets: Sockets) -> bool:
    """Return whether one of these connections has ended, at either end. Linux shows it; elsewhere none has."""
    for descriptor, name in sockets:
        try:
            with _same(descriptor, name) as connection:
                if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED:
                    return True
        except (OSError, AttributeError):
            return hasattr(socket, "TCP_INFO")
    return False


def joining(sockets: Sockets, ports: Collection[int]) -> Sockets:
    """Return those of ``sockets`` that are connected to one of these ports, at this end or the other.

    Others were opened meanwhile by somebody else.
    """
    found = set()
    for descriptor, name in sockets:
        with suppress(OSError, IndexError), _same(descriptor, name) as connection:
            if not {connection.getsockname()[1], connection.getpeername()[1]}.isdisjoint(ports):
                found.add((descriptor, name))
    return frozenset(found)


def _same(descriptor: int, name: str) -> socket.socket:
    """Return the socket of this name, to be closed; OSError when the descriptor is another's by now."""
    found = socket.socket(fileno=os.dup(descriptor))
    if os.readlink(f"/proc/self/fd/{found.fileno()}") != name:
        found.close()
        raise OSError("it was given out again")
    return found


def close_listeners(sockets: Sockets) -> None:
    """Let nobody else in: the listening ones among ``sockets`` drop whatever comes to them from now on.

    Gloo keeps its listener open for as long as the group stands, though all members are connected. It has no token,
    keeps every stranger's connection, and ends the process when descriptors run out. Closing or shutting the listener
    ends the process as well, so the kernel is asked not to deliver. Nothing happens where there are no such filters.
    """
    program = ctypes.create_string_buffer(struct.pack("HBBI", *DROP_ALL))
    request = struct.pack("HP", 1, ctypes.addressof(program))
    for descriptor, name in sockets:
        with suppress(OSError), _same(descriptor, name) as listener:
            if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, request)
