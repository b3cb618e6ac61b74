"""The gradients of a worker whose processes divide a model among them (`fully_shard`).

Inside the worker torch sums the processes' gradients of every micro-batch, and leaves each process its part: so no
process holds more than one block of the model completely at a time. At the end of a step the parts come together in
flat tensors that the processes share. There the worker's first process sums with the other workers, as any worker
does, whatever their number of processes, and makes the mean; each process then takes its part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from paceline.checkpoint.shards import dimension, divided, local, part_of
from paceline.errors import MisuseError
from paceline.gradients.buckets import Bucket, Buckets, Section, Slot
from paceline.transport import Collective


def set_up(models: Sequence[torch.nn.Module]) -> None:
    """Have torch add up the gradients of a worker's processes, and divide by nothing: the step divides by its count.

    Raise ValueError where this torch can only divide: the step's gradient would be too small by the group's size.
    """
    parts: list[Any] = [part for model in models for part in model.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        if not hasattr(part, "set_force_sum_reduction_for_comms"):
            raise ValueError(
                f"a model divided by fully_shard needs torch 2.8 or newer, and this is {torch.__version__}: it cannot "
                "add gradients up without dividing them; upgrade torch, or start without --procs-per-worker"
            )
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)


class ShardedBucket(Bucket):
    """A bucket whose flat tensors the worker's processes share; each process writes its parts."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], *, worker: Collective, number: int, flats: int
    ) -> None:
        """Allocate shared memory; ``number`` identifies the bucket among the worker's processes."""
        self._worker, self._number = worker, number
        super().__init__(parameters, flats=flats)

    def _new_flat(self, size: int, like: torch.Tensor) -> torch.Tensor:
        return self._worker.shared("gradients", size, like.dtype)

    def renew(self) -> None:
        self._worker.relay("renew", self._number)
        super().renew()

    def own(self, slot: Slot) -> torch.Tensor:
        """Return this process's part of a parameter's view."""
        assert slot.home is not None
        return part_of(slot.home, self._worker.shard, self._worker.shards, dimension(slot.parameter))

    @torch.no_grad()
    def fill_part(self) -> None:
        """Copy this process's parts to where they are summed."""
        for slot in self.slots:
            if slot.grad is None:
                self.own(slot).zero_()
            else:
                self.own(slot).copy_(local(slot.grad))


class ShardedBuckets(Buckets):
    """The gradients of all trained parameters, divided over a worker's processes.

    ``reruns``: a round may be run again, and its result handed on, so the fleet's gradients outlast the next round.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        start: Callable[[torch.Tensor], None],
        *,
        in_sections: Callable[[], bool],
        reruns: bool,
        worker: Collective,
    ) -> None:
        self._worker = worker
        numbers = count()
        super().__init__(
            parameters,
            start,
            in_sections=in_sections,
            copies_late=True,
            make=lambda one: ShardedBucket(one, worker=worker, number=next(numbers), flats=2 if reruns else 1),
        )
        self._noted: torch.Tensor | None = None
        """The norms of this process's parts after the last backward: clipping, for one, changes no version."""
        self._changes: list[torch.Tensor] = []
        """Whether the norms had changed, at each check; read at the end of the step, so that no check synchronises."""
        self._direct = [parameter.register_hook(_refuse_direct) for parameter in self.parameters]  # type: ignore[no-untyped-call]
        worker.on("fill", lambda _: self._fill_all())
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
        if not self._worker.from_first(label, len(set(self._worker.collect(label, got))) == 1):
            raise MisuseError(
                "the processes of this worker used unlike parameters in a micro-batch (a branch, or experts chosen by "
                "the data), whose sums torch would mix up: have every parameter used by every micro-batch, as with 0 * "
                "output.sum(), or hold the model whole (--procs-per-worker 1)"
            )

    def _versions(self) -> list[int]:
        return [-1 if slot.grad is None else local(slot.grad)._version for slot in self.slots]

    def check_untouched(self) -> None:
        super().check_untouched()
        if self._noted is not None:
            self._changes.append((self._norms() != self._noted).any())

    def _norms(self) -> torch.Tensor:
        """Return the norms' bits as integers: NaN equals itself there."""
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

    def _fill(self, sections: Sequence[Section]) -> None:
        return  # all processes have: `_fill_all`

    def _fill_all(self) -> None:
        for bucket in self.buckets:
            assert isinstance(bucket, ShardedBucket)
            bucket.fill_part()
        self._worker.collect("gradients", None)

    def start_rest(self) -> None:
        """Write this process's parts; `start_together` starts the sums."""
        if any(map(bool, self._changes)):
            raise MisuseError(
                "gradients were changed in the middle of a step (clipping?): step.commit clips; for code of your own "
                "call step.reduce() first"
            )
        self._fill_all()

    def _start_ready(self) -> None:
        return  # parts of the other processes may be missing

    def start_together(self) -> None:
        self._start_all()

    def restart(self) -> None:
        self._started = 0
        self._worker.relay("fill")
        self._fill_all()
        self.start_together()

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
        "the worker's processes have: use the optimiser's weight_decay, or change the gradients after step.reduce()"
    )
