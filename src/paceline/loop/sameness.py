"""What must be the same on every worker, object by object: parameters, and the state of everything tracked.

Workers first compare one number of it all (`Contents.number`). Only where these differ do they ask each other for the
numbers of the single tensors, to name what differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from paceline.combine.header import number_of
from paceline.loop.replicas import fingerprint, sums_of
from paceline.transport import Collective


@dataclass(frozen=True)
class Contents:
    """Tensors and plain values by name."""

    tensors: Sequence[tuple[str, torch.Tensor]]
    plain: Sequence[tuple[str, str]] = ()

    def number(self, inside: Collective | None = None) -> float:
        """A number that workers with equal contents share: whole, and below 2**52. One wait for a device."""
        number = fingerprint((tensor for _, tensor in self.tensors), inside)
        return (
            float((int(number) * 1_000_003 + number_of(repr(self.plain).encode())) % (1 << 52))
            if self.plain
            else number
        )

    def by_name(self) -> dict[str, int]:
        """The same of each tensor and value."""
        sums = sums_of([tensor for _, tensor in self.tensors])
        values = {name: number % (1 << 52) for (name, _), number in zip(self.tensors, sums, strict=True)}
        return {**values, **{name: number_of(value.encode()) for name, value in self.plain}}


def parameters_of(models: Sequence[torch.nn.Module]) -> Contents:
    """All parameters of some models."""
    return Contents(
        [
            (f"parameter {_prefix(models, number)}{name}", tensor)
            for number, model in enumerate(models)
            for name, tensor in model.named_parameters()
        ]
    )


def saved_buffers_of(models: Sequence[torch.nn.Module]) -> Contents:
    """The buffers that are saved with some models. The others may be caches of each worker's own."""
    found = []
    for number, model in enumerate(models):
        for path, module in model.named_modules():
            for key, tensor in module._buffers.items():
                if tensor is not None and key not in module._non_persistent_buffers_set:
                    found.append((f"{_prefix(models, number)}{path}.{key}", tensor))
    return Contents(found)


def state_of(things: Iterable[tuple[str, Any]]) -> Contents:
    """The state of modules, optimisers and schedules; of other things nothing, for it may be each worker's own. What an
    optimiser updates with is compared in every step (hyperparameters.py)."""
    tensors: list[tuple[str, torch.Tensor]] = []
    plain: list[tuple[str, str]] = []
    for name, thing in things:
        if isinstance(thing, torch.nn.Module):
            tensors += [(f"{name}: {key}", value) for key, value in thing.state_dict().items() if is_readable(value)]
        elif isinstance(thing, torch.optim.Optimizer):
            for key, value in _optimizer_state(thing):
                if is_readable(value):
                    tensors.append((f"{name}: {key}", value))
                elif (said := _said(value)) is not None:
                    plain.append((f"{name}: {key}", said))
        elif isinstance(thing, LRScheduler) and (said := _said(thing.state_dict())) is not None:
            plain.append((name, said))
    return Contents(tensors, plain)


def together(*contents: Contents) -> Contents:
    return Contents(
        [pair for one in contents for pair in one.tensors], [pair for one in contents for pair in one.plain]
    )


def _prefix(models: Sequence[torch.nn.Module], number: int) -> str:
    return f"of model {number}: " if len(models) > 1 else ""


def _optimizer_state(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        state = optimizer.state.get(parameter, {})
        if isinstance(state, Mapping):
            yield from ((f"{key} of its parameter {number}", value) for key, value in state.items())


def is_readable(value: Any) -> bool:
    """Whether it is a tensor with numbers of its own."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta


def _said(value: Any) -> str | None:
    """A plain value in words that workers share although they round differently; None: it is not plain.

    >>> _said({"lr": 0.1 + 0.2, "of": [1, None], "by": print})
    "{'lr': 0.3, 'of': [1, None]}"
    """
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (bool, int, str, type(None))):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(said for item in value if (said := _said(item)) is not None)}]"
    if isinstance(value, Mapping):
        pairs = ((key, _said(item)) for key, item in value.items())
        return f"{{{', '.join(f'{key!r}: {said}' for key, said in pairs if said is not None)}}}"
    return None


# -- in words ----------------------------------------------------------------------------------------------------------


def unlike_text(everybody: Sequence[Mapping[str, int]], *, when: str, causes: Sequence[str] = ()) -> str:
    """Who does not hold what worker 0 does, which objects these are, and what to write; empty when all are equal.

    >>> print(unlike_text([{"parameter 0.weight": 1}, {"parameter 0.weight": 2}], when="before step 0")[:74])
    before step 0 worker 1 does not hold what worker 0 does: parameter 0.weigh
    """
    first = everybody[0]
    apart = {
        worker: [name for name in dict.fromkeys([*first, *theirs]) if theirs.get(name) != first.get(name)]
        for worker, theirs in enumerate(everybody)
    }
    others = [worker for worker, names in apart.items() if names]
    if not others:
        return ""
    names = apart[others[0]]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    also = f" (workers {others[1:]} do not either)" if len(others) > 1 else ""
    tracked = sorted({name.partition(":")[0] for name in names if not name.startswith("parameter ")})
    advice = []
    if len(tracked) < len(names) or not tracked:
        advice.append(
            "weights that are loaded or set after fleet.model(...) must be so on every worker: load them on all, or "
            "before fleet.model(...), which gives every worker the leader's"
        )
    for name in tracked[:2]:
        advice.append(
            f"the state of {name} must be loaded and updated on every worker alike: load it on all, or before "
            f"fleet.track({name if name.isidentifier() else '...'}=...), which gives every worker the leader's (a "
            "module whose buffers forward changes belongs in fleet.model)"
        )
    likely = f". Other causes: {'; '.join(causes)}" if causes else ""
    said = f"{when} worker {others[0]} does not hold what worker 0 does: {names[0]}{more}{also}"
    return f"{said}. {'; '.join(advice)}{likely}"


def unlike_modes(everybody: Sequence[Sequence[str]], *, step: int) -> str:
    """Which module trains on one worker and evaluates on another; empty when all are alike. ``everybody``: the modules
    in evaluation mode."""
    for worker, theirs in enumerate(everybody):
        if apart := sorted(set(theirs) ^ set(everybody[0])):
            here = "evaluates" if apart[0] in everybody[0] else "trains"
            there = "evaluates" if apart[0] in theirs else "trains"
            more = f" (and {len(apart) - 1} more)" if len(apart) > 1 else ""
            return (
                f"in step {step} the module {apart[0]}{more} {here} on worker 0 and {there} on worker {worker}: call "
                "model.train() and model.eval() on every worker, and model.train() again after code that only some run"
            )
    return ""
