"""Goodput of a described fleet whose machines fail: Paceline beside restarts from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.simulate import goodput_table
from paceline.simulate.goodput import compare_goodput, fleet_mtbf_s, usual_costs
from paceline.simulate.planning.choices import Choice
from paceline.simulate.planning.fleet_spec import HOUR_S, FleetSpec, churn


@dataclass(frozen=True)
class FleetGoodput:
    """What failures leave of a fleet, as figures and in sentences."""

    figures: dict[str, Any]
    sentences: list[str]


def with_failures(fleet: FleetSpec, *, mtbf_h: float | None, replace_s: float | None) -> FleetSpec:
    """Return the fleet with a mean time between failures for machines that the file says nothing of."""
    if mtbf_h is None:
        if replace_s is not None:
            raise ValueError("--replace-s goes with --mtbf-h, a machine's mean hours between failures")
        return fleet
    if not mtbf_h > 0:
        raise ValueError(f"--mtbf-h is {mtbf_h:g}: hours, above 0")
    if replace_s is None or not (replace_s >= 0 and math.isfinite(replace_s)):
        raise ValueError("--mtbf-h needs --replace-s, the seconds until a machine that failed is replaced, at least 0")
    kinds = (
        kind if kind.reclaimed_per_hour else replace(kind, reclaimed_per_hour=1 / mtbf_h, away_s=replace_s)
        for kind in fleet.kinds
    )
    return replace(fleet, kinds=tuple(kinds))


def fleet_goodput(
    fleet: FleetSpec, chosen: Choice, *, seed: int = 0, known: Mapping[str, float] | None = None
) -> FleetGoodput | None:
    """Return the goodput of a fleet that trains as ``chosen``; None where no machine fails.

    ``known`` are costs that replace the usual ones. A newcomer's state takes as long as its slowest way, at least.
    """
    rates = fleet.column("reclaimed_per_hour") / HOUR_S
    if not rates.any():
        if known:
            raise ValueError("--costs are those of failures: give --mtbf-h, or reclaimed_per_hour in [[machines]]")
        return None
    mtbf_s = [1 / rate if rate else math.inf for rate in rates.tolist()]
    somebody_s, changes = fleet_mtbf_s(fleet.workers, mtbf_s), churn(fleet)
    step_s = fleet.training.batch / chosen.samples_per_s
    size = {"state_bytes": fleet.training.state_bytes, "fleet_mtbf_s": somebody_s}
    join_s = max(changes.coming_s, usual_costs(fleet.workers, **size).join_s)
    costs = usual_costs(fleet.workers, **size, **{"step_s": step_s, "join_s": join_s, **(known or {})})
    away_s, speeds = fleet.column("away_s").tolist(), fleet.column("speed").tolist()
    found = compare_goodput(speeds, costs, mtbf_s=mtbf_s, replace_s=away_s, seed=seed)
    sentences = goodput_table.verdict(found, costs, fleet_mtbf_s=somebody_s)
    return FleetGoodput(goodput_table.figures(found, costs), sentences)
