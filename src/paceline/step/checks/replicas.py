"""Fingerprints of replicas, and the leader's state for those that differ; `sameness.py` says in which steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import torch

from paceline.checkpoint import content as checkpoint
from paceline.checkpoint import load
from paceline.checkpoint.shards import any_sharded, gathered, is_sharded, local, outline, own_part
from paceline.errors import FleetError
from paceline.gradients.buffers import sums_of
from paceline.settings import must_agree
from paceline.transport import Collective, Transport


@torch.no_grad()
def fingerprint(tensors: Iterable[torch.Tensor], inside: Collective | None = None) -> float:
    """Return a number that two sets of tensors share when they are equal bit for bit.

    It is made of sums of their bits, tensor by tensor: a whole number below 2**52, so it travels exactly in a float64.
    Within a tensor it does not see the order, so the parts that the processes of a worker hold add up to it
    (``inside``: all of them call).
    """
    sums = sums_of([local(tensor) for tensor in tensors], divided=inside is not None and inside.grouped)
    parts = inside.collect("comparing replicas", sums) if inside is not None else [sums]
    total = 0
    for own in zip(*parts, strict=True):
        total = (total * 1_000_003 + _wrapped(sum(own))) % (1 << 52)
    return float(total if inside is None else inside.from_first("comparing replicas", total))


def _wrapped(number: int) -> int:
    """As a sum of 64 bits would have it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def shape_of(model: torch.nn.Module) -> list[list[Any]]:
    state = model.state_dict()
    return [[name, list(t.shape), str(t.dtype)] for name, t in state.items() if isinstance(t, torch.Tensor)]


def check_same_shape(transport: Transport, model: torch.nn.Module) -> None:
    """Raise ValueError on every worker, naming the first parameter that differs, when models are not alike.

    They are alike when they have the same parameters and buffers in the same order, by which tensors are summed.
    """
    shape = shape_of(model)
    digest = blake2b(repr(shape).encode(), digest_size=16).hexdigest()
    if len(set(transport.gather("fleet.model()", digest))) == 1:
        return
    described = {name: f"{size} {dtype}" for name, size, dtype in shape}
    orders = transport.gather("fleet.model() names", list(described))
    names = sorted({name for theirs in orders for name in theirs})
    must_agree(transport, "fleet.model()", {name: described.get(name, "missing") for name in names})
    if any(theirs != orders[0] and sorted(theirs) == sorted(orders[0]) for theirs in orders):
        raise ValueError(_another_order(orders))


def _another_order(orders: Sequence[Sequence[str]]) -> str:
    """Return which parameter is the first that has another place on some worker, given everybody's names in order."""
    alike = sorted(orders[0])
    worker, theirs = next(
        (w, theirs) for w, theirs in enumerate(orders) if theirs != orders[0] and sorted(theirs) == alike
    )
    expected, found = next(pair for pair in zip(orders[0], theirs, strict=True) if pair[0] != pair[1])
    return (
        f"workers disagree in fleet.model(): the layers have another order on worker {worker}, where {found} stands in "
        f"the place of worker 0's {expected}. Layers named from a set, or from a folder's listing, have an order of "
        "their own in every process: build them from sorted(...)"
    )


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
    """Largest difference of each worker's parameters from worker 0's, over the largest parameter."""
    devices: Sequence[str]

    @property
    def harmless(self) -> bool:
        """Unlike devices round differently, a little."""
        return len(set(self.devices)) > 1 and max(self.distances) < ROUNDING

    def text(self, step: int, *, missing: Sequence[str]) -> str:
        """Return which workers differed after a step, and the likely causes, the likeliest first."""
        astray = [worker for worker, distance in enumerate(self.distances) if distance > 0]
        far = f"{max(self.distances):.1g}"
        when = f"after step {step}" if step >= 0 else "before the first step"
        found = f"{when} the parameters of workers {astray} were not worker 0's (by {far})"
        if self.harmless:
            return f"{found}: unlike devices ({', '.join(sorted(set(self.devices)))}) round differently"
        return f"{found}. Likely causes: {'; '.join(likely_causes(missing))}"


def likely_causes(missing: Sequence[str]) -> list[str]:
    """Why replicas may part, the likeliest first. ``missing``: what is not tracked."""
    untracked = [f"{', '.join(missing)} is not tracked and began anew on a worker that joined"] if missing else []
    return [
        *untracked,
        "forward or the inner loop moves a parameter by its own samples (a code book, units drawn anew): make it a "
        "buffer, or move it behind step.commit, from fleet.predict",
        "code of the script changes parameters or gradients by something that is each worker's own (random numbers "
        "drawn outside of the steps, its data, its rank)",
        "parameters are changed outside step.commit on some workers only",
        "an optimiser computes differently on unlike devices",
    ]


ROUNDING = 1e-2
"""A larger difference than unlike devices make in a hundred steps."""


@torch.no_grad()
def moved(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> float:
    """Return the largest difference between these tensors and those, relative to the largest of those."""
    pairs = [(one, other) for one, other in zip(before, after, strict=True) if other.numel()]
    size = max((float(other.abs().max()) for _, other in pairs), default=0.0)
    largest = max((float((one - other).abs().max().nan_to_num(nan=torch.inf)) for one, other in pairs), default=0.0)
    return largest / size if size else largest


@torch.no_grad()
def distance(models: Sequence[torch.nn.Module], states: Sequence[Mapping[str, torch.Tensor]]) -> float:
    """Return the largest difference between the models' parameters and saved ones, relative to the largest of these."""
    largest, size = 0.0, 0.0
    for model, state in zip(models, states, strict=True):
        for name, parameter in model.named_parameters(remove_duplicate=False):
            whole, ours = state[name], local(parameter)
            theirs = whole.to(ours)
            if theirs.numel():
                apart = (ours - theirs).abs().max().nan_to_num(nan=torch.inf)
                largest, size = max(largest, float(apart)), max(size, float(theirs.abs().max()))
    return largest / size if size else largest


def handed_in(
    inside: Collective, read: Callable[[torch.device], dict[str, Any]], *, device: torch.device
) -> dict[str, Any]:
    """Return a state that was received; ``read`` reads it to a device.

    In a worker of several processes the first one received it: that one holds the tensors, on the CPU, and the others
    an outline of them.
    """
    if inside.shards == 1:
        return read(device)
    state = read(torch.device("cpu")) if inside.shard == 0 else {}
    first = inside.from_first("a state", outline(state))
    return state if inside.shard == 0 else first


def _unpacked(data: torch.Tensor, device: torch.device) -> dict[str, Any]:
    return checkpoint.unpack(data, device=device)


def send_to_all(transport: Transport, content: Mapping[str, Any], *, device: torch.device) -> dict[str, Any]:
    """Return the leader's ``content`` (plain values and tensors) on every worker."""
    for _ in range(load.ATTEMPTS):
        packs = transport.rank == 0 and transport.shard == 0
        data = checkpoint.pack(content) if packs else torch.empty(0, dtype=torch.uint8)
        size = transport.gather("the leader's state", len(data))[0]
        data = data if len(data) == size or transport.shard else torch.zeros(size, dtype=torch.uint8)
        transport.broadcast([data], inside=False)
        digest = blake2b(data.numpy().tobytes(), digest_size=16).hexdigest()
        if len(set(transport.gather("the leader's state that came", digest))) == 1:
            return handed_in(transport, partial(_unpacked, data), device=device)
    raise FleetError("the leader's state did not reach every worker: leaders were lost, one after another")
