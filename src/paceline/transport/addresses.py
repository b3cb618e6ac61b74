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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any

from paceline import concurrency
from paceline.roster.calls import name_workers
from paceline.transport.group import Group, Watch
from paceline.transport.network import address_towards, interfaces

PATIENCE_S = 2.0
"""How long an address may take to answer."""
HEAD_START_S = 0.3
"""How long a worker's first address is waited for once another one has answered, besides twice the time that took."""
LABEL = "finding the network"

Said = Mapping[str, Any]
"""A worker's report: its ``addresses`` in the order of its liking, and its door's ``port`` and ``word``."""


def find_address(
    group: Group, own: Sequence[str], *, facts: Mapping[int, Mapping[str, Any]], watch: Watch, turn: int = 0
) -> str:
    """Return the address at which this worker is to be reached, of its ``own``.

    All workers of the group come here, and those of one computer need not try. Raises ConnectionError, with the names
    of two who do not reach each other, on all of them; ``facts``, in the order of ranks, name them.
    """
    if len({report.get("place") for report in facts.values()}) == 1:
        return own[0]
    names = list(name_workers(facts).values())
    with closing(Door()) as door:
        mine: dict[str, Any] = {"addresses": own, "port": door.port, "word": door.word}
        everybody: list[Said] = group.gather(f"addresses/{turn}", LABEL, mine, watch=watch)
        others = {rank: report for rank, report in enumerate(everybody) if rank != group.rank}
        for thorough in (False, True):
            mine = {str(rank): found for rank, found in reached(others, thorough=thorough).items()}
            found = group.gather(f"reached/{turn}/{int(thorough)}", LABEL, mine, watch=watch)
            chosen = [common(rank, everybody[rank]["addresses"], found) for rank in range(group.size)]
            if all(chosen):
                return chosen[group.rank]
    raise ConnectionError(unreached(everybody, found, names))


def own_addresses(host: str, port: int, *, first: str = "") -> list[str]:
    """Return this computer's addresses, the best first.

    That is the one that packets to ``host`` leave from, or the one that served before (``first``), if it is still
    there. GLOO_SOCKET_IFNAME leaves one.
    """
    named = interfaces().get(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    if named is not None:
        return [named]
    found = [address_towards(host, port), *(one for one in interfaces().values() if not one.startswith("127."))]
    return list(dict.fromkeys([*([first] if first in found else []), *found]))


def common(rank: int, addresses: Sequence[str], found: Sequence[Mapping[str, Sequence[str]]]) -> str:
    """Return the first of a worker's addresses that all others have reached; empty when there is none.

    >>> common(0, ["127.0.0.1", "10.0.0.1", "10.1.0.1"], [{}, {"0": ["10.1.0.1", "10.0.0.1"]}, {"0": ["10.1.0.1"]}])
    '10.1.0.1'
    """
    others = [theirs[str(rank)] for other, theirs in enumerate(found) if other != rank]
    return next((address for address in addresses if all(address in theirs for theirs in others)), "")


def unreached(everybody: Sequence[Said], found: Sequence[Mapping[str, Sequence[str]]], names: Sequence[str]) -> str:
    """Return a sentence: who does not reach whom, or whose addresses some reach and none is reached by all."""
    for rank, theirs in enumerate(found):
        for other in map(int, theirs):
            if not theirs[str(other)]:
                where = ", ".join(everybody[other]["addresses"])
                return f"{names[rank]} does not reach {names[other]} at {where}: a firewall, or no way between them"
    lonely = next(rank for rank, report in enumerate(everybody) if not common(rank, report["addresses"], found))
    ways = [f"{names[rank]} at {', '.join(theirs[str(lonely)])}" for rank, theirs in enumerate(found) if rank != lonely]
    return f"{names[lonely]} has no address that everybody reaches: {'; '.join(ways)}"


class Door:
    """A listener at all addresses of this computer that sends whoever comes a word.

    An address may be that of another computer in another network.
    """

    def __init__(self) -> None:
        self.word = secrets.token_hex(8)
        try:
            self._listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        except (OSError, ValueError):  # a computer without IPv6
            self._listener = socket.create_server(("", 0))
        self.port = int(self._listener.getsockname()[1])
        concurrency.Thread(target=self._answer, name="paceline-door", daemon=True).start()

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
    """Return the addresses of each other worker that answer from here.

    ``thorough``: all of them are waited for, and not only as long as a better one may come.
    """
    began, found, first_at = concurrency.monotonic(), {rank: list[str]() for rank in others}, dict[int, float]()
    tried = {rank: list(report["addresses"]) for rank, report in others.items()}  # but for those that have failed

    def waits_for(rank: int) -> bool:
        late = PATIENCE_S
        if not thorough and rank in first_at:
            late = min(late, 0.0 if tried[rank][0] in found[rank] else 3 * first_at[rank] + HEAD_START_S)
        return concurrency.monotonic() < began + late and len(found[rank]) < len(tried[rank])

    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        for rank, report in others.items():
            for address in report["addresses"]:
                try:
                    connection = stack.enter_context(closing(_connecting(address, report["port"])))
                    selector.register(connection, selectors.EVENT_READ, (rank, address, report["word"]))
                except OSError:  # no route
                    tried[rank].remove(address)
        while any(map(waits_for, others)) and selector.get_map():
            for key, _ in selector.select(0.02):
                rank, address, word = key.data
                selector.unregister(key.fileobj)
                if _hears(key.fileobj, word):
                    found[rank].append(address)
                    first_at.setdefault(rank, concurrency.monotonic() - began)
                else:
                    tried[rank].remove(address)
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
