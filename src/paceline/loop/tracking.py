"""What has state beside the models: what the script tracks, and what it has and does not track.

Everything tracked is saved, loaded and handed to workers that join. What is not tracked is only seen: torch tells of
every optimiser that makes a step, and schedules and averaged copies are found among the living objects.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel

from paceline.combine.gradients.scaling import take_over
from paceline.loop.values import Values
from paceline.settings import must_agree
from paceline.transport import Transport

_OF_THE_DEVICE = ("params", "foreach", "fused", "capturable", "differentiable")
"""Entries of a parameter group that say how it is computed, not what."""

Optimizers = Sequence[torch.optim.Optimizer]
Settings = Sequence[tuple[str, dict[str, Any]]]
"""What each parameter group is updated with, and the group's name."""


class Tracked:
    """The things with state of one script. ``parameters`` gives those of the fleet's models."""

    def __init__(self, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._parameters = parameters
        self.things: dict[str, Any] = {}
        self.state = Values()
        self.scaler: torch.amp.GradScaler | None = None
        self._stepped: list[weakref.ref[torch.optim.Optimizer]] = []
        """In the order in which they made their first step, the same on every worker."""
        self._averaged: dict[int, int] = {}
        self._last: tuple[list[list[Any]], float] = ([], 0.0)
        """Hyper-parameters when they were looked at last, and their digest."""
        self._hook = register_optimizer_step_post_hook(self._saw_step)

    def close(self) -> None:
        self._hook.remove()

    def add(self, objects: Mapping[str, Any]) -> None:
        for name, thing in objects.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise ValueError(f"fleet.track({name}=...): it has no state_dict and load_state_dict")
            if name in self.things and self.things[name] is not thing:
                raise ValueError(f"fleet.track({name}=...): that name is taken by another object")
        things = {**self.things, **objects}
        scalers = {id(thing): thing for thing in things.values() if isinstance(thing, torch.amp.GradScaler)}
        if len(scalers) > 1:
            raise ValueError("fleet.track knows more than one GradScaler: one loss scale serves the whole step")
        self.things = things
        for scaler in scalers.values():
            take_over(scaler)
            self.scaler = scaler

    def must_agree(self, transport: Transport, label: str) -> None:
        """Raise ValueError on every worker when they do not track the same names."""
        must_agree(transport, label, self.facts())

    def facts(self) -> dict[str, Any]:
        """What must be the same on every worker."""
        return {"what fleet.track was given": sorted(self.things)}

    def values_facts(self) -> dict[str, Any]:
        """The same of the script's own values. A newcomer may have fewer, before it takes over the others'."""
        return {"the names in fleet.state": sorted(name for name, _ in self.state)}

    def holds(self, thing: Any) -> bool:
        """Whether it is tracked, by itself or as a part of what is: a schedule of schedules, a wrapped optimiser."""
        return any(thing is part for tracked in self.things.values() for part in _parts(tracked))

    # -- optimisers --------------------------------------------------------------------------------------------------

    def _saw_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if all(seen() is not optimizer for seen in self._stepped) and self._ours(optimizer):
            self._stepped.append(weakref.ref(optimizer))

    def _ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it updates parameters of the fleet's models."""
        ours = {id(parameter) for parameter in self._parameters()}
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """By name: those that are tracked."""
        return {name: thing for name, thing in self.things.items() if isinstance(thing, torch.optim.Optimizer)}

    def stepped_untracked(self) -> Optimizers:
        """Those that were seen to make a step and are not tracked."""
        return [optimizer for optimizer in self._seen() if not self.holds(optimizer)]

    def _seen(self) -> Optimizers:
        return [optimizer for seen in list(self._stepped) if (optimizer := seen()) is not None]

    def forget_steps(self) -> None:
        """A new loop begins: optimisers of earlier ones may not matter any more."""
        self._stepped.clear()

    def _known(self) -> list[tuple[str, torch.optim.Optimizer]]:
        """Every optimiser that is tracked or was seen, by name."""
        others = enumerate(self.stepped_untracked(), 1)
        named = [(f"the untracked {type(one).__name__} (number {number})", one) for number, one in others]
        return [*self.optimizers.items(), *named]

    def hyperparameters(self) -> list[tuple[str, dict[str, Any]]]:
        """What each parameter group of every known optimiser is updated with, and the group's name."""
        return [
            (f"group {number} of {name}", _settings_of(group))
            for name, optimizer in self._known()
            for number, group in enumerate(optimizer.param_groups)
        ]

    def digest(self) -> float:
        """Of the hyper-parameters; worked out anew only when one of them has changed."""
        values = [
            [_looked_at(value) for name, value in group.items() if name != "params"]
            for _, optimizer in self._known()
            for group in optimizer.param_groups
        ]
        if values != self._last[0]:
            self._last = (values, digest_of(self.hyperparameters()))
        return self._last[1]

    def rates(self) -> list[Any]:
        """The learning rate of each parameter group of every known optimiser."""
        return [_looked_at(group.get("lr")) for _, optimizer in self._known() for group in optimizer.param_groups]

    # -- what is not tracked -----------------------------------------------------------------------------------------

    def missing(self, *, optimizers: bool = False) -> list[str]:
        """In words, what is alive, belongs to the models or to a tracked optimiser, has state, and is not tracked.
        ``optimizers``: also those that have not been seen to step."""
        if not self._missing(optimizers=optimizers):
            return []
        gc.collect()  # what the script has dropped is no concern of it
        return self._missing(optimizers=optimizers)

    def note_averages(self) -> None:
        """Averaged copies that nobody updates from here on are no concern: they are of an earlier training."""
        self._averaged = {id(copy): int(copy.n_averaged) for copy in _alive(AveragedModel)}

    def averages(self) -> list[str]:
        """In words, the averaged copies of the models that are alive and not tracked."""
        gc.collect()  # what the script has dropped is no concern of it
        alive = [copy for copy in _alive(AveragedModel) if not self.holds(copy) and self._like_ours(copy)]
        return sorted({f"ema={type(copy).__name__}" for copy in alive})

    def _like_ours(self, copy: AveragedModel) -> bool:
        sizes = {parameter.shape for parameter in self._parameters()}
        return all(parameter.shape in sizes for parameter in copy.parameters())

    def _missing(self, *, optimizers: bool) -> list[str]:
        alive = _alive(torch.optim.Optimizer, LRScheduler, AveragedModel)
        missing = [thing for thing in alive if not self.holds(thing)]
        ours = [one for one in alive if optimizers and isinstance(one, torch.optim.Optimizer) and self._ours(one)]
        known = [*self.optimizers.values(), *self._seen(), *ours]
        scheduled = [one.optimizer for one in alive if isinstance(one, LRScheduler)]
        found = []
        for thing in missing:
            if isinstance(thing, torch.optim.Optimizer):
                # A schedule's own state does not hold the rate that it has brought its optimiser to.
                state = keeps_state(thing) or any(thing is one for one in scheduled)
                found += [f"optimizer={type(thing).__name__}"] if state and any(thing is one for one in known) else []
            elif isinstance(thing, LRScheduler):
                found += [f"scheduler={type(thing).__name__}"] if any(thing.optimizer is one for one in known) else []
            elif int(thing.n_averaged) > self._averaged.get(id(thing), 0) and self._like_ours(thing):
                found.append(f"ema={type(thing).__name__}")
        return sorted(found)


def keeps_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update depends on those before it: not so in plain SGD."""
    plain = type(optimizer) is torch.optim.SGD
    return not plain or any(group["momentum"] != 0 for group in optimizer.param_groups)


def digest_of(settings: Settings) -> float:
    """A number that workers share when these are equal; 0 when there are none. Whole and below 2**52."""
    if not settings:
        return 0.0
    digest = blake2b(repr(settings).encode(), digest_size=6).digest()
    return 1.0 + int.from_bytes(digest, "big")


def unlike_settings(everybody: Sequence[Sequence[Sequence[Any]]], *, step: int, missing: Sequence[str]) -> str:
    """Which group's settings differ between which workers, and why that may be; empty when they are as good as equal.

    >>> lr = [[["group 0 of optimizer", {"lr": rate}]] for rate in (0.1, 0.2)]
    >>> print(unlike_settings(lr, step=3, missing=[])[:92])
    workers update with unlike settings in step 3: lr in group 0 of optimizer is 0.1 on worker 0
    """
    groups: list[dict[str, dict[str, Any]]] = [{name: settings for name, settings in mine} for mine in everybody]  # noqa: C416
    named = [(group, setting) for group, settings in groups[0].items() for setting in settings]
    told = [[mine.get(group, {}).get(setting) for mine in groups] for group, setting in named]
    apart = [
        (*where, values) for where, values in zip(named, told) if any(_unlike(value, values[0]) for value in values)
    ]
    if apart:
        group, setting, values = apart[0]
        other = next(worker for worker, value in enumerate(values) if _unlike(value, values[0]))
        said = f"{setting} in {group} is {values[0]} on worker 0 and {values[other]} on worker {other}"
    elif any(set(mine) != set(groups[0]) for mine in groups):
        said = "they do not have the same optimizers"
    else:
        return ""
    untracked = f"{', '.join(missing)} is not tracked, so a worker that joined or returned began it anew; "
    return (
        f"workers update with unlike settings in step {step}: {said}. Likely causes: {untracked if missing else ''}"
        "scheduler.step() inside the loop over micro-batches, which workers run unequally often (move it behind "
        "step.commit); a schedule fed with a worker's own figure (use step.loss or fleet.evaluate); a learning rate "
        "that depends on the rank"
    )


def _unlike(one: Any, other: Any) -> bool:
    """Whether two settings differ by more than rounding; what a device keeps for itself is not known."""
    if one is None or other is None:
        return False
    if isinstance(one, float) and isinstance(other, float):
        return not math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-30)
    return bool(one != other)


def _parts(thing: Any) -> Iterator[Any]:
    """A tracked thing, and what it is made of."""
    yield thing
    for part in getattr(thing, "_schedulers", ()):
        yield from _parts(part)
    if not isinstance(thing, (torch.nn.Module, LRScheduler)):  # a schedule does not save its optimiser
        yield from (part for part in getattr(thing, "__dict__", {}).values() if isinstance(part, torch.optim.Optimizer))


def changed_rate(groups: Sequence[str], before: Sequence[Any], after: Sequence[Any], *, step: int) -> str:
    """Which group's learning rate changed between two micro-batches of a step, and what to write.

    >>> print(changed_rate(["group 0 of optimizer"], [0.1], [0.2], step=3)[:86])
    lr in group 0 of optimizer changed from 0.1 to 0.2 between two micro-batches of step 3
    """
    changed = [
        f"lr in {group} changed from {then} to {now}" for group, then, now in zip(groups, before, after) if then != now
    ]
    said = changed[0] if changed else "the optimizers changed"
    return (
        f"{said} between two micro-batches of step {step}, and each worker has another number of these: a step has one "
        "update, so move scheduler.step(), or whatever changed it, behind step.commit"
    )


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: plain for name, value in group.items() if name not in _OF_THE_DEVICE for plain in _comparable(value)}


def _looked_at(value: Any) -> Any:
    """Something to be compared with ``==`` later, also when the value is changed in place."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _comparable(value) or id(value)
    return [_looked_at(item) for item in value] if isinstance(value, (list, tuple)) else value


def _comparable(value: Any) -> list[Any]:
    """The value as plain data; nothing where looking at it would make a device wait, or would not be plain."""
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


def _alive(*kinds: type) -> list[Any]:
    """The living objects of these kinds. Looked at by their type alone: other objects may do anything when asked."""
    wanted: dict[type, bool] = {}
    found = []
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in wanted:
            wanted[kind] = issubclass(kind, kinds)
        if wanted[kind]:
            found.append(thing)
    return found
