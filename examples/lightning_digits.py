"""Handwritten digits (scikit-learn's) with Lightning, on whatever machines there are.

    python examples/lightning_digits.py                                        # one process
    torchrun --nproc-per-node 2 examples/lightning_digits.py                   # as before
    paceline run -n 4 --emulate 1,1,2,4 examples/lightning_digits.py           # four unlike machines, emulated
    paceline run -n 2:4 examples/lightning_digits.py                           # workers come and go

Module and DataLoaders know nothing of Paceline: the one line that does is the Trainer's strategy.
"""

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from paceline.adapters.lightning import PacelineStrategy


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """1,437 digits to train on and 360 to test with, the same split everywhere."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("accuracy", self.accuracy)

    def on_train_epoch_end(self) -> None:
        found = self.trainer.callback_metrics
        accuracy = 100 * found["accuracy"]
        self.print(f"epoch {self.current_epoch}: loss {found['loss']:.4f}, test accuracy {accuracy:.1f}%", flush=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--global-batch", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    train, test = datasets()
    torch.manual_seed(options.seed)
    strategy = PacelineStrategy(options.global_batch, options.micro_batch, seed=options.seed)
    trainer = pl.Trainer(
        strategy=strategy,
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(monitor="accuracy", mode="max"), LearningRateMonitor("step")],
        logger=CSVLogger("lightning"),
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), DataLoader(train, batch_size=16, shuffle=True), DataLoader(test, batch_size=64))


if __name__ == "__main__":
    main()
