"""The rounds of a fleet in several sites: the bytes over every link, and the seconds that they take.

Every worker has a cable of its own into its site. Links lead from site to site, and all workers of a site share them.
Where no link joins two sites, their traffic takes the route over other sites with the least delay.

One ring of n workers, ordered site by site, sends ``2 (n - 1) / n * B`` over each of its hops. A part of the sum goes
round nearly twice, so the delays add up to ``2 (n - 1) / n`` times those of all hops. A link that k hops cross carries
k times as much. Small sums go in about log n turns.

With two levels the workers of a site send their data to one of them. These, one per site, exchange it over the s sites
(in parts, each summed by one of them: ``2 / s * B`` between any two, each way), and the sum comes back. Pieces of it
are on all these ways at once, so the slowest counts; the cable of the worker that crosses carries B for each other
worker of its site. Within one site every worker exchanges parts. A wire format of fewer bytes is used between workers
that exchange parts: in place of one ring, that is every worker.

TCP doubles what it sends with every round trip until the path is full, so t seconds after it was idle
``14,600 (2^(t / 2d) - 1)`` bytes are sent, d the path's delay, until that grows by the bandwidth. On 100 Mbit/s and
20 ms this costs 10 MB another 169 ms.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import permutations
from typing import Literal

from paceline.machines.link import Link
from paceline.transport.formats import part_of

Topology = Literal["ring", "two levels"]
Hop = tuple[str, str]
"""A site and the next, joined by one link."""

SMALL = 1 << 20
"""Bytes up to which a sum goes in turns and not round a ring (`paceline.transport.engines.small_sums`)."""
LITTLE = 1 << 14
"""Bytes that one worker sends in total, up to which it sends everything to everybody at once."""
FAST_BITS = 2.5e9
"""Bits per second from which on one ring within a site is as fast as two levels."""
FIRST_WINDOW = 14_600
"""Bytes that TCP sends before the first acknowledgement."""
HEADER_NUMBERS, HEADER_FIXED = 36, 136
"""Numbers of eight bytes in a round's header (`paceline.gradients.header`): per worker, and in addition."""


@dataclass(frozen=True)
class RoundCost:
    """The cost of a sum: ``latency_s``, which does not depend on its size, and ``transfer_s`` of sending."""

    latency_s: float = 0.0
    transfer_s: float = 0.0
    cable_bytes: float = 0.0
    """Bytes sent, and received, over the busiest worker's cable."""
    link_bytes: Mapping[Hop, float] = field(default_factory=dict)
    """Bytes over each link, per direction."""

    @property
    def seconds(self) -> float:
        return self.latency_s + self.transfer_s

    def then(self, other: RoundCost) -> RoundCost:
        """Return the cost of this sum and the other after it."""
        return self._with(other, self.latency_s + other.latency_s)

    def beside(self, other: RoundCost) -> RoundCost:
        """Return the cost of both sums at once: they share the links, and wait together."""
        return self._with(other, max(self.latency_s, other.latency_s))

    def _with(self, other: RoundCost, latency_s: float) -> RoundCost:
        hops = {*self.link_bytes, *other.link_bytes}
        links = {hop: self.link_bytes.get(hop, 0.0) + other.link_bytes.get(hop, 0.0) for hop in hops}
        transfer_s = self.transfer_s + other.transfer_s
        return RoundCost(latency_s, transfer_s, self.cable_bytes + other.cable_bytes, links)


