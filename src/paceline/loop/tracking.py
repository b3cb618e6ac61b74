"""What has state beside the models: what the script tracks, and what it has and does not track.

Everything tracked is saved, loaded and handed to workers that join. What is not tracked is only seen: torch tells of
every optimiser that makes a step, and schedules and averaged copies are found among the living objects.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from paceline.combine.gradients.scaling import instances, take_over
from paceline.loop.horizons import parts_of
from paceline.loop.hyperparameters import Digest, rates_of, settings_of
from paceline.loop.updates import UpdateGuard
from paceline.loop.values import Values
from paceline.settings import must_agree
from paceline.transport import Transport

Optimizers = Sequence[torch.optim.Optimizer]


class Living:
    """The living objects of some kinds: those with state, unless given. They are found when first asked for, in a scan
    of all objects of the process (about 0.1 s for a million), which questions that follow each other share."""

    def __init__(self, *kinds: type) -> None:
        self._kinds = kinds or (torch.optim.Optimizer, LRScheduler, AveragedModel)
        self._objects: list[Any] | None = None
        self._collected = False

    @property
    def objects(self) -> list[Any]:
        if self._objects is None:
            self._objects = instances(*self._kinds)
        return self._objects

    def collect_garbage(self) -> None:
        """Leave out what the script has dropped and only a reference cycle still holds."""
        if not self._collected:
            self._objects = None  # else the scan would keep them alive
            gc.collect()
            self._collected = True


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
        """How often averaged copies had been updated when `note_averages` looked, by ``id``."""
        self._digest = Digest()
        self.updates = UpdateGuard(self.is_ours, self._note_step)

    def close(self) -> None:
        self.updates.close()

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

    def must_agree(
        self, transport: Transport, label: str, *, also: Mapping[str, Any] | None = None, each: Any = None
    ) -> list[dict[str, Any]]:
        """Raise ValueError on every worker when they do not track the same names. Returns what everybody said, with
        what each says ``also`` and what ``each`` process says."""
        return must_agree(transport, label, self.facts(), also=also, each=each)

    def parts(self) -> list[tuple[str, Any]]:
        """Everything tracked, what it is made of, and optimisers that were seen to make a step, by name."""
        tracked = [(name, part) for name, thing in self.things.items() for part in _parts(thing)]
        return [*tracked, *((f"the untracked {type(one).__name__}", one) for one in self.stepped_untracked())]

    def facts(self) -> dict[str, Any]:
        """What must be the same on every worker."""
        return {"what fleet.track was given": sorted(self.things)}

    def values_facts(self) -> dict[str, Any]:
        """The same of the script's own values. A newcomer may have fewer, before it takes over the others'."""
        return {"the names in fleet.state": sorted(name for name, _ in self.state)}

    def is_tracked(self, thing: Any) -> bool:
        """Whether a thing is tracked, by itself or as a part: of a schedule of schedules, of an optimiser's wrapper."""
        return any(thing is part for tracked in self.things.values() for part in _parts(tracked))

    # -- optimisers --------------------------------------------------------------------------------------------------

    def _note_step(self, optimizer: torch.optim.Optimizer) -> None:
        if all(seen() is not optimizer for seen in self._stepped):
            self._stepped.append(weakref.ref(optimizer))

    def is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it updates parameters of the fleet's models."""
        ours = {id(parameter) for parameter in self._parameters()}
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """By name: those that are tracked."""
        return {name: thing for name, thing in self.things.items() if isinstance(thing, torch.optim.Optimizer)}

    def stepped_untracked(self) -> Optimizers:
        """Those that were seen to make a step and are not tracked."""
        return [optimizer for optimizer in self._seen() if not self.is_tracked(optimizer)]

    def _seen(self) -> Optimizers:
        return [optimizer for seen in list(self._stepped) if (optimizer := seen()) is not None]

    def forget_steps(self) -> None:
        """A new loop begins: optimisers of earlier ones may not matter any more."""
        self._stepped.clear()
        self.updates.forget()

    def _known(self) -> list[tuple[str, torch.optim.Optimizer]]:
        """Every optimiser that is tracked or was seen, by name."""
        only = self._seen()
        if len(self.things) == 1 == len(only):  # as mostly
            name, thing = next(iter(self.things.items()))
            if thing is only[0]:
                return [(name, thing)]
        others = enumerate(self.stepped_untracked(), 1)
        named = [(f"the untracked {type(one).__name__} (number {number})", one) for number, one in others]
        return [*self.optimizers.items(), *named]

    def hyperparameters(self) -> list[tuple[str, dict[str, Any]]]:
        """What each parameter group of every known optimiser is updated with, and the group's name."""
        return settings_of(self._known())

    def digest(self) -> float:
        """Of the hyper-parameters: workers that update alike have the same."""
        return self._digest.of(self._known())

    def rates(self) -> list[Any]:
        """The learning rate of each parameter group of every known optimiser."""
        return rates_of(self._known())

    def schedules(self) -> dict[str, LRScheduler]:
        """By name: those that are tracked, and those of a known optimiser that are not. The process's objects are
        scanned only where an optimiser has a schedule, as torch notes, and none is tracked."""
        tracked = {name: thing for name, thing in self.things.items() if isinstance(thing, LRScheduler)}
        held = {id(thing.optimizer) for thing in tracked.values()}
        others = [one for _, one in self._known() if hasattr(one.step, "_wrapped_by_lr_sched") and id(one) not in held]
        living = [one for one in Living(LRScheduler).objects if one.optimizer in others] if others else []
        inner = {id(part) for one in living for part in parts_of(one) if part is not one}
        untracked = [one for one in living if id(one) not in inner]
        return tracked | {f"not tracked, number {number}": one for number, one in enumerate(untracked, 1)}

    # -- what is not tracked -----------------------------------------------------------------------------------------

    def missing(self, living: Living | None = None, *, optimizers: bool = False) -> list[str]:
        """In words, what is alive, belongs to the models or to a tracked optimiser, has state, and is not tracked.
        ``living``: a scan made just before. ``optimizers``: also those that have not been seen to step."""
        living = living or Living()
        if not self._missing(living, optimizers=optimizers):
            return []
        living.collect_garbage()
        return self._missing(living, optimizers=optimizers)

    def note_averages(self, living: Living) -> None:
        """Averaged copies that nobody updates from here on do not matter: they are of an earlier training."""
        copies = (copy for copy in living.objects if isinstance(copy, AveragedModel))
        self._averaged = {id(copy): int(copy.n_averaged) for copy in copies}

    def averages(self) -> list[str]:
        """In words, the averaged copies of the models that are alive and not tracked."""
        living = Living(AveragedModel)
        living.collect_garbage()
        alive = [copy for copy in living.objects if not self.is_tracked(copy) and self._like_ours(copy)]
        return sorted({f"ema={type(copy).__name__}" for copy in alive})

    def _like_ours(self, copy: AveragedModel) -> bool:
        sizes = {parameter.shape for parameter in self._parameters()}
        return all(parameter.shape in sizes for parameter in copy.parameters())

    def _missing(self, living: Living, *, optimizers: bool) -> list[str]:
        alive = living.objects
        missing = [thing for thing in alive if not self.is_tracked(thing)]
        ours = [one for one in alive if optimizers and isinstance(one, torch.optim.Optimizer) and self.is_ours(one)]
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


def _parts(thing: Any) -> Iterator[Any]:
    """A tracked thing, and what it is made of."""
    yield thing
    for part in getattr(thing, "_schedulers", ()):
        yield from _parts(part)
    if not isinstance(thing, (torch.nn.Module, LRScheduler)):  # a schedule does not save its optimiser
        yield from (part for part in getattr(thing, "__dict__", {}).values() if isinstance(part, torch.optim.Optimizer))
