"""``combine="gradients"``: one round a step sums gradients and counts, and all divide by the true count.

With S_i the sum of worker i's per-sample gradients and n_i its count, the step's gradient is ``sum_i S_i / sum_i n_i``:
exactly that of one machine with the whole batch, for any shares (P0's weighted form, P1's rule). A worker adds up its
micro-batches (`Accumulation`), the round sums over the fleet (`GradientExchange`), `MeanGradient` divides and clips.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.combine.gradients.accumulation import Accumulation, Aside
from paceline.combine.gradients.buckets import Among, Buckets
from paceline.combine.gradients.exchange import GradientExchange, Sum
from paceline.combine.gradients.mean import MeanGradient
from paceline.combine.gradients.scaling import is_active, next_state
from paceline.combine.gradients.varying import VaryingCount
from paceline.combine.header import Header, Layout
from paceline.errors import GenerationOver
from paceline.transport import Collective


class Gradients:
    """The gradients of a fleet's models, from backward to update."""

    name = "gradients"

    def __init__(self, transport: Collective, models: Sequence[torch.nn.Module], *, overlap: bool = True) -> None:
        self._transport = transport
        self.overlap = overlap
        self.keep_graph = False
        """Whether gradients keep their graph, for an optimiser that needs second derivatives."""
        self.whole = False
        """Whether a micro-batch's gradient joins the sum whole or not at all, at the price of memory for one more."""
        self.scaler: Any = None
        self.next_scaler: Any = None
        """Takes effect with the next step: half a step with a scale and half without would be wrong."""
        self.varying: VaryingCount | None = None
        """Scales the learning rate of steps whose count is not the global batch."""
        self.accumulation = Accumulation(transport, models, self._start_sum)
        self.everything = self.accumulation.everything
        self._exchange = GradientExchange(transport, self.accumulation)
        self._mean = MeanGradient(transport, self.accumulation, self._exchange)

    @property
    def buckets(self) -> Buckets:
        return self.accumulation.buckets

    @property
    def layout(self) -> Layout:
        """Of the round's header, among the members of this moment."""
        return Layout(self._transport.size, len(self.buckets.parameters), self.accumulation.counters)

    @property
    def trained(self) -> list[bool]:
        """Which parameters are trained, the others being frozen."""
        return self.accumulation.trained

    def train_only(self, trained: Sequence[bool]) -> None:
        """Freeze and unfreeze as a peer has."""
        self.accumulation.train_only(trained)

    def state_dict(self) -> dict[str, float]:
        varying = {} if self.varying is None else self.varying.state_dict()
        return {"weight_per_sample": self._mean.weight_per_sample, **varying}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._mean.weight_per_sample = state["weight_per_sample"]
        if self.varying is not None and "seen" in state:
            self.varying.load_state_dict(state)

    def statistics_were_set(self) -> None:
        """Running statistics were loaded or broadcast: count from there."""
        self.accumulation.statistics.rebase()

    def detach(self) -> None:
        """Give the parameters back, and let go of the transport's group."""
        self.buckets.detach()
        self._exchange.release()

    # -- work ------------------------------------------------------------------------------------------------------

    def begin(self, planned_samples: int) -> None:
        """A step begins in which the whole fleet plans to do so many samples."""
        self.scaler = self.next_scaler
        self.accumulation.begin(planned_samples * self._mean.weight_per_sample, self.scaler)
        self._exchange.begin()
        self._mean.begin()

    def backward(
        self, loss: torch.Tensor, weight: Any, *, last: bool, retain_graph: bool = False, among: Among = None
    ) -> None:
        """Add the gradient of a micro-batch's mean loss with this weight, to all parameters or to those ``among``."""
        self.accumulation.backward(
            loss,
            weight,
            last=last and self.overlap and among is None,  # what the other parts are for is not final yet
            whole=self.whole,
            keep_graph=self.keep_graph,
            retain_graph=retain_graph,
            among=among,
        )

    def backward_aside(
        self, loss: torch.Tensor, weight: Any, *, retain_graph: bool = False, among: Among = None
    ) -> Aside:
        """The same, beside the sum until ``accumulation.join``: the micro-batch joins it whole or not at all."""
        return self.accumulation.backward_aside(loss, weight, retain_graph=retain_graph, among=among)

    @property
    def _learns_norms(self) -> bool:
        return self.varying is not None and self.varying.wants_norms

    def _start_sum(self, flat: torch.Tensor) -> None:
        self._exchange.start_sum(flat, squares=self._learns_norms)

    def finish(self) -> bool:
        """This worker has done its share: start what is left to sum. True if its gradients are finite."""
        self.accumulation.finish()
        return self._mean.measure_alone() if self._transport.solitary else self._exchange.finite()

    def squares(self, weight: float) -> float:
        """``n_i |g_i|^2`` of this worker's own gradient, from its sum over n_i; 0 where nobody asks."""
        return self._exchange.squares(weight)

    # -- round -----------------------------------------------------------------------------------------------------

    def exchange(self, header: Header, samples: int, label: str) -> bool:
        """The round: when it returns, ``header`` and the gradients hold the fleet's sums. False: the members changed,
        and the round is to be run again, with a new header."""
        return self._exchange.run(header, samples, label)

    def re_form_after(self, over: GenerationOver) -> None:
        """Re-form the group among the workers that live, and start all sums again."""
        self._exchange.re_form(over)

    def close(self, samples: int) -> Sum:
        """What this worker has finished when a deadline is there, ready to be summed."""
        return self._exchange.close(samples, squares=self._learns_norms)

    def nothing(self) -> Sum:
        """The same of a worker that has finished nothing, in tensors of its own."""
        return self._exchange.nothing()

    def exchange_aside(self, mine: Sum, header: Header, label: str) -> bool:
        """The round with a deadline, on a thread of its own: as `exchange`, with the gradients' sums in ``mine``."""
        return self._exchange.run_aside(mine, header, label)

    def adopt(self, total: Sum, header: Header) -> None:
        """Make the sums of a round with a deadline this worker's, for `mean`."""
        self._exchange.adopt(total, header)

    # -- update ----------------------------------------------------------------------------------------------------

    def mean(self, header: Header, clip_norm: float | None, *, own: bool = False) -> None:
        """Leave the fleet's mean gradient, clipped, in ``p.grad``. ``own``: the script may change it there, which must
        not change what may have to be handed to a worker that missed the round's end."""
        self._mean.make(header, clip_norm, own=own, varying=self.varying)

    def intact(self) -> bool:
        """Whether the last mean is as the round gave it, so that it can be handed to a worker that lacks it."""
        return self._mean.intact()

    def lr_factor(self, weight: float) -> float:
        """By what the learning rate of an update from so much weight is scaled."""
        return 1.0 if self.varying is None else self.varying.factor(weight / self._mean.weight_per_sample)

    @property
    def known_norm(self) -> float | None:
        """The norm, where it had to be measured anyway."""
        return self._mean.known_norm

    def norm(self) -> float:
        """The norm of the step's mean gradient before clipping. Once asked for, it is measured in every step."""
        return self._mean.norm()

    def clear(self, *, overflow: bool) -> None:
        """The step is over: forget its gradients, and tell the scaler how it went."""
        if self._transport.elastic:
            self.intact()
        self.accumulation.clear()
        if is_active(self.scaler):
            self.scaler.load_state_dict(next_state(self.scaler.state_dict(), overflow=overflow))
