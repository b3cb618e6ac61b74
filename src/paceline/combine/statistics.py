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
        self._before = self._counts()
        self._flat: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self._layers)

    def payload(self, samples: int) -> torch.Tensor:
        """What this worker adds to the round: its statistics times its samples."""
        parts = [t.detach().flatten() for layer in self._layers for t in _tensors(layer)]
        self._flat = torch.cat(parts).mul_(float(samples))
        return self._flat

    def moved(self) -> list[int]:
        """Micro-batches each layer has tracked on this worker since the last merge."""
        return [now - before for now, before in zip(self._counts(), self._before, strict=True)]

    def merge(self, samples: float, moved: Sequence[float]) -> None:
        """Take the fleet's mean for every layer that moved anywhere; one that did not keeps its exact values."""
        assert self._flat is not None
        if samples:
            self._flat.div_(samples)
        offset = 0
        for layer, count, before in zip(self._layers, moved, self._before, strict=True):
            for tensor in _tensors(layer):
                if samples and count:
                    tensor.copy_(self._flat[offset : offset + tensor.numel()].view_as(tensor))
                offset += tensor.numel()
            assert layer.num_batches_tracked is not None
            layer.num_batches_tracked.fill_(before + int(count))
        self._before = self._counts()

    def rebase(self) -> None:
        """The statistics were set from outside (loaded, broadcast): count from here."""
        self._before = self._counts()

    def _counts(self) -> list[int]:
        counts = [m.num_batches_tracked for m in self._layers if m.num_batches_tracked is not None]
        return [int(count) for count in torch.stack(counts).tolist()] if counts else []  # one synchronisation, not many


def _tensors(layer: _NormBase) -> tuple[torch.Tensor, torch.Tensor]:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return layer.running_mean, layer.running_var
