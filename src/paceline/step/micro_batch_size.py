"""The size of this worker's micro-batches with ``micro_batch="auto"``, and what happens when memory runs out.

`Sizing` times the first micro-batches and sets their size (`paceline.feed.micro_size` chooses it). A size that was
found is saved in checkpoints and kept on the same kind of device. When a backward runs out of memory, `shrink` halves
the micro-batch; `Guard` does so inside a model's forward, which then runs in halves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from paceline import concurrency
from paceline.feed.micro_size import MemoryUse, SizeSearch

if TYPE_CHECKING:
    from paceline.feed.dealing import Dealing
    from paceline.feed.micro_batches import MicroBatch
    from paceline.step.context import LoopContext

OutOfMemory = torch.OutOfMemoryError


class Sizing:
    """The size of one worker's micro-batches, in one loop."""

    def __init__(self, search: SizeSearch, dealing: Dealing, device: torch.device) -> None:
        self.search, self._dealing, self._device = search, dealing, device
        self._first = self._timed = self._counts = False
        """Whether the next micro-batch is the step's first; whether the open one is timed, and its time counts."""
        self._taken = 0.0
        self._reported = search.settled

    def begin(self, share: int, *, deadline: bool) -> None:
        """Choose the size for a step whose share is yet to be cut; it may have a ``deadline``."""
        self.search.begin(share, deadline=deadline)
        self._dealing.micro_batch = self.search.size
        self._first = True

    def take(self, largest: int | None = None) -> MicroBatch | None:
        """Return the next micro-batch, of the size to try next, and of ``largest`` samples at most."""
        if self.search.size != self._dealing.micro_batch:
            self._dealing.resize(self.search.size)
        taken = self._dealing.take(largest)
        self._timed = not self.search.settled and taken is not None
        # A step's first one may bear what is paid once per step; where there is no other, it is all there is to time.
        self._counts = not (self._first and self._dealing.left)
        self._first = False
        self._taken = concurrency.perf_counter()
        return taken

    def done(self, samples: int) -> None:
        """Measure the micro-batch that was taken last, and is used."""
        if not self._timed:
            return
        self._timed = False
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        took = concurrency.perf_counter() - self._taken
        self.search.measure(samples, took, memory_of(self._device), counts=self._counts)

    def ran_out(self, samples: int) -> None:
        """Note that memory did not suffice for this number of samples; the caller has shrunk the dealing's size."""
        self._timed = False
        self.search.ran_out(samples)
        if self.search.settled and self.search.size != self._dealing.micro_batch:
            self._dealing.resize(self.search.size)

    def news(self) -> str | None:
        """Return, in words, a size that was found since the last call; None: there is none."""
        found, search = self.search.settled, self.search
        if found in (0, self._reported):
            return None
        self._reported = found
        tried = ", ".join(f"{size} ({1000 * cost:.3g} ms)" for size, cost in search.costs.items())
        bound = ", which is what memory holds" if search.by_memory else ""
        return f"micro_batch is {found}{bound}" + (f"; tried, with the time of a sample: {tried}" if tried else "")


def memory_of(device: torch.device) -> MemoryUse | None:
    """Return a GPU's use of memory; None for other devices."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    most = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return MemoryUse(
        peak=torch.cuda.max_memory_allocated(device),
        held=torch.cuda.memory_allocated(device),
        usable=min(most, free + torch.cuda.memory_reserved(device)),
    )


def device_name(device: torch.device, emulated: str | None) -> str:
    """Return the name by which a resumed run recognises the kind of device on which a size was found."""
    if emulated is not None:
        return f"{device.type}, {emulated}"
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def saved_sizes(loop: LoopContext) -> dict[str, Any] | None:
    """Return each worker's size and device, for a checkpoint; None where sizes are given."""
    if not loop.micro_batches.auto or not (newest := loop.training.recent[-1:]):
        return None
    record, devices = newest[0], dict(zip(loop.transport.workers, loop.micro_batches.devices))
    found = zip(record.workers, record.micro_size, record.memory_bound)
    sizes = [[worker, size, bound, devices.get(worker, "")] for worker, size, bound in found if size]
    return {"workers": loop.transport.size, "found": sizes}


