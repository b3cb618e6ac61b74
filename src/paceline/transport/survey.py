"""Finds out where workers are: round trips between computers, and what the links between them carry.

Only the first worker of each computer measures, and only what nobody has measured yet, so a fleet on one computer
measures nothing, and one that lost a member neither. A round trip is the time of opening a connection, which the other
computer's kernel answers by itself however busy its workers are.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

import torch

from paceline import concurrency
from paceline.transport.engines.base import Look
from paceline.transport.group import Group, Watch
from paceline.transport.network import place
from paceline.transport.topology import (
    Pair,
    Topology,
    arranged,
    computers_of,
    one_place,
    pair,
    sums_over_tree,
)

logger = logging.getLogger("paceline")

TRIES = 3
PATIENCE_S = 2.0
"""For all connections of one try."""
LANDMARKS = 64
"""Round trips are measured to so many computers, the first; those of larger fleets are near each other where they are
near the same one of these."""
PROBE_BYTES = 1 << 18
PROBE_TAG = (1 << 29) - 16
At = tuple[str, int]


def place_facts() -> dict[str, Any]:
    """What a worker says of where it is. PACELINE_SITES=off, on any worker, keeps the whole fleet to rings in the order
    of ranks; PACELINE_SITE names a worker's site in place of what is measured."""
    site, sites = os.environ.get("PACELINE_SITE", ""), os.environ.get("PACELINE_SITES", "").lower()
    if sites not in ("", "on", "off"):
        raise ValueError(f"PACELINE_SITES is {sites!r}; it can be on or off")
    here = f"{socket.gethostname()}/{sha256(place().encode()).hexdigest()[:8]}"
    computer = f"{here}@{site}" if site else here
    return {"computer": computer, **({"site": site} if site else {}), **({"sites": "off"} if sites == "off" else {})}


class Survey:
    """What this worker knows of the links between computers, from one group to the next. What nobody among the present
    heads of computers has said counts as unknown, so that all members measure the same."""

    def __init__(self) -> None:
        self._round_trips: dict[Pair, float] = {}
        self._speeds: dict[str, float] = {}
        """Bits/s from a computer to the next one in order."""

    def arrange(self, group: Group, facts: Sequence[Mapping[str, Any]], *, host: str, watch: Watch) -> Topology:
        """Where the workers of a group are, before it is connected; all of them come here. ``host``: the address at
        which this one is reached."""
        computers = computers_of(facts)
        if len(computers) == 1 or any(fact.get("sites") == "off" for fact in facts):
            return one_place(group.size)
        heads = {name: ranks[0] for name, ranks in computers.items()}
        here = next((name for name, head in heads.items() if head == group.rank), None)
        with _listening(host) as at:
            mine = {"at": at, **self._known(here, computers)} if here else None
            said = group.gather("places", "saying where it is", mine, watch=watch)
            self._round_trips, self._speeds = {}, {}
            for name, head in heads.items():
                self._note(name, said[head]["row"])
                if said[head]["speed"] is not None:
                    self._speeds[name] = float(said[head]["speed"])
            landmarks = list(computers)[:LANDMARKS]
            missing = {one: [at for at in landmarks if not self._knows(one, at)] for one in computers}
            if any(missing.values()):
                doors = {at: (str(said[heads[at]]["at"][0]), int(said[heads[at]]["at"][1])) for at in landmarks}
                row = round_trips({at: doors[at] for at in missing[here]}) if here else {}
                rows = group.gather("round trips", "measuring round trips", row, watch=watch)
                for name, head in heads.items():
                    self._note(name, rows[head])
        return arranged(facts, self._round_trips)

    def weigh(self, group: Group, topology: Topology, facts: Sequence[Mapping[str, Any]], *, watch: Watch) -> Topology:
        """The same with bandwidths, once the group is connected, and whether sums go over the tree."""
        if len(topology.computers) == 1:
            return topology
        if any(name not in self._speeds for name in topology.names):
            speed = (
                _speed(group, topology.heads, partial(_look, group, watch)) if group.rank in topology.heads else None
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


@contextmanager
def _listening(host: str) -> Iterator[At]:
    """Where connections are answered by the kernel, and by nobody else."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen(socket.SOMAXCONN)
        yield host, int(listener.getsockname()[1])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def round_trips(doors: Mapping[str, At], *, tries: int = TRIES) -> dict[str, float]:
    """Seconds that opening a connection to each door takes, the least of some tries; those that cannot be reached are
    left out."""
    found = _connect_all(doors)
    for _ in range(tries - 1 if found else 0):
        again = _connect_all({name: doors[name] for name in found})
        found = {name: min(seconds, again.get(name, seconds)) for name, seconds in found.items()}
    return found


def _connect_all(doors: Mapping[str, At]) -> dict[str, float]:
    found: dict[str, float] = {}
    until = concurrency.monotonic() + PATIENCE_S
    with selectors.DefaultSelector() as selector:
        for name, (host, port) in doors.items():
            one = socket.socket(_family(host), socket.SOCK_STREAM)
            one.setblocking(False)
            started = concurrency.perf_counter()
            if one.connect_ex((host, port)) in (0, errno.EINPROGRESS):
                selector.register(one, selectors.EVENT_WRITE, (name, started))
            else:
                one.close()
        while selector.get_map() and (left := until - concurrency.monotonic()) > 0:
            ready, now = selector.select(left), concurrency.perf_counter()
            for key, _ in ready:
                name, started = key.data
                if not key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):  # type: ignore[union-attr]
                    found[name] = now - started
                _close(selector, key.fileobj)
        for key in list(selector.get_map().values()):
            _close(selector, key.fileobj)
    return found


def _close(selector: selectors.BaseSelector, one: Any) -> None:
    selector.unregister(one)
    with suppress(OSError):
        one.close()


def _look(group: Group, watch: Watch) -> None:
    """Raise when a message in this group can no longer come."""
    watch.check()
    watch.check_group(group)


def _speed(group: Group, heads: Sequence[int], look: Look) -> float:
    """Bits/s from this computer to the next in order, measured by all of them at once: the time in which some bytes are
    sent and their receipt is, less that of one byte; the best of some tries, after one in which they meet."""
    place = heads.index(group.rank)
    before, after = heads[place - 1], heads[(place + 1) % len(heads)]
    _, *short = [_sent_on(group, before, after, 1, look) for _ in range(TRIES)]
    best = min(_sent_on(group, before, after, PROBE_BYTES, look) for _ in range(TRIES))
    return PROBE_BYTES * 8 / (best - min(*short, best / 2))


def _sent_on(group: Group, before: int, after: int, size: int, look: Look) -> float:
    data, got, receipts = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8), torch.zeros(2)
    coming = group.receive(got, before, PROBE_TAG)
    receipt = group.receive(receipts[:1], after, PROBE_TAG + 1)
    started = concurrency.perf_counter()
    sent = [group.send(data, after, PROBE_TAG)]
    coming.wait(look)
    sent.append(group.send(receipts[1:], before, PROBE_TAG + 1))
    receipt.wait(look)
    seconds = concurrency.perf_counter() - started
    for work in sent:
        work.wait(look)
    return seconds