@dataclass(frozen=True, eq=False)
class Sites:
    """The sites of a fleet: each site's cable (every worker there has one) and the links between sites."""

    cables: Mapping[str, Link]
    links: Mapping[frozenset[str], Link] = field(default_factory=dict)

    def link(self, hop: Hop) -> Link:
        return self.links[frozenset(hop)]

    def delay_s(self, start: str, stop: str) -> float:
        """Return the delay between two workers: the cable's within a site, the sum of the links' between two sites."""
        if start == stop:
            return self.cables[start].delay_s
        return sum(self.link(hop).delay_s for hop in self.route(start, stop))

    def route(self, start: str, stop: str) -> tuple[Hop, ...]:
        """Return the links from one site to another with the least delay; raise ValueError where none lead there."""
        if (found := self._routes[start].get(stop)) is None:
            raise ValueError(f"no link leads from {start} to {stop}")
        return found

    @cached_property
    def _routes(self) -> dict[str, dict[str, tuple[Hop, ...]]]:
        return {site: self._from(site) for site in self.cables}

    def _from(self, start: str) -> dict[str, tuple[Hop, ...]]:
        """Return the routes from a site to all others, by Dijkstra's algorithm."""
        found: dict[str, tuple[Hop, ...]] = {}
        queue: list[tuple[float, str, tuple[Hop, ...]]] = [(0.0, start, ())]
        while queue:
            delay_s, site, way = heapq.heappop(queue)
            if site in found:
                continue
            found[site] = way
            for ends, link in self.links.items():
                if site in ends and (other := next(iter(ends - {site}), site)) not in found:
                    heapq.heappush(queue, (delay_s + link.delay_s, other, (*way, (site, other))))
        return found

    def found(self, order: Sequence[str]) -> Topology:
        """Return the topology that a run chooses: two levels between sites or on slow cables."""
        slow = min(self.cables[site].bits_per_s for site in set(order)) < FAST_BITS
        return "two levels" if len(set(order)) > 1 or (slow and len(order) > 1) else "ring"

    # -- sums ------------------------------------------------------------------------------------------------------

    def sum(self, order: Sequence[str], data: float, topology: Topology = "ring", *, wire: float = 1.0) -> RoundCost:
        """Return the cost of a sum of ``data`` bytes over workers in these sites, in rank order.

        ``wire`` is the part of the bytes that is sent where parts are exchanged.
        """
        if len(order) < 2:
            return RoundCost()
        if topology == "two levels":
            return self._two_levels(order, data, wire)
        if wire < 1:
            return self._exchange(Counter(order), wire * data)
        return self._turns(order, data) if data <= SMALL else self._ring(order, data)

    def _ring(self, order: Sequence[str], data: float) -> RoundCost:
        workers = len(order)
        part = 2 * (workers - 1) / workers
        hops = Counter(zip(order, [*order[1:], order[0]]))
        latency_s = part * sum(many * self.delay_s(*hop) for hop, many in hops.items())
        return self._cost(hops, part * data, latency_s, cables=dict.fromkeys(order, part * data))

    def _turns(self, order: Sequence[str], data: float) -> RoundCost:
        """Return the cost of a sum in turns, in each of which every worker exchanges with one other.

        Ranks are ordered site by site, so the last turns cross links, with every worker's message.
        """
        sites = list(Counter(order).items())
        across = math.ceil(math.log2(len(sites)))
        inside = max(0, math.ceil(math.log2(len(order))) - across)
        crossing: Counter[Hop] = Counter()
        for turn in range(across):
            for number, (site, many) in enumerate(sites):
                crossing[site, sites[(number + 2**turn) % len(sites)][0]] += many
        near_s = inside * max(self.cables[site].delay_s for site, _ in sites)
        far_s = across * max((self.delay_s(*hop) for hop in crossing), default=0.0)
        return self._cost(crossing, data, near_s + far_s, cables=dict.fromkeys(order, (inside + across) * data))

    def _two_levels(self, order: Sequence[str], data: float, wire: float) -> RoundCost:
        inside = Counter(order)
        if len(inside) < 2:
            return self._exchange(inside, wire * data)
        across = self._exchange(Counter(list(inside)), wire * data)
        cables = {site: (many - 1) * data + across.cable_bytes for site, many in inside.items()}
        near = [site for site, many in inside.items() if many > 1]
        latency_s = across.latency_s + 2 * max((self.cables[site].delay_s for site in near), default=0.0)
        return self._over(across.link_bytes, latency_s, cables)

    def _exchange(self, workers: Counter[str], data: float) -> RoundCost:
        """Return the cost of an exchange of parts: everybody sends each other its part, then the sum of its own.

        Two workers, and workers with little data, send everything at once instead.
        """
        many = workers.total()
        if many < 2:
            return RoundCost()
        times, part = (1, data) if many == 2 or (many - 1) * data <= LITTLE else (2, data / many)
        pairs = permutations(workers, 2)
        hops = Counter({(start, stop): times * workers[start] * workers[stop] for start, stop in pairs})
        far_s = [self.delay_s(*hop) for hop in hops]
        near_s = [self.cables[site].delay_s for site, here in workers.items() if here > 1]
        cables = dict.fromkeys(workers, times * (many - 1) * part)
        return self._cost(hops, part, times * max(*far_s, *near_s, 0.0), cables=cables)

    def _cost(self, hops: Counter[Hop], data: float, latency_s: float, *, cables: Mapping[str, float]) -> RoundCost:
        """Return the cost of ``data`` bytes over every hop, as often as it is counted.

        ``cables`` has the bytes over each worker's own cable, by site.
        """
        carried: dict[Hop, float] = {}
        for (start, stop), many in hops.items():
            for hop in self.route(start, stop) if start != stop else ():
                carried[hop] = carried.get(hop, 0.0) + many * data
        return self._over(carried, latency_s, cables)

    def _over(self, carried: Mapping[Hop, float], latency_s: float, cables: Mapping[str, float]) -> RoundCost:
        """Return the cost of these bytes over links and cables, all sent at once."""
        times = [sending_s(self.link(hop), amount) for hop, amount in carried.items()]
        times += [sending_s(self.cables[site], amount) for site, amount in cables.items()]
        return RoundCost(latency_s, max(times, default=0.0), max(cables.values(), default=0.0), carried)


