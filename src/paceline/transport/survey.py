"""Finds out where workers are: round trips between computers, and what the links between them carry.

Only the first worker of each computer measures, and only what nobody has measured yet, so a fleet on one computer
measures nothing, and one that lost a member neither (`paceline.transport.link_speed` measures).
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

import torch

from paceline import concurrency
from paceline.transport.engines.contract import PROBE_TAG, Check
from paceline.transport.group import Group, Watch
from paceline.transport.link_speed import TRIES, bandwidth, listening_at, round_trips
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
