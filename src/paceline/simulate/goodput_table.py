"""Goodput under failures as figures, sentences and a table; and how its costs are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from paceline.observe.words.numbers import duration, number, percent
from paceline.simulate.comparison_table import empty_table
from paceline.simulate.goodput import FailureCosts, Goodput

if TYPE_CHECKING:
    from rich.table import Table

OPTIMISER_COPIES = 3
"""Parameters and two numbers for each of them: the state of a training with Adam."""
NOT_MODELLED = (
    "Simulated, not run. Not modelled: machines that stand still, several that fail for one reason, and what a smaller "
    "batch does to the training."
)


def parse_costs(text: str | None) -> dict[str, float]:
    """Return the costs of ``start=120,join=0.5``, in seconds, by the names of `FailureCosts`.

    >>> parse_costs("start=120,join=0.5")
    {'start_s': 120.0, 'join_s': 0.5}
    """
    known = [field.name.removesuffix("_s") for field in fields(FailureCosts)]
    found: dict[str, float] = {}
    for part in text.split(",") if text is not None else ():
        name, _, value = part.partition("=")
        if name.strip() not in known:
            raise ValueError(
                f"--costs has {part!r}: write seconds such as start=120,join=0.5; there are {', '.join(known)}"
            )
        try:
            found[f"{name.strip()}_s"] = seconds = float(value)
        except ValueError:
            seconds = -1.0
        if not (seconds >= 0 and math.isfinite(seconds)):
            raise ValueError(f"--costs has {part!r}: {name.strip()} is a number of seconds, at least 0")
    return found


def figures(found: Sequence[Goodput], costs: FailureCosts) -> dict[str, Any]:
    """Return every rule's parts and the costs."""
    finite = {name: value if math.isfinite(value) else None for name, value in asdict(costs).items()}
    return {"rules": [asdict(one) for one in found], "costs": finite}


def table(found: Sequence[Goodput]) -> Table:
    """Return the parts as a table for a terminal. Needs rich."""
    drawn = empty_table(["rule"], ["goodput", "away", "stopped", "checkpoints", "redone"])
    for one in found:
        parts = (one.goodput, one.away, one.stopped, one.checkpoints, one.redone)
        drawn.add_row(one.rule, *(f"{100 * part:.1f} %" for part in parts))
    return drawn


def verdict(found: Sequence[Goodput], costs: FailureCosts, *, fleet_mtbf_s: float) -> list[str]:
    """Return what the figures mean, and what they rest on, in sentences."""
    by_rule = {one.rule: one for one in found}
    ours, others = by_rule["Paceline"], [one for one in found if one.rule != "Paceline"]
    best = max(others, key=lambda one: one.goodput)
    saved = f"every {duration(costs.every_s)}" if math.isfinite(costs.every_s) else "at no time"
    ratio = f": {ours.goodput / best.goodput:.2f} times as much" if best.goodput else ""
    size = "with the machines that are there" if best.rule.endswith("any size") else "once the machine is replaced"
    listed = ", ".join(
        f"{field.name.removesuffix('_s')}={number(getattr(costs, field.name))}"
        for field in fields(costs)
        if math.isfinite(getattr(costs, field.name))
    )
    return [
        f"Somebody fails every {duration(fleet_mtbf_s)}: Paceline does {percent(ours.goodput)} of what these machines "
        f"do without failures, a restart from a checkpoint taken {saved}, {size}, {percent(best.goodput)}{ratio}.",
        f"Costs in seconds: {listed}; --costs replaces them.",
        NOT_MODELLED,
    ]
