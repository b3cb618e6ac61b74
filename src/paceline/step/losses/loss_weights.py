"""A micro-batch's loss and its weight, as a script gives them to ``step.backward``, or as the loss's graph shows it.

A weight that is read is what the loss was divided by (step/losses/loss_graph.py), in units that all workers share. The
first round shows whether every micro-batch had the same whole number of items per sample (features, pixels): then
weights are samples from there on, else they stay counts of items. Either is proportional to the count, on every worker
alike, so the step's mean is the same.

Whether the weights of a step fit together is seen in its header, by everybody, before the update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.errors import MisuseError
from paceline.gradients.header import number_of
from paceline.step.losses.coupling import COUPLED, LEAST, MIXED_INSIDE
from paceline.step.losses.loss_constants import Constants, any_apart, divides_penalty
from paceline.step.losses.loss_graph import LossReading, divisor_of_mean, read_loss

if TYPE_CHECKING:
    from paceline.gradients import Header
    from paceline.step.context import EpochLength, LoopContext

GIVEN, SAMPLES, ITEMS, UNREAD, APART, UNLIKE_ROWS, ROUGH, FINE = (1 << bit for bit in range(8))
UNSURE, CLAMPED, COUPLES, VARIES, UNLIKELY, ASIDE, MIXED, MIXES = (1 << bit for bit in range(8, 16))
"""What a worker reports of its weights in a step: some were given; those read are samples, or counts of other items;
some losses could not be read; counts of several means are not proportional; micro-batches of unlike sizes; losses in
half or in double precision; some losses could be read in two ways; a sum was divided by 1, which may have been a count
of nothing; a loss couples samples; a loss has values that are not the same in every micro-batch; a loss is divided by
what may be no count; weights that were given are not proportional to the counts that are read; micro-batches have
losses with unlike terms; a model mixes samples."""
PRECISION = {torch.float64: FINE, torch.float32: 0}
TOLERANCE = {ROUGH: 2e-2, FINE: 1e-9, 0: 1e-5}
"""Largest relative change of the ratio of two counts that rounding may cause."""
PROPORTIONAL = 1e-3
"""Largest relative change of the ratio of a count to the weight that was given: ``mask.sum() + 1e-6`` is one count."""


def check_weight(weight: Any) -> Any:
    """Return a number or, where reading it would make a device wait, a tensor; raise ValueError for anything else."""
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
    """Return ``loss * weight`` in double precision: a number, where reading it makes no device wait.

    A weight of 0, which only the device may know, drops even a loss that is NaN.
    """
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


MOST_EMPTY = 3
"""Steps in a row without any gradient, after which the script is warned."""


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
    """Sum of the ratios of one micro-batch's counts, the same where they are proportional."""
    means: int = 0
    """How many counts are in it."""
    ratios: list[Any] = field(default_factory=list)
    rows: set[int] = field(default_factory=set)
    precision: int = 0
    unsure: bool = False
    """Whether a loss could be read in two ways."""
    clamped: Any = False
    """Whether a sum that is not 0 was divided by exactly 1; on CUDA a tensor."""
    couplings: list[Any] = field(default_factory=list)
    """Strength with which losses were found to couple samples."""
    mixings: list[Any] = field(default_factory=list)
    """Strength with which models were found to mix samples."""
    factor: Any = None
    """Fingerprint of the factors of one micro-batch's loss, besides counts."""
    factors: list[Any] = field(default_factory=list)
    unlikely: Any = False
    """Whether a sum was divided by a tensor that may be no count; on CUDA a tensor."""
    divisor: Any = None
    """Fingerprint of the tensors by which one micro-batch's means are divided, besides counts."""
    divisors: list[Any] = field(default_factory=list)
    constants: list[Constants] = field(default_factory=list)
    """The script's values in the losses' graphs."""
    proportions: list[Any] = field(default_factory=list)
    """Ratios of counts that were read to the weights that were given; on CUDA tensors."""
    terms: set[float] = field(default_factory=set)
    """Digests of the kinds of terms that losses have."""

    def add(self, other: Tally) -> None:
        self.given |= other.given
        self.raw |= other.raw
        self.unread |= other.unread
        self.precision |= other.precision
        self.read += other.read
        self.ratios += other.ratios if other.ratio is None else [*other.ratios, other.ratio]
        self.rows |= other.rows
        self.unsure |= other.unsure
        self.clamped = self.clamped | other.clamped
        self.couplings += other.couplings
        self.mixings += other.mixings
        self.factors += other.factors if other.factor is None else [*other.factors, other.factor]
        self.unlikely = self.unlikely | other.unlikely
        self.divisors += other.divisors if other.divisor is None else [*other.divisors, other.divisor]
        self.constants += other.constants
        self.proportions += other.proportions
        self.terms |= other.terms

    def plain(self) -> Tally:
        """Return a tally without tensors of a device, which is waited for."""
        weights = _numbers(weight for weight, _ in self.read)
        read = [(weight, rows) for weight, (_, rows) in zip(weights, self.read, strict=True)]
        return replace(
            self,
            read=read,
            ratios=_numbers(self.ratios),
            rows=set(self.rows),
            clamped=bool(self.clamped),
            couplings=_numbers(self.couplings),
            mixings=_numbers(self.mixings),
            factors=_numbers(self.factors),
            unlikely=bool(self.unlikely),
            divisors=_numbers(self.divisors),
            constants=self._plain_constants(),
            proportions=_numbers(self.proportions),
            terms=set(self.terms),
        )

    def _plain_constants(self) -> list[Constants]:
        numbers = iter(_numbers(number for one in self.constants for number in one))
        return [Constants(*three) for three in zip(numbers, numbers, numbers, strict=True)]

    def facts(self, weight: float) -> dict[str, float]:
        """Return the header's facts about weights, given the sum of this worker's weights."""
        kinds = GIVEN * self.given | UNREAD * self.unread | UNLIKE_ROWS * (len(self.rows) > 1) | self.precision
        kinds |= UNSURE * self.unsure | CLAMPED * bool(self.clamped) | UNLIKELY * bool(self.unlikely)
        kinds |= COUPLES * any(found > LEAST for found in _numbers(self.couplings))
        kinds |= MIXES * any(found > LEAST for found in _numbers(self.mixings))
        facts = {"unit": 0.0, "ratio": 0.0}
        if factors := [factor for factor in _numbers(self.factors) if math.isfinite(factor) and factor]:
            facts["factor"] = factors[0]
            kinds |= VARIES * _apart(factors, self.precision)
        if divisors := [divisor for divisor in _numbers(self.divisors) if math.isfinite(divisor) and divisor]:
            facts["divisor"] = divisors[0]
            kinds |= UNLIKELY * _apart(divisors, self.precision)
        if constants := [one for one in self._plain_constants() if math.isfinite(one.number)]:
            facts["graph"], facts["constants"], facts["certain"] = constants[0]
            kinds |= VARIES * any_apart(constants, _allowed(self.precision))
        if proportions := [one for one in _numbers(self.proportions) if math.isfinite(one) and one]:
            facts["proportion"] = proportions[0]
            kinds |= ASIDE * _is_beyond(proportions, PROPORTIONAL)
        if self.terms:
            facts["terms"] = min(self.terms)
            kinds |= MIXED * (len(self.terms) > 1)
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


