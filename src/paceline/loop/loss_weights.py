"""A micro-batch's loss and its weight, as a script gives them to ``step.backward``, or as the loss's graph tells it.

A weight that is read is what the loss was divided by (`paceline.loop.loss_graph`), in units that all workers share.
The first round shows whether every micro-batch had the same whole number of items per sample (features, pixels): then
weights are samples from there on, else they stay counts of items. Either is proportional to the count, on every worker
alike, so the step's mean is the same.

Whether the weights of a step fit together is seen in its header, by everybody, before the update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.errors import MisuseError
from paceline.loop.coupling import warn_of_coupling
from paceline.loop.loss_graph import LossReading, read_loss

if TYPE_CHECKING:
    from paceline.combine import Header
    from paceline.loop.context import LoopContext

GIVEN, SAMPLES, ITEMS, UNREAD, APART, UNLIKE_ROWS, ROUGH, FINE = (1 << bit for bit in range(8))
"""What a worker says of its weights in a step: some were given; those read are samples, or counts of other items; some
losses could not be read; counts of several means are not proportional; micro-batches of unlike sizes; losses in half or
in double precision."""
PRECISION = {torch.float64: FINE, torch.float32: 0}
TOLERANCE = {ROUGH: 2e-2, FINE: 1e-9, 0: 1e-5}
"""By how much rounding may change the ratio of two counts, relatively."""


def check_weight(weight: Any) -> Any:
    """A number or, where looking at it would make a device wait, a tensor there; ValueError for any other."""
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise ValueError(f"weight must be one number, got a tensor of shape {tuple(weight.shape)}")
        weight = weight.detach().reshape(())
        if weight.device.type != "cpu":
            return weight.to(torch.float64)  # looking at it would make the device wait
        weight = weight.item()
    if not isinstance(weight, (int, float, np.number)) or not 0 <= weight < float("inf"):
        raise ValueError(f"weight must be a finite number, zero or more, got {weight!r}")
    return float(weight)


def weighted(loss: torch.Tensor, weight: Any) -> torch.Tensor | float:
    """``loss * weight`` in double precision: a number, where looking at it makes no device wait. A weight of 0, which
    only the device may know, drops even a loss that is NaN."""
    if loss.is_cpu and not isinstance(weight, torch.Tensor):
        return float(loss.item()) * float(weight)
    loss = loss.detach().to(torch.float64)
    if isinstance(weight, torch.Tensor):
        loss = torch.where(weight > 0, loss, torch.zeros_like(loss))
    product: torch.Tensor = loss * weight
    return product


def check_loss(loss: Any) -> None:
    """Raise ValueError unless it is one number."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"the loss must be a scalar tensor, the mean over the micro-batch; got {shape}")


@dataclass
class Tally:
    """What the weights of some micro-batches are made of."""

    given: bool = False
    read: list[tuple[Any, int]] = field(default_factory=list)
    """Weights that were read, and their samples."""
    raw: bool = False
    """Whether they are counts as they were read: no unit is agreed yet."""
    unread: bool = False
    ratio: Any = None
    """Of one micro-batch: a sum of the ratios of its counts, the same where they are proportional."""
    means: int = 0
    """How many counts are in it."""
    ratios: list[Any] = field(default_factory=list)
    rows: set[int] = field(default_factory=set)
    precision: int = 0

    def add(self, other: Tally) -> None:
        self.given |= other.given
        self.raw |= other.raw
        self.unread |= other.unread
        self.precision |= other.precision
        self.read += other.read
        self.ratios += other.ratios if other.ratio is None else [*other.ratios, other.ratio]
        self.rows |= other.rows

    def plain(self) -> Tally:
        """The same without tensors of a device, which is waited for."""
        weights = _numbers(weight for weight, _ in self.read)
        read = [(weight, rows) for weight, (_, rows) in zip(weights, self.read, strict=True)]
        return replace(self, read=read, ratios=_numbers(self.ratios), rows=set(self.rows))

    def facts(self, weight: float) -> dict[str, float]:
        """What the header is told, given the sum of this worker's weights."""
        kinds = GIVEN * self.given | UNREAD * self.unread | UNLIKE_ROWS * (len(self.rows) > 1) | self.precision
        facts = {"unit": 0.0, "ratio": 0.0}
        if self.read and self.raw:
            weights = _numbers(one for one, _ in self.read)
            each = {one / rows for one, (_, rows) in zip(weights, self.read, strict=True) if one}
            kinds |= SAMPLES if each <= {1.0} else ITEMS
            alike = len(each) == 1 and all(one.is_integer() for one in each)
            facts["unit"] = 0.0 if not each else each.pop() if alike else -1.0
        elif self.read:
            mixed = self.given or self.unread
            whole = sum(_numbers(one for one, _ in self.read)) if mixed else weight
            kinds |= SAMPLES if whole == sum(rows for _, rows in self.read) else ITEMS
        if ratios := [ratio for ratio in _numbers(self.ratios) if not math.isnan(ratio)]:
            facts["ratio"] = ratios[0] if math.isfinite(ratios[0]) else 0.0
            kinds |= APART * _apart(ratios, self.precision)
        return {"kinds": float(kinds), **facts}


