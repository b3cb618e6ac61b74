"""``combine="gradients"``: one round per step sums gradients and counts, and all divide by the true count.

With S_i the sum of worker i's per-sample gradients and n_i its count, the step's gradient is ``sum_i S_i / sum_i n_i``:
exactly that of one machine with the whole batch, for any shares (P0's weighted form; P1's rule as reconstructed). A
worker adds up its micro-batches (`Accumulation`), the round sums over the fleet (`GradientExchange`), `MeanGradient`
divides, measures and clips, and leaves the mean in ``p.grad``.

With a deadline the count varies from step to step. `VaryingCount` is the rule by which the learning rate may follow it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.errors import MisuseError
from paceline.gradients.accumulation import Accumulation
from paceline.gradients.buckets import Among, Buckets
from paceline.gradients.exchange import GradientExchange, Sum
from paceline.gradients.header import Header, Layout, layout_of
from paceline.gradients.scaling import is_active, next_state
from paceline.transport import Collective
from paceline.transport.formats import Format

LR_RULES = ("none", "linear", "gain")
LR_SMOOTHING = 0.1
"""Weight of the newest step in the running estimates."""


def gain(scale: float, variance: float, squared_mean: float) -> float:
    """Return AdaScale's gain for a batch ``scale`` times the usual one.

    >>> gain(0.5, variance=1.0, squared_mean=0.0), gain(0.5, variance=0.0, squared_mean=1.0), gain(1.0, 1.0, 1.0)
    (0.5, 1.0, 1.0)
    """
    if scale <= 0 or variance + squared_mean <= 0:
        return scale
    return (variance + squared_mean) / (variance / scale + squared_mean)


class VaryingCount:
    """The rule that scales the learning rate of a step whose count is not the global batch.

    With n of B samples, S = n / B, an update may be scaled by

    - ``none``: 1. The gradient is a mean over what arrived, and the rate stays.
    - ``linear``: S. Every sample moves the parameters as far as in a whole batch.
    - ``gain``: ``(v + m) / (v / S + m)`` as in AdaScale SGD, with v the variance of a whole batch's gradient and m the
      squared norm of its mean. Where noise rules it is linear, where the mean rules it is 1; it lies between them.

    v and m are learned from every round: with g_i the mean gradient of worker i's n_i samples and g that of all n, both

        sum_i n_i |g_i|^2  =  n m + k s        |g|^2  =  m + s / n

    hold in expectation for k workers and a per-sample variance s, so ``s = (sum_i n_i |g_i|^2 - n |g|^2) / (k - 1)``.
    The rule is the same on every worker, for all see the same rounds.
    """

    def __init__(self, rule: str, usual: float) -> None:
        """Make the rule; ``usual`` is the weight of a whole batch."""
        if rule not in LR_RULES:
            raise ValueError(f"the learning rate for a varying count can be {', '.join(LR_RULES)}, not {rule!r}")
        if not usual > 0:
            raise ValueError(f"a whole batch weighs more than 0, not {usual}")
        self.rule, self.usual = rule, usual
        self._noise = self._signal = self._seen = 0.0

    @property
    def wants_norms(self) -> bool:
        """Whether the rule needs the norms of the workers' own gradients."""
        return self.rule == "gain"

    def learn(self, *, weighted_squares: float, squared_norm: float, weight: float, workers: int) -> None:
        """Learn from a round: ``sum_i n_i |g_i|^2``, ``|g|^2``, n, and the number of workers that had a part in it."""
        if workers < 2 or weight <= 0:
            return
        per_sample = max(0.0, (weighted_squares - weight * squared_norm) / (workers - 1))
        self._noise += LR_SMOOTHING * (per_sample - self._noise)
        self._signal += LR_SMOOTHING * (max(0.0, squared_norm - per_sample / weight) - self._signal)
        self._seen += LR_SMOOTHING * (1.0 - self._seen)  # both start at 0: their ratio is not biased by it

    def factor(self, weight: float) -> float:
        """Return the factor for an update whose samples have this ``weight`` in all."""
        scale = weight / self.usual
        if self.rule == "none":
            return 1.0
        if self.rule == "linear" or self._seen == 0.0:
            return scale
        return gain(scale, self._noise / self.usual, self._signal)

    def state_dict(self) -> dict[str, float]:
        return {"noise": self._noise, "signal": self._signal, "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._noise, self._signal, self._seen = state["noise"], state["signal"], state["seen"]


class MeanGradient:
    """The mean of what the round summed, and its norm."""

    def __init__(self, transport: Collective, accumulation: Accumulation, exchange: GradientExchange) -> None:
        self._alone, self._elastic, self._transport = transport.solitary, transport.elastic, transport
        self._accumulation, self._exchange = accumulation, exchange
        self.weight_per_sample = 1.0
        """The weight per sample of the last round, which turns a planned count into a planned weight."""
        self.unit: float | None = None
        """The items per sample by which counts that are read are divided; None before the first round with counts."""
        self.known_norm: float | None = None
        """The norm of this step's mean before clipping, where it had to be measured anyway."""
        self._norm_alone = torch.zeros((), dtype=torch.float64)
        self._norm_wanted = True  # the first step's is measured in any case, so that asking for it works from there on
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._changed_in_place = False

    def begin(self) -> None:
        """Begin a step."""
        self.known_norm = None

    def agree_on_unit(self, header: Header) -> None:
        """Settle the unit of counts that are read, by the first round that has such, with an update or without."""
        if self.unit is None and header.column("unit").any():
            self.unit = header.unit()

    def measure_alone(self) -> None:
        """Unscale and measure the gradients of a worker alone, whose sum is its own."""
        tensors = self._accumulation.buckets.tensors()
        if self._accumulation.unscale != 1.0 and tensors:
            torch._foreach_mul_(tensors, self._accumulation.unscale)
        self._norm_alone = _norm(tensors)

    def finite_alone(self) -> bool:
        """Wait for the device, and return whether the gradients of a worker alone are finite."""
        self.known_norm = float(self._norm_alone)
        return math.isfinite(self.known_norm) or all(
            bool(t.isfinite().all()) for t in self._accumulation.buckets.tensors()
        )

    def make(self, header: Header, clip_norm: float | None, *, own: bool, varying: VaryingCount | None) -> None:
        """Leave the mean, clipped, in ``p.grad``.

        It is a copy where the script (``own``) or an optimiser may change it there, for the mean may have to be handed
        to a worker that missed the round's end.
        """
        used, copies = header.used.tolist(), self._elastic and (own or self._changed_in_place)
        self._accumulation.buckets.expose(used)
        total = header.total("weight")
        learner = varying if varying is not None and varying.wants_norms else None
        measure = self._norm_wanted or learner is not None
        self.known_norm = self._transport.once(
            "the mean gradient", lambda: self._mean(total, clip_norm, measure=measure)
        )
        if learner is not None and self.known_norm is not None:
            _learn(learner, header, total, self.known_norm)
        self._note(header, total)
        if copies:
            self._accumulation.buckets.expose(used, copies=True)
        self._accumulation.buckets.take_mean(used)

    def _mean(self, total: float, clip_norm: float | None, *, measure: bool) -> float | None:
        """Divide the sum, unless the mean was handed over; return the norm before clipping, where it is known."""
        if self._exchange.is_mean:
            norm = float(self._exchange.norm)
            return None if math.isnan(norm) else norm
        self._divide(total, clip_norm, measure=measure)
        return self.known_norm

    def _divide(self, total: float, clip_norm: float | None, *, measure: bool) -> None:
        """Divide the sum by the true count, and clip it."""
        factor, tensors = self._accumulation.planned / total, self._accumulation.buckets.tensors()
        wanted = measure or clip_norm is not None
        known = self.known_norm if self._alone else float(_norm(tensors)) if wanted else None
        self.known_norm = None if known is None else known * factor
        if clip_norm is not None and self.known_norm is not None:
            factor *= min(1.0, clip_norm / (self.known_norm + 1e-6))
        if factor != 1.0 and tensors:
            torch._foreach_mul_(tensors, factor)
        if self._elastic:
            self._exchange.norm.fill_(math.nan if self.known_norm is None else self.known_norm)

    @torch.no_grad()
    def make_on_device(self, weight: Any, clip_norm: float | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Leave the mean of a worker alone, clipped, in ``p.grad``, without waiting for the device.

        Returns the norm before clipping, whether the gradient is finite and, as the number 1 or 0, whether there is
        nothing to apply: it is not, or the ``weight`` of its losses, which only the device may know, is 0.
        """
        buckets = self._accumulation.buckets
        tensors, factor = buckets.tensors(), self._accumulation.planned / weight
        buckets.expose(buckets.used())
        norm, finite = self._norm_alone * factor, self._norm_alone.isfinite()
        bad = ~norm.isfinite() if not isinstance(weight, torch.Tensor) else ~(norm.isfinite() & (weight > 0))
        if clip_norm is not None:
            factor = factor * (clip_norm / (norm + 1e-6)).clamp(max=1.0)
        for dtype in {tensor.dtype for tensor in tensors}:
            alike = [tensor for tensor in tensors if tensor.dtype is dtype]
            torch._foreach_mul_(alike, factor.to(dtype) if isinstance(factor, torch.Tensor) else factor)
        self.known_norm = None
        return norm, finite, bad.to(torch.float32)

    def measured(self, header: Header, norm: float) -> None:
        """Note the weight and the norm of a mean that was made on the device, once the host has them."""
        self.known_norm = norm
        self._note(header, header.total("weight"))

    def _note(self, header: Header, total: float) -> None:
        self._norm_wanted = False
        self._tensors = [] if self._alone else self._accumulation.buckets.tensors()
        self._versions = self._versions_now()
        samples, unit = header.total("samples"), header.unit()
        self.weight_per_sample = total / unit / samples if samples else self.weight_per_sample

    def _versions_now(self) -> list[int]:
        return [tensor._version for tensor in self._tensors]

    def intact(self) -> bool:
        """Return whether the last mean is as the round gave it: some optimisers change gradients in place.

        Once one has been seen to do so, optimisers get copies.
        """
        untouched = self._versions_now() == self._versions
        self._changed_in_place = self._changed_in_place or not untouched
        return untouched

    def norm(self) -> float:
        """Return the norm of the step's mean gradient before clipping; the next step's is measured in time."""
        self._norm_wanted = True
        if self.known_norm is None:
            if self._versions_now() != self._versions:
                raise MisuseError(
                    "the gradients were changed since the round (some optimisers do), so their norm is lost for this "
                    "step; from the next step on it is measured in time"
                )
            self.known_norm = float(_norm(self._tensors))
        return self.known_norm


def _learn(varying: VaryingCount, header: Header, total: float, norm: float) -> None:
    unit = header.unit()
    varying.learn(
        weighted_squares=float(header.column("squares").sum()) / unit,
        squared_norm=norm**2,
        weight=total / unit,
        workers=int((header.column("weight") > 0).sum()),
    )


@torch.no_grad()
def _norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all tensors together, in float64; on CUDA, without synchronising."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    norms = list(torch._foreach_norm(list(tensors)))
    if len({norm.dtype for norm in norms}) > 1:
        norms = [norm.to(torch.float64) for norm in norms]
    total: torch.Tensor = torch.stack(norms).to(torch.float64).norm()
    return total


class Gradients:
    """The gradients of a fleet's models, from backward to update."""

    def __init__(
        self,
        transport: Collective,
        models: Sequence[torch.nn.Module],
        *,
        overlap: bool = True,
        wire_format: Format | None = None,
        shared: Sequence[torch.nn.Module] | None = None,
    ) -> None:
        """Make the parts for these models.

        ``wire_format``: the format in which gradients travel; None sends them unchanged. ``shared``: the models whose
        buffers all workers share; all of them unless given.
        """
        self._transport = transport
        self.overlap = overlap
        self.keep_graph = False
        """Whether gradients keep their graph, for an optimiser that needs second derivatives."""
        self.atomic = False
        """Whether a micro-batch's gradient joins the sum completely or not at all; costs memory for one gradient."""
        self.scaler: Any = None
        self.next_scaler: Any = None
        """The scaler from the next step on: half a step with a scale and half without would be wrong."""
        self.varying: VaryingCount | None = None
        """The rule that scales the learning rate of steps whose count is not the global batch."""
        self.shared = models if shared is None else shared
        self.accumulation = Accumulation(
            transport, models, self._start_sum, in_sections=lambda: self.exchange.in_sections(), shared=self.shared
        )
        self.everything = self.accumulation.everything
        self.exchange = GradientExchange(transport, self.accumulation, wire_format)
        self.mean_gradient = MeanGradient(transport, self.accumulation, self.exchange)

    @property
    def buckets(self) -> Buckets:
        return self.accumulation.buckets

    @property
    def layout(self) -> Layout:
        """The layout of the round's header for the present members."""
        work = self.accumulation
        return layout_of(self._transport.size, len(self.buckets.parameters), work.counters + len(work.buffers))

    def state_dict(self) -> dict[str, float]:
        varying = {} if self.varying is None else self.varying.state_dict()
        unit = self.mean_gradient.unit or 0.0
        return {"weight_per_sample": self.mean_gradient.weight_per_sample, "unit": unit, **varying}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.mean_gradient.weight_per_sample = state["weight_per_sample"]
        self.mean_gradient.unit = state.get("unit") or None
        if self.varying is not None and "seen" in state:
            self.varying.load_state_dict(state)

    def statistics_were_set(self) -> None:
        """Count from the running statistics and other buffers as they are now: they were loaded or broadcast."""
        self.accumulation.statistics.rebase()
        self.accumulation.buffers.rebase()

    def detach(self) -> None:
        """Remove hooks and views from the parameters, and forget the sums of the transport's group."""
        self.buckets.detach()
        self.exchange.release()

    # -- work ------------------------------------------------------------------------------------------------------

    def loop_begins(self) -> None:
        """Clear what a backward of the script's own left in ``p.grad``, and watch for such backwards from now on."""
        for parameter in self.everything:
            parameter.grad = None
        self.buckets.idle = False

    def loop_ends(self) -> None:
        """Let the script call ``loss.backward()`` itself until the next loop begins: no step is open."""
        self.buckets.idle = True

    def begin(self, planned_samples: int) -> None:
        """Begin a step for which the whole fleet plans ``planned_samples``."""
        self.scaler = self.next_scaler
        self.accumulation.begin(planned_samples * self.mean_gradient.weight_per_sample, self.scaler)
        self.exchange.begin()
        self.mean_gradient.begin()

    def backward(self, loss: torch.Tensor, weight: Any, *, last: bool, among: Among = None, **graph: bool) -> None:
        """Add the gradient of a micro-batch's mean loss with this weight, to all parameters or to those ``among``."""
        # A loss for some parameters alone may be followed by another of the same micro-batch: nothing is final yet.
        last = last and self.overlap and among is None
        self.accumulation.backward(
            loss, weight, last=last, atomic=self.atomic, keep_graph=self.keep_graph, among=among, **graph
        )

    @property
    def _learns_norms(self) -> bool:
        return self.varying is not None and self.varying.wants_norms

    def _start_sum(self, flat: torch.Tensor) -> None:
        self.exchange.start_sum(flat, squares=self._learns_norms)

    def start_rest(self) -> None:
        """Start the sums that are left, when this worker has done its share."""
        self.accumulation.start_rest()
        if self._transport.solitary:
            self.mean_gradient.measure_alone()
        else:
            self.exchange.start_finite_check()

    def finite(self) -> bool:
        """Wait for the device, after `start_rest`, and return whether this worker's gradients are finite."""
        return self.mean_gradient.finite_alone() if self._transport.solitary else self.exchange.finite()

    def start(self) -> bool:
        """Start the sums and return whether the worker's gradients are finite.

        The first of a worker's processes calls this, when all of them have done their share.
        """
        self.buckets.start_together()
        self.exchange.start_finite_check()
        return self.exchange.finite()

    # -- round -----------------------------------------------------------------------------------------------------

    def close(self, samples: int) -> Sum:
        """Return what this worker has finished at a deadline, ready to be summed."""
        return self.exchange.close(samples, squares=self._learns_norms)

    # -- update ----------------------------------------------------------------------------------------------------

    def mean(self, header: Header, clip_norm: float | None, *, own: bool = False) -> None:
        """Leave the fleet's mean gradient, clipped, in ``p.grad``.

        ``own``: the script may change it there. Then it is a copy, for the mean may have to be handed to a worker that
        missed the round's end.
        """
        try:
            self.mean_gradient.make(header, clip_norm, own=own, varying=self.varying)
        except RuntimeError:
            self.buckets.check_kinds()
            raise

    @property
    def scales_lr(self) -> bool:
        """Whether the learning rate of an update follows its count."""
        return self.varying is not None and self.varying.rule != "none"

    def lr_factor(self, weight: float) -> float:
        """Return the factor for the learning rate of an update whose samples have this ``weight`` in all."""
        return 1.0 if self.varying is None else self.varying.factor(weight / self.mean_gradient.weight_per_sample)

    def clear(self, *, overflow: bool) -> None:
        """Forget the gradients of the step, which is over, and adjust the loss scale."""
        if self._transport.elastic:
            self.mean_gradient.intact()
        self.accumulation.clear()
        if is_active(self.scaler):
            self.scaler.load_state_dict(next_state(self.scaler.state_dict(), overflow=overflow))
