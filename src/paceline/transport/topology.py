"""The places of workers: computers, sites of computers that are near one another, and the tree over which they sum.

Workers of one computer add up their parts, then computers of one site, and the first worker of each site crosses the
links between sites: with n workers behind a link a sum crosses it once each way, where a ring's hops carry it nearly
twice, and ``2 n`` times when ranks lie unluckily. Everything here is a pure function of facts that all workers know, so
all come to the same tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

NEAR_S = 0.001
"""Round trips below this are a local network's, whatever they are on a busy computer."""
CLEARLY = 4.0
"""Factor between round trips of two sites and those within from which they count as two."""
FLOOR_S = NEAR_S / CLEARLY
"""Below this, round trips are noise."""
FAST_BITS_S = 2.5e9
"""From here on a ring through the computers in order is as fast: the tree's first level costs what its last saves."""

Pair = tuple[str, str]
Links = Mapping[Pair, float]
"""Seconds of a round trip between two computers, named in order."""


def pair(one: str, other: str) -> Pair:
    return (one, other) if one < other else (other, one)


def near_ones(computers: Sequence[str], links: Links) -> list[list[str]]:
    """Return computers by site, in order.

    The shortest links that join all of them, sorted by length, fall into near and far where the next is `CLEARLY`
    longer and no less than `NEAR_S`, at the last such gap; without one all are near, or all far. A link that took long
    by noise is not among these as long as there is another way, so it parts nobody. A computer with no known link is by
    itself.

    >>> near_ones(["a", "b", "c"], {("a", "b"): 0.0004, ("a", "c"): 0.021, ("b", "c"): 0.02})
    [['a', 'b'], ['c']]
    """
    joins = _shortest_joins(computers, links)
    known = [seconds for seconds, _ in joins]
    gaps = [low for low, high in pairwise(known) if high >= max(NEAR_S, CLEARLY * low)]
    limit = gaps[-1] if gaps else known[-1] if known and known[-1] < NEAR_S else 0.0
    site = {computer: [computer] for computer in computers}
    for seconds, (one, other) in joins:
        if seconds <= limit:
            _merge(site, one, other)
    return [list(one) for one in dict.fromkeys(tuple(sorted(s, key=computers.index)) for s in site.values())]


def _shortest_joins(computers: Sequence[str], links: Links) -> list[tuple[float, Pair]]:
    """Return the links, shortest first, between what shorter ones have not joined yet (a least spanning tree)."""
    joined, found = {computer: [computer] for computer in computers}, []
    for seconds, (one, other) in sorted((max(seconds, FLOOR_S), ends) for ends, seconds in links.items()):
        if joined[one] is not joined[other]:
            _merge(joined, one, other)
            found.append((seconds, (one, other)))
    return found


def _merge(groups: dict[str, list[str]], one: str, other: str) -> None:
    merged = [*groups[one], *groups[other]]
    for computer in merged:
        groups[computer] = merged


@dataclass(frozen=True)
class Branch:
    """One worker's place in the tree; others are ranks."""

    children: tuple[int, ...] = ()
    """The ranks whose sums it adds to its own part, in this order."""
    parent: int | None = None
    """The rank that adds its sum; None: it crosses between sites."""
    tops: tuple[int, ...] = ()
    """All that cross, in the order in which their sums are added."""