def read_weight(loss: torch.Tensor, rows: int, tally: Tally, *, unit: float | None, part: bool) -> tuple[Any, str]:
    """The weight of a micro-batch whose loss has none given, and a warning, which may be empty.

    ``unit``: items per sample that all workers agree on; None before the first round. ``part``: the loss is for some
    models alone, and those of others have the same weight.
    """
    found = read_loss(loss, rows)
    if found.sum_over is not None:
        raise MisuseError(_sum_text(found.sum_over, rows))
    if not found.counts:
        tally.unread |= found.unread is not None
        tally.rows.add(rows)
        return float(rows), _bent_text(found.bends) if found.bends else ""
    tally.precision |= PRECISION.get(loss.dtype, ROUGH)
    base = _base(found.counts)
    if part or (not isinstance(base, torch.Tensor) and not math.isfinite(base)):  # then the gradient shows it
        base = rows
    if part or len(found.counts) > 1:
        ratio = _ratio(found.counts, base, tally.means)
        tally.ratio = ratio if tally.ratio is None else tally.ratio + ratio
        tally.means += len(found.counts)
    weight = _positive(base, loss) if found.by_tensor and not part else base
    if unit is not None and unit != 1.0 and not part:
        weight = weight / unit
    weight = weight.to(torch.float64) if isinstance(weight, torch.Tensor) else float(weight)
    if not tally.read:
        tally.read.append((weight, rows))
    tally.raw |= unit is None and not part
    return weight, _odd_text(found) if found.bends or found.unread else ""


def _base(counts: list[Any]) -> Any:
    """The count that is the weight: any, as they are proportional; a number where there is one. A mean over nothing
    beside one over something must not drop both: then they are not proportional, and `_ratio` says so."""
    known = [count for count in counts if not isinstance(count, torch.Tensor)]
    return next(filter(None, known), known[0]) if known else counts[0]


def _ratio(counts: Iterable[Any], base: Any, place: int) -> Any:
    """A number that stays the same while the counts are proportional to ``base``, infinite where some are 0 and others
    not; ``place``: of the first of them."""
    if not isinstance(base, torch.Tensor) and base == 0:
        return math.nan
    total: Any = 0.0
    for number, count in enumerate(counts, start=place):
        if isinstance(count, torch.Tensor):
            count = count.to(torch.float64)
        elif count == 0:
            return math.inf
        total = total + math.sqrt(2 * number + 3) * (count / base)
    return total


def _positive(count: Any, loss: torch.Tensor) -> Any:
    """A count by which a sum was divided. One of 1 under a sum of exactly 0 is a count of nothing that was made 1, so
    that nothing is divided by 0."""
    if isinstance(count, torch.Tensor):
        count = count.abs()
        return torch.where((count == 1) & (loss.detach() == 0).reshape(()), torch.zeros_like(count), count)
    count = abs(count)
    return 0.0 if count == 1 and loss.is_cpu and loss.item() == 0 else count