def read_weight(
    loss: torch.Tensor, rows: int, tally: Tally, *, unit: float | None, part: bool, like: Tally | None = None
) -> tuple[Any, str]:
    """Return the weight of a micro-batch whose loss has none given, and a warning, which may be empty.

    ``unit``: items per sample that all workers agree on; None before the first round. ``part``: the loss is for some
    models alone, and those of others have the same weight. ``like``: this worker's micro-batches of the step so far,
    which show how a loss is to be read that could be read in two ways.
    """
    found = read_loss(loss, rows)
    if found.sum_over is not None:
        raise MisuseError(_sum_text(found.sum_over, rows))
    if found.nothing and not found.counts and not (found.unread or found.bends or found.couples):
        return 0.0, ""
    tally.unsure |= found.unsure
    tally.factor = found.factor if tally.factor is None else tally.factor + found.factor
    tally.divisor = found.divisor if tally.divisor is None else tally.divisor + found.divisor
    tally.unlikely = tally.unlikely | found.unlikely
    if found.clamped is not False:
        tally.clamped = tally.clamped | (found.clamped & (loss.detach().reshape(()) != 0))
    if not found.counts:
        tally.unread |= found.unread is not None
        tally.rows.add(rows)
        return float(rows), _odd_text(found) if found.bends or found.couples else ""
    tally.precision |= PRECISION.get(loss.dtype, ROUGH)
    if found.unsure and all(not isinstance(one, torch.Tensor) and one == found.counts[0] for one in found.counts):
        found.counts = found.counts[:1]  # how many losses there are may be the number of samples
    if rows > 1 and not (part or found.unsure):
        # Sums divided by len(x) may be any number (one per time step of the longest text); the first is told apart.
        tally.terms.add(_terms_number(frozenset(found.kinds), len(found.counts) - max(0, found.sums - 2)))
    base = _base(found.counts)
    if found.otherwise is not None and _fits(found.otherwise, base, rows, unit, like):
        found.counts, base = [found.otherwise], found.otherwise
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
    return weight, _odd_text(found)


