"""Several computers on one: each is a network namespace whose only cables are TUN devices, and one thread forwards
their packets with delay, jitter, loss, rate and cuts.

Tests and benchmarks share it. It needs root and /dev/net/tun, and neither ``ip`` nor ``tc``. A namespace has no name
and ends with the processes in it: nothing is left, however a test ends.

    with Switch("abc") as switch:
        switch.every(delay_s=0.02, bits_s=50e6)     # 20 ms each way, each cable 50 Mbit/s each way
        switch.between["a", "b"].cut = True         # b no longer hears a, and a still hears b
        with switch.inside("a"):
            subprocess.Popen(...)                   # runs on computer a
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFMTU, IFF_UP = 0x8914, 0x8916, 0x891C, 0x8922, 1
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000


@dataclass
class Way:
    """One direction of a cable or link. All but the counts may be changed while packets travel."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    """Up to so much more delay, drawn for each packet. Packets keep their order."""
    loss: float = 0.0
    """Part of the packets that is lost."""
    bits_s: float = 0.0
    """Bits a second; 0: no limit."""
    queue_s: float = 0.2
    """A packet that would wait for longer than this before it is sent is dropped, as by a full router."""
    cut: bool = False
    bytes: int = 0
    """That have come through."""
    dropped: int = 0
    _free: float = 0.0
    _last: float = 0.0

    def passes(self, at: float, size: int, chance: random.Random) -> float | None:
        """When a packet that comes at ``at`` is through, in monotonic seconds; None when it is lost."""
        sent = at if not self.bits_s else max(at, self._free) + 8 * size / self.bits_s
        if self.cut or (self.loss and chance.random() < self.loss) or (self.bits_s and sent - at > self.queue_s):
            self.dropped += 1
            return None
        self._free, self.bytes = sent, self.bytes + size
        self._last = max(self._last, sent + self.delay_s + (chance.random() * self.jitter_s if self.jitter_s else 0.0))
        return self._last


class Switch:
    """These computers on one switch. A packet goes through ``out`` of its sender, ``between`` of the two, and ``into``
    of its receiver; packets of a computer to itself stay there, without delay.

    ``networks``: which computers each interface's network joins, when there are several, as ``{"eth0": "abc", "eth1":
    "bc"}``; nothing is routed from one into the other. A name in ``dead`` is a network that leads nowhere.
    """

    def __init__(
        self, computers: Iterable[str], *, networks: Mapping[str, Iterable[str]] | None = None, mtu: int = 9000
    ) -> None:
        self.computers = list(computers)
        self.networks = {name: list(on) for name, on in (networks or {"eth0": self.computers}).items()}
        self.mtu = mtu
        self.out = {one: Way() for one in self.computers}
        self.into = {one: Way() for one in self.computers}
        self.between = {(a, b): Way() for a in self.computers for b in self.computers if a != b}
        self.dead: set[str] = set()
        self._namespaces: dict[str, tuple[int, int]] = {}
        self._ports: dict[int, tuple[str, str]] = {}
        self._by_address: dict[bytes, int] = {}
        self._chance = random.Random(0)
        self._order = count()
        self._stack = ExitStack()

    def __enter__(self) -> Switch:
        with ExitStack() as stack:
            stack.enter_context(without_loopback())
            for computer in self.computers:
                self._namespaces[computer] = namespaces = _new_namespaces(computer)
                for descriptor in namespaces:
                    stack.callback(os.close, descriptor)
            for network, computers in self.networks.items():
                for computer in computers:
                    stack.callback(os.close, self._plug_in(computer, network))
            end = os.eventfd(0)
            stack.callback(os.close, end)
            thread = threading.Thread(target=self._forward, args=[end], name="switch", daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(os.eventfd_write, end, 1)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _plug_in(self, computer: str, network: str) -> int:
        address = self.address(computer, network)
        with self.inside(computer):
            port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(port, TUNSETIFF, struct.pack("16sH", network.encode(), IFF_TUN | IFF_NO_PI))
            _configure(network, address, self.mtu)
        self._ports[port], self._by_address[socket.inet_aton(address)] = (computer, network), port
        return port

    # -- the computers -------------------------------------------------------------------------------------------

    def address(self, computer: str, network: str | None = None) -> str:
        """On its first network, or on this one."""
        network = network or next(name for name, on in self.networks.items() if computer in on)
        return f"10.{88 + list(self.networks).index(network)}.7.{1 + self.computers.index(computer)}"

    def place(self, computer: str) -> str:
        """What another process gives `enter`."""
        return ":".join(f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in self._namespaces[computer])

    @contextmanager
    def inside(self, computer: str) -> Iterator[None]:
        """This thread, and the threads and processes that it starts, are on that computer."""
        home = [os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts")]
        try:
            _set(self._namespaces[computer])
            yield
        finally:
            _set(home)
            for descriptor in home:
                os.close(descriptor)

    # -- the cables ----------------------------------------------------------------------------------------------

    def every(self, **attributes: Any) -> None:
        """Attributes of every computer's outgoing way: a delay is then one of each direction."""
        for way in self.out.values():
            _change(way, attributes)

    def link(self, near: Iterable[str], far: Iterable[str], **attributes: Any) -> tuple[Way, Way]:
        """One link that all between two sites share, each direction for itself: there, and back."""
        there, back = Way(), Way()
        for way in (there, back):
            _change(way, attributes)
        near, far = list(near), list(far)
        self.between |= {(a, b): there for a in near for b in far} | {(b, a): back for a in near for b in far}
        return there, back

    def cut(self, *computers: str) -> None:
        """Pull their cables: nothing goes in or out, and nobody is told."""
        for one in computers:
            self.out[one].cut = self.into[one].cut = True

    def split(self, *computers: str) -> None:
        """These reach one another, and nobody else."""
        for a, b in self.between:
            if (a in computers) != (b in computers):
                self.between[a, b].cut = True

    def heal(self) -> None:
        """Everything that was cut."""
        for way in (*self.out.values(), *self.into.values(), *self.between.values()):
            way.cut = False

    # -- the thread ----------------------------------------------------------------------------------------------

    def _forward(self, end: int) -> None:
        queue: list[tuple[float, int, int, bytes]] = []
        with select.epoll() as poll:
            for descriptor in (end, *self._ports):
                poll.register(descriptor, select.EPOLLIN)
            while True:
                wait = queue[0][0] - time.monotonic() if queue else 1.0
                ready = [one for one, _ in poll.poll(max(0.0, wait - 0.001))]  # it counts in whole milliseconds
                if end in ready:
                    return
                if not ready and 0 < wait <= 0.001:
                    time.sleep(wait)
                for port in ready:
                    self._take(port, queue)
                now = time.monotonic()
                while queue and queue[0][0] <= now:
                    _, _, port, packet = heapq.heappop(queue)
                    _write(port, packet)

    def _take(self, port: int, queue: list[tuple[float, int, int, bytes]]) -> None:
        for _ in range(64):  # then it is another port's turn
            try:
                packet = os.read(port, 65536)
            except OSError:
                return
            target = self._by_address.get(packet[16:20]) if packet[0] >> 4 == 4 else None
            at = None if target is None else self._travel(port, target, len(packet))
            if at is not None:
                assert target is not None
                heapq.heappush(queue, (at, next(self._order), target, packet))

    def _travel(self, port: int, target: int, size: int) -> float | None:
        """When the packet arrives; None: never."""
        (a, network), (b, other) = self._ports[port], self._ports[target]
        at: float | None = None if network != other or network in self.dead else time.monotonic()
        for way in (self.out[a], self.between[a, b], self.into[b]):
            at = None if at is None else way.passes(at, size, self._chance)
        return at


