"""What must be the same on every worker, object by object: parameters, the state of everything tracked, custom orders.

Workers first compare one number of it all (`Contents.number`). Only where these differ do they ask each other for the
numbers of the single tensors, to name what differs. While they train, `ReplicaComparison` does so now and then, in the
header of a round that all have waited for.

With unlike custom orders of an epoch, samples would be lost and doubled in silence. Their digests are compared; where
they differ, workers exchange digests of ever smaller parts of the order until the first position with unlike numbers is
found (`check_order`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import MisuseError
from paceline.gradients import Header
from paceline.gradients.buffers import sums_of
from paceline.gradients.header import number_of
from paceline.roster.calls import strangers
from paceline.settings import must_agree
from paceline.step.checks.replicas import fingerprint, likely_causes
from paceline.step.step_state import StepState
from paceline.transport import Collective

if TYPE_CHECKING:
    from paceline.feed.dealing import Dealing
    from paceline.step.context import LoopContext
    from paceline.transport import Transport

SAMPLED = 1024
"""Numbers of each tensor that are compared, about, where all of them would take long."""


def sampled_number(tensors: Sequence[torch.Tensor]) -> int:
    """Return a number that workers share whose tensors have equal samples."""
    parts = [tensor.detach().reshape(-1)[:: max(1, tensor.numel() // SAMPLED)] for tensor in tensors]
    return number_of(repr(sums_of(parts)).encode())


@dataclass(frozen=True)
class Contents:
    """Tensors and plain values by name."""

    tensors: Sequence[tuple[str, torch.Tensor]]
    plain: Sequence[tuple[str, str]] = ()

    def number(self, inside: Collective | None = None) -> float:
        """Return a number that workers with equal contents share, whole and below 2**52; wait once for a device."""
        number = fingerprint((tensor for _, tensor in self.tensors), inside)
        return (
            float((int(number) * 1_000_003 + number_of(repr(self.plain).encode())) % (1 << 52))
            if self.plain
            else number
        )

    def sampled(self) -> int:
        """Return a number of about `SAMPLED` numbers of each tensor, which costs the same for large ones."""
        return sampled_number([tensor for _, tensor in self.tensors])

    def by_name(self) -> dict[str, int]:
        """Return one number per tensor and value, by name."""
        sums = sums_of([tensor for _, tensor in self.tensors])
        values = {name: number % (1 << 52) for (name, _), number in zip(self.tensors, sums, strict=True)}
        return {**values, **{name: number_of(value.encode()) for name, value in self.plain}}


def parameters_of(models: Sequence[torch.nn.Module]) -> Contents:
    """Return all parameters of some models."""
    return Contents(
        [
            (f"parameter {_prefix(models, number)}{name}", tensor)
            for number, model in enumerate(models)
            for name, tensor in model.named_parameters()
        ]
    )


def saved_buffers_of(models: Sequence[torch.nn.Module]) -> Contents:
    """Return the buffers that are saved with some models. The others may be caches of each worker's own."""
    found = []
    for number, model in enumerate(models):
        for path, module in model.named_modules():
            for key, tensor in module._buffers.items():
                if tensor is not None and key not in module._non_persistent_buffers_set:
                    found.append((f"{_prefix(models, number)}{path}.{key}", tensor))
    return Contents(found)


def state_of(things: Iterable[tuple[str, Any]]) -> Contents:
    """Return the state of modules, optimisers and schedules; that of other things may be each worker's own.

    The settings of an optimiser are compared in every step (updates.py).
    """
    tensors: list[tuple[str, torch.Tensor]] = []
    plain: list[tuple[str, str]] = []
    for name, thing in things:
        if isinstance(thing, torch.nn.Module):
            tensors += [(f"{name}: {key}", value) for key, value in thing.state_dict().items() if is_readable(value)]
        elif isinstance(thing, torch.optim.Optimizer):
            for key, value in _optimizer_state(thing):
                if is_readable(value):
                    tensors.append((f"{name}: {key}", value))
                elif (words := _in_words(value)) is not None:
                    plain.append((f"{name}: {key}", words))
        elif isinstance(thing, LRScheduler) and (words := _in_words(thing.state_dict())) is not None:
            plain.append((name, words))
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
    """Return whether the value is a tensor with numbers of its own."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta


def _in_words(value: Any) -> str | None:
    """Return a plain value in words that workers share although they round differently; None: it is not plain.

    >>> _in_words({"lr": 0.1 + 0.2, "of": [1, None], "by": print})
    "{'lr': 0.3, 'of': [1, None]}"
    """
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (bool, int, str, type(None))):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(words for item in value if (words := _in_words(item)) is not None)}]"
    if isinstance(value, Mapping):
        pairs = ((key, _in_words(item)) for key, item in value.items())
        return f"{{{', '.join(f'{key!r}: {words}' for key, words in pairs if words is not None)}}}"
    return None


# -- in words ----------------------------------------------------------------------------------------------------------


def unlike_text(everybody: Sequence[Mapping[str, int]], *, when: str, causes: Sequence[str] = ()) -> str:
    """Return which workers do not hold what worker 0 does, in which objects, and what to write; empty when all do.

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
            "module whose buffers forward changes belongs in fleet.model, and a schedule that is fed with a worker's "
            "own figure, such as its mean loss, takes step.loss or a result of fleet.evaluate instead)"
        )
    likely = f". Other causes: {'; '.join(causes)}" if causes else ""
    words = f"{when} worker {others[0]} does not hold what worker 0 does: {names[0]}{more}{also}"
    return f"{words}. {'; '.join(advice)}{likely}"


def unlike_modes(everybody: Sequence[Sequence[str]], *, step: int) -> str:
    """Return which module trains on one worker and evaluates on another; empty when all are alike.

    ``everybody``: each worker's modules in evaluation mode.
    """
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