@dataclass(frozen=True)
class Topology:
    """The places of a group's workers, by rank."""

    sites: tuple[tuple[tuple[int, ...], ...], ...]
    """Ranks by site and computer, all in the order of ranks; the first of each is the one that crosses."""
    names: tuple[str, ...] = ()
    """The computers', in the same order."""
    tree: bool = False
    """Whether sums go over the tree; else over a ring in `order`."""
    far_s: float | None = None
    """The shortest round trip between two sites or, where there is one site, two computers."""
    bits_s: float | None = None
    """What the slowest link there carries."""
    by_name: bool = field(default=False, compare=False)
    """Whether PACELINE_SITE names the sites."""

    @cached_property
    def computers(self) -> tuple[tuple[int, ...], ...]:
        return tuple(computer for site in self.sites for computer in site)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Ranks such that neighbours are near: a ring crosses between two sites once each way."""
        return tuple(rank for computer in self.computers for rank in computer)

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """The first worker of each computer."""
        return tuple(computer[0] for computer in self.computers)

    @property
    def places(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """What crosses among itself: sites or, where there is one, its computers."""
        return self.sites if len(self.sites) > 1 else tuple((computer,) for computer in self.computers)

    def branch(self, rank: int) -> Branch:
        """Return a worker's position in the tree.

        >>> Topology(sites=(((0, 1), (2, 3)), ((4, 5),))).branch(0)
        Branch(children=(1, 2), parent=None, tops=(0, 4))
        """
        tops = tuple(place[0][0] for place in self.places)
        for place in self.places:
            for computer in place:
                if rank in computer:
                    if rank != computer[0]:
                        return Branch((), computer[0], tops)
                    if rank != place[0][0]:
                        return Branch(computer[1:], place[0][0], tops)
                    return Branch((*computer[1:], *(other[0] for other in place[1:])), None, tops)
        raise ValueError(f"no worker of rank {rank} in {self.sites}")

    def crosses(self, head: int, other: int) -> bool:
        """Return whether these two are at unlike places."""
        return not any({head, other} <= {rank for computer in place for rank in computer} for place in self.places)

    def among(self, ranks: Sequence[int]) -> Topology:
        """Return the topology of some of these workers, whose ranks are counted anew."""
        found = {rank: number for number, rank in enumerate(ranks)}
        kept = [[[found[r] for r in computer if r in found] for computer in site] for site in self.sites]
        names = [n for n, computer in zip(self.names, self.computers) if any(r in found for r in computer)]
        sites = tuple(tuple(tuple(c) for c in site if c) for site in kept if any(site))
        several = sum(map(len, sites)) > 1
        return Topology(sites, tuple(names), self.tree and several, self.far_s, self.bits_s, self.by_name)

    def facts(self, workers: Sequence[int]) -> dict[str, Any]:
        """Return facts for the run's log (JSON), with each worker's own name in place of its rank."""
        sites = [[[workers[rank] for rank in computer] for computer in site] for site in self.sites]
        return {"sites": sites, "tree": self.tree, "round_trip_s": self.far_s, "bits_s": self.bits_s}


def computers_of(facts: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each computer's workers, in the order of their first.

    A worker without that fact counts by host.
    """
    found: dict[str, list[int]] = {}
    for rank, fact in enumerate(facts):
        found.setdefault(str(fact.get("computer") or fact.get("host")), []).append(rank)
    return {name: tuple(ranks) for name, ranks in found.items()}


def one_place(size: int) -> Topology:
    """Return the topology of workers that are on one computer, or of which nothing more is known."""
    return Topology(sites=((tuple(range(size)),),))


def arranged(facts: Sequence[Mapping[str, Any]], links: Links) -> Topology:
    """Return the topology, so far without bandwidths, of workers with these facts.

    PACELINE_SITE, where all have it, takes the place of what was measured.
    """
    computers = computers_of(facts)
    named = {name: facts[ranks[0]].get("site") for name, ranks in computers.items()}
    by_name = all(named.values()) and len(set(named.values())) > 1
    if by_name:
        sites = [[one for one in computers if named[one] == site] for site in dict.fromkeys(named.values())]
    else:
        sites = near_ones(list(computers), links)
    where = {computer: number for number, site in enumerate(sites) for computer in site}
    between = {ends: seconds for ends, seconds in links.items() if len(sites) == 1 or where[ends[0]] != where[ends[1]]}
    return Topology(
        tuple(tuple(computers[name] for name in site) for site in sites),
        tuple(name for site in sites for name in site),
        far_s=min(between.values(), default=None),
        by_name=by_name,
    )


def sums_over_tree(topology: Topology, facts: Sequence[Mapping[str, Any]], *, bits_s: float | None) -> bool:
    """Return whether the tree is worth it: the link between places is long or slow, and tensors lie in main memory."""
    several = len(topology.computers) > 1
    on_cpus = all(str(fact["device"]).startswith("cpu") for fact in facts)
    slow = topology.by_name or len(topology.sites) > 1 or (bits_s is not None and bits_s < FAST_BITS_S)
    return several and on_cpus and slow
