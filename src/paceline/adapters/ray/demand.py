"""The resources that each worker needs on its node, in the command line's names and in Ray's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

NAMES = {"cpus": "CPU", "gpus": "GPU", "memory": "memory"}
"""Our names of Ray's built-in resources, and Ray's own."""
SIZES = {"": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?"


@dataclass(frozen=True)
class Demand:
    """Resources by Ray's names, and Ray's label selector."""

    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    labels: Mapping[str, str] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """Return the options of an actor of Ray."""
        own = {name: amount for name, amount in self.resources.items() if name not in NAMES.values()}
        options: dict[str, Any] = {
            "num_cpus": self.resources.get("CPU", 0.0),
            "num_gpus": self.resources.get("GPU", 0.0),
            "resources": own,
        }
        if "memory" in self.resources:
            options["memory"] = int(self.resources["memory"])
        return {**options, "label_selector": dict(self.labels)} if self.labels else options

    def parts(self) -> list[Demand]:
        """Return each need by itself."""
        resources = [Demand({name: amount}) for name, amount in self.resources.items()]
        return resources + [Demand({}, {key: value}) for key, value in self.labels.items()]

    def fits(self, node: Mapping[str, Any]) -> bool:
        """Return whether a node, as ``ray.nodes()`` describes it, has all of it when nothing else runs there."""
        has, labels = node.get("Resources", {}), node.get("Labels", {})
        enough = all(has.get(name, 0.0) >= amount for name, amount in self.resources.items())
        return enough and all(_selects(wanted, labels.get(key)) for key, wanted in self.labels.items())

    def __str__(self) -> str:
        """Return the demand as the command line writes it.

        >>> str(Demand({"CPU": 4.0, "GPU": 1.0}, {"spot": "in(true,false)"}))
        'cpus=4, gpus=1, label spot=true|false'
        """
        ours = {theirs: mine for mine, theirs in NAMES.items()}
        resources = [f"{ours.get(name, name)}={amount:g}" for name, amount in self.resources.items()]
        return ", ".join(resources + [f"label {key}{_written(value)}" for key, value in self.labels.items()])


def lacking(demand: Demand, nodes: Iterable[Mapping[str, Any]]) -> str:
    """Return which needs no living node has, in words; empty when one node has all.

    >>> node = {"Alive": True, "Resources": {"CPU": 2.0}}
    >>> lacking(Demand({"CPU": 1.0, "GPU": 1.0}), [node]), lacking(Demand({"CPU": 1.0}), [node])
    ('gpus=1', '')
    """
    alive = [node for node in nodes if node.get("Alive")]
    if any(demand.fits(node) for node in alive):
        return ""
    missing = [str(part) for part in demand.parts() if not any(part.fits(node) for node in alive)]
    return ", ".join(missing) or f"{demand} together"


def read_demand(per_worker: str | None, labels: str | None) -> Demand:
    """Read ``gpus=1,cpus=4`` and ``spot=true|false,zone!=b``; by default a worker has one CPU.

    >>> read_demand("gpus=1,cpus=4", "spot=true|false").options()["label_selector"]
    {'spot': 'in(true,false)'}
    """
    return Demand({"CPU": 1.0, **_read_resources(per_worker)}, _read_labels(labels))


def make_demand(
    num_cpus: float, num_gpus: float, resources: Mapping[str, float] | None, labels: Mapping[str, str] | None
) -> Demand:
    """Return the demand of the arguments of `paceline.adapters.ray.run`, which are those of a Ray actor."""
    given = {"CPU": num_cpus, **({"GPU": num_gpus} if num_gpus else {}), **(resources or {})}
    for name, amount in given.items():
        if not isinstance(amount, (int, float)) or isinstance(amount, bool) or not 0 <= amount < float("inf"):
            raise ValueError(f"{name} must be a number from 0, got {amount!r}")
    _check_gpus(num_gpus, f"num_gpus={num_gpus:g}")
    return Demand({name: float(amount) for name, amount in given.items()}, dict(labels or {}))


def _read_resources(text: str | None) -> dict[str, float]:
    found: dict[str, float] = {}
    for item in (text or "").split(",") if text is not None else []:
        match = re.fullmatch(r"\s*([A-Za-z][\w.:-]*)\s*=\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", item, re.ASCII)
        if match is None:
            raise ValueError(f"--per-worker: {item.strip()!r} is not a resource; write such as gpus=1,cpus=4")
        name, unit = match[1], match[3].lower()
        if unit not in (SIZES if name == "memory" else {""}):
            example = "memory=8GB" if name == "memory" else f"{name}={match[2]}"
            raise ValueError(f"--per-worker: {item.strip()!r} has a unit that is not known; write such as {example}")
        if NAMES.get(name, name) in found:
            raise ValueError(f"--per-worker names {name} twice")
        found[NAMES.get(name, name)] = float(match[2]) * SIZES[unit]
    _check_gpus(found.get("GPU", 0.0), f"--per-worker: gpus={found.get('GPU', 0.0):g}")
    return found


def _check_gpus(gpus: float, where: str) -> None:
    if gpus > 1 and gpus != int(gpus):
        raise ValueError(f"{where}: more than one GPU must be a whole number; a part of one is such as 0.5")


def _read_labels(text: str | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in text.split(",") if text is not None else []:
        match = re.fullmatch(rf"\s*((?:{LABEL}/)?{LABEL})\s*(!?)=\s*({LABEL}(?:\|{LABEL})*)\s*", item, re.ASCII)
        if match is None:
            raise ValueError(f"--labels: {item.strip()!r} is not a label; write such as spot=true|false or zone!=b")
        if match[1] in found:
            raise ValueError(f"--labels names {match[1]} twice; write {match[1]}=A|B for either")
        values = match[3].split("|")
        found[match[1]] = match[2] + (values[0] if len(values) == 1 else f"in({','.join(values)})")
    return found


def _selects(wanted: str, value: str | None) -> bool:
    """Return whether a label's value matches Ray's rule: ``a``, ``!a``, ``in(a,b)`` or ``!in(a,b)``."""
    negated, inner = wanted.startswith("!"), wanted.removeprefix("!")
    several = inner.removeprefix("in(").removesuffix(")") if inner.startswith("in(") else inner
    return (value in [one.strip() for one in several.split(",")]) != negated


def _written(selector: str) -> str:
    """Return a selector as `_read_labels` reads it."""
    values = selector.removeprefix("!").removeprefix("in(").removesuffix(")").replace(" ", "").replace(",", "|")
    return f"{'!' if selector.startswith('!') else ''}={values}"
