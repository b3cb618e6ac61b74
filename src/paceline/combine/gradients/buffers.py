"""Buffers that forward changes, such as a running centre, spectral norm's vectors or a memory bank: after every round
all workers hold those of one of them.

It is the first worker that did something in the step: the leader, mostly, as in DDP. Each worker's header says which of
its buffers have changed since the last round, by their version counters, so that nobody waits for a device; only these
are sent, in a sum to which all others add zeros. Batch norm's statistics are merged by count instead (statistics.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, is_
from typing import NamedTuple

import torch
from torch.nn.modules.batchnorm import _NormBase

from paceline.errors import MisuseError

_MERGED_BY_COUNT = ("running_mean", "running_var", "num_batches_tracked")
_ALIGNED = 16


class SeenBuffers(NamedTuple):
    """The buffers after some work: which of them had changed since the last round, and copies of those that ever
    have."""

    changed: Sequence[int]
    copies: dict[int, torch.Tensor]


class _Place(NamedTuple):
    """Where a module keeps a buffer, and what it was when it was first seen."""

    home: dict[str, torch.Tensor | None]
    key: str
    name: str
    persistent: bool
    shape: torch.Size
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its room in a message."""
        return -(-self.shape.numel() * self.dtype.itemsize // _ALIGNED) * _ALIGNED


class ModuleBuffers:
    """The buffers of some models, but for batch norm's statistics."""

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        self._places = [place for model in models for place in _places(model)]
        self._homes, self._keys = [place.home for place in self._places], [place.key for place in self._places]
        self._ever: set[int] = set()
        """Those that have changed since the beginning, on this worker or on another."""
        self._nothing = [0.0] * len(self._places)
        self.rebase()

    def __len__(self) -> int:
        return len(self._places)

    def rebase(self) -> None:
        """Count changes from here: the models were loaded, or made equal."""
        self._tensors = list(map(dict.get, self._homes, self._keys))
        # The quicker one, where none has been set to None.
        self._version = _version if any(tensor is None for tensor in self._tensors) else attrgetter("_version")
        self._versions = list(map(_version, self._tensors))

    # -- what this worker brings -------------------------------------------------------------------------------------

    def changed(self) -> list[int]:
        """Which have changed since the last round."""
        if not self._places:
            return []
        now = list(map(dict.get, self._homes, self._keys))
        if all(map(is_, now, self._tensors)) and list(map(self._version, now)) == self._versions:
            return []
        moved = [
            number
            for number, tensor in enumerate(now)
            if tensor is not self._tensors[number] or _version(tensor) != self._versions[number]
        ]
        return [number for number in moved if self._is_alike(number, now[number])]

    def _is_alike(self, number: int, tensor: torch.Tensor | None) -> bool:
        """Whether it still is of its old kind. One that is not saved may be a cache of each worker's own."""
        place = self._places[number]
        if tensor is not None and tensor.shape == place.shape and tensor.dtype == place.dtype:
            return True
        if place.persistent or number in self._ever:
            now = "None" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"
            raise MisuseError(
                f"the buffer {place.name} changed from {list(place.shape)} {place.dtype} to {now} while training, so "
                'workers cannot share it: keep its shape and type, or write fleet.model(..., buffers="own"), with '
                "which each worker keeps its own buffers"
            )
        return False

    def look(self) -> SeenBuffers:
        """The buffers as they stand; costs no wait for the device."""
        changed = self.changed()
        self._ever.update(changed)
        live = ((number, self._places[number].home.get(self._places[number].key)) for number in sorted(self._ever))
        return SeenBuffers(changed, {number: tensor.detach().clone() for number, tensor in live if tensor is not None})

    def flags(self, changed: Sequence[int]) -> list[float]:
        """For the header: 1 for each that has changed."""
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
        """The bytes of the ``chosen`` ones, or zeros where they are not ``mine`` to give. ``copies``: of those that
        may be changing while a round runs beside the loop."""
        device = next((tensor.device for tensor in self._tensors if tensor is not None), torch.device("cpu"))
        message = torch.zeros(sum(self._places[number].bytes for number in chosen), dtype=torch.uint8, device=device)
        if mine:
            for number, room in zip(chosen, self._rooms(chosen, message), strict=True):
                room.copy_(copies[number] if copies is not None and number in copies else self._live(number))
        return message

    # -- what the round gave -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def take(self, chosen: Sequence[int], message: torch.Tensor) -> None:
        """Overwrite the ``chosen`` ones with those in a message."""
        for number, room in zip(chosen, self._rooms(chosen, message), strict=True):
            live = self._live(number)
            live.detach().copy_(room)
            self._tensors[number], self._versions[number] = live, live._version
        self._ever.update(chosen)

    def _rooms(self, chosen: Sequence[int], message: torch.Tensor) -> list[torch.Tensor]:
        """Each one's room in the message, as a tensor of its kind."""
        rooms, start = [], 0
        for number in chosen:
            place = self._places[number]
            size = place.shape.numel() * place.dtype.itemsize
            rooms.append(message[start : start + size].view(place.dtype).view(place.shape))
            start += place.bytes
        return rooms

    def _live(self, number: int) -> torch.Tensor:
        place = self._places[number]
        tensor = place.home.get(place.key)
        if not self._is_alike(number, tensor) or tensor is None:
            raise MisuseError(
                f"the buffer {place.name} has another shape or type on this worker than on one that shares it: write "
                'fleet.model(..., buffers="own"), with which each worker keeps its own buffers'
            )
        return tensor

    def refuse(self, changed: Sequence[int]) -> None:
        """Raise MisuseError for a worker of several processes, each of which has changed its own."""
        if changed:
            raise MisuseError(
                f"the buffer {self._places[changed[0]].name} changes in forward, and each process of a worker started "
                'with --group would keep its own: write fleet.model(..., buffers="own") if that is meant'
            )

    # -- a newcomer --------------------------------------------------------------------------------------------------

    def unsaved(self) -> dict[str, torch.Tensor]:
        """Those that a model's state lacks and that have changed, for a worker that takes over this one's place."""
        numbers = [number for number in sorted(self._ever) if not self._places[number].persistent]
        return {str(number): self._live(number).detach() for number in numbers}

    @torch.no_grad()
    def take_unsaved(self, unsaved: Mapping[str, torch.Tensor]) -> None:
        for number, tensor in unsaved.items():
            self._ever.add(int(number))
            self._live(int(number)).detach().copy_(tensor)


def _version(tensor: torch.Tensor | None) -> int:
    return -1 if tensor is None else tensor._version


def _places(model: torch.nn.Module) -> list[_Place]:
    return [
        _Place(
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
