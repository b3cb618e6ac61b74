"""One worker's gradient of a step, micro-batch by micro-batch, in the flat buckets that the round sums.

Each micro-batch's mean loss enters scaled by its weight over the planned total, so that when everything planned was
done the fleet's sum already is the mean, and half-precision gradients stay in range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from paceline.checkpoint.shards import any_sharded, local
from paceline.errors import MisuseError
from paceline.gradients.buckets import REACHED_NO_MODEL, Among, Buckets
from paceline.gradients.buffers import BufferSnapshot, ModuleBuffers, RunningStatistics, StatisticsSnapshot
from paceline.gradients.header import number_of
from paceline.gradients.scaling import LivingScalers, is_active, scale_in
from paceline.gradients.scaling import scaled as scale_loss
from paceline.gradients.sharded import ShardedBuckets
from paceline.transport import Collective

_TRAINED, _VERSION = attrgetter("requires_grad"), attrgetter("_version")

_REACHED_NOTHING = (
    "the losses of this step reached no parameter of the fleet's model: compute them with the module that fleet.model "
    "returned"
)


class MicroBatchGradient(NamedTuple):
    """One micro-batch's gradient, kept apart from the step's sum until it joins it, or never does."""

    grads: list[torch.Tensor | None]
    """The gradient of each trained parameter; None where it has none."""
    statistics: StatisticsSnapshot
    """The running statistics after the micro-batch."""
    buffers: BufferSnapshot
    """The other buffers after it."""


class Accumulation:
    """The sum of one worker's micro-batch gradients, over the trained parameters of a fleet's models.

    ``start(flat)`` begins the fleet's sum of a bucket, or of a section of one while ``in_sections()`` is true.
    """

    def __init__(
        self,
        transport: Collective,
        models: Sequence[torch.nn.Module],
        start: Callable[[torch.Tensor], None],
        *,
        in_sections: Callable[[], bool] = lambda: False,
        shared: Sequence[torch.nn.Module] | None = None,
    ) -> None:
        """Watch the parameters; ``shared``: the models whose buffers all workers share, all of them unless given."""
        self._transport = transport
        self._start, self._in_sections = None if transport.solitary else start, in_sections
        self.everything = _unique(p for model in models for p in model.parameters())
        self._sharded = any_sharded(self.everything)
        self.trained = self._trained_now()
        """Whether each parameter is trained; the others are frozen."""
        self.statistics = RunningStatistics(models)
        self.counters = 0 if transport.solitary else len(self.statistics)
        """The number of layers whose running statistics the round merges."""
        self.buffers = ModuleBuffers([] if transport.solitary else models if shared is None else shared)
        """The other buffers; after every round all workers hold those of one worker."""
        self.buckets = self._make_buckets()
        self.seen: BufferSnapshot | None = None
        """The buffers after the last micro-batch that joined the sum, in a step with a deadline."""
        self.planned = 1.0
        """The weight that the whole fleet plans for this step."""
        self.unscale = 1.0
        """The factor that divides the loss scale out of this worker's gradients."""
        self._scaler: Any = None
        self._begun = False
        self._versions: list[int] = []
        self._last_factor: tuple[Any, torch.Tensor] | None = None
        self._models, self._modules = models, [module for model in models for module in model.modules()]
        self.asks_modes = False
        """Whether workers compare in this step which of their modules train."""
        self.modes = 0.0
        """A digest of which modules train, at the step's first backward; 0 where that is not compared."""
        self.refrozen = False
        """Whether parameters were frozen or unfrozen since the beginning."""
        self._follows_freezing = False
        self._looked = False
        """Whether all losses of one step were examined for a scale that the script left in."""
        self._living = LivingScalers()
        self.trained_models: set[frozenset[int]] = set()
        """The sets of models, by their numbers, that the micro-batches of the first step reached."""

    def _make_buckets(self) -> Buckets:
        parameters = [p for p, trained in zip(self.everything, self.trained, strict=True) if trained]
        if self._start is not None and any_sharded(parameters):
            return ShardedBuckets(
                parameters,
                self._start,
                in_sections=self._in_sections,
                reruns=self._transport.elastic,
                worker=self._transport,
            )
        return Buckets(parameters, self._start, in_sections=self._in_sections, copies_late=self._transport.elastic)

    # -- which parameters are trained ------------------------------------------------------------------------------

    def follow_freezing(self) -> None:
        """Let the next step without a deadline follow what was frozen or unfrozen in steps with a deadline.

        Until then frozen parameters have no gradient, and unfrozen ones have none yet.
        """
        self._follows_freezing = True

    def _trained_now(self) -> list[bool]:
        return list(map(_TRAINED, self.everything))

    def train_only(self, trained: Sequence[bool]) -> None:
        """Freeze and unfreeze parameters as a peer has."""
        for parameter, wanted in zip(self.everything, trained, strict=True):
            parameter.requires_grad_(wanted)
        if list(trained) != self.trained:
            self._rebuild(list(trained))

    def _rebuild(self, trained: list[bool]) -> None:
        self.buckets.detach()
        self.trained, self.refrozen = trained, True
        idle, self.buckets = self.buckets.idle, self._make_buckets()
        self.buckets.idle = idle

    def _notice_freezing(self) -> None:
        """Follow the script where it froze or unfroze parameters before the step's first backward.

        Raises ValueError unless every worker did the same.
        """
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
        """Return a number that is equal on workers whose modules train and evaluate alike."""
        training = bytes(module.training for module in self._modules)
        return 1.0 + number_of(training)

    def evaluating(self) -> list[str]:
        """Return the names of the modules in evaluation mode."""
        named = (pair for model in self._models for pair in model.named_modules())
        return [name or type(module).__name__ for name, module in named if not module.training]

    # -- a step ----------------------------------------------------------------------------------------------------

    def begin(self, planned: float, scaler: Any) -> None:
        """Begin a step for which the whole fleet plans a total weight of ``planned``."""
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
        if not self._looked and len(self._models) > 1 and how.get("among") is None:
            self._note_models()

    def _note_models(self) -> None:
        """Note which models the backward pass that has ended reached."""
        if reached := self.buckets.reached():
            models = enumerate(self._models)
            numbers = (number for number, model in models if any(id(p) in reached for p in model.parameters()))
            self.trained_models.add(frozenset(numbers))

    def _begin_work(self) -> None:
        self._begun = True
        if self.asks_modes:
            self.modes = self._modes_digest()
        self._versions = self._versions_now()

    def _scaled(self, loss: torch.Tensor, weight: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the tensor to call backward on, and its gradient: a factor that is a number costs no operation."""
        if not self._looked and (scale := scale_in(loss, self._living)) is not None:
            raise MisuseError(
                f"the loss was multiplied by a GradScaler's scale, {scale:g}, which nothing would divide out: call "
                "fleet.track(scaler=scaler) before the first step, and write step.backward(loss) without scaler.scale"
            )
        factor = weight / self.planned
        if isinstance(factor, torch.Tensor) or is_active(self._scaler):
            return (scale_loss(self._scaler, loss * factor) if is_active(self._scaler) else loss * factor), None
        return loss, self._factor(loss, factor)

    def _factor(self, loss: torch.Tensor, factor: float) -> torch.Tensor:
        """Return the factor as a tensor like the loss: mostly the cached one of the micro-batch before."""
        kind = (factor, loss.dtype, loss.device, loss.shape)
        if self._last_factor is None or self._last_factor[0] != kind:
            self._last_factor = kind, torch.full_like(loss, factor, requires_grad=False)
        return self._last_factor[1]

    def start_rest(self) -> None:
        """Start the sums that are left, when this worker has done its share."""
        self._notice_freezing()
        self.buckets.check_untouched()
        self._check_unchanged()
        if self._begun and not any(self.buckets.used()):
            raise MisuseError(_REACHED_NOTHING)
        self.buckets.start_rest()

    def _check_unchanged(self) -> None:
        if self._begun and (now := self._versions_now()) != self._versions:
            changed = [p for p, new, old in zip(self.everything, now, self._versions, strict=True) if new != old]
            raise MisuseError(self._changed_text(changed[0]))

    def _changed_text(self, parameter: torch.Tensor) -> str:
        """Say which parameter changed in the middle of a step, and why that may be."""
        for model in self._models:
            for path, module in model.named_modules():
                own = [name for name, one in module._parameters.items() if one is parameter]
                if own and getattr(module, "max_norm", None) is not None:
                    return (
                        f"forward changed parameter {path}.{own[0]} in the middle of a step: {type(module).__name__} "
                        f"with max_norm={module.max_norm} rescales the rows that a worker looks up, and replicas would "
                        "drift apart. Build it without max_norm, and rescale the weight behind step.commit, on every "
                        "worker: torch.renorm(weight, 2, 0, max_norm)"
                    )
                if own and not parameter.requires_grad:
                    name = ".".join(filter(None, (path, own[0])))
                    return (
                        f"parameter {name}, which is not trained, changed in the middle of a step, from this worker's "
                        "samples alone: replicas would drift apart. What forward moves itself (a code book, a running "
                        "mean) is a buffer: register_buffer. An average of the weights is updated once per step, "
                        "behind step.commit or in on_train_batch_end"
                    )
        return (
            "parameters changed in the middle of a step (an optimizer.step() left in?): replicas would "
            "drift apart; step.commit(optimizer) makes the update, and changes of your own (a clamp, a projection) "
            "belong behind it"
        )

    def _versions_now(self) -> list[int]:
        if self._sharded:  # what the optimiser changes is this process's part
            return [local(parameter)._version for parameter in self.everything]
        return list(map(_VERSION, self.everything))

    def clear(self) -> None:
        """Forget the gradients of the step, which is over."""
        self.buckets.clear()
        self._looked = self._looked or self._begun
        self._begun, self._living = False, LivingScalers()

    # -- beside the sum: a micro-batch joins it completely or not at all ---------------------------------------------

    def backward_apart(
        self, loss: torch.Tensor, weight: Any, *, among: Among = None, **graph: bool
    ) -> MicroBatchGradient:
        """Return the gradient of a micro-batch's mean loss with this weight, which is not in the sum before `join`."""
        if not self._begun:
            self._begin_work()
        if self.refrozen and self._follows_freezing:
            still = (id(p) for p in self.buckets.parameters if p.requires_grad)
            among = frozenset(p for p in still if among is None or p in among)
            if not among:
                return self.no_gradient()
        scaled, gradient = self._scaled(loss, weight)
        try:
            grads = self.buckets.backward_apart(scaled, gradient, among=among, **graph)
        except RuntimeError:
            self.buckets.check_kinds()
            raise
        if all(grad is None for grad in grads):
            raise MisuseError(_REACHED_NOTHING if among is None else REACHED_NO_MODEL)
        return MicroBatchGradient(grads, self.statistics.snapshot(), self.buffers.snapshot())

    def no_gradient(self) -> MicroBatchGradient:
        """Return what a micro-batch leaves that was left out: no gradient."""
        nothing: list[torch.Tensor | None] = [None] * len(self.buckets.slots)
        return MicroBatchGradient(nothing, self.statistics.snapshot(), self.buffers.snapshot())

    def prepare_apart(self) -> None:
        """Check the script's parameters and gradients, in a step without a deadline, before `backward_apart`."""
        if not self._begun:
            self._notice_freezing()
        self.buckets.check_untouched()

    def join_and_show(self, gradient: MicroBatchGradient) -> None:
        """Add a micro-batch's gradient to the sum, in a step without a deadline, and leave the sum in ``p.grad``."""
        self.buckets.join(gradient.grads)
        self.buckets.show()

    def check_apart(self) -> None:
        """Raise MisuseError when the script changed parameters or gradients since the last micro-batch.

        For steps with a deadline.
        """
        if self._trained_now() != self.trained:
            if not self._follows_freezing:
                raise MisuseError(
                    "parameters were frozen or unfrozen between steps, which rounds with a deadline cannot follow: "
                    "make new steps with fleet.steps, or use another pace"
                )
            self.refrozen = True
        self.buckets.check_untouched()
        self._check_unchanged()

    def join(self, gradient: MicroBatchGradient) -> None:
        """Count the gradient and the statistics of a finished micro-batch, in a step with a deadline.

        Any thread may call this.
        """
        self.seen = gradient.buffers
        self.buckets.join(gradient.grads)
        self.statistics.note(gradient.statistics)


def _unique(parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Return the parameters in order, each once."""
    return list({id(p): p for p in parameters}.values())
