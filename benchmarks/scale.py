"""A plan for 10, 100, 1,000 and 10,000 workers in five sites that come and go, and what breaks first.

The rows are those of ``paceline plan``: the simulator's own pacers, rounds and network. Half of the machines are old
ones; each is reclaimed once in ten hours and stalls once an hour. The batch grows with the fleet, so that a step is as
long everywhere. What breaks is looked for at sizes in between: a part breaks where it takes more than a fifth of the
time, or all that it may take. ``computed_cpu_s`` are the processor seconds of a row.

    python benchmarks/scale.py [--smoke]
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from _smoke import smoke
from plan_scale import measure as plan_ms

from paceline.machines.link import parse_link
from paceline.simulate.goodput import reform_s
from paceline.simulate.planning.advice import best, best_average
from paceline.simulate.planning.choices import Choice, Player, choices
from paceline.simulate.planning.fleet_spec import FleetSpec, MachineKind, TrainedModel, churn
from paceline.simulate.sites import SiteNetwork, Sites, Topology, sending_s

SIZES = (10, 100, 1_000, 10_000)
STEPS: int | None = None
BETWEEN = tuple(round(10 * 2 ** (power / 2)) for power in range(23))
"""Sizes at which parts are looked at: 10 to about 20,000."""
PLACES = ("amsterdam", "berlin", "cork", "dresden", "espoo")
CABLE, LINK = "10gbit,0.05ms", "10gbit,10ms"
PARAMETERS, SHARE, SAMPLE_S = 25_000_000, 32, 0.1
TOO_MUCH = 0.2
"""A part breaks where it takes more than this part of the time."""
BEAT_CPU_S, BEATS_PER_S = 1e-4, 5
"""The roster's processor time for a beat (`roster_scale.py`), and a worker's beats."""
OPEN_FILES = 1024
"""Files that a process may have open, as systems come; a worker is connected to all others."""

globals().update(smoke(SIZES=(10, 20), STEPS=10, BETWEEN=(10, 100, 1_000)))


def fleet(workers: int) -> FleetSpec:
    """Half of each site's machines are old ones of half the speed."""
    sites = Sites(
        {place: parse_link(CABLE) for place in PLACES},
        {frozenset(ends): parse_link(LINK) for ends in combinations(PLACES, 2)},
    )
    coming = {"reclaimed_per_hour": 0.1, "stalls_per_hour": 1.0, "stall_s": 5.0}
    kinds = []
    for number, place in enumerate(PLACES):
        here = workers // 5 + (number < workers % 5)
        old = here // 2
        kinds += [MachineKind(f"new in {place}", place, here - old, 1.0, cost_per_hour=1.0, **coming)]
        kinds += [MachineKind(f"old in {place}", place, old, 0.5, cost_per_hour=0.3, **coming)] if old else []
    return FleetSpec(tuple(kinds), sites, TrainedModel(4 * PARAMETERS, SHARE * workers, SAMPLE_S))


@dataclass(frozen=True)
class Part:
    """Something that grows with the fleet."""

    name: str
    load: Callable[[int], float]
    """Of what it may take at most, at this size; it breaks above 1."""


def links_s(network: SiteNetwork) -> float:
    sent = network.gradients.link_bytes
    return max(sending_s(network.sites.link(hop), data) for hop, data in sent.items())


def cable_s(network: SiteNetwork) -> float:
    return sending_s(parse_link(CABLE), network.gradients.cable_bytes)


def parts() -> list[Part]:
    step_s = SHARE * SAMPLE_S * 4 / 3  # as many old machines as new ones

    def seconds(part: Callable[[SiteNetwork], float], topology: Topology) -> Callable[[int], float]:
        def load(workers: int) -> float:
            spec = fleet(workers)
            took_s = part(SiteNetwork(spec.sites, spec.order, spec.training.model_bytes, "float32", topology))
            return took_s / (took_s + step_s) / TOO_MUCH

        return load

    def planning(workers: int) -> float:
        made, observed = plan_ms(workers)
        return (made + observed) / 1000 / step_s / TOO_MUCH

    def pauses(workers: int) -> float:
        paused = churn(fleet(workers)).paused
        return paused / (1 + paused) / TOO_MUCH

    return [
        Part("delays, one ring", seconds(lambda network: network.gradients.latency_s, "ring")),
        Part("delays, two levels", seconds(lambda network: network.gradients.latency_s, "two levels")),
        Part("links, one ring", seconds(links_s, "ring")),
        Part("links, two levels", seconds(links_s, "two levels")),
        Part("cables, one ring", seconds(cable_s, "ring")),
        Part("cable of who crosses, two levels", seconds(cable_s, "two levels")),
        Part("header, one ring", seconds(lambda network: network.header.seconds, "ring")),
        Part("header, two levels", seconds(lambda network: network.header.seconds, "two levels")),
        Part("the leader's plan", planning),
        Part("the roster's beats", lambda workers: workers * BEATS_PER_S * BEAT_CPU_S),
        Part("pauses when members change", pauses),
        Part("open files of a worker", lambda workers: (workers + 3) / OPEN_FILES),
    ]


def breaks() -> dict[str, int | None]:
    """By part: the size from which on it takes too much; None up to the largest looked at."""
    found: dict[str, int | None] = {}
    for part in parts():
        above = next((size for size in BETWEEN if part.load(size) > 1), None)
        below = max((size for size in BETWEEN if above is not None and size < above), default=above or 0)
        while above is not None and above - below > 1:
            middle = (below + above) // 2
            below, above = (below, middle) if part.load(middle) > 1 else (middle, above)
        found[part.name] = above
        print(f"{part.name:<32} {found[part.name] or f'not up to {BETWEEN[-1]:,}'}", flush=True)
    return found


def row(workers: int) -> dict[str, Any]:
    began, cpu = time.perf_counter(), time.process_time()
    player = Player(fleet(workers), steps=STEPS)
    found = choices(player)
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    exact = best(found)
    average = best_average(found)

    def of(wire: str, topology: Topology) -> Choice:
        return next(one for one in found if (one.pace, one.comm_dtype, one.topology) == (exact.pace, wire, topology))

    return {
        "workers": workers,
        "limit": player.limit_per_s,
        "pace": exact.pace,
        "ring": of("float32", "ring").over_limit,
        "two_levels": of("float32", "two levels").over_limit,
        "two_levels_bf16": of("bf16", "two levels").over_limit,
        "average": average.over_limit if average else None,
        "average_name": f"{average.name}, {average.comm_dtype}" if average else None,
        "round_s": of("float32", "two levels").round_s,
        "ring_s": of("float32", "ring").round_s,
        "change_every_s": 1 / player.churn.changes_per_s,
        "paused": player.churn.paused / (1 + player.churn.paused),
        "reform_s": reform_s(workers),
        "computed_s": took_s,
        "computed_cpu_s": cpu_s,
    }


def main() -> None:
    rows = []
    for workers in SIZES:
        rows.append(row(workers))
        print(json.dumps(rows[-1]), flush=True)
    broken = breaks()
    first = min((size, name) for name, size in broken.items() if size) if any(broken.values()) else (None, None)
    slowest = {f"slowest_row_{name}": max(one[f"computed_{name}"] for one in rows) for name in ("s", "cpu_s")}
    print(json.dumps({"rows": rows, "breaks": broken, "breaks_first": first[1], "at": first[0], **slowest}))


if __name__ == "__main__":
    main()