def look_at_division(loss: torch.Tensor, rows: int) -> str:
    """Return a warning about a mean that was divided by a whole number, as code does that adds up gradients; or empty.

    >>> look_at_division(torch.ones(3, requires_grad=True).mean(), 3)
    ''
    """
    number = divisor_of_mean(loss, rows)
    if not number:
        return ""
    return (
        f"the loss is a mean divided by {number}. If {number} is a number of micro-batches whose gradients the script "
        "adds up, leave the division out: a step is the mean over all its samples, and its gradients and step.loss are "
        f"{number} times too small. Where {number} belongs to the loss (half a squared error), all is well"
    )


def look_at_penalty(loss: torch.Tensor, epoch: EpochLength | None) -> str:
    """Return a warning about a penalty that was divided by the length of the script's loader; or empty."""
    if epoch is None or epoch.batches == epoch.updates or not divides_penalty(loss, epoch.batches):
        return ""
    return (
        f"a penalty on the weights is divided by {epoch.batches}, which is len(loader): that counts micro-batches, and "
        f"an epoch has {epoch.updates} updates. A penalty that is to count once per epoch (a KL divergence) is divided "
        "by the number of updates, len(steps) // epochs of steps = fleet.steps(...). Where the number is one of your "
        "own, all is well"
    )


def look_at_given(loss: torch.Tensor, weight: Any, rows: int, tally: Tally) -> str:
    """Note how a weight that was given goes with what the loss is a mean over; return a warning, which may be empty."""
    found = read_loss(loss, rows)
    if found.sum_over == "":
        return _SUM_WITH_WEIGHT
    if not (found.unsure or found.unread):
        # Of several counts one may stay the same, which goes with weight=len(x); the samples are known to vary.
        several = [rows] if rows in [one for one in found.counts if not isinstance(one, torch.Tensor)] else []
        tally.proportions += [one / weight for one in (found.counts if len(found.counts) == 1 else several)]
    return ""


@lru_cache
def _terms_number(terms: frozenset[str], count: int) -> float:
    return 1.0 + number_of(repr((sorted(terms), count)).encode())


def _fits(otherwise: int, base: Any, rows: int, unit: float | None, like: Tally | None) -> bool:
    """Return whether only the other reading of a loss gives the items per sample that other micro-batches have."""
    if unit is None and like is not None and like.read and not isinstance(like.read[0][0], torch.Tensor):
        unit = like.read[0][0] / like.read[0][1]
    return unit is not None and otherwise == unit * rows and not isinstance(base, torch.Tensor) and base != unit * rows


def _base(counts: list[Any]) -> Any:
    """Return the count that is the weight: any, as they are proportional; a number where there is one.

    A mean over nothing beside one over something must not drop both: they are not proportional, which `_ratio` shows.
    """
    known = [count for count in counts if not isinstance(count, torch.Tensor)]
    return next(filter(None, known), known[0]) if known else counts[0]


def _ratio(counts: Iterable[Any], base: Any, place: int) -> Any:
    """Return a number that stays the same while the counts are proportional to ``base``.

    It is infinite where some counts are 0 and others are not, and the same for any number of equal counts. ``place``:
    the position of the first count.
    """
    if not isinstance(base, torch.Tensor) and base == 0:
        return math.nan
    total: Any = 0.0
    whole = 0.0
    for number, count in enumerate(counts, start=place):
        if isinstance(count, torch.Tensor):
            count = count.to(torch.float64)
        elif count == 0:
            return math.inf
        part = math.sqrt(2 * number + 3)
        total, whole = total + part * (count / base), whole + part
    return math.sqrt(2 * place + 3) * (total / whole)


