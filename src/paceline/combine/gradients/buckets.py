"""Gradients as views of a few flat tensors, each summed over the fleet as soon as it is final.

A parameter's first gradient of a step is copied into its place in a flat bucket, and the later ones add to it there.
In the last micro-batch a bucket whose parameters all have their gradient starts its sum while backward goes on, as in
DDP. A worker with no micro-batch at all sends zeros. Buckets are started in one fixed order, so that every worker
runs the same sums in the same order whatever its share.

Where workers come and go, a round may have to be run again, and its result be handed to a worker that missed its end.
There the copy is made last, not first: gradients add up where autograd puts them and are copied when their sum starts,
into one of two flat tensors by turns, so that a worker's own gradient lasts until the round is over and the fleet's
until the next one is. That costs memory, and no time.

Autograd calls back for every parameter that has its gradient, which costs a microsecond or two each. So all parameters
call back only where that is needed: in the first step, which shows whether each gradient comes once a pass, and in
micro-batches during which sums start. In the others one parameter does, to notice a backward that is not the step's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, is_

import torch

from paceline.combine.gradients.bucket import Bucket, Slot, copy_all, group
from paceline.combine.gradients.callbacks import Callbacks
from paceline.errors import MisuseError

_GRAD, _VERSION = attrgetter("grad"), attrgetter("_version")

Among = frozenset[int] | None
"""Parameters, by id, that a loss's gradient is for; None: all."""

REACHED_NO_MODEL = (
    "the loss given to step.backward(models=...) reached no parameter of these models: compute it with them, and "
    "without detach() or no_grad() on the way"
)


