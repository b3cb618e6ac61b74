"""Lightning trainings of a worker of a fleet, and the same without Paceline."""

from __future__ import annotations

import logging
import os
import runpy
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from elastic_cases import beside, pause
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.adapters.lightning import PacelineStrategy

LENGTH, BATCH = 150, 32
EXAMPLES = Path(__file__).parents[2] / "examples"
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def data(length: int = LENGTH) -> TensorDataset:
    x = torch.randn(length, 6, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, (x.sum(1) > 0).long())


class Module(pl.LightningModule):
    """Knows nothing of Paceline."""

    def __init__(
        self, *, pause_s: float = 0.0, optimiser: str = "sgd", schedule: str = "step", die: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        self.auc = torchmetrics.classification.BinaryAUROC()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(2, average="micro")
        self.pause_s, self.optimiser, self.schedule = pause_s, optimiser, schedule
        self.seen = self.validated = 0
        self.die = die or {}
        self.counted: list[int] = []
        self.epoch_losses: list[float] = []
        self.epochs: list[int] = []

    def _may_die(self, where: str) -> None:
        """Kill this very process in that epoch, if it is told to."""
        worker, epoch = self.die.get(where, (None, None))
        if os.environ.get("PACELINE_WORKER") == worker and self.current_epoch == epoch:
            os.kill(os.getpid(), signal.SIGKILL)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.pause_s:
            pause(self.pause_s)
        if batch_idx == 4:
            self._may_die("last step")
        if batch_idx == 1:
            _may_freeze()
        x, y = batch
        self.seen += len(x)
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("positive", y.float().sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.epoch_losses.append(float(self.trainer.callback_metrics["loss_epoch"]))
        self.epochs.append(self.current_epoch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        if not self.trainer.sanity_checking:
            self.validated += len(x)
            self._may_die("validation")
        out = self.net(x)
        self.log("val", nn.functional.cross_entropy(out, y))
        self.log("largest", x.max(), reduce_fx="max")
        self.log("counted", float(len(x)), reduce_fx="sum")
        self.auc(out.softmax(1)[:, 1], y)
        self.accuracy(out, y)
        self.log("auc", self.auc)
        self.log("accuracy", self.accuracy)

    test_step = validation_step

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.counted.append(int(self.trainer.callback_metrics["counted"]))

    def configure_optimizers(self) -> Any:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.optimiser == "adamw":
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.schedule == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}
        total: Any = self.trainer.estimated_stepping_batches
        made: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=int(total))
        if self.schedule == "epoch":
            made = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, "interval": self.schedule}}


def _may_freeze() -> None:
    """Worker 0 stops in the middle of a step, once, when there is a file *freeze*."""
    if os.environ.get("PACELINE_WORKER") != "0" or not beside("freeze").exists() or beside("frozen").exists():
        return
    beside("frozen").touch()
    os.kill(os.getpid(), signal.SIGSTOP)


def flat(module: nn.Module) -> list[float]:
    return [float(value) for parameter in module.parameters() for value in parameter.detach().flatten()]


def trained(strategy: Any, folder: Path, args: dict[str, Any]) -> dict[str, Any]:
    """Fit and test a `Module`, with everything a Trainer is asked for; what came of it."""
    torch.manual_seed(args.get("weights", 0))
    module = Module(**args.get("module", {}))
    saved = ModelCheckpoint(folder / "saved", monitor="val", save_top_k=2, save_last=True)
    stop, average = EarlyStopping("val", **{"patience": 50, **args.get("stop", {})}), EMAWeightAveraging(decay=0.9)
    callbacks: list[Any] = [saved, stop, LearningRateMonitor("step")]
    callbacks += [ModelCheckpoint(folder / "every", every_n_train_steps=every)] if (every := args.get("every")) else []
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        callbacks=[*callbacks, average] if args.get("average") else callbacks,
        logger=CSVLogger(folder / "logs"),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 3, "log_every_n_steps": 1, **args.get("trainer", {})},
    )
    loader = DataLoader(data(), batch_size=args.get("loader", BATCH), shuffle=False)
    trainer.fit(module, loader, DataLoader(data(70), batch_size=16), ckpt_path=args.get("ckpt_path"))
    found = trainer.test(module, DataLoader(data(50), batch_size=16), verbose=False)
    return {
        "weights": flat(module),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "test": found,
        "epoch_losses": module.epoch_losses,
        "epochs": module.epochs,
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "seen": module.seen,
        "validated": module.validated,
        "counted": module.counted,
        "best": Path(saved.best_model_path).name,
        "scores": sorted(float(score) for score in saved.best_k_models.values()),
        "stop": stop.state_dict()["wait_count"],
        "leader": trainer.is_global_zero,
        "size": strategy.fleet.world_size if isinstance(strategy, PacelineStrategy) else 1,
    }


def fit(args: dict[str, Any]) -> dict[str, Any]:
    """A worker's training."""
    strategy = PacelineStrategy(BATCH, 4, pace=args.get("pace", "adaptive"), quiet=True)
    assert "RANK" not in os.environ
    made = trained(strategy, beside("lightning"), args)
    strategy.close()
    return made


class Collects(Module):
    """As many do: outputs are kept, and made one figure when the epoch ends."""

    def on_validation_epoch_start(self) -> None:
        self.kept: list[torch.Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.kept.append(batch[0].sum())

    def on_validation_epoch_end(self) -> None:
        self.log("twice", 2 * self.trainer.callback_metrics.get("counted", torch.tensor(0.0)))
        self.log("sum", torch.stack(self.kept).sum())


def example(args: dict[str, Any]) -> None:
    """One of the examples, in a folder of its own."""
    folder = beside("example")
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [args["name"], "--epochs", "3"]
    runpy.run_path(str(EXAMPLES / args["name"]), run_name="__main__")


def collects(args: dict[str, Any]) -> str:
    strategy = PacelineStrategy(BATCH, 4, pace="equal", quiet=True)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", logger=False, max_epochs=1, enable_progress_bar=False)
    try:
        trainer.fit(Collects(), DataLoader(data(), batch_size=4), DataLoader(data(70), batch_size=16))
    except ValueError as error:
        return str(error)
    return ""
