"""Data and a network for the scripts beside it: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

TRAIN, TEST, FEATURES = 80, 21, 6


def points(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x[:, :3].argmax(1))


def dataloaders(batch_size: int, rows: Any = None) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders for training, of some ``rows`` where they are given, and for evaluation."""
    train: Any = points(TRAIN, 1)
    train = train if rows is None else Subset(train, rows)
    return DataLoader(train, batch_size=batch_size), DataLoader(points(TEST, 2), batch_size=5)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def linear(optimizer: Any, steps: int) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))


def flat(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
