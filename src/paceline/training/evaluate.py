"""Evaluation: the test set is dealt once over the fleet, and means and sums over it are exact whatever the shares.

A score gives one value per sample, whose mean over all samples is returned. One number for a batch may be its mean or
its sum, and batches have unlike sizes: it is a sum where the call names it so, and refused otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.feed import EvaluationNumbers, Feed, Order, Source, split
from paceline.feed import total as total_of
from paceline.feed.ranges import Ranges
from paceline.records import Range

if TYPE_CHECKING:
    from paceline.training.context import TrainingContext

MEAN = "mean"
"""Name of values that were given without one."""
PlacedBatches = Iterable[tuple[tuple[Range, ...], Any]]
"""Batches with their positions: in the dataset, or among the draws of a sampler."""


def each_batch(
    source: Source,
    *,
    shares: Sequence[int],
    rank: int,
    batch_size: int,
    numbers: EvaluationNumbers,
    part: tuple[int, int] = (0, 1),
) -> PlacedBatches:
    """Yield this worker's part of the data, which is contiguous; each batch has random numbers of its own.

    ``part`` is (index, count) of this process among those of its worker. Where it has no row of a batch, it goes
    through the model with one at no position.
    """
    assert source.length is not None
    draws = source.once
    order: Order | None = None if isinstance(draws, int) else lambda epoch: draws
    feed = Feed(source.length, workers=len(shares), shuffle=False, order=order)
    feed.deal(shares)
    own, counted = _own_pieces(feed.queue(rank), batch_size, *part)
    pieces = [(piece, feed.indices(piece)) for piece in own]
    if source.ahead:
        source.expect(0, pieces)
    with numbers:
        for number, (piece, indices) in enumerate(pieces):
            batch = source.take(0, piece, indices)
            numbers.seed(piece[0][0])
            yield piece if number < counted else (), batch


def _own_pieces(
    queue: Sequence[Range], batch_size: int, shard: int, shards: int
) -> tuple[list[tuple[Range, ...]], int]:
    """Return the batches of one of a worker's processes, and how many of them count.

    They are a contiguous part of the worker's. All processes have equally many, because they go through the model
    together.

    >>> _own_pieces([(0, 5)], 2, 0, 2), _own_pieces([(0, 5)], 2, 1, 2)
    (([((0, 1),), ((1, 2),), ((0, 1),)], 2), ([((2, 3),), ((3, 4),), ((4, 5),)], 3))
    """
    if shards == 1:
        batches = list(split(queue, batch_size))
        return batches, len(batches)
    length, size, rest = total_of(queue), max(1, batch_size // shards), Ranges(queue)
    rest.take_front(length * shard // shards)
    mine = list(split(rest.take_front(length * (shard + 1) // shards - length * shard // shards), size))
    longest = -(-length // shards)
    most = -(-longest // size)
    filler = [Ranges(queue).take_front(1)] * (most - len(mine))
    return mine + filler, len(mine)


def length_of(source: Source) -> int:
    """Return the number of samples to go through: the dataset's, or a sampler's draws."""
    return source.once if isinstance(source.once, int) else len(source.once)


def facts_of(source: Source) -> dict[str, Any]:
    """Return the facts that must be equal on every worker."""
    draws = source.once
    digest = None if isinstance(draws, int) else blake2b(draws.tobytes(), digest_size=16).hexdigest()
    return {"dataset length": source.length, "the sampler's draws": digest}


def called(function: Callable[..., Any], batch: Any) -> Any:
    """Call the user's function with a batch, unpacked as the training loop would."""
    return function(*batch) if isinstance(batch, (list, tuple)) else function(batch)


@dataclass(frozen=True)
class Kinds:
    """Rules for merging the values of a name: a mean over the samples, unless the call names it otherwise."""

    sums: tuple[str, ...] = ()
    """Names of numbers that are sums over the batch."""
    tables: tuple[str, ...] = ()
    """Names of tensors of one shape that are added element by element."""

    @classmethod
    def read(cls, sums: str | Sequence[str], tables: str | Sequence[str]) -> Kinds:
        ones, others = ((names,) if isinstance(names, str) else tuple(names) for names in (sums, tables))
        if both := set(ones) & set(others):
            raise ValueError(f"fleet.evaluate: {min(both)!r} is in sums= and in tables=: name it in one of them")
        return cls(ones, others)

    def facts(self) -> dict[str, list[str]]:
        """Return the facts that must be equal on every worker."""
        return {"sums": list(self.sums), "tables": list(self.tables)}

    @property
    def added(self) -> tuple[str, ...]:
        """Return the names that are not divided by the number of samples."""
        return (*self.sums, *self.tables)


MEANS = Kinds()


def own_sums(score: Callable[..., Any], batches: PlacedBatches, kinds: Kinds = MEANS) -> dict[str, Any]:
    """Run ``score`` over this worker's part of the data and add up what it returns, in float64.

    Every batch must give the same names, and a table the same shape: which batches a worker gets depends on the pace,
    and must not show in the result.
    """
    sums: dict[str, torch.Tensor] = {}
    count = 0
    for piece, batch in batches:
        found = called(score, batch)
        if not piece:
            continue
        samples = total_of(piece)
        figures = {name: _added_up(name, value, samples, kinds) for name, value in _named(found).items()}
        if count:
            _same_names(sums, figures, "for one batch and not for another")
        for name, value in figures.items():
            sums[name] = _added(name, sums[name], value) if name in sums else value
        count += samples
    return {name: value.tolist() for name, value in sums.items()} | {"count": count}


