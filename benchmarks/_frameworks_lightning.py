"""Lightning's part of frameworks.py: one training, with its own DDP, with PacelineStrategy, and with neither."""

from __future__ import annotations

import logging
import os
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from _smoke import smoking
from common import CLASSES, FEATURES, _dataset
from torch import nn
from torch.utils.data import DataLoader

from paceline.adapters.lightning import PacelineStrategy
from paceline.machines import Machine, from_env

WIDTH = 16 if smoking() else 768
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Training(pl.LightningModule):
    """Notes when each update is over. With DDP the worker plays its machine here; in a fleet Paceline does."""

    def __init__(self, machine: Machine | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
        )
        self.machine, self.began, self.samples = machine, 0.0, 0
        self.stamps: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.began = time.perf_counter()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        self.samples = len(y)
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def on_after_backward(self) -> None:
        if self.machine is not None:
            self.machine.pad(len(self.stamps), self.samples, self.began)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.stamps.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def commits(way: str, *, global_batch: int, micro_batch: int, steps: int) -> list[float]:
    """Seconds on the clock after each of so many steps: ``way`` is "ddp", "paceline", or "plain" in one process."""
    before, options = dict(os.environ), {"strategy": "auto", "batch": global_batch, "machine": None}
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if way == "ddp":
        os.environ |= {"NODE_RANK": str(rank), "LOCAL_RANK": "0"}
        options = {"strategy": "ddp", "batch": global_batch // size, "machine": from_env(rank)}
    strategy = PacelineStrategy(global_batch, micro_batch, pace="adaptive", quiet=True) if way == "paceline" else None
    module = Training(options["machine"])
    trainer = pl.Trainer(
        strategy=strategy or options["strategy"],
        num_nodes=size if way == "ddp" else 1,
        devices=1,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(_dataset(global_batch * steps), batch_size=options["batch"], shuffle=True))
    if strategy is not None:
        strategy.close()
    os.environ.clear()
    os.environ.update(before)
    return module.stamps
