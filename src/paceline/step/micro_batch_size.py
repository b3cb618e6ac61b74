"""The size of this worker's micro-batches with ``micro_batch="auto"``, and what happens when memory runs out.

`SizeSearch` looks for the number of samples that go through the model at once. Sizes double from a small one, and a few
micro-batches of each are timed. The size grows while the cost per sample falls, while memory suffices, and while the
worker's share holds enough micro-batches of it. Of the sizes that were tried, the search keeps the largest that is
nearly as fast as the fastest: a busy computer makes a size look slower by chance, and where sizes are alike the larger
one has fewer fixed costs. It has fitted into memory already.

>>> search = SizeSearch(4)
>>> while not search.settled:  # every micro-batch takes 1 s, and 0.1 s more per sample
...     search.begin(64)
...     for _ in range(64 // search.size):
...         search.measure(search.size, 1.0 + 0.1 * search.size)
>>> search.settled, [round(cost, 3) for cost in search.costs.values()]
(80, [0.35, 0.225, 0.163, 0.131, 0.116])

`Sizing` times the micro-batches of a loop for it. A size that was found is saved in checkpoints and kept on the same
kind of device. When a backward runs out of memory, `shrink` halves the micro-batch; `Guard` does so inside a model's
forward, which then runs in halves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from paceline import concurrency

if TYPE_CHECKING:
    from paceline.feed.dealing import Dealing
    from paceline.feed.micro_batches import MicroBatch
    from paceline.step.context import LoopContext

GAIN = 0.05
"""Part by which the seconds per sample of a size must be lower for it to count as faster than another."""
ALIKE = 0.03
"""Part by which the seconds per sample of a size may be above the lowest: of such sizes the largest is kept."""
ENOUGH = 3
"""Micro-batches of a size that are timed, after one that is not: the first may load kernels, or fill caches."""
DOUBTED = 7
"""Micro-batches timed of a size that does not look faster: a busy computer slows down single ones."""
CLEARLY = 0.25
"""Part by which the seconds per sample must be below those of every smaller size for one timing to suffice.

Nothing makes work faster by chance.
"""
PATIENCE = 2
"""Sizes in a row without a gain that end the search: one may look slow by chance."""
MOST_STEPS = 20
"""Steps of this worker after which the best size so far is kept."""
LADDER = 16
"""Micro-batches of the first size in an equal share."""
FEWEST = 4
"""Micro-batches that a share holds at least in a step with a deadline: one that is unfinished then is lost."""
FEWEST_NORMALISED = 16
"""Samples of the first size where batch norm computes its statistics over a micro-batch."""
NEARLY = 0.75
"""Part of a size that a micro-batch must have to be timed as one of that size: a share's last two are smaller."""
HEADROOM = 1.25
"""Factor by which a size that only share or memory bounds is enlarged: a share that grows a little has as few parts.

Also the factor by which a size is clearly larger, and a share so much larger that it is searched again.
"""
GROWN = 1.5
"""Factor by which parts of a share with a deadline may be too small before they are made larger."""
MOST_AGAIN = 3
"""Repetitions of the search at most: a size that changes makes shares change, too."""
MOST_MEMORY = 0.9
"""Part of the memory that a larger size may be predicted to need."""


@dataclass(frozen=True)
class MemoryUse:
    """A GPU's memory after a micro-batch, in bytes."""

    peak: int
    """The most bytes in use so far."""
    held: int
    """Bytes in use between two micro-batches: parameters, gradients, the optimiser's state."""
    usable: int