def _positive(count: Any, loss: torch.Tensor) -> Any:
    """Return a count by which a sum was divided, as a count of 0 or more.

    A count of 1 under a sum of exactly 0 stands for 0: it was made 1 so that nothing is divided by 0.
    """
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
    return math.isinf(max(ratios)) or _is_beyond(ratios, _allowed(precision))


def _is_beyond(numbers: list[float], allowed: float) -> bool:
    return max(numbers) - min(numbers) > allowed * abs(numbers[0])


def _allowed(precision: int) -> float:
    return TOLERANCE[ROUGH if precision & ROUGH else precision & FINE]


def check_weights(loop: LoopContext, step: int, header: Header) -> None:
    """After a round: raise MisuseError when the weights of its micro-batches do not fit together."""
    _notice_empty_steps(loop, header)
    kinds = 0
    for one in map(int, header.column("kinds").tolist()):
        kinds |= one
    ratios = [ratio for ratio in header.column("ratio").tolist() if ratio]
    if kinds & APART or (len(ratios) > 1 and _apart(ratios, kinds)):
        raise MisuseError(_apart_text(step))
    if kinds & UNSURE and _unlike_units(header, kinds):
        raise MisuseError(_unsure_text(step))
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
        loop.notes.warn_once(_UNREAD)
    if kinds & CLAMPED:
        loop.notes.warn_once(_CLAMPED)
    factors = [factor for factor in header.column("factor").tolist() if factor]
    columns = (header.column(name).tolist() for name in ("graph", "constants", "certain"))
    unlike = any_apart([one for one in map(Constants, *columns) if one.graph], _allowed(kinds))
    if kinds & VARIES or (len(factors) > 1 and _apart(factors, kinds)) or unlike:
        loop.notes.warn_once(_VARIES)
    divisors = [divisor for divisor in header.column("divisor").tolist() if divisor]
    if kinds & UNLIKELY or (len(divisors) > 1 and _apart(divisors, kinds)):
        loop.notes.warn_once(_UNLIKELY)
    if kinds & COUPLES:
        loop.notes.warn_once(COUPLED)
    if kinds & MIXES:
        loop.notes.warn_once(MIXED_INSIDE)
    proportions = [one for one in header.column("proportion").tolist() if one]
    if kinds & ASIDE or (len(proportions) > 1 and _is_beyond(proportions, PROPORTIONAL)):
        loop.notes.warn_once(_NOT_PROPORTIONAL)
    if kinds & MIXED or len(set(header.column("terms").tolist()) - {0.0}) > 1:
        loop.notes.warn_once(_UNLIKE_TERMS)


def _notice_empty_steps(loop: LoopContext, header: Header) -> None:
    """Warn when no micro-batch of several steps in a row had a gradient: a script may set gradients by hand."""
    empty = header.total("samples") > 0 and not header.total("weight")
    loop.script.empty_steps = loop.script.empty_steps + 1 if empty else 0
    if loop.script.empty_steps == MOST_EMPTY:
        loop.notes.warn_once(_EMPTY)


