"""A worker alone, for tests in one process: data whose every gradient is known, and the plainest training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


def numbers(length: int = 40, *, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Samples of three features and one target each."""
    x = torch.randn(length, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    return TensorDataset(x, x.sum(1, keepdim=True))


def linear(*, dtype: torch.dtype = torch.float64) -> nn.Linear:
    torch.manual_seed(4)
    return nn.Linear(3, 1).to(dtype)


def deep() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def join(folder: Path, *args: Any, **options: Any) -> paceline.Fleet:
    return paceline.join(*args, quiet=True, run_dir=folder / "run", **options)


def mse(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def training(
    fleet: paceline.Fleet,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Any,
    *,
    loss: Callable[..., torch.Tensor] = mse,
    clip_norm: float | None = None,
    **options: Any,
) -> Iterator[paceline.Step]:
    """A plain training loop, as a generator of committed steps."""
    for step in fleet.steps(data, **options):
        for x, y in step:
            step.backward(loss(model, x, y))
        step.commit(optimizer, clip_norm=clip_norm)
        yield step


def flat(model: nn.Module) -> torch.Tensor:
    """All parameters in one vector."""
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


def plain(model: nn.Module, data: TensorDataset, *, batch: int, epochs: int = 1, clip_norm: float | None = None) -> Any:
    """The same training in plain torch, in the dataset's order; returns the parameters."""
    optimizer = sgd(model)
    x, y = data.tensors
    for _ in range(epochs):
        for part in torch.arange(len(x)).split(batch):
            optimizer.zero_grad()
            mse(model, x[part], y[part]).backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
    return flat(model)
