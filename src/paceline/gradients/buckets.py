"""Gradients as views of a few flat tensors, each summed over the fleet as soon as it is final.

Parameters are grouped in about the order in which backward ends (`group`). A `Bucket` is one flat tensor, and a `Slot`
is one parameter's part of it. `Callbacks` reports the gradients that autograd has made, and `Buckets` puts them there
and starts the sums.

A parameter's first gradient of a step is copied into its part of a flat tensor, and the later ones add to it there.
In the last micro-batch a bucket whose parameters all have their gradient starts its sum while backward goes on, as in
DDP. A worker with no micro-batch at all sends zeros. Buckets are started in one fixed order, so that every worker
runs the same sums in the same order whatever its share.

Over slow links, where sums travel piece by piece anyway, a bucket is summed in sections: the link carries the first one
long before the bucket is complete. Whether it is depends on the network alone, so all workers do the same.

Where workers come and go, a round may have to be run again, and its result be handed to a worker that missed its end.
There the copy is made last, not first: gradients add up where autograd puts them and are copied when their sum starts,
into one of two flat tensors by turns, so that a worker's own gradient lasts until the round is over and the fleet's
until the next one is. That costs memory, and no time.

Autograd calls back for every parameter that has its gradient, which costs a microsecond or two each. So all parameters
call back only where that is needed: in the first step, which shows whether each gradient comes once per pass, and in
micro-batches during which sums start. In the others one parameter does, to notice a backward that is not the step's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from operator import attrgetter, is_
from typing import Any

import torch

from paceline.errors import MisuseError

FIRST_BYTES = 1 << 20
BUCKET_BYTES = 8 << 20
"""The sizes of the first bucket and of the others.

As in DDP a small first bucket starts the round early, and then larger ones keep it efficient. They are a third of
DDP's: sums of 8 MiB are as fast per byte as larger ones on Gloo, travel side by side, and end sooner after backward.
"""
SECTIONS = 8
"""The number of a full bucket's sections: 100 Mbit/s carry one of the first bucket's in about 10 ms."""

_GRAD, _VERSION = attrgetter("grad"), attrgetter("_version")

Among = frozenset[int] | None
"""The ids of the parameters that a loss's gradient is for; None: all parameters."""

Came = Callable[[int, torch.nn.Parameter], None]
"""A function that is called with a parameter and its number when autograd has made its gradient."""

REACHED_NO_MODEL = (
    "the loss given to step.backward(models=...) reached no parameter of these models: compute it with them, and "
    "without detach() or no_grad() on the way"
)


class Slot:
    """One parameter, its gradient, and its part (``home``) of a bucket's flat tensor."""

    __slots__ = ("bucket", "grad", "home", "parameter", "section", "seen", "shown", "version")

    def __init__(self, parameter: torch.nn.Parameter, bucket: Bucket | None, home: torch.Tensor | None) -> None:
        self.parameter, self.bucket, self.home = parameter, bucket, home
        self.section: Section | None = None
        self.grad: torch.Tensor | None = None
        """The tensor in which this step's gradient adds up; None until the first one comes."""
        self.shown: torch.Tensor | None = None
        """The tensor in ``p.grad`` until the next backward, which the script must not change.

        It is the sum or, under a deadline, the gradient of the micro-batch before it joins the sum.
        """
        self.version = 0
        self.seen = -1
        """The backward pass in which the last gradient came."""


class Section:
    """Neighbouring slots of a bucket, which can be summed before the others are final."""

    def __init__(self, bucket: Bucket, slots: Sequence[Slot], end: int) -> None:
        """Note the slots; ``end``: where they end in the flat tensor."""
        self.bucket, self.slots = bucket, slots
        self.begin, self.end = end - sum(slot.parameter.numel() for slot in slots), end
        for slot in slots:
            slot.section = self
        self.clear()

    def clear(self) -> None:
        """Await all gradients."""
        self.awaited, self.started = len(self.slots), False


