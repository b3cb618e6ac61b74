"""Replicas: the same parameters on every worker, checked when they start and now and then while they train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

from paceline.checkpoint import content as checkpoint
from paceline.checkpoint import load
from paceline.checkpoint.shards import any_sharded, gathered, is_sharded, local, outline, own_part
from paceline.errors import FleetError
from paceline.settings import must_agree
from paceline.transport import Collective, Transport

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(tensors: Iterable[torch.Tensor], inside: Collective | None = None) -> float:
    """A number that two sets of tensors share when they are equal bit for bit: sums of their bits, tensor by tensor.

    Whole numbers below 2**52, so it travels exactly in a float64. Within a tensor it does not see the order, so the
    parts that the processes of a worker hold add up to it (``inside``: all of them call).
    """
    sums = sums_of([local(tensor) for tensor in tensors], divided=inside is not None and inside.grouped)
    parts = inside.collect("comparing replicas", sums) if inside is not None else [sums]
    total = 0
    for own in zip(*parts, strict=True):
        total = (total * 1_000_003 + _wrapped(sum(own))) % (1 << 52)
    return float(total if inside is None else inside.said("comparing replicas", total))


@torch.no_grad()
def sums_of(tensors: Sequence[torch.Tensor], *, divided: bool = False) -> list[int]:
    """The sum of each tensor's bits. ``divided``: such that those of its parts add up to it, which takes
    2.5 times as long as sums of 8 bytes at a time. On a device, one wait for all."""
    sums = [_sum_of_parts(tensor) if divided else _sum_of_words(tensor) for tensor in tensors]
    there = [one for one in sums if not one.is_cpu]
    fetched = {id(one): number for one, number in zip(there, _fetched(there), strict=True)}
    return [fetched[id(one)] if id(one) in fetched else int(one) for one in sums]


def _fetched(sums: Sequence[torch.Tensor]) -> list[int]:
    if len({one.device for one in sums}) == 1:
        numbers: list[int] = torch.stack(list(sums)).tolist()
        return numbers
    return [int(one) for one in sums]


def _sum_of_parts(tensor: torch.Tensor) -> torch.Tensor:
    return _bits(tensor.detach().contiguous().reshape(-1)).sum(dtype=torch.int64)


def _sum_of_words(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    per_word = max(1, 8 // flat.element_size())
    whole = flat.numel() // per_word * per_word
    words = flat[:whole]
    if words.storage_offset() % per_word:
        words = words.clone()
    total = words.view(torch.int64).sum()
    return total if whole == flat.numel() else 31 * total + _bits(flat[whole:]).sum(dtype=torch.int64)


def _bits(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(_INTEGERS.get(flat.element_size(), torch.uint8))


def _wrapped(number: int) -> int:
    """As a sum of 64 bits would have it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def shape_of(model: torch.nn.Module) -> list[list[Any]]:
    state = model.state_dict()
    return [[name, list(t.shape), str(t.dtype)] for name, t in state.items() if isinstance(t, torch.Tensor)]


def check_same_shape(transport: Transport, model: torch.nn.Module) -> None:
    """Raise ValueError on every worker, naming the first parameter that differs, when models are not alike."""
    shape = shape_of(model)
    digest = blake2b(repr(shape).encode(), digest_size=16).hexdigest()
    if len(set(transport.gather("fleet.model()", digest))) == 1:
        return
    described = {name: f"{size} {dtype}" for name, size, dtype in shape}
    names = sorted({name for theirs in transport.gather("fleet.model() names", list(described)) for name in theirs})
    must_agree(transport, "fleet.model()", {name: described.get(name, "missing") for name in names})


@torch.no_grad()
def spread(transport: Transport, models: Sequence[torch.nn.Module]) -> None:
    """Give every worker the leader's parameters and buffers, and check that they arrived."""
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    if any_sharded(tensors):
        for tensor in tensors:
            whole = gathered(tensor.detach(), keep=True)
            transport.broadcast([whole])
            local(tensor).copy_(own_part(whole, tensor) if is_sharded(tensor) else whole)
        own = fingerprint(tensors, transport)
    else:
        transport.broadcast([t.detach() for t in tensors if t.numel()])
        own = fingerprint(tensors)
    must_agree(transport, "the leader's weights", {"fingerprint": own})


