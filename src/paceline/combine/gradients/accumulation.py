"""One worker's gradient of a step, micro-batch by micro-batch, in the flat buckets that the round sums.

Each micro-batch's mean loss enters scaled by its weight over the planned total, so that when everything planned was
done the fleet's sum already is the mean, and half-precision gradients stay in range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch

from paceline.checkpoint.shards import any_sharded, local
from paceline.combine.gradients.buckets import REACHED_NO_MODEL, Among, Buckets
from paceline.combine.gradients.buffers import ModuleBuffers, SeenBuffers
from paceline.combine.gradients.scaling import is_active, scale_in
from paceline.combine.gradients.scaling import scaled as scale_loss
from paceline.combine.gradients.sharded import ShardedBuckets
from paceline.combine.gradients.statistics import Look, RunningStatistics
from paceline.combine.header import number_of
from paceline.errors import MisuseError
from paceline.transport import Collective

_TRAINED, _VERSION = attrgetter("requires_grad"), attrgetter("_version")

_REACHED_NOTHING = (
    "the losses of this step reached no parameter of the fleet's model: compute them with the module that fleet.model "
    "returned"
)

Aside = tuple[list[torch.Tensor | None], tuple[Look, SeenBuffers]]
"""What one micro-batch left, by parameter, and the running statistics and other buffers after it."""


class Accumulation:
    """The sum of one worker's micro-batch gradients, over the trained parameters of a fleet's models.

    ``start(flat)`` begins the fleet's sum of a bucket.
    """

    def __init__(
        self,
        transport: Collective,
        models: Sequence[torch.nn.Module],
        start: Callable[[torch.Tensor], None],
        *,
        shared: Sequence[torch.nn.Module] | None = None,
    ) -> None:
        """``shared``: the models whose buffers all workers share; all of them unless given."""
        self._transport = transport
        self._start = None if transport.solitary else start
        self.everything = _unique(p for model in models for p in model.parameters())
        self._sharded = any_sharded(self.everything)
        self.trained = self._trained_now()
        """Which parameters are trained, the others being frozen."""
        self.statistics = RunningStatistics(models)
        self.counters = 0 if transport.solitary else len(self.statistics)
        """Layers whose running statistics the round merges."""
        self.buffers = ModuleBuffers([] if transport.solitary else models if shared is None else shared)
        """Other buffers, which are one worker's after every round."""
        self.buckets = self._make_buckets()
        self.seen: SeenBuffers | None = None
        """The buffers after the work of this step that has joined, where it does so beside the loop."""
        self.planned = 1.0
        """The weight that the whole fleet plans for this step."""
        self.unscale = 1.0
        """Divides the loss scale out of this worker's gradients."""
        self._scaler: Any = None
        self._begun = False
        self._versions: list[int] = []
        self._last_factor: tuple[Any, torch.Tensor] | None = None
        self._models, self._modules = models, [module for model in models for module in model.modules()]
        self.asks_modes = False
        """Whether this step's modes are compared: which modules train."""
        self.modes = 0.0
        """A digest of them at the step's first backward."""
        self.refrozen = False
        """Whether parameters were frozen or unfrozen since the beginning."""
        self.follows_freezing = False
        """Whether the first step without a deadline follows what was frozen or unfrozen in one with a deadline: until
        then the frozen have no gradient, and the unfrozen not yet."""
        self._looked = False
        """Whether a whole step's losses were looked at for a scale that was left in."""

    def _make_buckets(self) -> Buckets:
        parameters = [p for p, trained in zip(self.everything, self.trained, strict=True) if trained]
        if self._start is not None and any_sharded(parameters):
            return ShardedBuckets(parameters, self._start, keeps=self._transport.elastic, worker=self._transport)
        return Buckets(parameters, self._start, keeps=self._transport.elastic)

    # -- which parameters are trained ------------------------------------------------------------------------------

    def _trained_now(self) -> list[bool]:
        return list(map(_TRAINED, self.everything))

    def train_only(self, trained: Sequence[bool]) -> None:
        """Freeze and unfreeze as a peer has."""
        for parameter, wanted in zip(self.everything, trained, strict=True):
            parameter.requires_grad_(wanted)
        if list(trained) != self.trained:
            self._rebuild(list(trained))

    def _rebuild(self, trained: list[bool]) -> None:
        self.buckets.detach()
        self.trained, self.refrozen = trained, True
        self.buckets = self._make_buckets()

    def _notice_freezing(self) -> None:
        """Parameters may have been frozen or unfrozen before the step's first backward, on every worker alike."""
        trained = self._trained_now()
        if trained == self.trained:
            return
        if self._begun:
            raise MisuseError(
                "parameters were frozen or unfrozen in the middle of a step: do it before its first backward"
            )
        label = "freezing or unfreezing parameters"
        everybody = self._transport.gather(label, lambda: self._transport.collect(label, trained))
        if any(other != trained for worker in everybody for other in worker):
            raise ValueError("workers disagree on which parameters are frozen (requires_grad)")
        self._rebuild(trained)

    # -- which modules train ---------------------------------------------------------------------------------------

    def _modes_digest(self) -> float:
        """A number that workers share whose modules train and evaluate alike."""
        training = bytes(module.training for module in self._modules)
        return 1.0 + number_of(training)

    def evaluating(self) -> list[str]:
        """The modules in evaluation mode, by name."""
        named = (pair for model in self._models for pair in model.named_modules())
        return [name or type(module).__name__ for name, module in named if not module.training]

    # -- a step ----------------------------------------------------------------------------------------------------

    def begin(self, planned: float, scaler: Any) -> None:
        """A step begins in which the whole fleet plans to do so much weight."""
        if self._begun:  # the last step was left half done
            self.buckets.clear()
        self._begun, self._versions, self.modes = False, [], 0.0
        self.planned, self._scaler = planned, scaler
        self.statistics.begin()
        self.seen = None
        self.unscale = 1.0 / scaler.get_scale() if is_active(scaler) else 1.0

    def backward(self, loss: torch.Tensor, weight: Any, **how: Any) -> None:
        """Add the gradient of a micro-batch's mean loss with this weight; the other arguments as in `Buckets`."""
        if not self._begun:
            self._notice_freezing()
            self._begin_work()
        try:
            self.buckets.backward(*self._scaled(loss, weight), **how)
        except RuntimeError:
            self.buckets.check_kinds()
            raise

    def _begin_work(self) -> None:
        self._begun = True
        if self.asks_modes:
            self.modes = self._modes_digest()
        self._versions = self._versions_now()

    def _scaled(self, loss: torch.Tensor, weight: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What to go backward from, and with which gradient: a factor that is a number takes no operation."""
        if not self._looked and (scale := scale_in(loss)) is not None:
            raise MisuseError(
                f"the loss was multiplied by a GradScaler's scale, {scale:g}, which nothing would divide out: call "
                "fleet.track(scaler=scaler) before the first step, and write step.backward(loss) without scaler.scale"
            )
        factor = weight / self.planned
        if isinstance(factor, torch.Tensor) or is_active(self._scaler):
            return (scale_loss(self._scaler, loss * factor) if is_active(self._scaler) else loss * factor), None
        return loss, self._factor(loss, factor)

    def _factor(self, loss: torch.Tensor, factor: float) -> torch.Tensor:
        """The factor as a tensor like the loss: mostly that of the micro-batch before."""
        kind = (factor, loss.dtype, loss.device, loss.shape)
        if self._last_factor is None or self._last_factor[0] != kind:
            self._last_factor = kind, torch.full_like(loss, factor, requires_grad=False)
        return self._last_factor[1]

    def finish(self) -> None:
        """This worker has done its share: start what is left to sum."""
        self._notice_freezing()
        self.buckets.check_untouched()
        self._check_unchanged()
        if self._begun and not any(self.buckets.used()):
            raise MisuseError(_REACHED_NOTHING)
        self.buckets.finish()

    def _check_unchanged(self) -> None:
        if self._begun and self._versions_now() != self._versions:
            raise MisuseError(
                "parameters changed in the middle of a step (an optimizer.step() left in?): replicas would "
                "drift apart; step.commit(optimizer) makes the update"
            )

    def _versions_now(self) -> list[int]:
        if self._sharded:  # what the optimiser changes is this process's part
            return [local(parameter)._version for parameter in self.everything]
        return list(map(_VERSION, self.everything))

    def clear(self) -> None:
        """The step is over: forget its gradients."""
        self.buckets.clear()
        self._looked = self._looked or self._begun
        self._begun = False

    # -- beside the sum: a micro-batch joins it whole or not at all --------------------------------------------------

    def backward_aside(self, loss: torch.Tensor, weight: Any, *, among: Among = None, **graph: bool) -> Aside:
        """The same, beside the sum until `join`: the micro-batch joins it whole or not at all."""
        if not self._begun:
            self._begin_work()
        if self.refrozen and self.follows_freezing:
            still = (id(p) for p in self.buckets.parameters if p.requires_grad)
            among = frozenset(p for p in still if among is None or p in among)
            if not among:
                return self.no_gradient()
        scaled, gradient = self._scaled(loss, weight)
        try:
            grads = self.buckets.backward_aside(scaled, gradient, among=among, **graph)
        except RuntimeError:
            self.buckets.check_kinds()
            raise
        if all(grad is None for grad in grads):
            raise MisuseError(_REACHED_NOTHING if among is None else REACHED_NO_MODEL)
        return grads, self._look()

    def no_gradient(self) -> Aside:
        """Of a micro-batch that was left out."""
        return [None] * len(self.buckets.slots), self._look()

    def _look(self) -> tuple[Look, SeenBuffers]:
        return self.statistics.look(), self.buffers.look()

    def begin_whole(self) -> None:
        """Before a micro-batch's first part is computed beside the sum in a step without a deadline."""
        if not self._begun:
            self._notice_freezing()
        self.buckets.check_untouched()

    def join_whole(self, aside: Aside) -> None:
        """All parts of a micro-batch are there, in a step without a deadline."""
        self.buckets.join(aside[0])
        self.buckets.show()

    def check_aside(self) -> None:
        """Raise MisuseError when the script changed parameters or gradients since the last micro-batch of a step with a
        deadline."""
        if self._trained_now() != self.trained:
            if not self.follows_freezing:
                raise MisuseError(
                    "parameters were frozen or unfrozen between steps, which rounds with a deadline cannot follow: "
                    "make new steps with fleet.steps, or use another pace"
                )
            self.refrozen = True
        self.buckets.check_untouched()
        self._check_unchanged()

    def join(self, aside: Aside) -> None:
        """A micro-batch of a step with a deadline is finished: its gradient and its statistics count. Any thread may
        call this."""
        grads, (look, self.seen) = aside
        self.buckets.join(grads)
        self.statistics.note(look)


def _unique(parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Shared parameters once, in order."""
    return list({id(p): p for p in parameters}.values())