def _numbers(values: Iterable[Any]) -> list[float]:
    """As numbers; a device is waited for once."""
    values = list(values)
    there = [value.to(torch.float64) for value in values if isinstance(value, torch.Tensor)]
    known = iter(torch.stack(there).tolist() if there else ())
    return [next(known) if isinstance(value, torch.Tensor) else float(value) for value in values]


def _apart(ratios: list[float], precision: int) -> bool:
    allowed = TOLERANCE[ROUGH if precision & ROUGH else precision & FINE]
    return math.isinf(max(ratios)) or max(ratios) - min(ratios) > allowed * abs(ratios[0])


def check_weights(loop: LoopContext, step: int, header: Header) -> None:
    """After a round: raise MisuseError when the weights of its micro-batches do not fit together."""
    told = list(map(int, header.column("kinds").tolist()))
    kinds = 0
    for one in told:
        kinds |= one
    ratios = [ratio for ratio in header.column("ratio").tolist() if ratio]
    if kinds & APART or (len(ratios) > 1 and _apart(ratios, kinds)):
        raise MisuseError(_apart_text(step))
    if kinds & ITEMS and kinds & (GIVEN | UNREAD):
        why = (
            "others were given a weight: give every step.backward a weight, or none"
            if kinds & GIVEN
            else "the losses of others cannot be read: give every step.backward(loss, weight=...) its count"
        )
        raise MisuseError(
            f"in step {step} some micro-batches count by what their loss was divided by, which is not their number of "
            f"samples, and {why}"
        )
    if kinds & UNREAD and _unlike_sizes(header, kinds):
        loop.warn_once(_UNREAD)
    warn_of_coupling(loop)


def _unlike_sizes(header: Header, kinds: int) -> bool:
    samples, micro_batches = header.column("samples"), header.column("micro_batches")
    sizes = {a / b for a, b in zip(samples.tolist(), micro_batches.tolist(), strict=True) if b}
    return bool(kinds & UNLIKE_ROWS) or len(sizes) > 1


# -- in words ---------------------------------------------------------------------------------------------------------

_UNREAD = (
    "what the loss was divided by cannot be read (it is compiled, or of a function of your own), so each micro-batch "
    "counts by its samples, and they have unlike numbers of these. If the loss is a mean over something else, such as "
    "tokens, the step is not that of one process: give step.backward(loss, weight=count), or weight=len(x) if it is not"
)


def _sum_text(divided_by: str, rows: int) -> str:
    give = "or say how much the micro-batch counts, step.backward(loss, weight=...)"
    if not divided_by:
        return (
            "the loss is a sum over the micro-batch and not a mean, so the step would depend on how samples are dealt: "
            "divide it by what it adds up, such as loss / len(x) (times global_batch, for the sum over a whole "
            f"batch), {give}"
        )
    return (
        f"the loss is a sum divided by {divided_by}, which is neither the micro-batch's number of samples ({rows}) nor "
        "the number of values in the sum, so the step would depend on how samples are dealt: divide by len(x), or by "
        f"the count as a tensor (mask.sum() without .item()), {give}"
    )


def _apart_text(step: int) -> str:
    return (
        f"the losses of step {step} add up means over unlike things (tokens here, samples there), whose counts are not "
        "proportional from micro-batch to micro-batch, so that no weight makes the step that of one process: make them "
        "means over the same, or give step.backward(loss, weight=...) the count that the step is to go by"
    )


def _bent_text(name: str) -> str:
    return (
        f"the loss is no sum over samples divided by a count ({name} of one), so the step depends on how samples are "
        "dealt, as with DDP: take the mean last"
    )


def _odd_text(found: LossReading) -> str:
    if found.bends:
        return _bent_text(found.bends)
    if found.unread:
        return (
            f"a term of the loss cannot be read ({found.unread}): the micro-batch counts by what the others were "
            "divided by; give step.backward(loss, weight=...) if that one is a mean over something else"
        )
    return ""
