"""Batch normalisation's running statistics, merged in the round by the number of samples behind them.

Each worker's running mean and variance have moved by its own micro-batches; the fleet keeps their mean, weighted by
samples, so replicas stay equal. The normalisation itself uses each micro-batch's own statistics, as in plain DDP, so a
model with batch norm does not equal one machine with the whole batch: GroupNorm or LayerNorm does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn.modules.batchnorm import _NormBase


class RunningStatistics:
    """The running statistics of all batch-norm layers of some models."""

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        layers = (layer for model in models for layer in model.modules())
        self._layers = [m for m in layers if isinstance(m, _NormBase) and m.num_batches_tracked is not None]
        self.rebase()

    def __len__(self) -> int:
        return len(self._layers)

    def rebase(self) -> None:
        """Count from here: the statistics were merged, or set from outside (loaded, broadcast)."""
        self._counted = self._counts()
        self.begin()

    def begin(self) -> None:
        """A step begins: nothing is finished yet."""
        self._before = self._values()
        self._noted, self._moved = torch.zeros_like(self._before), [0] * len(self._layers)

    def note(self) -> None:
        """The layers stand as this worker's finished work left them."""
        self._noted = self._values()
        self._moved = [now - before for now, before in zip(self._counts(), self._counted, strict=True)]

    def payload(self, samples: int) -> torch.Tensor:
        """What this worker adds to the round: its statistics, as last noted, times its samples."""
        return self._noted * float(samples)

    @property
    def moved(self) -> list[int]:
        """Micro-batches each layer had tracked on this worker since the last merge when last noted."""
        return self._moved

    def merge(self, total: torch.Tensor, samples: float, moved: Sequence[float]) -> None:
        """Take the fleet's mean for every layer that moved anywhere; one that did not has its exact values back.

        ``total`` is the sum of the payloads, ``samples`` and ``moved`` the fleet's.
        """
        mean = total / samples if samples else total
        offset = 0
        for layer, count, before in zip(self._layers, moved, self._counted, strict=True):
            source = mean if samples and count else self._before
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
        counts = [m.num_batches_tracked for m in self._layers if m.num_batches_tracked is not None]
        return [int(count) for count in torch.stack(counts).tolist()] if counts else []  # one synchronisation, not many


def _tensors(layer: _NormBase) -> tuple[torch.Tensor, torch.Tensor]:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return layer.running_mean, layer.running_var