def sending_s(link: Link, data: float) -> float:
    """Return the seconds to send ``data`` bytes over a path that was idle, without its delay.

    >>> round(sending_s(Link(100e6, 0.02), 10e6), 3), sending_s(Link(100e6, 0.0), 10e6)
    (0.969, 0.8)
    """
    trip_s, full = 2 * link.delay_s, 2 * link.delay_s * link.bits_per_s / 8
    if full <= FIRST_WINDOW * math.log(2):
        return 8 * data / link.bits_per_s
    sent = full / math.log(2) - FIRST_WINDOW
    if data <= sent:
        return trip_s * math.log2(1 + data / FIRST_WINDOW)
    return trip_s * math.log2(1 + sent / FIRST_WINDOW) + 8 * (data - sent) / link.bits_per_s


@dataclass(frozen=True)
class SiteNetwork:
    """A fleet's rounds on its sites, with the figures that `paceline.simulate.network` needs (`RoundCosts`)."""

    sites: Sites
    order: tuple[str, ...]
    """Each worker's site, in rank order."""
    model_bytes: int
    wire: str = "float32"
    topology: Topology = "ring"

    @property
    def workers(self) -> int:
        return len(self.order)

    @property
    def gradients_s(self) -> float:
        return self.gradients.seconds

    @property
    def average_s(self) -> float:
        return self.average.seconds

    @property
    def sent_bytes(self) -> float:
        return self.gradients.cable_bytes

    @property
    def gradients(self) -> RoundCost:
        """The cost of a round of gradients: the model's sum and, at the same time, the header's."""
        return self._sum(self.model_bytes, part_of(self.wire)).beside(self.header)

    @property
    def average(self) -> RoundCost:
        """The cost of a round of parameters: a table of facts, from which all compute the weights, then the sum."""
        return self.header.then(self._sum(self.model_bytes, part_of(self.wire)))

    @property
    def header(self) -> RoundCost:
        """The cost of a header's sum: small facts of all workers, and the leader's plan."""
        return self._sum(header_bytes(self.workers))

    def _sum(self, data: float, wire: float = 1.0) -> RoundCost:
        return _sum(self.sites, self.order, data, self.topology, wire)


def header_bytes(workers: int) -> int:
    return 8 * (HEADER_NUMBERS * workers + HEADER_FIXED)


@lru_cache(maxsize=256)
def _sum(sites: Sites, order: tuple[str, ...], data: float, topology: Topology, wire: float) -> RoundCost:
    return sites.sum(order, data, topology, wire=wire)