class Bucket:
    """Slots that share a flat tensor."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, flats: int = 1) -> None:
        first = parameters[0]
        size = sum(p.numel() for p in parameters)
        self._flats = [self._new_flat(size, first) for _ in range(flats)]
        self._homes = [_homes(flat, parameters) for flat in self._flats]
        self.flat = self._flats[0]
        self.slots = [Slot(p, self, home) for p, home in zip(parameters, self._homes[0], strict=True)]

    def _new_flat(self, size: int, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(size, dtype=like.dtype, device=like.device)

    def touch(self) -> None:
        """Write zeros, which are there already: only then does the system hand out the memory."""
        for flat in self._flats:
            flat.zero_()

    def renew(self) -> None:
        """Replace the flat tensor, because an abandoned sum may still write into this one."""
        self._flats[0] = self._new_flat(self.flat.numel(), self.flat)
        self._homes[0] = _homes(self._flats[0], [slot.parameter for slot in self.slots])
        self._use_first()

    def turn_over(self) -> None:
        """Use the other flat tensor, and leave this one as it is."""
        self._flats.reverse()
        self._homes.reverse()
        self._use_first()

    def _use_first(self) -> None:
        self.flat = self._flats[0]
        for slot, home in zip(self.slots, self._homes[0], strict=True):
            slot.home = home


@torch.no_grad()
def copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy to each first tensor its second, in one call: on a GPU in a few kernels."""
    if pairs:
        torch._foreach_copy_([into for into, _ in pairs], [source.detach() for _, source in pairs])


@torch.no_grad()
def fill(slots: Sequence[Slot]) -> None:
    """Copy these slots' gradients to where they are summed, and zeros where no gradient came."""
    clear_empty(slots)
    copy_all([(slot.home, slot.grad) for slot in slots if slot.home is not None and slot.grad is not None])


@torch.no_grad()
def clear_empty(slots: Sequence[Slot]) -> None:
    """Write zeros where no gradient came."""
    if empty := [slot.home for slot in slots if slot.home is not None and slot.grad is None]:
        torch._foreach_zero_(empty)


