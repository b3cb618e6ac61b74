"""What optimisers update with: the settings of their parameter groups, which must be the same on every worker."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from paceline.gradients.header import number_of

_PLAIN = {bool, int, float, str, type(None)}
"""Kinds of values that cannot change in place."""
_OF_THE_DEVICE = ("params", "foreach", "fused", "capturable", "differentiable")
"""Entries of a parameter group that say how it is computed, not what."""

Settings = Sequence[tuple[str, dict[str, Any]]]
"""What each parameter group is updated with, and the group's name."""
Named = Iterable[tuple[str, torch.optim.Optimizer]]
"""Optimisers, each with its name."""


def settings_of(optimizers: Named) -> list[tuple[str, dict[str, Any]]]:
    """Return what each parameter group of these optimisers is updated with, and the group's name."""
    return [
        (f"group {number} of {name}", _settings_of(group))
        for name, optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
    ]


def rates_of(optimizers: Named) -> list[Any]:
    """Return the learning rate of each parameter group, to be compared with ``==`` later."""
    return [_comparable_later(group.get("lr")) for _, optimizer in optimizers for group in optimizer.param_groups]


class Digest:
    """Digest of the settings, computed again only when one of them has changed."""

    def __init__(self) -> None:
        self._values: tuple[int, list[Any]] = 0, []
        self._digest = 0.0

    def of(self, optimizers: Sequence[tuple[str, torch.optim.Optimizer]]) -> float:
        """Return a number that workers share when their optimisers' settings are equal."""
        groups = [group for _, optimizer in optimizers for group in optimizer.param_groups]
        raw = [value for group in groups for name, value in group.items() if name != "params"]
        if set(map(type, raw)) <= _PLAIN:
            values = raw
        else:
            values = [_comparable_later(value) for value in raw]
        if (len(groups), values) != self._values:
            self._values, self._digest = (len(groups), values), digest_of(settings_of(optimizers))
        return self._digest


def digest_of(settings: Settings) -> float:
    """Return a number that workers share when these are equal; 0 when there are none. Whole and below 2**52."""
    if not settings:
        return 0.0
    return 1.0 + number_of(repr(settings).encode())


def unlike_settings(everybody: Sequence[Sequence[Sequence[Any]]], *, step: int, missing: Sequence[str]) -> str:
    """Return which group's settings differ between which workers, and why that may be; empty when none does.

    >>> lr = [[["group 0 of optimizer", {"lr": rate}]] for rate in (0.1, 0.2)]
    >>> print(unlike_settings(lr, step=3, missing=[])[:92])
    workers update with unlike settings in step 3: lr in group 0 of optimizer is 0.1 on worker 0
    """
    groups: list[dict[str, dict[str, Any]]] = [{name: settings for name, settings in mine} for mine in everybody]  # noqa: C416
    named = [(group, setting) for group, settings in groups[0].items() for setting in settings]
    given = [[mine.get(group, {}).get(setting) for mine in groups] for group, setting in named]
    apart = [
        (*where, values) for where, values in zip(named, given) if any(_unlike(value, values[0]) for value in values)
    ]
    if apart:
        group, setting, values = apart[0]
        other = next(worker for worker, value in enumerate(values) if _unlike(value, values[0]))
        difference = f"{setting} in {group} is {values[0]} on worker 0 and {values[other]} on worker {other}"
    elif any(set(mine) != set(groups[0]) for mine in groups):
        difference = "they do not have the same optimizers"
    else:
        return ""
    untracked = f"{', '.join(missing)} is not tracked, so a worker that joined or returned began it anew; "
    return (
        f"workers update with unlike settings in step {step}: {difference}. Likely causes: "
        f"{untracked if missing else ''}scheduler.step() inside the loop over micro-batches, which workers run "
        "unequally often (move it behind step.commit); a schedule fed with a worker's own figure (use step.loss or "
        "fleet.evaluate); a learning rate that depends on the rank"
    )


def _unlike(one: Any, other: Any) -> bool:
    """Return whether two settings differ by more than rounding; what a device keeps for itself is not known."""
    if one is None or other is None:
        return False
    if isinstance(one, float) and isinstance(other, float):
        return not math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-30)
    return bool(one != other)


def changed_rate(groups: Sequence[str], before: Sequence[Any], after: Sequence[Any], *, step: int) -> str:
    """Return which group's learning rate changed between two micro-batches of a step, and what to write.

    >>> print(changed_rate(["group 0 of optimizer"], [0.1], [0.2], step=3)[:86])
    lr in group 0 of optimizer changed from 0.1 to 0.2 between two micro-batches of step 3
    """
    changed = [
        f"lr in {group} changed from {then} to {now}" for group, then, now in zip(groups, before, after) if then != now
    ]
    difference = changed[0] if changed else "the optimizers changed"
    return (
        f"{difference} between two micro-batches of step {step}, and each worker has another number of these: a step "
        "has one update, so move scheduler.step(), or whatever changed it, behind step.commit"
    )


@contextmanager
def scaled_rates(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> Iterator[None]:
    """Learning rates times ``factor`` for one update, and as they were afterwards."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    before = [group["lr"].clone() if isinstance(group["lr"], torch.Tensor) else group["lr"] for group in groups]
    for group, rate in zip(groups, before, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].mul_(factor)
        else:
            group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(groups, before, strict=True):
            if isinstance(rate, torch.Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: plain for name, value in group.items() if name not in _OF_THE_DEVICE for plain in _comparable(value)}


def _comparable_later(value: Any) -> Any:
    """Something to be compared with ``==`` later, also when the value is changed in place."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _comparable(value) or id(value)
    return [_comparable_later(item) for item in value] if isinstance(value, (list, tuple)) else value


def _comparable(value: Any) -> list[Any]:
    """Return the value as plain data; nothing where reading it would make a device wait, or it is not plain."""
    if isinstance(value, torch.Tensor):
        return [value.item()] if value.numel() == 1 and value.device.type == "cpu" else []
    if isinstance(value, (list, tuple)):
        parts = [part for item in value for part in _comparable(item)]
        return [parts] if len(parts) == len(value) else []
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return [float(value)]  # not one of its subclasses, which are written differently
    return [value] if isinstance(value, (bool, int, str, type(None))) else []
