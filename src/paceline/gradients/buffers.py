"""What forward changes in a module beside its parameters: batch norm's statistics, and other buffers.

Batch norm's running statistics are merged in the round by the number of samples behind them: each worker's mean and
variance have moved by its own micro-batches, and the fleet keeps their mean, weighted by samples, so replicas stay
equal. The normalisation itself uses each micro-batch's own statistics, as in plain DDP, so a model with batch norm does
not equal one machine with the whole batch: GroupNorm or LayerNorm does.

Of other buffers (a running centre, spectral norm's vectors, a memory bank) all workers hold those of one worker after
every round. It is the first that did something in the step: the leader, mostly, as in DDP. Each worker's header reports
which of its buffers have changed since the last round, by their version counters, so that nobody waits for a device;
only these are sent, in a sum to which all others add zeros. A change through ``buffer.data`` moves no version counter:
in steps in which replicas are compared the contents are compared too, and a buffer that has changed in this way is sent
in every round from then on.

Contents are compared by sums of their bits (`sums_of`), which are equal where the tensors are, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, is_
from typing import NamedTuple

import torch
from torch.nn.modules.batchnorm import _NormBase

from paceline.errors import MisuseError
from paceline.gradients.header import number_of

StatisticsSnapshot = tuple[torch.Tensor, torch.Tensor]
"""All layers' running means and variances, and the number of micro-batches that each layer has tracked."""


class RunningStatistics:
    """The running statistics of all batch-norm layers of some models."""

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        layers = (layer for model in models for layer in model.modules())
        self._seen: torch.Tensor | None = None
        self._before: torch.Tensor | None = None
        self._layers = [m for m in layers if isinstance(m, _NormBase) and m.num_batches_tracked is not None]
        self.rebase()

    def __len__(self) -> int:
        return len(self._layers)

    def rebase(self) -> None:
        """Count from here: the statistics were merged, or set from outside (loaded, broadcast)."""
        self._counted = self._counts()
        self.begin()

    def begin(self) -> None:
        """Begin a step, in which nothing is finished yet."""
        if self._layers or self._before is None:
            self._before = self._values()
            self._noted = torch.zeros_like(self._before)
        self._seen = None

    def snapshot(self) -> StatisticsSnapshot:
        """Return the layers' statistics as they are now, without waiting for the device."""
        return self._values(), self._count_tensor()

    def note(self, snapshot: StatisticsSnapshot | None = None) -> None:
        """Note the layers' statistics after this worker's finished work; by default as they are now."""
        self._noted, self._seen = self.snapshot() if snapshot is None else snapshot

    def payload(self, samples: int) -> torch.Tensor:
        """Return what this worker adds to the round: its statistics, as last noted, times its samples."""
        return self._noted * float(samples)

    @property
    def moved(self) -> list[int]:
        """The number of micro-batches that each layer had tracked since the last merge, when last noted."""
        if self._seen is None:
            return [0] * len(self._layers)
        return [int(now) - before for now, before in zip(self._seen.tolist(), self._counted, strict=True)]

    def merge(self, total: torch.Tensor, samples: float, moved: Sequence[float]) -> None:
        """Take the fleet's mean for every layer that moved anywhere; one that did not has its exact values back.

        ``total`` is the sum of the payloads, ``samples`` and ``moved`` the fleet's.
        """
        mean = total / samples if samples else total
        offset = 0
        for layer, count, before in zip(self._layers, moved, self._counted, strict=True):
            source = mean if samples and count else self._before
            assert source is not None
            for tensor in _tensors(layer):
                tensor.copy_(source[offset : offset + tensor.numel()].view_as(tensor))
                offset += tensor.numel()
            assert layer.num_batches_tracked is not None
            layer.num_batches_tracked.fill_(before + int(count))
        self.rebase()

    def _values(self) -> torch.Tensor:
        parts = [t.detach().flatten() for layer in self._layers for t in _tensors(layer)]
        return torch.cat(parts) if parts else torch.empty(0)

    def _counts(self) -> list[int]:
        return [int(count) for count in self._count_tensor().tolist()]  # one synchronisation, not many

    def _count_tensor(self) -> torch.Tensor:
        counts = [m.num_batches_tracked for m in self._layers if m.num_batches_tracked is not None]
        return torch.stack(counts) if counts else torch.empty(0)


