"""Finds out where workers are: at which address each is reached, and what the links between computers carry.

The route to where the fleet meets names one address. It is the wrong one where the roster is reached over another
network than the workers, or over loopback by those who share its computer. So workers on several computers say all
their addresses, each tries the others' (`reached`), and a worker takes the first of its own that everybody reaches
(`find_address`).

`Survey` measures round trips between computers, and the links between them (`paceline.transport.link_speed`). Only the
first worker of each computer measures, and only what nobody has measured yet, so a fleet on one computer measures
nothing, and one that lost a member neither.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

import torch

from paceline import concurrency
from paceline.roster.calls import name_workers
from paceline.transport.engines.contract import PROBE_TAG, Check
from paceline.transport.group import Group, Watch
from paceline.transport.link_speed import TRIES, bandwidth, listening_at, round_trips
from paceline.transport.network import address_towards, interfaces, place
from paceline.transport.topology import Pair, Topology, arranged, computers_of, one_place, pair, sums_over_tree

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


logger = logging.getLogger("paceline")

LANDMARKS = 64
"""Number of computers, the first, to which round trips are measured; those of larger fleets are near each other where
they are near the same one of these."""


def place_facts() -> dict[str, Any]:
    """Return a worker's facts about where it is.

    PACELINE_SITES=off, on any worker, keeps the whole fleet to rings in the order of ranks; PACELINE_SITE names a
    worker's site in place of what is measured.
    """
    site, sites = os.environ.get("PACELINE_SITE", ""), os.environ.get("PACELINE_SITES", "").lower()
    if sites not in ("", "on", "off"):
        raise ValueError(f"PACELINE_SITES is {sites!r}; it can be on or off")
    here = f"{socket.gethostname()}/{sha256(place().encode()).hexdigest()[:8]}"
    computer = f"{here}@{site}" if site else here
    return {"computer": computer, **({"site": site} if site else {}), **({"sites": "off"} if sites == "off" else {})}


class Survey:
    """The links between computers, as this worker has measured or received them, from one group to the next.

    What nobody among the present heads of computers has said counts as unknown, so that all members measure the same.
    """

    def __init__(self) -> None:
        self._round_trips: dict[Pair, float] = {}
        self._speeds: dict[str, float] = {}
        """Bits/s from a computer to the next one in order."""

    def arrange(self, group: Group, facts: Sequence[Mapping[str, Any]], *, host: str, watch: Watch) -> Topology:
        """Find out where the workers of a group are, before it is connected; all of them come here.

        ``host`` is the address at which this one is reached.
        """
        computers = computers_of(facts)
        if len(computers) == 1 or any(fact.get("sites") == "off" for fact in facts):
            return one_place(group.size)
        heads = {name: ranks[0] for name, ranks in computers.items()}
        here = next((name for name, head in heads.items() if head == group.rank), None)
        with listening_at(host) as at:
            mine = {"at": at, **self._known(here, computers)} if here else None
            reports = group.gather("places", "saying where it is", mine, watch=watch)
            self._round_trips, self._speeds = {}, {}
            for name, head in heads.items():
                self._note(name, reports[head]["row"])
                if reports[head]["speed"] is not None:
                    self._speeds[name] = float(reports[head]["speed"])
            landmarks = list(computers)[:LANDMARKS]
            missing = {one: [at for at in landmarks if not self._knows(one, at)] for one in computers}
            if any(missing.values()):
                doors = {at: (str(reports[heads[at]]["at"][0]), int(reports[heads[at]]["at"][1])) for at in landmarks}
                row = round_trips({at: doors[at] for at in missing[here]}) if here else {}
                rows = group.gather("round trips", "measuring round trips", row, watch=watch)
                for name, head in heads.items():
                    self._note(name, rows[head])
        return arranged(facts, self._round_trips)

    def weigh(self, group: Group, topology: Topology, facts: Sequence[Mapping[str, Any]], *, watch: Watch) -> Topology:
        """Return the topology with bandwidths, once the group is connected, and whether sums go over the tree."""
        if len(topology.computers) == 1:
            return topology
        if any(name not in self._speeds for name in topology.names):
            speed = (
                _speed(group, topology.heads, partial(_check, group, watch)) if group.rank in topology.heads else None
            )
            speeds = group.gather("speeds", "measuring what the links carry", speed, watch=watch)
            self._speeds = {name: float(speeds[head]) for name, head in zip(topology.names, topology.heads)}
        after = [*topology.heads[1:], topology.heads[0]]
        ends = zip(topology.names, topology.heads, after, strict=True)
        bits_s = min((self._speeds[name] for name, one, other in ends if topology.crosses(one, other)), default=None)
        found = replace(topology, bits_s=bits_s, tree=sums_over_tree(topology, facts, bits_s=bits_s))
        logger.info("worker %d of %d is in %s", group.rank, group.size, found.facts(range(group.size)))
        return found

    def _known(self, here: str, computers: Mapping[str, Any]) -> dict[str, Any]:
        row = {other: self._round_trips.get(pair(here, other)) for other in computers if other != here}
        known = {other: seconds for other, seconds in row.items() if seconds is not None}
        return {"row": known, "speed": self._speeds.get(here)}

    def _note(self, here: str, row: Mapping[str, float]) -> None:
        for other, seconds in row.items():
            before = self._round_trips.get(pair(here, other), seconds)
            self._round_trips[pair(here, other)] = min(before, seconds)

    def _knows(self, one: str, other: str) -> bool:
        return one == other or pair(one, other) in self._round_trips


def _check(group: Group, watch: Watch) -> None:
    """Raise when a message in this group can no longer come."""
    watch.check()
    watch.check_group(group)


def _speed(group: Group, heads: Sequence[int], check: Check) -> float:
    """Return the bits per second from this computer to the next in order, measured by all of them at once.

    The first try of the shortest message, in which all meet, does not count.
    """
    position = heads.index(group.rank)
    before, after = heads[position - 1], heads[(position + 1) % len(heads)]
    _, *short = [_sent_on(group, before, after, 1, check) for _ in range(TRIES)]
    return bandwidth(lambda size: _sent_on(group, before, after, size, check), trip_s=min(short), tries=TRIES)


def _sent_on(group: Group, before: int, after: int, size: int, check: Check) -> float:
    """Return the seconds until this worker has received from ``before``, and ``after`` has confirmed what it got."""
    data, got, receipts = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8), torch.zeros(2)
    coming = group.receive(got, before, PROBE_TAG)
    receipt = group.receive(receipts[:1], after, PROBE_TAG + 1)
    started = concurrency.perf_counter()
    sent = [group.send(data, after, PROBE_TAG)]
    coming.wait(check)
    sent.append(group.send(receipts[1:], before, PROBE_TAG + 1))
    receipt.wait(check)
    seconds = concurrency.perf_counter() - started
    for work in sent:
        work.wait(check)
    return seconds
