"""The machine's side of a process group: which address to use, and how to break off a sum that will never end."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch.distributed

dist: Any = torch.distributed  # its type stubs leave out half of what it exports
Store = Any
"""A torch.distributed store."""


def address_towards(host: str, port: int) -> str:
    """The local address that packets to ``host`` leave from: the interface the fleet can be reached on.

    >>> address_towards("127.0.0.1", 9)
    '127.0.0.1'
    """
    family, kind, proto, _, target = socket.getaddrinfo(host, port or 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(target)  # a datagram socket: sends nothing, only chooses the route
        return str(probe.getsockname()[0])


def gloo_device(host: str, port: int) -> tuple[object, str]:
    """Gloo's network device, and a description of it for the log. GLOO_SOCKET_IFNAME decides when it is set."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface), f"interface {interface}"
    address = address_towards(host, port)
    return dist.ProcessGroupGloo.create_device(hostname=address), f"address {address}"


Sockets = frozenset[tuple[int, str]]
"""Sockets of this process: descriptors, and what the system calls them, for a descriptor may be given out anew."""


def open_sockets() -> Sockets:
    """This process's sockets (none where /proc is missing)."""
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
        try:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if os.readlink(f"/proc/self/fd/{connection.fileno()}") != name:
                    continue
                ports = (connection.getsockname()[1], connection.getpeername()[1])
                if spare_port not in ports:
                    connection.shutdown(socket.SHUT_RDWR)
        except (OSError, IndexError):
            continue