def keep_saved(loop: LoopContext, saved: Mapping[str, Any] | None) -> None:
    """Keep the size that a checkpoint has for this worker, on a device of the same name in a fleet of the same size."""
    if loop.micro_batches.sizing is None or saved is None or saved["workers"] != loop.transport.size:
        return
    for worker, size, bound, device in saved["found"]:
        if worker == loop.transport.id and device == loop.micro_batches.own_device:
            loop.micro_batches.sizing.search.keep(size, by_memory=bool(bound))


def shrink(loop: LoopContext, samples: int, *, again: bool) -> bool:
    """Use at most half of ``samples`` at once, with which memory ran out; return False when that is not possible.

    ``again``: the samples come again.
    """
    if not loop.dealing.shrink(samples // 2, again=again):
        return False
    if loop.micro_batches.sizing is not None:
        loop.micro_batches.sizing.ran_out(samples)
    text = f"worker {loop.transport.rank} ran out of memory with {samples} samples at once: "
    loop.notes.warn(text + f"micro_batch is now {loop.dealing.micro_batch}")
    return True


class Guard:
    """A model's call that survives running out of memory, until ``remove``.

    ``enter(samples)`` may raise OutOfMemoryError (an emulated machine does). ``shrink(samples)`` is called with the
    number of samples that did not fit; without it, running out of memory stays an error. Until ``remove`` the model's
    class is a subclass of its own class; copies and pickles of the model are of its own class.
    """

    def __init__(
        self, model: torch.nn.Module, *, enter: Callable[[int], None], shrink: Callable[[int], Any] | None
    ) -> None:
        original: Any = type(model)
        self._model, self._original = model, original

        def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            samples = _samples(args, kwargs)
            try:
                enter(samples)
                return original.__call__(self, *args, **kwargs)
            except OutOfMemory:
                if shrink is None or samples < 2:
                    raise
            shrink(samples)  # outside the except clause: the traceback held on to the activations
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return _in_halves(self, call, args, kwargs, samples)

        def reduce(self: torch.nn.Module, protocol: Any) -> Any:
            _, _, *rest = original.__reduce_ex__(self, protocol)
            return (_new, (original,), *rest)

        members: dict[str, Any] = {"__call__": call, "__reduce_ex__": reduce, "__module__": original.__module__}
        model.__class__ = type(str(original.__name__), (original,), members)

    def remove(self) -> None:
        self._model.__class__ = self._original


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


def _in_halves(model: torch.nn.Module, call: Any, args: Any, kwargs: Any, samples: int) -> Any:
    half = (samples + 1) // 2
    parts = []
    for piece in (slice(0, half), slice(half, samples)):
        inputs = _walk((args, kwargs), partial(_cut, piece=piece, samples=samples))
        if torch.is_grad_enabled():
            parts.append(checkpoint(call, model, *inputs[0], use_reentrant=False, **inputs[1]))
        else:
            parts.append(call(model, *inputs[0], **inputs[1]))
    return _join(parts[0], parts[1])


def _cut(tensor: torch.Tensor, *, piece: slice, samples: int) -> torch.Tensor:
    return tensor[piece] if tensor.dim() and len(tensor) == samples else tensor


def _samples(args: Any, kwargs: Any) -> int:
    """Return the first dimension of the first tensor among the arguments."""
    sizes: list[int] = []
    _walk((args, kwargs), lambda t: sizes.append(len(t)) if t.dim() else None)
    return sizes[0] if sizes else 0


def _walk(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _walk(value, change) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return _like(tree, [_walk(value, change) for value in tree])
    return tree


def _like(tree: Any, values: list[Any]) -> Any:
    """Return a list, tuple or namedtuple of the same kind with other values."""
    return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)


def _join(first: Any, second: Any) -> Any:
    """Put the halves' outputs together along the first dimension."""
    if isinstance(first, torch.Tensor):
        if not first.dim():
            raise ValueError(
                "the model ran out of memory and returns a scalar for the whole batch, which halves cannot give: use a "
                "smaller micro_batch, or compute the loss outside the model"
            )
        return torch.cat([first, second])
    if isinstance(first, dict):
        return type(first)({key: _join(first[key], second[key]) for key in first})
    if isinstance(first, (list, tuple)):
        return _like(first, [_join(a, b) for a, b in zip(first, second, strict=True)])
    return first