@dataclass(frozen=True)
class Repair:
    """What was found when replicas were made equal."""

    distances: Sequence[float]
    """Of each worker's parameters from worker 0's: the largest difference, by the largest parameter."""
    devices: Sequence[str]

    @property
    def harmless(self) -> bool:
        """Unlike devices round differently, a little."""
        return len(set(self.devices)) > 1 and max(self.distances) < ROUNDING

    def text(self, step: int, *, missing: Sequence[str]) -> str:
        """Who was astray after a step and why that may be, the likeliest first."""
        astray = [worker for worker, distance in enumerate(self.distances) if distance > 0]
        far = f"{max(self.distances):.1g}"
        when = f"after step {step}" if step >= 0 else "before the first step"
        said = f"{when} the parameters of workers {astray} were not worker 0's (by {far})"
        if self.harmless:
            return f"{said}: unlike devices ({', '.join(sorted(set(self.devices)))}) round differently"
        return f"{said}. Likely causes: {'; '.join(likely_causes(missing))}"


def likely_causes(missing: Sequence[str]) -> list[str]:
    """Why replicas may part, the likeliest first. ``missing``: what is not tracked."""
    untracked = [f"{', '.join(missing)} is not tracked and began anew on a worker that joined"] if missing else []
    return [
        *untracked,
        "code of the script changes parameters or gradients by something that is each worker's own (random numbers "
        "drawn outside of the steps, its data, its rank)",
        "parameters are changed outside step.commit on some workers only",
        "an optimiser computes differently on unlike devices",
    ]


ROUNDING = 1e-2
"""A larger difference than unlike devices make in a hundred steps."""


@torch.no_grad()
def moved(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> float:
    """The largest difference between these and those, by the largest of those."""
    pairs = [(one, other) for one, other in zip(before, after, strict=True) if other.numel()]
    size = max((float(other.abs().max()) for _, other in pairs), default=0.0)
    largest = max((float((one - other).abs().max().nan_to_num(nan=torch.inf)) for one, other in pairs), default=0.0)
    return largest / size if size else largest


@torch.no_grad()
def distance(models: Sequence[torch.nn.Module], states: Sequence[Mapping[str, torch.Tensor]]) -> float:
    """The largest difference between the models' parameters and saved ones, by the largest of these."""
    largest, size = 0.0, 0.0
    for model, state in zip(models, states, strict=True):
        for name, parameter in model.named_parameters(remove_duplicate=False):
            whole, ours = state[name], local(parameter)
            theirs = whole.to(ours)
            if theirs.numel():
                apart = (ours - theirs).abs().max().nan_to_num(nan=torch.inf)
                largest, size = max(largest, float(apart)), max(size, float(theirs.abs().max()))
    return largest / size if size else largest


def handed_in(inside: Collective, data: torch.Tensor, *, device: torch.device) -> dict[str, Any]:
    """A state that came as bytes. In a worker of several processes it came to the first: it holds the tensors, on the
    CPU, and the others an outline of them."""
    if inside.shards == 1:
        return checkpoint.unpack(data, device=device)
    state = checkpoint.unpack(data, device=torch.device("cpu")) if inside.shard == 0 else {}
    told = inside.said("a state", outline(state))
    return state if inside.shard == 0 else told


def hand_round(transport: Transport, content: Mapping[str, Any], *, device: torch.device) -> dict[str, Any]:
    """The leader's ``content`` (plain values and tensors) on every worker."""
    for _ in range(load.ATTEMPTS):
        packs = transport.rank == 0 and transport.shard == 0
        data = checkpoint.pack(content) if packs else torch.empty(0, dtype=torch.uint8)
        size = transport.gather("the leader's state", len(data))[0]
        data = data if len(data) == size or transport.shard else torch.zeros(size, dtype=torch.uint8)
        transport.broadcast([data], inside=False)
        digest = blake2b(data.numpy().tobytes(), digest_size=16).hexdigest()
        if len(set(transport.gather("the leader's state that came", digest))) == 1:
            return handed_in(transport, data, device=device)
    raise FleetError("the leader's state did not reach every worker: leaders were lost, one after another")