def first_size(equal_share: int, *, normalises: bool = False) -> int:
    """Return the size with which the search begins. ``normalises``: the model has batch norm.

    >>> first_size(256), first_size(6), first_size(64, normalises=True)
    (16, 1, 16)
    """
    return max(1, equal_share // LADDER, min(equal_share, FEWEST_NORMALISED) if normalises else 1)


def next_size(size: int, share: int, *, fewest: int = 1) -> int:
    """Return about twice ``size``, such that the share has parts of nearly that size.

    Return 0 where the share does not hold ``fewest`` micro-batches of a clearly larger size.

    >>> next_size(8, 64), next_size(8, 22), next_size(16, 22), next_size(22, 22), next_size(16, 70, fewest=4)
    (16, 22, 22, 0, 0)
    """
    most = share // fewest
    if most < HEADROOM * size:
        return 0
    larger = min(2 * size, most)
    if _comes(larger, share, fewest):
        return larger
    return -(-share // (-(-share // larger) - 1))


def part_of(share: int, most: int) -> int:
    """Return the size of the parts of a share that is cut into as few equal ones as have at most ``most`` samples.

    >>> part_of(44, 22), part_of(96, 40), part_of(7, 100)
    (22, 32, 7)
    """
    return -(-share // -(-share // most))


def usual(times: list[float]) -> float:
    """Return the lower quartile of a size's times: nothing makes work faster by chance, but much makes it slower.

    It is not the least one: micro-batches whose samples are short really are faster.

    >>> usual([5.0, 1.0, 2.0]), usual([1.0, 2.0, 3.0, 4.0, 9.0, 9.0, 9.0])
    (1.0, 2.0)
    """
    return sorted(times)[len(times) // 4]


def _comes(size: int, share: int, fewest: int) -> bool:
    """Return whether a share cut into parts of this size (`pieces_of`) has some of nearly that size.

    The first part does not count: it may bear what is paid once per step.
    """
    parts = -(-share // size)
    part = size if parts > 3 else -(-(share - size * (parts == 3)) // min(parts, 2))
    return part >= NEARLY * size and (share // fewest >= NEARLY * size or size == 1)


class SizeSearch:
    """One worker's search. ``begin`` each step, ``measure`` each micro-batch, and use ``size`` for the next."""

    def __init__(self, first: int) -> None:
        """Begin with size ``first``."""
        self.size = first
        """Size of the next micro-batch."""
        self.costs: dict[int, float] = {}
        """Seconds per sample of each size that was timed (`usual`)."""
        self.by_memory = False
        """Whether memory, not speed, bounds the size."""
        self._tried, self._found = first, 0
        """The size under trial, and the one that was found; 0 while the search goes on."""
        self._fewest, self._cut = 1, 0
        """Micro-batches that this step's share must hold at least, and the size that this has last led to."""
        self._by_share = False
        self._whole = False
        """Whether the size under trial was a whole share."""
        self._share, self._too_large = 0, 10**9
        """Samples of this step's share, and the smallest size of which memory does not hold a micro-batch."""
        self._steps = self._again = 0
        self._times: list[float] = []
        self._warm = False
        """Whether a micro-batch of this size has run before."""
        self._peak: tuple[int, int] | None = None
        """The size that was timed last, and the peak of memory by then."""

    @property
    def settled(self) -> int:
        """Return the size that was found; 0 while the search goes on."""
        return self._found

    def keep(self, size: int, *, by_memory: bool) -> None:
        """Adopt the size that an earlier run found here."""
        self.size = self._tried = self._found = size
        self._by_share, self.by_memory = False, by_memory

    def begin(self, share: int, *, deadline: bool = False) -> None:
        """Begin a step with ``share`` samples, which has a ``deadline`` or not.

        The first step is not timed: the optimiser has no state yet, so its use of memory is unknown. A size that only
        the share bounded is searched again when the share has outgrown it by `HEADROOM`.
        """
        if not share:
            return
        self._share, self._fewest = share, FEWEST if deadline else 1
        if self._found and self._may_grow():
            self._found, self._steps, self._again = 0, 1, self._again + 1
            self._try(next_size(self._tried, share, fewest=self._fewest))
        self._steps += 1
        if not self._found and self._steps > MOST_STEPS:
            self._settle()
        elif not self._found and not _comes(self._tried, share, self._fewest):
            if self._whole and share <= HEADROOM * self._tried:  # else a share that wavers would end no search
                self.size = self._tried = min(share, self._too_large - 1)
            else:
                self._aim_anew()
        if self._found:
            self.size = self._within_share()

    def _within_share(self) -> int:
        """Return the size that was found or, where the share must hold several of them, a smaller one.

        It stays while the share wavers: every size is a shape that kernels and caches meet anew.
        """
        most = max(1, self._share // self._fewest)
        if self._fewest == 1 or NEARLY * self._found <= most:
            return self._found
        if not NEARLY * self._cut <= most <= GROWN * self._cut:
            self._cut = most
        return min(self._cut, self._found)

    def _may_grow(self) -> bool:
        """Return whether only the share bounded the size that was found, and has outgrown it since."""
        grown = min(self._share // self._fewest, self._too_large - 1) >= HEADROOM * self._tried
        return self._by_share and grown and self._again < MOST_AGAIN

    def _aim_anew(self) -> None:
        """Choose another size to try: the share changed, and has no parts of the current one."""
        if not self.costs:
            self._try(min(self._tried, max(1, self._share // self._fewest)))
        elif not (larger := next_size(max(self.costs), self._share, fewest=self._fewest)):
            self._settle(by_share=True)
        elif larger < self._too_large:
            self._try(larger)
        elif part := self._between(self._too_large):
            self._try(part)
        else:
            self._settle(by_memory=True)

    def measure(self, samples: int, seconds: float, memory: MemoryUse | None = None, *, counts: bool = True) -> None:
        """Record a micro-batch's seconds. ``counts``: whether they are the model's alone."""
        if self._found or self._steps < 2 or samples < NEARLY * self._tried:
            return
        if self._warm and counts:
            self._times.append(seconds / samples)
        self._warm = True
        if self._is_known():
            self.costs[self._tried] = usual(self._times)
            self._go_on(memory)

    def ran_out(self, samples: int) -> None:
        """Lower the limit after memory did not suffice: half of ``samples`` may fit, or a size that was timed."""
        self._too_large = min(self._too_large, samples)
        if samples > self.size:  # a forward that ran out goes on in halves, and they may run out again and again
            return
        self.costs = {size: cost for size, cost in self.costs.items() if size < samples}
        fits = max(samples // 2, 1, *self.costs)
        if self._found:
            self.by_memory |= self._found > fits
            self._found, self.size = min(self._found, fits), min(self.size, fits)
        elif self._tried >= samples or self._tried > fits:
            if part := self._between(samples):
                self._try(part)
            else:
                self._tried = fits
                self._settle(by_memory=True)

    def _go_on(self, memory: MemoryUse | None) -> None:
        larger = next_size(self._tried, self._share, fewest=self._fewest)
        between = self._between(larger)
        roomy = max(self._tried + 1, int(HEADROOM * self._tried))
        fitting = [size for size in (larger, between) if self._fits(size, memory)]
        if not self._fits(roomy, memory):
            self._too_large = min(self._too_large, roomy)
        if memory is not None:
            self._peak = (self._tried, memory.peak)
        if sum(size > min(self._within(GAIN)) for size in self.costs) >= PATIENCE:
            self._settle()
        elif not larger:
            self._settle(by_share=True)
        elif fitting:
            self._try(fitting[0])
        else:
            self._settle(by_memory=True)

    def _between(self, larger: int) -> int:
        """Return a size between those that were timed and one that does not fit, as equal parts of the share.

        Doubling passes it by: a share of 44 has parts of 16 and of 44, but 22 may be what memory holds. 0: none that is
        clearly larger than those timed.
        """
        timed = max(self.costs, default=0)
        most = min((timed + larger) // 2, self._share // self._fewest)
        if not timed or most < HEADROOM * timed:
            return 0
        part = part_of(self._share, most)
        return part if part >= HEADROOM * timed and _comes(part, self._share, self._fewest) else 0

    def _is_known(self) -> bool:
        """Return whether the size was timed often enough."""
        times, least = self._times, min(self.costs.values(), default=float("inf"))
        if self.costs and times and times[-1] < (1 - CLEARLY) * least:
            return True
        return len(times) >= DOUBTED or (len(times) >= ENOUGH and usual(times) < (1 - GAIN) * least)

    def _within(self, part: float) -> list[int]:
        """Return the sizes whose seconds per sample are above the lowest by this part of their own at most."""
        enough = min(self.costs.values()) / (1 - part)
        return [size for size, cost in self.costs.items() if cost <= enough]

    def _fits(self, size: int, memory: MemoryUse | None) -> bool:
        """Return whether memory should suffice for this size, larger than the one under trial; False for 0."""
        if not 0 < size < self._too_large:
            return False
        return memory is None or foreseen(memory, self._tried, size, self._peak) <= MOST_MEMORY * memory.usable

    def _roomy(self, size: int) -> int:
        """Return a size with room for a share that grows a little, unless memory does not hold that."""
        return larger if (larger := int(HEADROOM * size)) < self._too_large else size

    def _try(self, size: int) -> None:
        self.size = self._tried = size
        self._whole = size == self._share
        self._times, self._warm = [], False

    def _settle(self, *, by_share: bool = False, by_memory: bool = False) -> None:
        """End the search. ``by_share``, ``by_memory``: the bound that excluded a larger size, if speed did not."""
        best = max(self._within(ALIKE)) if self.costs else self._tried
        self._tried = max(self.costs, default=self._tried)
        grows = best == self._tried  # a larger size might have been faster
        self._by_share, self.by_memory = by_share and grows, by_memory and grows
        roomy = (self._by_share or self.by_memory) and self._fewest == 1
        self.size = self._found = self._roomy(best) if roomy else best


def foreseen(memory: MemoryUse, size: int, larger: int, before: tuple[int, int] | None) -> float:
    """Return the predicted peak of a larger size, in bytes.

    It grows by what the last doubling added (``before``: a smaller size and its peak); without one, all that ``size``
    needs beside what is held grows in proportion.

    >>> foreseen(MemoryUse(peak=70, held=50, usable=100), 8, 16, None)
    90.0
    >>> foreseen(MemoryUse(peak=70, held=50, usable=100), 8, 16, (4, 65))
    80.0
    """
    if before is None:
        return memory.held + (memory.peak - memory.held) * larger / size
    smaller, peak = before
    return memory.peak + (memory.peak - peak) * (larger - size) / (size - smaller)


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