def sum_of_processes(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of a worker's processes as one worker's."""
    if len(parts) < 2 or not any(part["count"] for part in parts):
        return dict(parts[0]) if parts else {"count": 0}
    return {name: value.tolist() for name, value in _total(parts).items()}


def final_figures(parts: Sequence[Mapping[str, Any]], kinds: Kinds = MEANS) -> dict[str, Any]:
    """Add up the workers' sums, and divide those that are means by the number of samples.

    Numbers stay numbers, tables tensors.
    """
    sums = _total(parts)
    for argument, names in kinds.facts().items():
        for name in names:
            if name not in sums:
                raise ValueError(f"fleet.evaluate(..., {argument}=...): the function returns nothing called {name!r}")
    count = int(sums.pop("count"))
    figures = {name: value if name in kinds.added else value / count for name, value in sums.items()}
    return {name: value.item() if value.dim() == 0 else value for name, value in figures.items()} | {"count": count}


def _total(parts: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the sums over the workers that had samples: one without any has no names."""
    sums: dict[str, torch.Tensor] = {}
    for part in (part for part in parts if part["count"]):
        values = {name: torch.tensor(value, dtype=torch.float64) for name, value in part.items()}
        if sums:
            _same_names(sums, values, "on one worker and not on another")
        sums = {name: _added(name, sums[name], value) if sums else value for name, value in values.items()}
    return sums


def _added_up(name: str, value: Any, samples: int, kinds: Kinds) -> torch.Tensor:
    """Return a batch's value under this name as one number, or as a table."""
    try:
        values = torch.as_tensor(value, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"fleet.evaluate: {name!r} must be a number or a tensor, got {value!r}") from None
    if name in kinds.tables or (name in kinds.sums and not values.dim()):
        return values
    if values.dim() and len(values) == samples == values.numel():
        return values.sum()
    if not values.dim():
        raise ValueError(
            f"fleet.evaluate: {name!r} is one number for a batch of {samples} samples, which may be their mean or "
            'their sum. For the mean over all samples return one value per sample (a loss with reduction="none", '
            f"model(x).argmax(1) == y). For the sum return the batch's sum and name it: "
            f'fleet.evaluate(..., sums=("{name}",))'
        )
    raise ValueError(
        f"fleet.evaluate: {name!r} has the shape {tuple(values.shape)} for a batch of {samples} samples, and must have "
        "one value per sample, whose mean over all samples comes back (values.flatten(1).mean(1) makes one of "
        "several). A table that is added element by element, such as a confusion matrix, is named: "
        f'tables=("{name}",). For predictions of each sample call fleet.predict'
    )


def _added(name: str, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if one.shape != other.shape:
        raise ValueError(
            f"fleet.evaluate: the table {name!r} has the shape {tuple(one.shape)} for one batch and "
            f"{tuple(other.shape)} for another, and is added element by element: give it one shape (minlength= of "
            "torch.bincount, for instance); for predictions of each sample call fleet.predict"
        )
    return one + other


def _same_names(ones: Mapping[str, Any], others: Mapping[str, Any], where: str) -> None:
    odd = [name for name in dict.fromkeys([*ones, *others]) if (name in ones) != (name in others)]
    if odd:
        raise ValueError(
            f"fleet.evaluate: the function returned {odd[0]!r} {where}: return the same names for every batch"
        )


def _named(figures: Any) -> dict[str, Any]:
    """Return figures by name; a tensor by itself is named "mean"."""
    if isinstance(figures, Mapping):
        if "count" in figures:
            raise ValueError('fleet.evaluate counts the samples itself: "count" is its own name')
        return dict(figures)
    if isinstance(figures, (torch.Tensor, np.ndarray, int, float)):
        return {MEAN: figures}
    raise ValueError(
        "the function given to fleet.evaluate must return one value per sample of the batch, or a dict of such: "
        f'{{"correct": model(x).argmax(1) == y}}; got {type(figures).__name__}'
    )


@contextmanager
def evaluation_mode(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Set models to evaluation mode without gradients; restore every module's mode afterwards."""
    were = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in were:
            module.training = training


def parts_of_fleet(answers: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the parts that make up the result: those of all workers.

    Where this worker fell out of the fleet and went through everything ``alone``, its own part is all.
    """
    return answers[:1] if answers[0]["alone"] else answers


class AgreedSpeeds:
    """The speeds by which workers divide work outside the steps, as the leader has them.

    A worker's own record may be one step older than another's, and parts by unlike speeds would overlap.
    """

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._workers: tuple[int, ...] = ()
        self._speeds: tuple[int, ...] = ()

    def own(self) -> dict[str, Any]:
        """Return this worker's speeds, for `paceline.settings.must_agree` to send to all."""
        steps = self._context.steps
        shares = steps.loop.position.full_shares if steps is not None else ()
        return {"workers": list(self._context.transport.workers), "speeds": list(shares)}

    def take(self, everybody: Sequence[Mapping[str, Any]]) -> None:
        """Adopt the leader's speeds."""
        self._workers, self._speeds = tuple(everybody[0]["workers"]), tuple(everybody[0]["speeds"])

    def of_members(self) -> tuple[int, tuple[int, ...]]:
        """Return this worker's rank, and the speeds of the workers present, by rank.

        The speeds are equal where the leader's are of other members. Members are read once: the proxy may follow a
        change of them meanwhile.
        """
        workers, speeds = self._context.transport.workers, self._speeds
        known = self._workers == workers and len(speeds) == len(workers) and any(speeds)
        return workers.index(self._context.transport.id), speeds if known else (1,) * len(workers)