class Buckets:
    """The gradients of all trained parameters of one worker.

    ``start(flat)`` begins the fleet's sum of a bucket; without it (a worker alone) gradients stay where autograd puts
    them and nothing is copied. ``keeps``: this worker's own gradients outlast the round, and the fleet's the next one.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        start: Callable[[torch.Tensor], None] | None = None,
        *,
        keeps: bool = False,
        make: Callable[[Sequence[torch.nn.Parameter]], Bucket] | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self._start, self._keeps = start, keeps
        make = make or partial(Bucket, flats=2 if keeps else 1)
        self.buckets = [make(one) for one in group(self.parameters)] if start else []
        homes = {id(slot.parameter): slot for bucket in self.buckets for slot in bucket.slots}
        self.slots = [homes.get(id(p)) or Slot(p, None, None) for p in self.parameters]
        self._callbacks = Callbacks(self.parameters, self._came)
        self._newest: int | None = None
        """The parameter whose gradient came last: at the end of a backward, one that most losses reach."""
        self._lacking: list[Slot] = []
        """Those without a gradient in this step as yet, once some have one."""
        self._held: tuple[list[torch.nn.Parameter], list[torch.Tensor], list[int]] | None = None
        """Parameters with a gradient, what stands there, and its versions after the last backward. None: ask the
        slots."""
        self._refused = False
        """A backward that is not a step's was, since the last step's."""
        self._inside = False
        self._aside = False
        self._last = False
        self._pass = 0
        self._overlap = False  # until one whole step has shown that every gradient comes once a pass
        self._twice = False
        self._started = 0

    def detach(self) -> None:
        """Give the parameters back: no hooks, no views."""
        self._callbacks.remove()
        self.clear()

    # -- during the step -------------------------------------------------------------------------------------------

    def backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        *,
        last: bool,
        whole: bool = False,
        keep_graph: bool = False,
        retain_graph: bool = False,
        among: Among = None,
    ) -> None:
        """Add the gradient of ``loss``, times ``gradient`` where it is given, to all parameters or to those ``among``.
        ``last`` says that nothing more comes in this step; ``retain_graph`` that another loss's backward goes through
        the same graph.

        With ``whole`` a backward that fails half-way (out of memory) leaves the sum as it was.
        """
        self.check_untouched()
        if whole:
            self.join(self.backward_aside(loss, gradient, retain_graph=retain_graph, among=among))
            self.show()
            return
        first = not any(slot.grad is not None for slot in self.slots)
        if first:
            self._forget_strange_gradients()
        closely = among is not None or keep_graph
        starts = last and self._overlap and self._start is not None
        self._callbacks.listen(None if closely or starts or not self._known else self._newest)
        self._pass += 1
        self._inside, self._last = True, last
        try:
            retain = retain_graph or keep_graph
            loss.backward(gradient, retain_graph=retain, create_graph=keep_graph, inputs=self._inputs(among))  # type: ignore[no-untyped-call]
        finally:
            self._inside = False
        self._hold(self.slots if first or closely or self._held is None else self._lacking)
        if among is not None and not any(slot.seen == self._pass for slot in self._chosen(among)):
            raise MisuseError(REACHED_NO_MODEL)

    @property
    def _known(self) -> bool:
        """Whether a whole step has shown how gradients come."""
        return (self._overlap or self._twice) and self._newest is not None

    def _forget_strange_gradients(self) -> None:
        """The user's own code between steps may have left some. A backward may not have: all parameters would have
        called, or one has and it was refused there."""
        refused, self._refused = self._refused, False
        if not (refused or self._callbacks.all) and any(p.grad is not None for p in self.parameters):
            raise MisuseError(
                "parameters of the fleet's model have gradients before the step's first step.backward(loss), from a "
                "loss.backward() or p.grad = ... of your own, which would be lost: use step.backward(loss), or clear "
                "them with optimizer.zero_grad()"
            )
        for parameter in self.parameters:
            parameter.grad = None

    def _hold(self, among: Sequence[Slot]) -> None:
        """A backward is over, in which these may have got their first gradient: bring home what is not there yet, and
        note what all gradients are."""
        self._bring_home([slot for slot in among if slot.parameter.grad is not slot.grad])
        if self._held is None or any(slot.shown is not None for slot in among):
            self._lacking = [slot for slot in self.slots if slot.shown is None]
            shown = [(slot.parameter, slot.shown) for slot in self.slots if slot.shown is not None]
            self._held = [parameter for parameter, _ in shown], [tensor for _, tensor in shown], []
        parameters, tensors, _ = self._held
        self._held = parameters, tensors, list(map(_VERSION, tensors))

    def _bring_home(self, new: Sequence[Slot]) -> None:
        pairs = []
        for slot in new:
            if (grad := slot.parameter.grad) is None:
                continue
            self._check_dense(grad)
            if slot.home is not None and not self._keeps:
                pairs.append((slot.home, grad))
                grad = slot.home
            slot.parameter.grad = slot.grad = slot.shown = grad
        copy_all(pairs)

    def _chosen(self, among: Among) -> list[Slot]:
        return self.slots if among is None else [slot for slot in self.slots if id(slot.parameter) in among]

    def _inputs(self, among: Among) -> list[torch.nn.Parameter] | None:
        return None if among is None else [slot.parameter for slot in self._chosen(among)]

    def backward_aside(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        *,
        retain_graph: bool = False,
        among: Among = None,
    ) -> list[torch.Tensor | None]:
        """The gradients of ``loss``, beside the sum: of all parameters or of those ``among``, None for the others. They
        stay in ``p.grad`` until `show`."""
        self._held = None
        chosen = self._chosen(among)
        for slot in chosen:
            slot.parameter.grad = None
        self._inside = self._aside = True
        try:
            loss.backward(gradient, retain_graph=retain_graph, inputs=self._inputs(among))  # type: ignore[no-untyped-call]
        except BaseException:
            self.show()
            raise
        finally:
            self._inside = self._aside = False
        for slot in chosen:
            slot.shown = slot.parameter.grad
        self._note_versions()
        return [slot.shown if among is None or id(slot.parameter) in among else None for slot in self.slots]

    @torch.no_grad()
    def join(self, aside: Sequence[torch.Tensor | None]) -> None:
        """Add a whole micro-batch's gradients to the sum. Any thread may: ``p.grad`` is left alone, for the user's
        thread may be in the middle of the next backward."""
        for slot, grad in zip(self.slots, aside, strict=True):
            if grad is not None and slot.grad is not None:
                slot.grad.add_(grad)
            elif grad is not None:
                slot.grad = self._at_home(slot, grad)
        self._note_versions()

    def show(self) -> None:
        """The sum shows in ``p.grad``."""
        self._held = None
        for slot in self.slots:
            slot.parameter.grad = slot.shown = slot.grad
        self._note_versions()

    def seal(self) -> list[torch.Tensor]:
        """The sum as it is, with zeros where no gradient came, not yet started."""
        self._complete(self.buckets)
        return [bucket.flat for bucket in self.buckets]

    def _note_versions(self) -> None:
        for slot in self.slots:
            if slot.shown is not None:
                slot.version = slot.shown._version

    def _came(self, number: int, parameter: torch.nn.Parameter) -> None:
        """Autograd has put or added to ``parameter.grad``."""
        if not self._inside:
            self._refused = True
            raise MisuseError(
                "a plain loss.backward() ran on the fleet's model: its gradient would not be weighted by the "
                "micro-batch; use step.backward(loss) instead"
            )
        if parameter.grad is None:
            raise MisuseError(
                "a hook of the script on a parameter (register_post_accumulate_grad_hook) set its gradient to None "
                "during backward, as an optimiser does that updates inside backward: it would update from one "
                "micro-batch of one worker, and the fleet's mean is known after the round alone. Remove the hook, "
                "build one optimizer of all parameters, and write step.commit(optimizer)"
            )
        if self._aside:
            return
        slot, self._newest = self.slots[number], number
        again, slot.seen = slot.seen == self._pass, self._pass
        self._twice = self._twice or again
        if slot.bucket and slot.bucket.started:
            raise MisuseError(
                "a parameter got its gradient in several parts, the last after its sum had begun (re-entrant "
                "checkpoints over a shared layer do this): pass overlap=False to fleet.model"
            )
        self._adopt(slot, parameter)
        if slot.bucket and self._last and self._overlap and not again:
            slot.bucket.awaited -= 1
            self._start_ready()

    def _adopt(self, slot: Slot, parameter: torch.nn.Parameter) -> None:
        grad = parameter.grad
        if grad is not None and grad is not slot.grad:
            parameter.grad = slot.grad = slot.shown = self._at_home(slot, grad)

    def _at_home(self, slot: Slot, grad: torch.Tensor) -> torch.Tensor:
        """A parameter's first gradient of the step, in its place."""
        self._check_dense(grad)
        return grad if slot.home is None or self._keeps else slot.home.copy_(grad.detach())

    def _check_dense(self, grad: torch.Tensor) -> None:
        if grad.is_sparse:
            raise ValueError("sparse gradients are not supported: build the embedding with sparse=False")

    def _start_ready(self) -> None:
        while self._started < len(self.buckets) and self.buckets[self._started].awaited == 0:
            self._start_next()

    def _start_next(self) -> None:
        assert self._start is not None
        bucket = self.buckets[self._started]
        bucket.started = True
        self._started += 1
        if self._keeps:
            bucket.fill()
        self._start(bucket.flat)

    def finish(self) -> None:
        """Zero what no gradient came for, and start the sums that are still to start."""
        if not self._keeps:
            self._complete(self.buckets[self._started :])
        while self._started < len(self.buckets):
            self._start_next()

    def start(self) -> None:
        """All parts are there, of a worker of several processes: start the sums."""
        return

    def restart(self) -> None:
        """Start all sums once more, from this worker's own gradients."""
        assert self._keeps
        self._started = 0
        self.finish()

    def _complete(self, buckets: Sequence[Bucket]) -> None:
        """Every place in these flat tensors holds this worker's gradient, or zero."""
        for bucket in buckets:
            if self._keeps:
                bucket.fill()
                continue
            empty = [slot for slot in bucket.slots if slot.grad is None]
            if len(empty) == len(bucket.slots):
                bucket.flat.zero_()
            else:
                for slot in empty:
                    assert slot.home is not None
                    slot.home.zero_()

    # -- between round and commit ----------------------------------------------------------------------------------

    def used(self) -> list[bool]:
        """Which parameters got a gradient on this worker."""
        return [slot.grad is not None for slot in self.slots]

    def expose(self, used: Sequence[float], *, copies: bool = False) -> None:
        """Leave the fleet's gradient in ``p.grad``, and None for parameters that nobody used, as one machine would.
        ``copies``: somebody will change them there."""
        for slot, anybody in zip(self.slots, used, strict=True):
            if slot.home is not None:
                slot.grad = None if not anybody else slot.home.clone() if copies else slot.home
            slot.parameter.grad = slot.grad

    def take_mean(self, used: Sequence[float]) -> None:
        """The mean was made where all share it: leave this process's part in ``p.grad``."""
        return

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that hold all gradients: the flat buckets, or a lone worker's own gradients."""
        return [b.flat for b in self.buckets] if self._start else [s.grad for s in self.slots if s.grad is not None]

    def clear(self) -> None:
        """Forget this step's gradients; ready for the next."""
        self._overlap = not self._twice and self._pass > 0
        self._started, self._held, self._lacking = 0, None, []
        for slot in self.slots:
            slot.parameter.grad = slot.grad = slot.shown = None
        for bucket in self.buckets:
            bucket.awaited, bucket.started = len(bucket.slots), False
            if self._keeps:
                bucket.turn_over()

    def check_kinds(self) -> None:
        """Raise MisuseError when parameters were given another type or device since the loop was made."""
        for slot in self.slots:
            now, home = slot.parameter, slot.home
            if home is not None and (now.dtype, now.device) != (home.dtype, home.device):
                raise MisuseError(
                    f"parameters of the model changed from {home.dtype} on {home.device} to {now.dtype} on "
                    f"{now.device} while training (model.float(), .half() or .to()): convert the model before "
                    "fleet.model, and use torch.autocast to compute in another type"
                )

    def check_untouched(self) -> None:
        """Raise MisuseError when somebody cleared or changed gradients since the last backward of this step."""
        if self._held is not None:
            parameters, tensors, versions = self._held
            same = all(map(is_, map(_GRAD, parameters), tensors)) and list(map(_VERSION, tensors)) == versions
            if same and all(slot.parameter.grad is None for slot in self._lacking):
                return
            noted = dict(zip(map(id, tensors), versions, strict=True))
            for slot in self.slots:
                slot.version = noted.get(id(slot.shown), 0)
        for slot in self.slots:
            # A running sum changes it, by its own right.
            running = slot.bucket is not None and slot.bucket.started and not self._keeps
            if running or (slot.shown is None and (self._held is None or slot.parameter.grad is None)):
                continue
            if slot.shown is None or slot.parameter.grad is not slot.shown or slot.shown._version != slot.version:
                raise MisuseError(
                    "gradients were cleared or changed in the middle of a step (optimizer.zero_grad(), clipping, "
                    "or p.grad = ...): step.commit clips and zeroes; for code of your own call step.combine() first"
                )
