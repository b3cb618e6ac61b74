"""The objects with state beside the models, tracked and untracked, and the script's own values in ``fleet.state``.

Everything tracked (`Tracked`) is saved, loaded and handed to workers that join. Untracked objects are only noticed:
torch's hooks report every optimiser that makes a step, and schedules and averaged copies are found among the living
objects (`Living`). `Values` is ``fleet.state``: the script's own numbers and texts, saved and handed over likewise.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from paceline.checkpoint.content import plain
from paceline.gradients.scaling import instances, take_over
from paceline.settings import must_agree
from paceline.step.checks.schedules import parts_of
from paceline.step.checks.updates import Digest, UpdateGuard, rates_of, settings_of
from paceline.transport import Transport

logger = logging.getLogger("paceline")

Optimizers = Sequence[torch.optim.Optimizer]


class Living:
    """The living objects of some kinds; unless given, of all kinds with state.

    They are found when first asked for, in a scan of all objects of the process (about 0.1 s for a million objects).
    Questions that follow each other share the scan.
    """

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
        """Leave out objects that the script has dropped and only a reference cycle still holds."""
        if not self._collected:
            self._objects = None  # else the scan would keep them alive
            gc.collect()
            self._collected = True


class Tracked:
    """The objects with state of one script. ``parameters`` returns those of the fleet's models."""

    def __init__(self, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._parameters = parameters
        self.things: dict[str, Any] = {}
        self.state = Values()
        self.scaler: torch.amp.GradScaler | None = None
        self._stepped: list[weakref.ref[torch.optim.Optimizer]] = []
        """The optimisers in the order of their first steps, which is the same on every worker."""
        self._averaged: dict[int, int] = {}
        """The number of updates of each averaged copy when `note_averages` was called, by ``id``."""
        self._digest = Digest()
        self.updates = UpdateGuard(parameters, self._note_step)

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
        """Raise ValueError on every worker when they do not track the same names.

        Returns everybody's facts: these, what each worker adds with ``also``, and what ``each`` of its processes has.
        """
        return must_agree(transport, label, self.facts(), also=also, each=each)

    def parts(self) -> list[tuple[str, Any]]:
        """Return everything tracked, its parts, and optimisers that were seen to make a step, each with its name."""
        tracked = [(name, part) for name, thing in sorted(self.things.items()) for part in _parts(thing)]
        return [*tracked, *((f"the untracked {type(one).__name__}", one) for one in self.stepped_untracked())]

    def facts(self) -> dict[str, Any]:
        """Return the names of what is tracked, which must be the same on every worker."""
        return {"what fleet.track was given": sorted(self.things)}

    def values_facts(self) -> dict[str, Any]:
        """Return the names of the script's own values; a newcomer may have fewer before it takes over the others'."""
        return {"the names in fleet.state": sorted(name for name, _ in self.state)}

    def is_tracked(self, thing: Any) -> bool:
        """Return whether a thing is tracked by itself, or as a part of a schedule of schedules or a wrapper."""
        return any(thing is part for tracked in self.things.values() for part in _parts(tracked))

    # -- optimisers --------------------------------------------------------------------------------------------------

    def _note_step(self, optimizer: torch.optim.Optimizer) -> None:
        if all(seen() is not optimizer for seen in self._stepped):
            self._stepped.append(weakref.ref(optimizer))

    def is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimiser updates parameters of the fleet's models."""
        ours = {id(parameter) for parameter in self._parameters()}
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The tracked optimisers by name."""
        ours = sorted(self.things.items())  # the same on workers that track in another order
        return {name: thing for name, thing in ours if isinstance(thing, torch.optim.Optimizer)}

    def stepped_untracked(self) -> Optimizers:
        """Return the optimisers that were seen to make a step and are not tracked."""
        return [optimizer for optimizer in self._seen() if not self.is_tracked(optimizer)]

    def _seen(self) -> Optimizers:
        return [optimizer for seen in list(self._stepped) if (optimizer := seen()) is not None]

    def forget_steps(self) -> None:
        """Forget the optimisers that were seen: a new loop begins, and they may not matter any more."""
        self._stepped.clear()
        self.updates.forget()

    def _known(self) -> list[tuple[str, torch.optim.Optimizer]]:
        """Return every optimiser that is tracked or was seen to make a step, with its name."""
        only = self._seen()
        if len(self.things) == 1 == len(only):  # as mostly
            name, thing = next(iter(self.things.items()))
            if thing is only[0]:
                return [(name, thing)]
        others = enumerate(self.stepped_untracked(), 1)
        named = [(f"the untracked {type(one).__name__} (number {number})", one) for number, one in others]
        return [*self.optimizers.items(), *named]

    def hyperparameters(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the name and the settings of each parameter group of every known optimiser."""
        return settings_of(self._known())

    def digest(self) -> float:
        """Return a digest of the hyper-parameters, which is equal on workers that update alike."""
        return self._digest.of(self._known())

    def rates(self) -> list[Any]:
        """Return the learning rate of each parameter group of every known optimiser."""
        return rates_of(self._known())

    def schedules(self) -> dict[str, LRScheduler]:
        """Return the schedules that are tracked, and those of a known optimiser that are not, by name.

        The process's objects are scanned only where an optimiser has a schedule (torch marks it) and none is tracked.
        """
        tracked = {name: thing for name, thing in self.things.items() if isinstance(thing, LRScheduler)}
        held = {id(thing.optimizer) for thing in tracked.values()}
        others = [one for _, one in self._known() if hasattr(one.step, "_wrapped_by_lr_sched") and id(one) not in held]
        living = [one for one in Living(LRScheduler).objects if one.optimizer in others] if others else []
        inner = {id(part) for one in living for part in parts_of(one) if part is not one}
        untracked = [one for one in living if id(one) not in inner]
        return tracked | {f"not tracked, number {number}": one for number, one in enumerate(untracked, 1)}

    # -- what is not tracked -----------------------------------------------------------------------------------------

    def missing(self, living: Living | None = None, *, optimizers: bool = False) -> list[str]:
        """Return, in words, the objects with state that belong to the models or a known optimiser and are not tracked.

        ``living``: a scan made just before. ``optimizers``: also optimisers that have not been seen to step.
        """
        living = living or Living()
        if not self._missing(living, optimizers=optimizers):
            return []
        living.collect_garbage()
        return self._missing(living, optimizers=optimizers)

    def note_averages(self, living: Living) -> None:
        """Note how often averaged copies were updated: those that are not updated again are of an earlier training."""
        copies = (copy for copy in living.objects if isinstance(copy, AveragedModel))
        self._averaged = {id(copy): int(copy.n_averaged) for copy in copies}

    def averages(self) -> list[str]:
        """Return, in words, the averaged copies of the models that are alive and not tracked."""
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
    """Return whether an update depends on those before it: not so in plain SGD."""
    plain = type(optimizer) is torch.optim.SGD
    return not plain or any(group["momentum"] != 0 for group in optimizer.param_groups)


def _parts(thing: Any) -> Iterator[Any]:
    """Yield a tracked thing, and its parts that have state."""
    yield thing
    for part in getattr(thing, "_schedulers", ()):
        yield from _parts(part)
    if not isinstance(thing, (torch.nn.Module, LRScheduler)):  # a schedule does not save its optimiser
        yield from (part for part in getattr(thing, "__dict__", {}).values() if isinstance(part, torch.optim.Optimizer))


class Values:
    """The script's own values, ``fleet.state``: attributes that are saved and loaded with every checkpoint.

    They are also handed to a worker that joins or returns, which would otherwise begin with its script's first values.

    >>> state = Values()
    >>> state.best = 0.5
    >>> state.best, "best" in state, dict(state)
    (0.5, True, {'best': 0.5})
    """

    def __init__(self) -> None:
        super().__setattr__("_values", {})
        super().__setattr__("_unread", set())

    def __getattr__(self, name: str) -> Any:
        self._unread.discard(name)
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(
                f"fleet.state has no {name!r}: give it a first value before the first step, and before fleet.load"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._unread and self._values[name] != value:
            logger.warning(
                "fleet.state.%s was just loaded from a checkpoint (%r) and is lost: give it its first value before "
                "fleet.load",
                name,
                self._values[name],
            )
        self._unread.discard(name)
        self._values[name] = plain(value, f"fleet.state.{name}")

    def __delattr__(self, name: str) -> None:
        getattr(self, name)
        del self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(list(self._values.items()))

    def __repr__(self) -> str:
        return f"<fleet.state: {', '.join(f'{name}={value!r}' for name, value in self) or 'empty'}>"

    def state_dict(self) -> dict[str, Any]:
        return {name: plain(value, f"fleet.state.{name}") for name, value in self}

    def load_state_dict(self, state: Mapping[str, Any], *, guard: bool = False) -> None:
        """Set these values; ``guard``: warn, until `loop_begins`, when the script overwrites one it has not read."""
        self._values.update(deepcopy(dict(state)))
        self._unread.clear()
        if guard:
            self._unread.update(state)

    def replace(self, state: Mapping[str, Any]) -> None:
        """Have exactly these values."""
        self._values.clear()
        self.load_state_dict(state)

    def loop_begins(self) -> None:
        self._unread.clear()
