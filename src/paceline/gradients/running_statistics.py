"""Batch normalisation's running statistics, merged in the round by the number of samples behind them.

Each worker's running mean and variance have moved by its own micro-batches; the fleet keeps their mean, weighted by
samples, so replicas stay equal. The normalisation itself uses each micro-batch's own statistics, as in plain DDP, so a
model with batch norm does not equal one machine with the whole batch: GroupNorm or LayerNorm does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn.modules.batchnorm import _NormBase

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