def group(parameters: Sequence[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Group parameters of one dtype and device, in reverse order of definition: about that in which backward ends."""
    groups: list[list[torch.nn.Parameter]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[torch.nn.Parameter], int]] = {}
    for parameter in reversed(parameters):
        kind = (parameter.dtype, parameter.device)
        group, size = open_groups.get(kind, ([], 0))
        if not group:
            groups.append(group)
        group.append(parameter)
        size += parameter.numel() * parameter.element_size()
        full = size >= (FIRST_BYTES if group is groups[0] else BUCKET_BYTES)
        open_groups[kind] = ([], 0) if full else (group, size)
    return groups


def divide(bucket: Bucket, section_bytes: int) -> list[Section]:
    """Divide a bucket into sections: each ends with the parameter that makes it so large, and none is empty."""
    runs: list[list[Slot]] = [[]]
    size = 0
    for slot in bucket.slots:
        if size >= section_bytes and slot.parameter.numel():
            runs.append([])
            size = 0
        runs[-1].append(slot)
        size += slot.parameter.numel() * slot.parameter.element_size()
    ends = accumulate(sum(slot.parameter.numel() for slot in run) for run in runs)
    return [Section(bucket, run, end) for run, end in zip(runs, ends, strict=True)]


def _homes(flat: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return each parameter's part of the flat tensor, one after another."""
    ends = accumulate(parameter.numel() for parameter in parameters)
    return [_view_like(flat, end - p.numel(), p) for end, p in zip(ends, parameters, strict=True)]


def _view_like(flat: torch.Tensor, offset: int, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a view of the flat tensor with the parameter's shape and, where dense, its memory layout."""
    dense = parameter.is_contiguous() or parameter.is_contiguous(memory_format=torch.channels_last)
    if dense if parameter.dim() == 4 else parameter.is_contiguous():
        return flat.as_strided(parameter.shape, parameter.stride(), offset)
    return flat[offset : offset + parameter.numel()].view(parameter.shape)


class Callbacks:
    """Autograd's hooks on the parameters: they call ``came`` for the parameters that are listened to, at first for all.

    torch looks into a parameter's dictionary of hooks whenever its gradient comes; an empty one costs next to nothing.
    Taking a hook out and putting it back is quicker than registering it again.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], came: Came) -> None:
        self._calls = [partial(came, number) for number in range(len(parameters))]
        self._handles = [_register(p, call) for p, call in zip(parameters, self._calls, strict=True)]
        self._hooks: list[dict[int, Any]] = [handle.hooks_dict_ref() for handle in self._handles]
        self._only: int | None = None

    @property
    def all(self) -> bool:
        """Whether all parameters are listened to."""
        return self._only is None

    def listen(self, only: int | None) -> None:
        """Listen to the parameter of number ``only`` alone, or to all."""
        if only == self._only:
            return
        for number, (hooks, handle, call) in enumerate(zip(self._hooks, self._handles, self._calls, strict=True)):
            if only is None or number == only:
                hooks[handle.id] = call
            else:
                hooks.pop(handle.id, None)
        self._only = only

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _register(parameter: Any, call: Any) -> Any:
    return parameter.register_post_accumulate_grad_hook(call)


class Buckets:
    """The gradients of all trained parameters of one worker.

    ``start(flat)`` begins the fleet's sum of a bucket, or of a section of one where ``in_sections()`` is true at that
    moment; without it (a worker alone) gradients stay where autograd puts them and nothing is copied. ``copies_late``:
    gradients are copied to the flat tensors when their sum starts, and not when they come. So this worker's own
    gradients outlast the round, and the fleet's the next one.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        start: Callable[[torch.Tensor], None] | None = None,
        *,
        in_sections: Callable[[], bool] = lambda: False,
        copies_late: bool = False,
        make: Callable[[Sequence[torch.nn.Parameter]], Bucket] | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self._start, self._in_sections, self._copies_late = start, in_sections, copies_late
        make = make or partial(Bucket, flats=2 if copies_late else 1)
        self.buckets = [make(one) for one in group(self.parameters)] if start else []
        self._sections = [
            section
            for bucket in self.buckets
            for section in divide(bucket, (FIRST_BYTES if bucket is self.buckets[0] else BUCKET_BYTES) // SECTIONS)
        ]
        homes = {id(slot.parameter): slot for bucket in self.buckets for slot in bucket.slots}
        self.slots = [homes.get(id(p)) or Slot(p, None, None) for p in self.parameters]
        self._callbacks = Callbacks(self.parameters, self._came)
        self._newest: int | None = None
        """The number of the parameter whose gradient came last in a backward: most losses reach it."""
        self._lacking: list[Slot] = []
        """The slots without a gradient in this step as yet, once some have one."""
        self._held: tuple[list[torch.nn.Parameter], list[torch.Tensor], list[int]] | None = None
        """The parameters with a gradient, the gradients, and their versions after the last backward.

        None: the slots have the versions.
        """
        self._refused = False
        """Whether a backward that is not a step's was refused, since the last step's."""
        self.idle = False
        """Whether no step is open: then a backward of the script's own is its own affair."""
        self._inside = False
        self._apart = False
        self._last = False
        self._pass = 0
        self._overlap = False  # until one whole step has shown that every gradient comes once per pass
        self._twice = False
        self._started = 0
        """The number of sections whose sums have started."""

    def detach(self) -> None:
        """Remove the hooks and the views from the parameters."""
        self._callbacks.remove()
        self.clear()

    # -- during the step -------------------------------------------------------------------------------------------

    def backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        *,
        last: bool,
        atomic: bool = False,
        keep_graph: bool = False,
        retain_graph: bool = False,
        among: Among = None,
    ) -> None:
        """Add the gradient of ``loss``, times ``gradient`` where it is given, to all parameters or to those ``among``.

        ``last``: no more gradients come in this step. ``retain_graph``: another loss's backward goes through the same
        graph. With ``atomic`` a backward that fails half-way (out of memory) leaves the sum as it was.
        """
        self.check_untouched()
        if atomic:
            self.join(self.backward_apart(loss, gradient, retain_graph=retain_graph, among=among))
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
        """Clear gradients that the user's own code left between steps; raise MisuseError where a backward made them.

        A backward is seen: either all parameters call back, or one did and the backward was refused there.
        """
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
        """Copy first gradients to their flat tensors, after a backward, and note what all gradients are.

        ``among``: the slots that may have got their first gradient in this backward.
        """
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
            if slot.home is not None and not self._copies_late:
                pairs.append((slot.home, grad))
                grad = slot.home
            slot.parameter.grad = slot.grad = slot.shown = grad
        copy_all(pairs)

    def _chosen(self, among: Among) -> list[Slot]:
        return self.slots if among is None else [slot for slot in self.slots if id(slot.parameter) in among]

    def _inputs(self, among: Among) -> list[torch.nn.Parameter] | None:
        return None if among is None else [slot.parameter for slot in self._chosen(among)]

    def backward_apart(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        *,
        retain_graph: bool = False,
        among: Among = None,
    ) -> list[torch.Tensor | None]:
        """Return the gradients of ``loss`` without adding them to the sum, for all parameters or those ``among``.

        The other parameters have None. The gradients stay in ``p.grad`` until `show`.
        """
        self._held = None
        chosen = self._chosen(among)
        for slot in chosen:
            slot.parameter.grad = None
        self._inside = self._apart = True
        try:
            loss.backward(gradient, retain_graph=retain_graph, inputs=self._inputs(among))  # type: ignore[no-untyped-call]
        except BaseException:
            self.show()
            raise
        finally:
            self._inside = self._apart = False
        for slot in chosen:
            slot.shown = slot.parameter.grad
        self._note_versions()
        return [slot.shown if among is None or id(slot.parameter) in among else None for slot in self.slots]

    @torch.no_grad()
    def join(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add a whole micro-batch's gradients to the sum.

        Any thread may call this: it does not touch ``p.grad``, for the user's thread may be in the next backward.
        """
        for slot, grad in zip(self.slots, grads, strict=True):
            if grad is not None and slot.grad is not None:
                slot.grad.add_(grad)
            elif grad is not None:
                slot.grad = self._at_home(slot, grad)
        self._note_versions()

    def show(self) -> None:
        """Leave the sum in ``p.grad``."""
        self._held = None
        for slot in self.slots:
            slot.parameter.grad = slot.shown = slot.grad
        self._note_versions()

    def seal(self) -> list[torch.Tensor]:
        """Return the flat tensors with this worker's sum, and zeros where no gradient came; start nothing."""
        if self._copies_late:
            self._fill(self._sections)
        else:
            clear_empty(self.slots)
        return [bucket.flat for bucket in self.buckets]

    def _note_versions(self) -> None:
        for slot in self.slots:
            if slot.shown is not None:
                slot.version = slot.shown._version

    def _came(self, number: int, parameter: torch.nn.Parameter) -> None:
        """Take in the gradient that autograd has made or added to, and start the sums of buckets that are complete."""
        if self.idle:
            return
        if not self._inside:
            self._refused = True
            raise MisuseError(
                "a plain loss.backward() ran on the fleet's model: its gradient would not be weighted by the "
                "micro-batch; use step.backward(loss) instead. For a gradient that is no part of the training (a "
                "saliency map, Fisher information) call torch.autograd.grad, or make it between two loops"
            )
        if parameter.grad is None:
            raise MisuseError(
                "a hook of the script on a parameter (register_post_accumulate_grad_hook) set its gradient to None "
                "during backward, as an optimiser does that updates inside backward: it would update from one "
                "micro-batch of one worker, and the fleet's mean is known after the round alone. Remove the hook, "
                "build one optimizer of all parameters, and write step.commit(optimizer)"
            )
        if self._apart:
            return
        slot, self._newest = self.slots[number], number
        again, slot.seen = slot.seen == self._pass, self._pass
        self._twice = self._twice or again
        if slot.section and slot.section.started:
            raise MisuseError(
                "a parameter got its gradient in several parts, the last after its sum had begun (re-entrant "
                "checkpoints over a shared layer do this): pass overlap=False to fleet.model"
            )
        self._adopt(slot, parameter)
        if slot.section and self._last and self._overlap and not again:
            slot.section.awaited -= 1
            if not slot.section.awaited:
                self._start_ready()

    def _adopt(self, slot: Slot, parameter: torch.nn.Parameter) -> None:
        grad = parameter.grad
        if grad is not None and grad is not slot.grad:
            parameter.grad = slot.grad = slot.shown = self._at_home(slot, grad)

    def _at_home(self, slot: Slot, grad: torch.Tensor) -> torch.Tensor:
        """Return a parameter's first gradient of the step, copied to the flat tensor unless it is kept apart."""
        self._check_dense(grad)
        return grad if slot.home is None or self._copies_late else slot.home.copy_(grad.detach())

    def _check_dense(self, grad: torch.Tensor) -> None:
        if grad.is_sparse:
            raise ValueError("sparse gradients are not supported: build the embedding with sparse=False")

    def _start_ready(self) -> None:
        while self._started < len(self._sections) and not self._sections[self._started].awaited:
            sections = self._next_sum()
            if any(section.awaited for section in sections):
                return
            self._start_sum(sections)

    def _next_sum(self) -> list[Section]:
        """Return the sections of the next sum: one, or all that are left of its bucket."""
        begin = self._started
        end, bucket = begin + 1, self._sections[begin].bucket
        if not self._in_sections():
            while end < len(self._sections) and self._sections[end].bucket is bucket:
                end += 1
        return self._sections[begin:end]

    def _start_sum(self, sections: Sequence[Section]) -> None:
        assert self._start is not None
        for section in sections:
            section.started = True
        self._started += len(sections)
        if self._copies_late:
            self._fill(sections)
        self._start(sections[0].bucket.flat[sections[0].begin : sections[-1].end])

    def _fill(self, sections: Sequence[Section]) -> None:
        """Copy this worker's own gradients to where they are summed."""
        fill([slot for section in sections for slot in section.slots])

    def start_rest(self) -> None:
        """Zero what no gradient came for, and start the sums that are still to start."""
        if not self._copies_late:
            clear_empty([slot for section in self._sections[self._started :] for slot in section.slots])
        self._start_all()

    def _start_all(self) -> None:
        """Start the sums that are still to start."""
        while self._started < len(self._sections):
            self._start_sum(self._next_sum())

    def start_together(self) -> None:
        """Start the sums of a worker of several processes, all of which have brought their parts."""
        return

    def restart(self) -> None:
        """Start all sums once more, from this worker's own gradients."""
        assert self._copies_late
        self._started = 0
        self.start_rest()

    # -- between round and commit ----------------------------------------------------------------------------------

    def reached(self) -> set[int] | None:
        """Return the ids of the parameters that the last backward reached; None where that was not listened to."""
        if self._known or not self.slots:
            return None
        return {id(slot.parameter) for slot in self.slots if slot.seen == self._pass}

    def used(self) -> list[bool]:
        """Return which parameters got a gradient on this worker."""
        return [slot.grad is not None for slot in self.slots]

    def expose(self, used: Sequence[float], *, copies: bool = False) -> None:
        """Leave the fleet's gradient in ``p.grad``, and None for parameters that nobody used, as one machine would.

        ``copies``: leave copies there, because somebody may change them.
        """
        for slot, anybody in zip(self.slots, used, strict=True):
            if slot.home is not None:
                slot.grad = None if not anybody else slot.home.clone() if copies else slot.home
            slot.parameter.grad = slot.grad

    def take_mean(self, used: Sequence[float]) -> None:
        """Leave this process's part of the mean, which was made in shared memory, in ``p.grad``."""
        return

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that hold all gradients: the flat buckets, or a lone worker's own gradients."""
        return [b.flat for b in self.buckets] if self._start else [s.grad for s in self.slots if s.grad is not None]

    def clear(self) -> None:
        """Forget this step's gradients, and be ready for the next."""
        self._overlap = not self._twice and self._pass > 0
        self._started, self._held, self._lacking = 0, None, []
        for slot in self.slots:
            slot.parameter.grad = slot.grad = slot.shown = None
        for section in self._sections:
            section.clear()
        if self._copies_late:
            for bucket in self.buckets:
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
            # A sum under way may change its section.
            running = slot.section is not None and slot.section.started and not self._copies_late
            if running or (slot.shown is None and (self._held is None or slot.parameter.grad is None)):
                continue
            if slot.shown is None or slot.parameter.grad is not slot.shown or slot.shown._version != slot.version:
                raise MisuseError(
                    "gradients were cleared or changed in the middle of a step (optimizer.zero_grad(), clipping, "
                    "or p.grad = ...): step.commit clips and zeroes; for code of your own call step.reduce() first"
                )
