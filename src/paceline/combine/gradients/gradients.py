"""``combine="gradients"``: one round a step sums gradients and counts, and all divide by the true count.

With S_i the sum of worker i's per-sample gradients and n_i its count, the step's gradient is ``sum_i S_i / sum_i n_i``:
exactly that of one machine with the whole batch, for any shares (P0's weighted form, P1's rule). Each micro-batch's
mean loss enters scaled by its weight over the planned total, so that when everything planned was done the sum already
is the mean, and half-precision gradients stay in range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.combine.gradients.buckets import REACHED_NO_MODEL, Among, Buckets
from paceline.combine.gradients.scaling import is_active, next_state, scale_in
from paceline.combine.gradients.scaling import scaled as scale_loss
from paceline.combine.gradients.statistics import Look, RunningStatistics
from paceline.combine.gradients.varying import VaryingCount
from paceline.combine.header import Header, Layout
from paceline.errors import GenerationOver, MisuseError
from paceline.transport import Pending, Transport

_REACHED_NOTHING = (
    "the losses of this step reached no parameter of the fleet's model: compute them with the module that fleet.model "
    "returned"
)

Aside = tuple[list[torch.Tensor | None], Look]
"""What one micro-batch left, by parameter, and the running statistics after it."""


@dataclass
class Sum:
    """What one worker brings to a round with a deadline and, after it, what the round gave."""

    flats: list[torch.Tensor]
    used: list[bool]
    statistics: torch.Tensor
    moved: list[int]
    finite: bool = True

    @property
    def bytes(self) -> int:
        return sum(flat.numel() * flat.element_size() for flat in self.flats)


class Gradients:
    """The gradients of a fleet's models, from backward to update."""

    name = "gradients"

    def __init__(self, transport: Transport, models: Sequence[torch.nn.Module], *, overlap: bool = True) -> None:
        self._transport = transport
        self.overlap = overlap
        self.keep_graph = False
        """Whether gradients keep their graph, for an optimiser that needs second derivatives."""
        self.whole = False
        """Whether a micro-batch's gradient joins the sum whole or not at all, at the price of memory for one more."""
        self._alone = transport.solitary
        self.everything = _unique(p for model in models for p in model.parameters())
        self._trained = self._trained_now()
        self._statistics = RunningStatistics(models)
        self._build()
        self._looked = False
        """Whether a whole step's losses were looked at for a scale that was left in."""
        self.scaler: Any = None
        self.next_scaler: Any = None
        """Takes effect with the next step: half a step with a scale and half without would be wrong."""
        self._unscale = 1.0
        self._weight_per_sample = 1.0
        self.varying: VaryingCount | None = None
        """Scales the learning rate of steps whose count is not the global batch."""
        self._norm_wanted = True  # the first step's is measured in any case, so that asking for it works from there on
        self._meant: list[torch.Tensor] = []
        self._mean_versions: list[int] = []
        self._changed_in_place = False
        self._reset()

    def _build(self) -> None:
        parameters = [p for p, trained in zip(self.everything, self._trained, strict=True) if trained]
        self.buckets = Buckets(parameters, None if self._alone else self._start_sum, keeps=self._transport.elastic)
        self._counters = 0 if self._alone else len(self._statistics)

    @property
    def layout(self) -> Layout:
        """Of the round's header, among those who are there."""
        return Layout(self._transport.size, len(self.buckets.parameters), self._counters)

    def _reset(self) -> None:
        self._sums: list[Pending] = []
        self._extremes: list[torch.Tensor] = []
        self._squares: list[torch.Tensor] = []
        self._planned = 1.0
        self._begun = False
        self._versions: list[int] = []
        self._norm: float | None = None
        self._is_mean = False
        """The round's result was handed over by a worker that had the mean already."""
        self._norm_kept = torch.full((1,), math.nan, dtype=torch.float64)

    def _trained_now(self) -> list[bool]:
        return [p.requires_grad for p in self.everything]

    @property
    def trained(self) -> list[bool]:
        """Which parameters are trained, the others being frozen."""
        return self._trained

    def train_only(self, trained: Sequence[bool]) -> None:
        """Freeze and unfreeze as a peer has."""
        for parameter, wanted in zip(self.everything, trained, strict=True):
            parameter.requires_grad_(wanted)
        if list(trained) != self._trained:
            self.buckets.detach()
            self._trained = list(trained)
            self._build()

    def state_dict(self) -> dict[str, float]:
        varying = {} if self.varying is None else self.varying.state_dict()
        return {"weight_per_sample": self._weight_per_sample, **varying}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._weight_per_sample = state["weight_per_sample"]
        if self.varying is not None and "seen" in state:
            self.varying.load_state_dict(state)

    def detach(self) -> None:
        self.buckets.detach()
        self._sums = []  # a finished sum keeps the engine's group alive

    def statistics_were_set(self) -> None:
        self._statistics.rebase()

    # -- work ------------------------------------------------------------------------------------------------------

    def begin(self, planned_samples: int) -> None:
        """A step begins in which the whole fleet plans to do so many samples."""
        if self._begun:  # the last step was left half done
            self.buckets.clear()
        self._reset()
        self.scaler = self.next_scaler
        self._planned = planned_samples * self._weight_per_sample
        self._statistics.begin()
        self._unscale = 1.0 / self.scaler.get_scale() if is_active(self.scaler) else 1.0

    def _notice_freezing(self) -> None:
        """Parameters may have been frozen or unfrozen before the step's first backward, on every worker alike."""
        trained = self._trained_now()
        if trained == self._trained:
            return
        if self._begun:
            raise MisuseError(
                "parameters were frozen or unfrozen in the middle of a step: do it before its first backward"
            )
        if any(other != trained for other in self._transport.gather("freezing or unfreezing parameters", trained)):
            raise ValueError("workers disagree on which parameters are frozen (requires_grad)")
        self.buckets.detach()
        self._trained = trained
        self._build()

    def backward(
        self, loss: torch.Tensor, weight: Any, *, last: bool, retain_graph: bool = False, among: Among = None
    ) -> None:
        """Add the gradient of a micro-batch's mean loss with this weight, to all parameters or to those ``among``."""
        if not self._begun:
            self._notice_freezing()
            self._begin_work()
        self.buckets.backward(
            self._scaled(loss, weight),
            last=last and self.overlap and among is None,  # what the other parts are for is not final yet
            whole=self.whole,
            keep_graph=self.keep_graph,
            retain_graph=retain_graph,
            among=among,
        )

    def _begin_work(self) -> None:
        self._begun = True
        self._versions = self._versions_now()

    def _scaled(self, loss: torch.Tensor, weight: Any) -> torch.Tensor:
        if not self._looked and (scale := scale_in(loss)) is not None:
            raise MisuseError(
                f"the loss was multiplied by a GradScaler's scale, {scale:g}, which nothing would divide out: call "
                "fleet.track(scaler=scaler) before the first step, and write step.backward(loss) without scaler.scale"
            )
        scaled: torch.Tensor = loss * (weight / self._planned)
        return scale_loss(self.scaler, scaled) if is_active(self.scaler) else scaled

    # -- work under a deadline: a micro-batch joins the sum whole or not at all, and any thread may close it ---------

    def backward_aside(
        self, loss: torch.Tensor, weight: Any, *, retain_graph: bool = False, among: Among = None
    ) -> Aside:
        """The gradient of a micro-batch's mean loss, beside the sum until `join`."""
        if not self._begun:
            self._begin_work()
        grads = self.buckets.backward_aside(self._scaled(loss, weight), retain_graph=retain_graph, among=among)
        if all(grad is None for grad in grads):
            raise MisuseError(_REACHED_NOTHING if among is None else REACHED_NO_MODEL)
        return grads, self._statistics.look()

    def begin_whole(self) -> None:
        """Before a micro-batch's first part is computed beside the sum in a step without a deadline."""
        if not self._begun:
            self._notice_freezing()
        self.buckets.check_untouched()

    def join_whole(self, aside: Aside) -> None:
        """All parts of a micro-batch are there, in a step without a deadline."""
        self.buckets.join(aside[0])
        self.buckets.show()

    def no_gradient(self) -> Aside:
        """Of a micro-batch that was left out."""
        return [None] * len(self.buckets.slots), self._statistics.look()

    def check_aside(self) -> None:
        """Raise MisuseError when somebody touched what is not theirs since the last micro-batch."""
        if self._trained_now() != self._trained:
            raise MisuseError(
                "parameters were frozen or unfrozen between steps, which rounds with a deadline cannot follow: make "
                "new steps with fleet.steps, or use another pace"
            )
        self.buckets.check_untouched()
        self._check_unchanged()

    def join(self, aside: Aside) -> None:
        """A micro-batch is finished: its gradient and its statistics count."""
        grads, look = aside
        self.buckets.join(grads)
        self._statistics.note(look)

    def show(self) -> None:
        self.buckets.show()

    def close(self, samples: int) -> Sum:
        """What this worker has finished, ready to be summed."""
        flats, self._squares = self.buckets.seal(), []
        if self._unscale != 1.0 and flats:
            torch._foreach_mul_(flats, self._unscale)
        extremes = [extreme.to(torch.float64) for flat in flats for extreme in torch.aminmax(flat)]
        finite = not extremes or bool(torch.stack(extremes).isfinite().all())
        self._note_squares(flats)
        if self._transport.elastic:  # the round may have to be run again
            flats = [flat.clone() for flat in flats]
        statistics = self._statistics.payload(samples)
        return Sum(flats, self.buckets.used(), statistics, list(self._statistics.moved), finite)

    def nothing(self) -> Sum:
        """The same of a worker that has finished nothing, in tensors of its own."""
        flats = [torch.zeros_like(bucket.flat) for bucket in self.buckets.buckets]
        statistics = torch.zeros_like(self._statistics.payload(0))
        return Sum(flats, [False] * len(self.buckets.slots), statistics, [0] * len(self._statistics))

    def exchange_aside(self, mine: Sum, header: Header, label: str) -> bool:
        """A round with a deadline: when it returns, ``header`` and ``mine`` hold the fleet's sums. False: the members
        changed under it, and it is to be run again, with new ones."""
        header.used[:] = mine.used
        header.counters[:] = mine.moved
        wire = header.tensor()
        parts = [*mine.flats, *([mine.statistics] if self._counters else []), wire]
        summed = sum_aside(self._transport, label, parts)
        if summed is None:
            return False
        mine.flats = summed[: len(mine.flats)]
        if self._counters:
            mine.statistics = summed[-2]
        header.vector[:] = summed[-1].numpy()
        return True

    def adopt(self, total: Sum, header: Header) -> None:
        """Take over a round's sums, for `mean`."""
        for bucket, flat in zip(self.buckets.buckets, total.flats, strict=True):
            if flat is not bucket.flat:
                bucket.flat.copy_(flat)
        if self._counters:
            self._merge(total.statistics, header)

    def _merge(self, statistics: torch.Tensor, header: Header) -> None:
        self._statistics.merge(statistics, float(header.column("samples").sum()), header.counters.tolist())

    # -- round -----------------------------------------------------------------------------------------------------

    def finish(self) -> bool:
        """This worker has done its share: start what is left to sum. True if its gradients are finite."""
        self._notice_freezing()
        self.buckets.check_untouched()
        self._check_parameters()
        self.buckets.finish()
        if not self._alone:
            return not self._extremes or bool(torch.stack(self._extremes).isfinite().all())
        self._norm = self._unscaled_norm()
        return math.isfinite(self._norm) or all(bool(t.isfinite().all()) for t in self.buckets.tensors())

    def _check_parameters(self) -> None:
        self._check_unchanged()
        if self._begun and not any(self.buckets.used()):
            raise MisuseError(_REACHED_NOTHING)

    def _check_unchanged(self) -> None:
        if self._begun and self._versions_now() != self._versions:
            raise MisuseError(
                "parameters changed in the middle of a step (an optimizer.step() left in?): replicas would "
                "drift apart; step.commit(optimizer) makes the update"
            )

    def _versions_now(self) -> list[int]:
        return [parameter._version for parameter in self.everything]

    def _unscaled_norm(self) -> float:
        tensors = self.buckets.tensors()
        if self._unscale != 1.0 and tensors:
            torch._foreach_mul_(tensors, self._unscale)
        return self._measure(tensors)

    def _start_sum(self, flat: torch.Tensor) -> None:
        if self._unscale != 1.0:
            flat.mul_(self._unscale)
        # One read of memory finds NaN and infinities, so that the worker behind them can be named.
        self._extremes += [extreme.to(torch.float64) for extreme in torch.aminmax(flat)]
        self._note_squares([flat])
        self._sums.append(self._transport.sum(flat))

    def _note_squares(self, flats: Sequence[torch.Tensor]) -> None:
        if self.varying is not None and self.varying.wants_norms:
            self._squares += [norm.to(torch.float64).square() for norm in torch._foreach_norm(list(flats))]

    def squares(self, weight: float) -> float:
        """``n_i |g_i|^2`` of this worker's own gradient, from its sum over n_i; 0 where nobody asks."""
        if not self._squares or not weight:
            return 0.0
        return float(torch.stack(self._squares).sum()) * self._planned**2 / weight

    def exchange(self, header: Header, samples: int, label: str) -> bool:
        """The round: when it returns, ``header`` and the gradients hold the fleet's sums. False: the members changed
        under it, and it is to be run again, with a new header."""
        header.used[:] = self.buckets.used()
        if self._counters:
            self._statistics.note()
            header.counters[:] = self._statistics.moved
        parts = [self._statistics.payload(samples)] if self._counters else []
        parts.append(header.tensor())
        try:
            with self._transport.round(label, keeps=[*self.buckets.tensors(), *parts, self._norm_kept]):
                self._sums += [self._transport.sum(part) for part in parts]
                for pending in self._sums:
                    pending.wait()
        except GenerationOver as over:
            given = self.recover(over, parts)
            if given is None:
                return False
            parts = given
            header.vector[:] = parts[-1].numpy()
        if self._counters:
            self._merge(parts[0], header)
        return True

    def recover(self, over: GenerationOver, parts: Sequence[torch.Tensor] = ()) -> list[torch.Tensor] | None:
        """Go on among those who live. What ``parts`` should have held, when some of them had finished the round and
        gave its result."""
        transport: Any = self._transport
        if not broken_off(transport, over, self._sums):
            parts = [torch.empty_like(part) for part in parts]
            for bucket in self.buckets.buckets:
                bucket.renew()
        transport.recover(over)
        self._is_mean, self._sums = transport.given([*self.buckets.tensors(), *parts, self._norm_kept]), []
        if self._is_mean:
            return list(parts)
        self._extremes, self._squares = [], []
        self.buckets.restart()
        return None

    # -- update ----------------------------------------------------------------------------------------------------

    def mean(self, header: Header, clip_norm: float | None, *, own: bool = False) -> None:
        """Leave the fleet's mean gradient, clipped, in ``p.grad``. ``own``: the user's code may change it there, which
        must not change what may have to be handed to a worker that missed the round's end."""
        used, copies = (header.used > 0).tolist(), self._transport.elastic and (own or self._changed_in_place)
        self.buckets.expose(used)
        self._make_mean(header, clip_norm)
        if copies:
            self.buckets.expose(used, copies=True)

    def intact(self) -> bool:
        """Whether the last mean is as the round gave it: some optimisers change gradients in place. Those that were
        seen to do so get copies from then on."""
        untouched = [tensor._version for tensor in self._meant] == self._mean_versions
        self._changed_in_place = self._changed_in_place or not untouched
        return untouched

    def _make_mean(self, header: Header, clip_norm: float | None) -> None:
        total = float(header.column("weight").sum())
        if self._is_mean:
            self._take_mean(header, total)
            return
        factor = self._planned / total
        learns = self.varying is not None and self.varying.wants_norms
        wanted = clip_norm is not None or self._norm_wanted or learns
        known = self._norm if self._alone else self._measure(self.buckets.tensors()) if wanted else None
        self._norm = None if known is None else known * factor
        if learns:
            self._learn(header, total)
        if clip_norm is not None and self._norm is not None:
            factor *= min(1.0, clip_norm / (self._norm + 1e-6))
        tensors = self.buckets.tensors()
        if factor != 1.0 and tensors:
            torch._foreach_mul_(tensors, factor)
        self._norm_kept.fill_(math.nan if self._norm is None else self._norm)
        self._note_mean(header, total)

    def _take_mean(self, header: Header, total: float) -> None:
        """What stands in the flat tensors is the mean, clipped."""
        norm = float(self._norm_kept)
        self._norm = None if math.isnan(norm) else norm
        if self._norm is not None and self.varying is not None and self.varying.wants_norms:
            self._learn(header, total)
        self._note_mean(header, total)

    def _note_mean(self, header: Header, total: float) -> None:
        self._norm_wanted = False
        self._meant = [] if self._alone else self.buckets.tensors()
        self._mean_versions = [tensor._version for tensor in self._meant]
        samples = float(header.column("samples").sum())
        self._weight_per_sample = total / samples if samples else self._weight_per_sample

    def _learn(self, header: Header, total: float) -> None:
        assert self.varying is not None
        assert self._norm is not None
        self.varying.observe(
            weighted_squares=float(header.column("squares").sum()),
            squared_norm=self._norm**2,
            weight=total,
            workers=int((header.column("weight") > 0).sum()),
        )

    def lr_factor(self, weight: float) -> float:
        """By what the learning rate of an update from so much weight is scaled."""
        return 1.0 if self.varying is None else self.varying.factor(weight / self._weight_per_sample)

    @torch.no_grad()
    def _measure(self, tensors: Sequence[torch.Tensor]) -> float:
        if not tensors:
            return 0.0
        return float(torch.stack([norm.to(torch.float64) for norm in torch._foreach_norm(list(tensors))]).norm())

    @property
    def known_norm(self) -> float | None:
        """The norm, where it had to be measured anyway."""
        return self._norm

    def norm(self) -> float:
        """The norm of the step's mean gradient before clipping. Once asked for, it is measured in every step."""
        self._norm_wanted = True
        if self._norm is None:
            if [tensor._version for tensor in self._meant] != self._mean_versions:
                raise MisuseError(
                    "the gradients were changed since the round (some optimisers do), so their norm is lost for this "
                    "step; from the next step on it is measured in time"
                )
            self._norm = self._measure(self._meant)
        return self._norm

    def clear(self, *, overflow: bool) -> None:
        """The step is over: forget its gradients, and tell the scaler how it went."""
        if self._transport.elastic:
            self.intact()
        self.buckets.clear()
        self._looked = self._looked or self._begun
        self._begun = False
        if is_active(self.scaler):
            self.scaler.load_state_dict(next_state(self.scaler.state_dict(), overflow=overflow))


