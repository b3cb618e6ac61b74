"""``combine="gradients"``: one round per step sums gradients and counts, and all divide by the true count.

With S_i the sum of worker i's per-sample gradients and n_i its count, the step's gradient is ``sum_i S_i / sum_i n_i``:
exactly that of one machine with the whole batch, for any shares (P0's weighted form; P1's rule as reconstructed). A
worker adds up its micro-batches (`Accumulation`), the round sums over the fleet (`GradientExchange`), `MeanGradient`
divides and clips.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.gradients.accumulation import Accumulation
from paceline.gradients.buckets import Among, Buckets
from paceline.gradients.exchange import GradientExchange, Sum
from paceline.gradients.header import Header, Layout, layout_of
from paceline.gradients.mean import MeanGradient, VaryingCount
from paceline.gradients.scaling import is_active, next_state
from paceline.transport import Collective
from paceline.transport.formats import Format


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
