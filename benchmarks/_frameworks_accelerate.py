"""Accelerate's part of frameworks.py: one loop, with its own Accelerator over DDP, with Paceline's, and alone."""

from __future__ import annotations

import os
import time
import warnings
from typing import Any

import accelerate
import torch
from _smoke import smoking
from accelerate.state import AcceleratorState, GradientState
from common import CLASSES, FEATURES, _dataset
from torch import nn
from torch.utils.data import DataLoader

from paceline.adapters.accelerate import Accelerator
from paceline.machines import from_env

WIDTH = 16 if smoking() else 768
warnings.filterwarnings("ignore")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
    )


def commits(way: str, *, global_batch: int, micro_batch: int, steps: int) -> list[float]:
    """Return the clock's seconds after each update; ``way`` is "ddp", "paceline", or "plain" in one process."""
    before, rank, size = dict(os.environ), int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    batch, machine = global_batch, None
    if way == "ddp":
        os.environ["LOCAL_RANK"], batch, machine = str(rank), global_batch // size, from_env(rank)
    elif way == "plain":
        os.environ.pop("LOCAL_RANK", None)
    if way == "paceline":
        options = {"global_batch": global_batch, "micro_batch": micro_batch, "quiet": True}
        accelerator: Any = Accelerator(cpu=True, **options)
    else:
        accelerator = accelerate.Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(_dataset(global_batch * steps), batch_size=batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    stamps: list[float] = []
    began = time.perf_counter()
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if machine is not None:
            machine.pad(len(stamps), len(y), began)
        if accelerator.sync_gradients:
            stamps.append(time.perf_counter())
        began = time.perf_counter()
    accelerator.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.clear()
    os.environ.update(before)
    return stamps
