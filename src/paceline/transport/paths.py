"""At which of its addresses each worker is reached by all others, where computers have several networks.

The route to where the fleet meets names one address. It is the wrong one where the roster is reached over another
network than the workers, or over loopback by those who share its computer. So workers on several computers say all
their addresses, each tries the others' (`reached`), and a worker takes the first of its own that everybody reaches.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

from paceline.transport.group import Group, Watch
from paceline.transport.network import address_towards, interfaces

PATIENCE_S = 2.0
"""How long an address may take to answer."""
HEAD_START_S = 0.3
"""How long a worker's first address is waited for once another one has answered, besides twice the time that took."""
LABEL = "finding the network"

Said = Mapping[str, Any]
"""What a worker says: ``place``, its ``addresses`` in the order of its liking, and its door's ``port`` and ``word``."""


def find_address(group: Group, towards: tuple[str, int], *, names: Sequence[str], watch: Watch, turn: int = 0) -> str:
    """The address at which this worker is to be reached; all workers of the group come here. ``towards``: where the
    fleet meets. Raises ConnectionError, with the names of two who do not reach each other, on all of them."""
    own = own_addresses(*towards)
    with closing(Door()) as door:
        mine = {"place": place(), "addresses": own, "port": door.port, "word": door.word}
        everybody: list[Said] = group.gather(f"addresses/{turn}", LABEL, mine, watch=watch)
        if len({said["place"] for said in everybody}) == 1:
            return own[0]
        others = {rank: said for rank, said in enumerate(everybody) if rank != group.rank}
        for thorough in (False, True):
            mine = {str(rank): found for rank, found in reached(others, thorough=thorough).items()}
            found = group.gather(f"reached/{turn}/{int(thorough)}", LABEL, mine, watch=watch)
            chosen = [common(rank, everybody[rank]["addresses"], found) for rank in range(group.size)]
            if all(chosen):
                return chosen[group.rank]
    raise ConnectionError(unreached(everybody, found, names))


def own_addresses(host: str, port: int) -> list[str]:
    """This computer's: first the one that packets to ``host`` leave from. GLOO_SOCKET_IFNAME leaves one."""
    named = interfaces().get(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    if named is not None:
        return [named]
    others = [address for address in interfaces().values() if not address.startswith("127.")]
    return list(dict.fromkeys([address_towards(host, port), *others]))


def place() -> str:
    """Names this computer as far as its network goes: in the same place, loopback is the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/thread-self/ns/net')}"
    except OSError:
        return socket.gethostname()


def common(rank: int, addresses: Sequence[str], found: Sequence[Mapping[str, Sequence[str]]]) -> str:
    """The first of a worker's addresses that all others have reached; empty when there is none.

    >>> common(0, ["127.0.0.1", "10.0.0.1", "10.1.0.1"], [{}, {"0": ["10.1.0.1", "10.0.0.1"]}, {"0": ["10.1.0.1"]}])
    '10.1.0.1'
    """
    others = [theirs[str(rank)] for other, theirs in enumerate(found) if other != rank]
    return next((address for address in addresses if all(address in theirs for theirs in others)), "")


def unreached(everybody: Sequence[Said], found: Sequence[Mapping[str, Sequence[str]]], names: Sequence[str]) -> str:
    """Who does not reach whom; where each is reached by all at some address, but not all at the same, it says so."""
    for rank, theirs in enumerate(found):
        for other in map(int, theirs):
            if not theirs[str(other)]:
                where = ", ".join(everybody[other]["addresses"])
                return f"{names[rank]} does not reach {names[other]} at {where}: a firewall, or no way between them"
    lonely = next(rank for rank, said in enumerate(everybody) if not common(rank, said["addresses"], found))
    ways = [f"{names[rank]} at {', '.join(theirs[str(lonely)])}" for rank, theirs in enumerate(found) if rank != lonely]
    return f"{names[lonely]} has no address that everybody reaches: {'; '.join(ways)}"


class Door:
    """Listens at all addresses of this computer, and tells whoever comes a word: an address may be that of another
    computer in another network."""

    def __init__(self) -> None:
        self.word = secrets.token_hex(8)
        try:
            self._listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        except (OSError, ValueError):  # a computer without IPv6
            self._listener = socket.create_server(("", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._answer, name="paceline-door", daemon=True).start()

    def _answer(self) -> None:
        with suppress(OSError):  # closed
            while True:
                guest, _ = self._listener.accept()
                with guest, suppress(OSError):
                    guest.sendall(self.word.encode())

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # the thread that accepts wakes
        self._listener.close()


def reached(others: Mapping[int, Said], *, thorough: bool) -> dict[int, list[str]]:
    """Which addresses of each other worker answer from here. ``thorough``: all of them are waited for, and not only as
    long as a better one may come."""
    began, found, first_at = time.monotonic(), {rank: list[str]() for rank in others}, dict[int, float]()

    def waits_for(rank: int) -> bool:
        now, mine = time.monotonic(), others[rank]["addresses"]
        if not thorough and mine[0] in found[rank]:
            return False
        late = began + PATIENCE_S
        if not thorough and rank in first_at:
            late = min(late, began + 3 * (first_at[rank] - began) + HEAD_START_S)
        return now < late and len(found[rank]) < len(mine)

    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        for rank, said in others.items():
            for address in said["addresses"]:
                with suppress(OSError):
                    connection = stack.enter_context(closing(_connecting(address, said["port"])))
                    selector.register(connection, selectors.EVENT_READ, (rank, address, said["word"]))
        while any(map(waits_for, others)) and selector.get_map():
            for key, _ in selector.select(0.02):
                rank, address, word = key.data
                selector.unregister(key.fileobj)
                if _hears(key.fileobj, word):
                    found[rank].append(address)
                    first_at.setdefault(rank, time.monotonic())
    return found


def _connecting(address: str, port: int) -> socket.socket:
    connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    connection.setblocking(False)
    try:
        with suppress(BlockingIOError):
            connection.connect((address, port))
    except OSError:
        connection.close()
        raise
    return connection


def _hears(connection: Any, word: str) -> bool:
    try:
        return bool(connection.recv(len(word)) == word.encode())
    except OSError:
        return False