@contextmanager
def without_loopback() -> Iterator[None]:
    """Computers of their own are joined by their cables: in the block, no process that is started inherits that Gloo
    is to use the loopback interface, which serves for workers of one computer."""
    before = os.environ.get(GLOO_INTERFACE)
    forget_loopback()
    try:
        yield
    finally:
        if before is not None:
            os.environ.setdefault(GLOO_INTERFACE, before)


def forget_loopback() -> None:
    """The same for this process, from now on."""
    if os.environ.get(GLOO_INTERFACE, "").startswith("lo"):
        del os.environ[GLOO_INTERFACE]


def enter(place: str) -> None:
    """This thread lives on that computer from now on, and so do the threads and processes that it starts."""
    forget_loopback()
    with ExitStack() as stack:
        _set([stack.enter_context(open(path)).fileno() for path in place.split(":")])


@cache
def missing() -> str:
    """Why there can be no such computers here; empty when there can."""
    try:
        with Switch("a") as switch, switch.inside("a"):
            return ""
    except (OSError, AttributeError) as error:
        return f"several computers on one need root, Linux and /dev/net/tun: {error}"


def _change(way: Way, attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        if not hasattr(way, name):
            raise TypeError(f"a way has no {name}")
        setattr(way, name, value)


def _new_namespaces(name: str) -> tuple[int, int]:
    """Descriptors of a network and a host name of their own."""
    found: list[Any] = []

    def make() -> None:
        try:
            _call("unshare", CLONE_NEWNET | CLONE_NEWUTS)
            socket.sethostname(name)
            _configure("lo", "127.0.0.1", 65536)
            found.extend(os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts"))
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=make)  # a thread that ends: this one stays where it is
    thread.start()
    thread.join()
    if isinstance(found[-1], OSError):
        raise found[-1]
    return found[0], found[1]


def _configure(device: str, address: str, mtu: int) -> None:
    def request(number: int, value: bytes) -> None:
        fcntl.ioctl(asker, number, struct.pack("16s24s", device.encode(), value))

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for number, ip in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, "255.255.255.0")):
            request(number, struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(ip)))
        request(SIOCSIFMTU, struct.pack("i", mtu))
        request(SIOCSIFFLAGS, struct.pack("H", IFF_UP))


def _set(namespaces: Iterable[int]) -> None:
    for descriptor in namespaces:
        _call("setns", descriptor, 0)


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _write(port: int, packet: bytes) -> None:
    try:
        os.write(port, packet)
    except OSError:  # the interface is down, or its queue full: the packet is lost, as on any network
        return
