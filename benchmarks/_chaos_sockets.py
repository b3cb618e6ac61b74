"""A network namespace for one run, and single TCP connections in it that the kernel closes by force (``ss -K``).

Both are asked of the kernel directly: neither ``ip`` nor ``ss`` is needed. The namespace has no name, and is gone with
the last process in it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNET = 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
NETLINK_SOCK_DIAG, SOCK_DESTROY, NLM_F_REQUEST, NLM_F_ACK = 4, 21, 1, 4
ANY_COOKIE = 0xFFFFFFFF
ESTABLISHED = "01"


@dataclass(frozen=True)
class Connection:
    """One end of an established TCP connection."""

    family: socket.AddressFamily
    local: tuple[bytes, int]
    remote: tuple[bytes, int]

    @property
    def ports(self) -> set[int]:
        """Both ends' ports."""
        return {self.local[1], self.remote[1]}


def enter_own_network() -> str:
    """Move this process into a network of its own, with a loopback interface; return why that failed, or nothing.

    Must be called before the process has threads: those keep the old network.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or not hasattr(libc, "unshare"):
        return "connections are not cut: a network namespace of its own needs root on Linux"
    if libc.unshare(CLONE_NEWNET):
        return f"connections are not cut: no network namespace ({os.strerror(ctypes.get_errno())})"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        request = struct.pack("16sH22x", b"lo", 0)
        flags = struct.unpack("16sH22x", fcntl.ioctl(asker, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(asker, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | IFF_UP))
    return _try_a_cut()


def _try_a_cut() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        here, there = client.getsockname(), client.getpeername()
        address = socket.inet_aton("127.0.0.1")
        try:
            cut(Connection(socket.AF_INET, (address, here[1]), (address, there[1])))
        except OSError as error:
            return f"connections are not cut: the kernel refuses it ({error.strerror})"
    return ""


def connections_of(pid: int) -> list[Connection]:
    """Return the established TCP connections of a process; none once it has ended."""
    inodes, found = set(), []
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                inodes.add(os.readlink(entry.path).removeprefix("socket:[").removesuffix("]"))
        for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == ESTABLISHED and words[9] in inodes:
                    found.append(Connection(family, _address(words[1]), _address(words[2])))
    return found


def _address(text: str) -> tuple[bytes, int]:
    """Return address and port as /proc writes them: in words of four bytes, which are in the machine's order."""
    words, _, port = text.partition(":")
    numbers = [int(words[at : at + 8], 16) for at in range(0, len(words), 8)]
    return struct.pack(f"={len(numbers)}I", *numbers), int(port, 16)


def cut(connection: Connection) -> None:
    """Have the kernel abort a connection: both ends receive an error. Raise OSError if it does not."""
    (here, sport), (there, dport) = connection.local, connection.remote
    ends = struct.pack(">HH16s16s", sport, dport, here, there)
    request = struct.pack("=BBBBI", connection.family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + ends
    request += struct.pack("=III", 0, ANY_COOKIE, ANY_COOKIE)
    header = struct.pack("=IHHII", 16 + len(request), SOCK_DESTROY, NLM_F_REQUEST | NLM_F_ACK, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(5.0)
        kernel.sendto(header + request, (0, 0))
        (code,) = struct.unpack_from("=i", kernel.recv(65536), 16)
    if code:
        raise OSError(-code, os.strerror(-code))
