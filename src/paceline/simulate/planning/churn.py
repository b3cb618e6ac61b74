"""What machines that are taken away cost a fleet: they are not there for a while, and the others stop to go on without.

With a_i the part of the time that machine i is there and v_i its speed, ``sum a_i v_i / sum v_i`` of the fleet's speed
is left. Of every reclaim the fleet hears twice: when the machine goes, and when another takes its place, which needs
the training's state. With c such changes a second of training and P seconds each, ``1 / (1 + c P)`` of the time is
training.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.simulate.planning.fleet_spec import HOUR_S, FleetSpec

NOTICED_S, MESH_S, ROSTER_S = 0.08, 1e-4, 1.6e-6
"""Until n members have formed a new group, ``NOTICED_S + MESH_S n + ROSTER_S n^2``: a loss is noticed and the round run
again (`benchmarks/kill.py`), each worker connects to all others, and the roster asks at every member's word whether all
have spoken (`benchmarks/roster_scale.py`)."""


@dataclass(frozen=True)
class Churn:
    """How much of the fleet's speed is left of it."""

    present: float
    """Part of the sum of speeds that is there."""
    changes_per_s: float
    """Members that go or come, a second."""
    going_s: float
    """The pause when one goes."""
    coming_s: float
    """And when one comes."""

    @property
    def paused(self) -> float:
        """Seconds of pause for each second of training."""
        return self.changes_per_s / 2 * (self.going_s + self.coming_s)

    @property
    def left(self) -> float:
        """Part of the undisturbed fleet's samples a second."""
        return self.present / (1 + self.paused)


def churn(fleet: FleetSpec) -> Churn:
    """Newcomers take the state from a peer in their own site, or over the link where they are alone."""
    speeds, present = fleet.column("speed"), fleet.column("present")
    reclaims = fleet.column("reclaimed_per_hour") * present / HOUR_S
    going_s = reform_s(fleet.workers)
    coming_s = going_s + 8 * fleet.training.state_bytes / _slowest_bits(fleet)
    return Churn(float((present * speeds).sum() / speeds.sum()), 2 * float(reclaims.sum()), going_s, coming_s)


def reform_s(workers: int) -> float:
    """Seconds until so many members have formed a new group.

    >>> round(reform_s(4), 2), round(reform_s(1000), 1)
    (0.08, 1.8)
    """
    return NOTICED_S + MESH_S * workers + ROSTER_S * workers**2


def _slowest_bits(fleet: FleetSpec) -> float:
    """Bandwidth of the slowest way that a reclaimed machine's state may come."""
    inside: dict[str, int] = {}
    for kind in fleet.kinds:
        inside[kind.site] = inside.get(kind.site, 0) + kind.count
    found = []
    for site in {kind.site for kind in fleet.kinds if kind.reclaimed_per_hour}:
        found.append(fleet.sites.cables[site].bits_per_s)
        others = [other for other in inside if other != site]
        if inside[site] == 1 and others:
            found.append(max(_narrowest(fleet, other, site) for other in others))
    return min(found, default=float("inf"))


def _narrowest(fleet: FleetSpec, start: str, stop: str) -> float:
    return min(fleet.sites.link(hop).bits_per_s for hop in fleet.sites.route(start, stop))