def _unlike_units(header: Header, kinds: int) -> bool:
    """Return whether samples have unlike numbers of items, so that it matters how a loss was read."""
    units = set(header.column("unit").tolist()) - {0.0}
    return -1.0 in units or len(units) > 1 or (not units and bool(kinds & ITEMS))


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
_CLAMPED = (
    "a sum of several values was divided by a count of exactly 1. If that was 0 made 1 (count.clamp(min=1)), the "
    "step is not that of one process, which has one count for the whole batch. The same step as one process's: "
    "step.add(count=count); step.backward(total / len(x)); then step.reduce(), multiply every p.grad by "
    'step.record.weight / max(step.sums["count"], 1), and step.commit(optimizer)'
)
_VARIES = (
    "a factor, exponent, bound or class weight in the loss is not the same in every micro-batch of a step (a ratio of "
    "losses, a statistic of the batch, len(x), a counter of micro-batches, a random number), so the step is not that "
    "of one process: make it once per step, from step.index or step.progress or from data of the whole batch "
    "(fleet.predict)"
)
_UNLIKELY = (
    "the loss is divided by a tensor that is neither a count of what it adds up nor the sum of its weights, and is "
    "taken for one. That is right for a sum over the same samples, such as target.square().sum(): then give "
    "step.backward(loss, weight=...) that sum, and this is not said. For anything else (a variance of the batch, a "
    "moving average, the size of the global batch) the step is not that of one process: make it once, over the "
    "dataset, as a number, beside a plain mean"
)
_EMPTY = (
    "no micro-batch of the last three steps had a gradient (step.skip(), or weight=0), so nothing is trained. "
    "Gradients that the script sets itself do not reach the update: call step.backward(loss) in every micro-batch, "
    "change p.grad between step.reduce() and optimizer.step(), then call step.commit()"
)
_SUM_WITH_WEIGHT = (
    "a weight was given with a loss that is a plain sum over the micro-batch, or has one as a term. A weight says what "
    "a mean is over, and makes no mean of a sum, so the step depends on how samples are dealt: divide the sum, such as "
    "loss / len(x) (times global_batch, for the sum over a whole batch), and leave the weight out. Where its values "
    "have weights that were divided by their sum (w = w / w.sum()), write (w * l).sum() / w.sum() with the weights as "
    "they were before, and leave weight= out"
)
_NOT_PROPORTIONAL = (
    "the weight given to step.backward is not proportional to what the loss is divided by, so the step is not that of "
    "one process, whose loss is one mean over the whole batch: leave the weight out, and that count is read from the "
    "loss. If the mean over micro-batches by your weight is meant, it is right as it is"
)
_PENALTY = (
    "a penalty on the weights is divided by the micro-batch's number of samples, so it weighs more than in one process "
    "with the whole batch: divide it by a number of your own, such as the global batch size"
)
_UNLIKE_TERMS = (
    "the losses of one step's micro-batches have unlike terms (one that only some samples have, or tasks by turns), so "
    "the step is not that of one process, which has every term once for the whole batch: give every micro-batch every "
    "term, divided by the same count, such as (l * mask).sum() / len(x); or, if each loss is a mean over its samples, "
    "give step.backward(loss, weight=len(x))"
)
SINGLES = (
    "each micro-batch is one sample, so nothing shows whether the loss couples samples: negatives from the batch, a "
    "softmax or a mean over samples, a mean for each task or class that only some samples have. Such a loss trains "
    "another model than one process would, and no warning comes. Try a few steps with micro_batch=2, where it is seen"
)
_SAMPLES_FIRST = "If the loss is a mean over samples all the same, give step.backward(loss, weight=len(x))"


def _sum_text(divided_by: str, rows: int) -> str:
    if not divided_by:
        return (
            "the loss is a sum over the micro-batch and not a mean, or has one as a term, so the step would depend on "
            "how samples are dealt: divide that sum by what it adds up, such as loss / len(x) (times global_batch, for "
            "the sum over a whole batch). Where its values have weights that were divided by their sum (w = w / "
            "w.sum()), write (w * l).sum() / w.sum() with the weights as they were before. step.backward(loss, "
            "weight=...) makes no mean of a sum"
        )
    return (
        f"the loss is a sum divided by {divided_by}, which is neither the micro-batch's number of samples ({rows}) nor "
        f"the number of values in the sum, so the step would depend on how samples are dealt. {_SAMPLES_FIRST}. If it "
        "is a sum over samples, divide it by len(x), or by the count as a tensor (mask.sum() without .item())"
    )


def _apart_text(step: int) -> str:
    return (
        f"the losses of step {step} add up means over unlike things (samples in one term; tokens, class weights or a "
        "group of samples in another), whose counts are not proportional from micro-batch to micro-batch. Divide every "
        "term by the same count, such as (l * mask).sum() / len(x): that is exact. step.backward(loss, weight=len(x)) "
        "is exact only where a term is over a set that never changes, such as boundary points. Any other weight=... is "
        "the count that the whole step goes by"
    )


def _unsure_text(step: int) -> str:
    return (
        f"the loss of step {step} can be read in two ways, because the number of samples of a micro-batch is also "
        "another size in it, and the two give unlike weights: give step.backward(loss, weight=len(x)) if the loss is a "
        "mean over samples, else weight=... what it is a mean over"
    )


def _bent_text(name: str) -> str:
    return (
        f"the loss is no sum over samples divided by a count ({name} of one), so the step depends on how samples are "
        "dealt, as with DDP: take the mean last"
    )


def _odd_text(found: LossReading) -> str:
    if found.couples:
        return COUPLED
    if found.bends:
        return _bent_text(found.bends)
    if found.unread:
        return (
            f"a term of the loss cannot be read ({found.unread}): the micro-batch counts by what the others were "
            "divided by; give step.backward(loss, weight=...) if that one is a mean over something else"
        )
    return _PENALTY if found.penalty else ""
