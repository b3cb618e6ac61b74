"""The gradients of a worker whose processes divide a model among them (`fully_shard`).

Inside the worker torch sums the processes' gradients of every micro-batch, and leaves each its part: so no more of
parameters and gradients than a block is whole in a process at a time. At the end of a step the parts come together,
whole, in flat tensors that the processes share: there the worker's first process sums with the other workers, as any
worker does, whatever their number of processes, and makes the mean; each process then takes its part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch

from paceline.checkpoint.shards import dimension, divided, local, part_of
from paceline.combine.gradients.bucket import Bucket, Slot
from paceline.combine.gradients.buckets import Buckets
from paceline.errors import MisuseError
from paceline.transport import Collective


def set_up(models: Sequence[torch.nn.Module]) -> None:
    """Have torch add up the gradients of a worker's processes, and divide by nothing: the step divides by its count."""
    parts: list[Any] = [part for model in models for part in model.modules()]
    for part in parts:
        if hasattr(part, "set_force_sum_reduction_for_comms"):
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)


class ShardedBucket(Bucket):
    """One whose flat tensors the worker's processes share, each writing its parts."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], *, worker: Collective, number: int, flats: int
    ) -> None:
        """``number``: by which the worker's processes know it."""
        self._worker, self._number = worker, number
        super().__init__(parameters, flats=flats)

    def _new_flat(self, size: int, like: torch.Tensor) -> torch.Tensor:
        return self._worker.shared("gradients", size, like.dtype)

    def renew(self) -> None:
        self._worker.tell("renew", self._number)
        super().renew()

    def own(self, slot: Slot) -> torch.Tensor:
        """This process's part of a parameter's place."""
        assert slot.home is not None
        return part_of(slot.home, self._worker.shard, self._worker.shards, dimension(slot.parameter))

    def fill(self) -> None:
        return  # all processes have: `fill_part`

    @torch.no_grad()
    def fill_part(self) -> None:
        """Copy this process's parts to where they are summed."""
        for slot in self.slots:
            if slot.grad is None:
                self.own(slot).zero_()
            else:
                self.own(slot).copy_(local(slot.grad))


class ShardedBuckets(Buckets):
    """The gradients of all trained parameters, divided over a worker's processes. ``keeps``: the fleet's outlast the
    next round."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        start: Callable[[torch.Tensor], None],
        *,
        keeps: bool,
        worker: Collective,
    ) -> None:
        self._worker = worker
        numbers = count()
        super().__init__(
            parameters,
            start,
            keeps=True,
            make=lambda one: ShardedBucket(one, worker=worker, number=next(numbers), flats=2 if keeps else 1),
        )
        self._noted: torch.Tensor | None = None
        """Norms of this process's parts after the last backward: some changes, clipping for one, show in no version."""
        self._changes: list[torch.Tensor] = []
        """Whether they had changed, wherever that was looked at; asked for at the end of the step, for the device."""
        self._direct = [parameter.register_hook(_refuse_direct) for parameter in self.parameters]  # type: ignore[no-untyped-call]
        worker.on("fill", lambda _: self._fill())
        worker.on("renew", lambda number: self.buckets[number].renew())

    def detach(self) -> None:
        for hook in self._direct:
            hook.remove()
        super().detach()

    def backward(self, *args: Any, **how: Any) -> None:
        before = self._versions()
        super().backward(*args, **how)
        got = bytes(one != other for one, other in zip(before, self._versions(), strict=True))
        self._noted = self._norms()
        label = "the gradients of a micro-batch"
        if not self._worker.said(label, len(set(self._worker.collect(label, got))) == 1):
            raise MisuseError(
                "the processes of this worker used unlike parameters in a micro-batch (a branch, or experts chosen by "
                "the data), whose sums torch would mix up: have every parameter used by every micro-batch, as with 0 * "
                "output.sum(), or hold the model whole (--group 1)"
            )

    def _versions(self) -> list[int]:
        return [-1 if slot.grad is None else local(slot.grad)._version for slot in self.slots]

    def check_untouched(self) -> None:
        super().check_untouched()
        if self._noted is not None:
            self._changes.append((self._norms() != self._noted).any())

    def _norms(self) -> torch.Tensor:
        """As whole numbers: NaN equals itself there."""
        norms = torch._foreach_norm([local(slot.grad) for slot in self.slots if slot.grad is not None])
        return torch.stack([norm.to(torch.float64) for norm in norms]).view(torch.int64) if norms else torch.zeros(0)

    def clear(self) -> None:
        self._noted, self._changes = None, []
        super().clear()

    def _forget_strange_gradients(self) -> None:
        if any(parameter.grad is not None for parameter in self.parameters):
            raise MisuseError(
                "parameters of the fleet's model have gradients before the step's first step.backward(loss), from a "
                "loss.backward() of your own: use step.backward(loss), or clear them with optimizer.zero_grad()"
            )

    def _fill(self) -> None:
        for bucket in self.buckets:
            assert isinstance(bucket, ShardedBucket)
            bucket.fill_part()
        self._worker.collect("gradients", None)

    def finish(self) -> None:
        if any(map(bool, self._changes)):
            raise MisuseError(
                "gradients were changed in the middle of a step (clipping?): step.commit clips; for code of your own "
                "call step.combine() first"
            )
        self._fill()

    def _start_ready(self) -> None:
        return  # parts of the other processes may lack

    def start(self) -> None:
        while self._started < len(self.buckets):
            self._start_next()

    def restart(self) -> None:
        self._started = 0
        self._worker.tell("fill")
        self._fill()
        self.start()

    def expose(self, used: Sequence[float], *, copies: bool = False) -> None:
        return  # the mean is not made yet: `take_mean`

    @torch.no_grad()
    def take_mean(self, used: Sequence[float]) -> None:
        for slot, anybody in zip(self.slots, used, strict=True):
            if not anybody:
                slot.grad = None
            elif slot.grad is None:
                assert slot.home is not None
                slot.grad = divided(slot.home, slot.parameter)
            else:
                assert isinstance(slot.bucket, ShardedBucket)
                local(slot.grad).copy_(slot.bucket.own(slot))
            slot.parameter.grad = slot.grad


def _refuse_direct(gradient: torch.Tensor) -> None:
    raise MisuseError(
        "a loss uses a parameter of a sharded model itself (a penalty on weights?), where torch does not add up what "
        "the worker's processes have: use the optimiser's weight_decay, or change the gradients after step.combine()"
    )
