"""``micro_batch="auto"``: times this worker's first micro-batches and sets their size (`paceline.feed.micro_size`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from paceline import concurrency
from paceline.feed.micro_size import MemoryUse, SizeSearch

if TYPE_CHECKING:
    from paceline.feed.dealing import Dealing
    from paceline.feed.micro_batches import MicroBatch
    from paceline.loop.context import LoopContext


class Sizing:
    """The size of one worker's micro-batches, in one loop."""

    def __init__(self, search: SizeSearch, dealing: Dealing, device: torch.device) -> None:
        self.search, self._dealing, self._device = search, dealing, device
        self._first = self._timed = self._counts = False
        """Whether the next micro-batch is the step's first; whether the open one is timed, and tells of its size."""
        self._taken = 0.0
        self._told = search.settled

    def begin(self, share: int) -> None:
        """A step begins, and its share is yet to be cut."""
        self.search.begin(share)
        self._dealing.micro_batch = self.search.size
        self._first = True

    def take(self, largest: int | None = None) -> MicroBatch | None:
        """The next micro-batch, of the size to try next. ``largest``: the time left allows no more samples."""
        if self.search.size != self._dealing.micro_batch:
            self._dealing.resize(self.search.size)
        taken = self._dealing.take(largest)
        self._timed = not self.search.settled and taken is not None
        # A step's first one may bear what is paid once a step; where there is no other, it is all there is to time.
        self._counts = not (self._first and self._dealing.left)
        self._first = False
        self._taken = concurrency.perf_counter()
        return taken

    def done(self, samples: int) -> None:
        """The micro-batch that was taken last is used."""
        if not self._timed:
            return
        self._timed = False
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        took = concurrency.perf_counter() - self._taken
        self.search.measure(samples, took, memory_of(self._device), counts=self._counts)

    def ran_out(self, samples: int) -> None:
        """Memory did not suffice for so many samples; the dealing knows."""
        self._timed = False
        self.search.ran_out(samples)
        if self.search.settled and self.search.size != self._dealing.micro_batch:
            self._dealing.resize(self.search.size)

    def news(self) -> str | None:
        """In words, a size that was found since this was asked last."""
        found, search = self.search.settled, self.search
        if found in (0, self._told):
            return None
        self._told = found
        tried = ", ".join(f"{size} ({1000 * cost:.3g} ms)" for size, cost in search.costs.items())
        bound = ", which is what memory holds" if search.by_memory else ""
        return f"micro_batch is {found}{bound}" + (f"; tried, with the time of a sample: {tried}" if tried else "")


def memory_of(device: torch.device) -> MemoryUse | None:
    """What is known of a GPU's memory; None elsewhere."""
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
    """By which a resumed run knows whether a size was found on such a device."""
    if emulated is not None:
        return f"{device.type}, {emulated}"
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def saved_sizes(loop: LoopContext) -> dict[str, Any] | None:
    """For a checkpoint: what each worker has found, and on which device; None where sizes are given."""
    if not loop.auto or not (newest := loop.training.recent[-1:]):
        return None
    record, devices = newest[0], dict(zip(loop.transport.workers, loop.devices))
    found = zip(record.workers, record.micro_size, record.memory_bound)
    sizes = [[worker, size, bound, devices.get(worker, "")] for worker, size, bound in found if size]
    return {"workers": loop.transport.size, "found": sizes}


def keep_saved(loop: LoopContext, saved: Mapping[str, Any] | None) -> None:
    """Keep the size that a checkpoint has for this worker, on a device of the same name in a fleet of the same size."""
    if loop.sizing is None or saved is None or saved["workers"] != loop.transport.size:
        return
    for worker, size, bound, device in saved["found"]:
        if worker == loop.transport.id and device == loop.own_device:
            loop.sizing.search.keep(size, by_memory=bool(bound))