def sum_aside(transport: Transport, label: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """The fleet's sums, in these tensors or others like them, on the thread of rounds with a deadline. None: members
    changed, and nothing came of it."""
    sums: list[Pending] = []
    try:
        with transport.round(label, aside=True, keeps=tensors):
            sums += [transport.sum(tensor) for tensor in tensors]
            for pending in sums:
                pending.wait()
    except GenerationOver as over:
        return recovered(transport, over, sums, tensors)
    return list(tensors)


def recovered(
    transport: Any, over: GenerationOver, sums: Sequence[Pending] = (), tensors: Sequence[torch.Tensor] = ()
) -> list[torch.Tensor] | None:
    """On the thread of rounds with a deadline: go on among those who live. What ``tensors`` should have held, when some
    of them had finished the round and gave its result."""
    if not broken_off(transport, over, sums):
        tensors = [torch.empty_like(tensor) for tensor in tensors]
    transport.recover(over)
    return list(tensors) if transport.given(tensors, aside=True) else None


def broken_off(transport: Any, over: GenerationOver, sums: Sequence[Pending]) -> bool:
    """End what is under way. False: something may still write into its tensors, which then are not to be used again."""
    transport.cut(over)
    ended = [pending.abandon() for pending in sums]
    return all(ended)


def _unique(parameters: Any) -> list[torch.nn.Parameter]:
    """Shared parameters once, in order."""
    return list({id(p): p for p in parameters}.values())
