"""Steps of a worker alone on a GPU: the host issues the update, and goes on, before the device has the gradient.

Where the host waits once per step for the loss and the norm, the device has nothing to do until the host has issued the
next kernels. Here these numbers stay on the device. A gradient that is not finite is left out of the update there: the
optimiser is given ``found_inf``, as torch's GradScaler does. The host reads the numbers in the next commit, or when the
script asks for them, and completes the step's record (`StepAhead.finish`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from paceline.gradients import Header
from paceline.gradients.scaling import is_active
from paceline.records import StepRecord
from paceline.step.checks.sameness import is_examined
from paceline.step.device import DeviceClock, mark, tensors_in, wait_for_event
from paceline.step.losses.loss_weights import Tally
from paceline.step.step_state import StepState, Work, has_gradient, record_of, write_header

if TYPE_CHECKING:
    from paceline.step.context import LoopContext

DEVICES = ("cuda",)
"""The devices that compute while the host goes on."""


class StepAhead:
    """A step that has been committed while the device may still compute it."""

    def __init__(self, loop: LoopContext, step_state: StepState, clock: DeviceClock, clip_norm: float | None) -> None:
        """Leave the mean gradient in ``p.grad``, and have its numbers copied to the host, without waiting."""
        self.step_state, self._loop, self._clock = step_state, loop, clock
        self.record: StepRecord | None = None
        """The step's record, complete after `finish`; until then as the host knows it."""
        self.complete: Callable[[], None] = lambda: None
        """Function that finishes the step, and does what its round's end would have done."""
        work = step_state.work
        self.header = write_header(loop, _without_numbers(step_state, loop), {}, finite=True)
        norm, finite, self._bad = loop.gradients.mean_gradient.make_on_device(work.weight, clip_norm)
        self._numbers = _Numbers(work, [norm, finite], loop.device)

    @contextmanager
    def guarding(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
        """Have these optimisers leave out an update whose gradient is not finite, when the device comes to it."""
        for optimizer in optimizers:
            optimizer.found_inf = self._bad  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for optimizer in optimizers:
                del optimizer.found_inf  # type: ignore[attr-defined]

    def finish(self) -> Header:
        """Wait for the numbers and complete the record; return the header as it is with them."""
        loop, step_state = self._loop, self.step_state
        work, (norm, finite) = self._numbers.read(loop, step_state.index)
        if (seconds := self._clock.seconds()) is not None:
            work.seconds = seconds
        header = write_header(loop, replace(step_state, work=work), {}, finite=bool(finite))
        header.write(loop.transport.rank, overflow=0.0, nonfinite=not finite)  # a scaler may have come since
        if applied := has_gradient(header):
            loop.gradients.mean_gradient.measured(header, norm)
        known = self.record
        assert known is not None
        full = record_of(
            step_state,
            header,
            loop.transport.slot_name,
            round_s=known.round_s or 0.0,
            emulated=False,
            auto=loop.micro_batches.auto,
            grad_norm=norm if applied else None,
        )
        late = ("seconds", "weight", "loss", "sums", "grad_norm", "applied")
        self.record = loop.training.amend({name: getattr(full, name) for name in late})
        return header


def why_not_ahead(loop: LoopContext, step_state: StepState, *, own: bool, partial: bool) -> str | None:
    """Return why the host has to wait in this step: empty where that is as it should be; None: it need not wait.

    ``own``: the gradient is for code of the script's own. ``partial``: losses were for some models alone.
    """
    gradients, weight, optimizers = loop.gradients, step_state.work.weight, loop.script.optimizers
    if not loop.transport.solitary or loop.device.type not in DEVICES or loop.machine is not None:
        return ""
    if own or partial or is_examined(step_state.index) or is_active(gradients.scaler) or gradients.scales_lr:
        return ""
    if not isinstance(weight, torch.Tensor) and not weight:
        return ""
    if any(grad.dtype not in (torch.float32, torch.float64) for grad in gradients.buckets.tensors()):
        return ""
    if unable := {type(one).__name__ for one in optimizers if not _skips_by_itself(one)}:
        names = " and ".join(sorted(unable))
        return (
            f"the host waits for {loop.device} in every step: {names} cannot leave out an update by itself when a "
            "gradient is not finite; with fused=True torch's SGD, Adam and AdamW can"
        )
    return "" if any(map(_begins, optimizers)) else None


def _skips_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimiser's kernels leave out an update when they find ``found_inf``."""
    fused = all(group.get("fused") for group in optimizer.param_groups)  # a state that was loaded brings its own
    return fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _begins(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether this update makes a parameter's first momentum, which a kernel that is skipped leaves unset."""
    return any(
        one.grad is not None and not optimizer.state.get(one)
        for group in optimizer.param_groups
        if group.get("momentum")
        for one in group["params"]
    )


class _Numbers:
    """A step's numbers on their way from the device to the host."""

    def __init__(self, work: Work, more: Sequence[torch.Tensor], device: torch.device) -> None:
        """Start copying the tensors of the work and ``more`` of them."""
        self._work, self._more = work, more
        there = [*more, *tensors_in(work)]
        self._places = {id(one): place for place, one in enumerate(there)}
        stacked = torch.stack([one.detach().reshape(()).to(device, torch.float64) for one in there])
        self._here = torch.empty(stacked.shape, dtype=torch.float64, pin_memory=device.type == "cuda")
        self._here.copy_(stacked, non_blocking=True)
        self._arrived = mark(device)

    def read(self, loop: LoopContext, step: int) -> tuple[Work, list[float]]:
        """Wait until they are here; return the work with numbers in the place of tensors, and the others."""
        wait_for_event(self._arrived, loop, step)
        numbers: list[float] = self._here.tolist()
        known = {key: numbers[place] for key, place in self._places.items()}
        tally = replace(self._work.tally, **_filled_in(vars(self._work.tally), known))
        work = replace(self._work, **{**_filled_in(vars(self._work), known), "tally": tally})
        return work, numbers[: len(self._more)]


def _filled_in(values: Any, known: Mapping[int, float]) -> Any:
    """Return nested lists, tuples and dictionaries with a number in the place of each tensor."""
    if isinstance(values, torch.Tensor):
        return known[id(values)]
    if isinstance(values, dict):
        return {name: _filled_in(value, known) for name, value in values.items()}
    if isinstance(values, list):
        return [_filled_in(value, known) for value in values]
    if isinstance(values, tuple):
        parts = [_filled_in(value, known) for value in values]
        return type(values)(*parts) if hasattr(values, "_fields") else tuple(parts)
    return values


def _without_numbers(step_state: StepState, loop: LoopContext) -> StepState:
    """Return the step as the host knows it: its work has the weight that was planned, and no loss."""
    work, planned = step_state.work, step_state.work.samples * loop.gradients.mean_gradient.weight_per_sample
    return replace(step_state, work=replace(work, weight=planned, loss_sum=float("nan"), added={}, tally=Tally()))