def _tensors(layer: _NormBase) -> tuple[torch.Tensor, torch.Tensor]:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return layer.running_mean, layer.running_var


_MERGED_BY_COUNT = ("running_mean", "running_var", "num_batches_tracked")
_ALIGNED = 16
"""Bytes to a multiple of which each buffer is padded in a message."""


class BufferSnapshot(NamedTuple):
    """The buffers after some work.

    ``changed`` lists those that had changed since the last round; ``copies`` has those that have ever changed.
    """

    changed: Sequence[int]
    copies: dict[int, torch.Tensor]


class _KnownBuffer(NamedTuple):
    """The dictionary in which a module keeps a buffer, and the buffer's kind when it was first seen."""

    home: dict[str, torch.Tensor | None]
    key: str
    name: str
    persistent: bool
    shape: torch.Size
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The bytes that the buffer takes in a message."""
        return -(-self.shape.numel() * self.dtype.itemsize // _ALIGNED) * _ALIGNED


class ModuleBuffers:
    """The buffers of some models, except batch norm's statistics."""

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        self._models = list(models)
        self._known = [known for model in self._models for known in _buffers_of(model)]
        self._homes, self._keys = [known.home for known in self._known], [known.key for known in self._known]
        self._ever: set[int] = set()
        """The numbers of the buffers that have changed since the beginning, on this worker or on another."""
        self._unversioned: set[int] = set()
        """The numbers of the buffers that change without their version counter, on this worker."""
        self._contents: list[int] | None = None
        """Sums of the buffers' bits at the beginning of a step whose round looks at contents."""
        self.moved_by_forward = ""
        """The name of a saved buffer that was seen to change between a step's beginning and its round."""
        self.came_later = ""
        """The name of a saved buffer that was None, or not there, at the beginning, so that workers do not share it."""
        self.set_between = ""
        """The name of a saved buffer that was seen to change between a round and the next step's micro-batches."""
        self._later: list[tuple[str, int]] = []
        """The names and sums of the saved buffers that came later, at the beginning of a step that is compared."""
        self._nothing = [0.0] * len(self._known)
        self.rebase()

    def __len__(self) -> int:
        return len(self._known)

    def rebase(self) -> None:
        """Count changes from here: the models were loaded, or made equal."""
        self._tensors = list(map(dict.get, self._homes, self._keys))
        # attrgetter is quicker, and works where no buffer is None.
        self._version = _version if any(tensor is None for tensor in self._tensors) else attrgetter("_version")
        self._versions = list(map(_version, self._tensors))
        self._contents = None

    def note_contents(self) -> None:
        """Let the next round look at contents as well as at version counters."""
        known = {(id(one.home), one.key) for one in self._known}
        found = (one for model in self._models for one in _buffers_of(model) if (id(one.home), one.key) not in known)
        later = [one for one in found if one.persistent]
        self._later = list(zip((o.name for o in later), _sums_of(o.home[o.key] for o in later), strict=True))
        self.came_later = later[0].name if later else ""
        if self._known:
            self._contents = self._contents_now()

    def digest_of_set(self) -> float:
        """Return a digest of the saved buffers that have changed since the last round, or came later; 0 where none has.

        It is asked for before a step's first micro-batch; only where some have changed, a device is waited for.
        """
        later, self._later, self.set_between = self._later, [], ""
        now = list(map(dict.get, self._homes, self._keys))
        unmoved = all(map(is_, now, self._tensors)) and list(map(self._version, now)) == self._versions
        moved = () if unmoved else [n for n, one in enumerate(now) if self._is_set(n, one)]
        if not moved and not later:
            return 0.0
        if moved:
            self.set_between = self._known[moved[0]].name
        return 1.0 + number_of(repr([*zip(moved, _sums_of(now[n] for n in moved), strict=True), *later]).encode())

    def _is_set(self, number: int, tensor: torch.Tensor | None) -> bool:
        return self._known[number].persistent and not self._is_unmoved(number, tensor)

    def _contents_now(self) -> list[int]:
        return _sums_of(home.get(key) for home, key in zip(self._homes, self._keys, strict=True))

    # -- what this worker brings -------------------------------------------------------------------------------------

    def changed(self) -> list[int]:
        """Return the numbers of the buffers that have changed since the last round."""
        if not self._known:
            return []
        now = list(map(dict.get, self._homes, self._keys))
        versioned = all(map(is_, now, self._tensors)) and list(map(self._version, now)) == self._versions
        if versioned and self._contents is None and not self._unversioned:
            return []
        if (before := self._contents) is not None:
            self._contents = None
            pairs = enumerate(zip(before, self._contents_now(), strict=True))
            apart = {number for number, (one, other) in pairs if one != other}
            self._unversioned |= {number for number in apart if self._is_unmoved(number, now[number])}
            self._note_moved(apart)
        moved = [
            number
            for number, tensor in enumerate(now)
            if number in self._unversioned or not self._is_unmoved(number, tensor)
        ]
        return [number for number in moved if self._is_alike(number, now[number])]

    def _note_moved(self, apart: Iterable[int]) -> None:
        """Note the first saved buffer whose contents are other ones than when the step began."""
        found = (self._known[number].name for number in sorted(apart) if self._known[number].persistent)
        self.moved_by_forward = self.moved_by_forward or next(found, "")

    def _is_unmoved(self, number: int, tensor: torch.Tensor | None) -> bool:
        """Return whether a buffer is the same tensor as after the last round, with the same version."""
        return tensor is self._tensors[number] and _version(tensor) == self._versions[number]

    def _is_alike(self, number: int, tensor: torch.Tensor | None) -> bool:
        """Return whether a buffer still has its shape and type; raise MisuseError where workers share it.

        A buffer that is not saved may be a cache of each worker's own: then False is returned.
        """
        known = self._known[number]
        if tensor is not None and tensor.shape == known.shape and tensor.dtype == known.dtype:
            return True
        if known.persistent or number in self._ever:
            now = "None" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"
            raise MisuseError(
                f"the buffer {known.name} changed from {list(known.shape)} {known.dtype} to {now} while training, so "
                'workers cannot share it: keep its shape and type, or write fleet.model(..., buffers="own"), with '
                "which each worker keeps its own buffers"
            )
        return False

    def snapshot(self) -> BufferSnapshot:
        """Return the buffers as they are now, without waiting for the device."""
        changed = self.changed()
        self._ever.update(changed)
        live = ((number, self._known[number].home.get(self._known[number].key)) for number in sorted(self._ever))
        return BufferSnapshot(
            changed, {number: tensor.detach().clone() for number, tensor in live if tensor is not None}
        )

    def flags(self, changed: Sequence[int]) -> list[float]:
        """Return the header's flags: 1 for each buffer that has changed."""
        if not changed:
            return self._nothing
        flags = self._nothing.copy()
        for number in changed:
            flags[number] = 1.0
        return flags

    @torch.no_grad()
    def message(
        self, chosen: Sequence[int], *, mine: bool, copies: Mapping[int, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return the bytes of the ``chosen`` buffers, or zeros where they are not ``mine`` to give.

        ``copies`` has those that may be changing while a round runs beside the loop.
        """
        device = next((tensor.device for tensor in self._tensors if tensor is not None), torch.device("cpu"))
        message = torch.zeros(sum(self._known[number].bytes for number in chosen), dtype=torch.uint8, device=device)
        if mine:
            for number, room in zip(chosen, self._rooms(chosen, message), strict=True):
                room.copy_(copies[number] if copies is not None and number in copies else self._live(number))
        return message

    # -- what the round gave -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def take(self, chosen: Sequence[int], message: torch.Tensor) -> None:
        """Overwrite the ``chosen`` buffers with those in a message."""
        for number, room in zip(chosen, self._rooms(chosen, message), strict=True):
            live = self._live(number)
            live.detach().copy_(room)
            self._tensors[number], self._versions[number] = live, live._version
        self._ever.update(chosen)

    def _rooms(self, chosen: Sequence[int], message: torch.Tensor) -> list[torch.Tensor]:
        """Return each buffer's part of the message, as a tensor of its shape and type."""
        rooms, start = [], 0
        for number in chosen:
            known = self._known[number]
            size = known.shape.numel() * known.dtype.itemsize
            rooms.append(message[start : start + size].view(known.dtype).view(known.shape))
            start += known.bytes
        return rooms

    def _live(self, number: int) -> torch.Tensor:
        known = self._known[number]
        tensor = known.home.get(known.key)
        if not self._is_alike(number, tensor) or tensor is None:
            raise MisuseError(
                f"the buffer {known.name} has another shape or type on this worker than on one that shares it: write "
                'fleet.model(..., buffers="own"), with which each worker keeps its own buffers'
            )
        return tensor

    def refuse(self, changed: Sequence[int]) -> None:
        """Raise MisuseError when the processes of one worker have changed buffers, each its own."""
        if changed:
            raise MisuseError(
                f"the buffer {self._known[changed[0]].name} changes in forward, and each process of a worker started "
                'with --procs-per-worker would keep its own: write fleet.model(..., buffers="own") if that is meant'
            )

    # -- a newcomer --------------------------------------------------------------------------------------------------

    def unsaved(self) -> dict[str, torch.Tensor]:
        """Return the buffers that have changed and are not in a model's state, for a worker that takes over a state."""
        numbers = [number for number in sorted(self._ever) if not self._known[number].persistent]
        return {str(number): self._live(number).detach() for number in numbers}

    @torch.no_grad()
    def take_unsaved(self, unsaved: Mapping[str, torch.Tensor]) -> None:
        for number, tensor in unsaved.items():
            self._ever.add(int(number))
            self._live(int(number)).detach().copy_(tensor)


def _sums_of(tensors: Iterable[torch.Tensor | None]) -> list[int]:
    empty = torch.zeros(0)
    return sums_of([empty if tensor is None or tensor.layout is not torch.strided else tensor for tensor in tensors])


def _version(tensor: torch.Tensor | None) -> int:
    return -1 if tensor is None else tensor._version


def _buffers_of(model: torch.nn.Module) -> list[_KnownBuffer]:
    return [
        _KnownBuffer(
            module._buffers,
            key,
            f"{path}.{key}" if path else key,
            key not in module._non_persistent_buffers_set,
            tensor.shape,
            tensor.dtype,
        )
        for path, module in model.named_modules()
        for key, tensor in module._buffers.items()
        if tensor is not None and not (isinstance(module, _NormBase) and key in _MERGED_BY_COUNT)
    ]


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def sums_of(tensors: Sequence[torch.Tensor], *, divided: bool = False) -> list[int]:
    """Return the sum of each tensor's bits; on a device, with one wait for all.

    ``divided``: the sums of a tensor's parts add up to it, which takes 2.5 times as long as sums of 8 bytes at a time.
    """
    sums = [_sum_of_parts(tensor) if divided else _sum_of_words(tensor) for tensor in tensors]
    there = [one for one in sums if not one.is_cpu]
    fetched = {id(one): number for one, number in zip(there, _fetched(there), strict=True)}
    return [fetched[id(one)] if id(one) in fetched else int(one) for one in sums]


def _fetched(sums: Sequence[torch.Tensor]) -> list[int]:
    if len({one.device for one in sums}) == 1:
        numbers: list[int] = torch.stack(list(sums)).tolist()
        return numbers
    return [int(one) for one in sums]


def _sum_of_parts(tensor: torch.Tensor) -> torch.Tensor:
    return _bits(tensor.detach().contiguous().reshape(-1)).sum(dtype=torch.int64)


def _sum_of_words(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    per_word = max(1, 8 // flat.element_size())
    whole = flat.numel() // per_word * per_word
    words = flat[:whole]
    if words.storage_offset() % per_word:
        words = words.clone()
    total = words.view(torch.int64).sum()
    return total if whole == flat.numel() else 31 * total + _bits(flat[whole:]).sum(dtype=torch.int64)


def _bits(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(_INTEGERS.get(flat.element_size(), torch.uint8))