PARTS = 64
"""Into how many parts a search divides what is left to search."""
CAUSE = (
    "The order must depend on the epoch alone: an unseeded shuffle (random.shuffle, torch.randperm, a sampler without "
    "a generator) is another one on every worker; draw it with torch.Generator().manual_seed(epoch)"
)


def check_order(transport: Transport, dealing: Dealing) -> None:
    """Raise ValueError, with the first position that differs, when the workers' orders are not the same.

    Every worker raises it, or those alone that came later with another order than the fleet's.
    """
    digest = dealing.order_digest()
    if digest is None:
        return
    label = f"order({dealing.epoch})"
    everybody = must_agree(transport, label, {}, also={"digest": digest, "since": transport.since})
    digests = [theirs["digest"] for theirs in everybody]
    if len(set(digests)) > 1:
        where = _where(transport, label, dealing.drawn())
        if is_to_end(digest, digests, [theirs["since"] for theirs in everybody]):
            raise ValueError(f"workers disagree in {label}{where}. {CAUSE}")


def is_to_end(mine: Any, values: Sequence[Any], since: Sequence[int]) -> bool:
    """Return whether a worker with this value is to end, because unlike ones were found.

    That is every worker, or those alone that came later and differ from the first ones.

    >>> [is_to_end(mine, "aab", [1, 1, 4]) for mine in "ab"], [is_to_end(mine, "aab", [1, 1, 1]) for mine in "ab"]
    ([False, True], [True, True])
    """
    found = strangers(dict(enumerate(values)), dict(enumerate(since)))
    return not found or mine in {values[rank] for rank in found}


def _where(transport: Transport, label: str, numbers: NDArray[np.int64]) -> str:
    """In words, where the orders differ first."""
    start, stop = 0, max(transport.gather(f"{label}: its length", len(numbers)))
    while stop - start > PARTS:
        edges = np.linspace(start, stop, PARTS + 1, dtype=np.int64).tolist()
        mine = [_digest(numbers[a:b]) for a, b in pairwise(edges)]
        part = _first_unlike(transport.gather(f"{label}: its parts", mine))
        if part is None:
            return ""
        start, stop = edges[part], edges[part + 1]
    everybody = transport.gather(f"{label}: its numbers", numbers[start:stop].tolist())
    place = _first_unlike(everybody)
    if place is None:
        return ": its batches are cut differently"
    values = [f"sample {own[place]}" if place < len(own) else "beyond its end" for own in everybody]
    other = next(worker for worker, value in enumerate(values) if value != values[0])
    return f": position {start + place} is {values[0]} on worker 0 and {values[other]} on worker {other}"


def _digest(numbers: NDArray[np.int64]) -> str:
    return blake2b(np.ascontiguousarray(numbers).tobytes(), digest_size=8).hexdigest()


def _first_unlike(everybody: list[list[Any]]) -> int | None:
    """Return the first position at which these lists differ; None where they are equal."""
    for place in range(max(map(len, everybody), default=0)):
        values = [own[place] if place < len(own) else None for own in everybody]
        if any(value != values[0] for value in values):
            return place
    return None


COMPARE_EVERY = 100
"""Steps between two comparisons of the replicas' parameters, and how long a repair must hold."""
COMPARE_EARLY = (1, 2, 4, 8, 16, 32, 64)
"""Steps at which replicas are compared too: what parts them mostly does so from the beginning."""


def is_examined(step: int) -> bool:
    """Return whether workers compare more than usual in this step."""
    return step % COMPARE_EVERY == 0 or step in COMPARE_EARLY


class ReplicaComparison:
    """The comparison of replicas now and then.

    A run whose replicas differ is stopped; where unlike devices round differently, they are made equal.
    """

    def __init__(self, loop: LoopContext) -> None:
        self._loop = loop

    def fingerprint(self, step_state: StepState) -> float:
        """Return a fingerprint of what this worker holds, in steps in which replicas are compared; else 0."""
        regular = step_state.index % COMPARE_EVERY == 0 or (self._loop.replica.alike and is_examined(step_state.index))
        due = self._loop.transport.size > 1 and (regular or step_state.compare)
        self._loop.gradients.accumulation.asks_modes = due
        if due:
            self._loop.gradients.accumulation.buffers.note_contents()
        if not due or self._loop.position.compared == step_state.index:
            return 0.0
        return 1.0 + self._loop.replica.contents().number(self._loop.transport)

    def refuse(self, step: int, header: Header) -> None:
        """Raise MisuseError, before an update that all have waited for, where workers do not hold the same.

        Compared are the contents of workers with like devices (unlike ones round differently, see `repair`) and which
        modules are in evaluation mode.
        """
        loop = self._loop
        if loop.replica.alike and header.differ():
            everybody = loop.transport.gather("comparing replicas", lambda: loop.replica.contents().by_name())
            causes = likely_causes(loop.tracking.missing())
            raise MisuseError(
                unlike_text(everybody, when=f"in step {step}", causes=causes)
                or f"workers did not hold the same when step {step} began"
            )
        if header.differ("modes"):
            everybody = loop.transport.gather("comparing modes", loop.gradients.accumulation.evaluating)
            if text := unlike_modes(everybody, step=step):
                raise MisuseError(text)

    def repair(self, step: int, header: Header) -> None:
        """Make replicas equal, after a round that all have waited for, that unlike devices have rounded apart."""
        if not header.differ():
            return
        found = self._loop.replica.repair()
        self._loop.gradients.statistics_were_set()
        text = found.text(step, missing=self._loop.tracking.missing())
        if not found.harmless:
            raise MisuseError(text)
        self._loop.notes.warn_all(f"{text}. Parameters and everything tracked were set to worker 0's")
