"""Lightning with PacelineStrategy in one process: what plain Lightning gives, and what is refused."""

from __future__ import annotations

import csv
import importlib.metadata
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="Lightning is not installed: pip install 'paceline[lightning]'")

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_cases import BATCH, Module, data, flat, trained
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
)
from torchmetrics.classification import MulticlassAccuracy

from paceline.adapters.lightning import PacelineStrategy, check_version
from paceline.adapters.lightning.logs import meta_of, name_of, weight_name
from paceline.adapters.lightning.strategy import continue_csv_files
from paceline.errors import MisuseError

Strategies = Callable[..., PacelineStrategy]


@pytest.fixture
def strategy(tmp_path: Path) -> Iterator[Strategies]:
    """Make strategies of a worker alone, and close them."""
    made: list[PacelineStrategy] = []

    def make(global_batch: int = BATCH, micro_batch: Any = BATCH, **options: Any) -> PacelineStrategy:
        folder = tmp_path / f"run{len(made)}"
        made.append(PacelineStrategy(global_batch, micro_batch, quiet=True, run_dir=folder, device="cpu", **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def trainer(strategy: Any, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    usual = {"accelerator": "cpu", "max_epochs": 2, "enable_checkpointing": False, "log_every_n_steps": 1}
    return pl.Trainer(strategy=strategy, **{**quiet, **usual, **options})


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(data(), **{"batch_size": BATCH, **options})


def approximately(figures: Any) -> Any:
    if isinstance(figures, list) and figures and isinstance(figures[0], dict):
        return [pytest.approx(one, abs=1e-6) for one in figures]
    return pytest.approx(figures, abs=1e-6)


def logged(folder: Path) -> list[dict[str, float]]:
    """Return the lines of the logger's table."""
    with next(folder.rglob("metrics.csv")).open() as table:
        rows = csv.DictReader(table)
        return [{name: float(value) for name, value in row.items() if value} for row in rows]


# -- the same as without -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        {"trainer": {"gradient_clip_val": 0.2}, "average": True},
        {"trainer": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, "module": {"schedule": "epoch"}},
        {"trainer": {"precision": "bf16-mixed"}, "module": {"schedule": "plateau", "optimiser": "adamw"}},
        {"trainer": {"max_epochs": -1, "max_steps": 8, "val_check_interval": 2, "limit_val_batches": 3}},
        {"trainer": {"precision": "64-true", "val_check_interval": 0.5}},
        {"trainer": {"precision": "bf16-true", "max_epochs": 9}, "stop": {"patience": 0, "min_delta": 10.0}},
    ],
    ids=["clipping by norm, EMA", "clipping by value, epochs", "bf16, plateau", "max_steps", "double", "early stop"],
)
def test_alone_it_trains_bit_for_bit_as_lightning_does(
    tmp_path: Path, strategy: Strategies, args: dict[str, Any]
) -> None:
    plain, ours = trained("auto", tmp_path / "plain", args), trained(strategy(), tmp_path / "ours", args)
    means = {name: (ours.pop(name), plain.pop(name)) for name in ("metrics", "test", "epoch_losses", "scores")}
    assert ours["epoch"] == (2 if "stop" in args else plain["epoch"])
    assert ours == plain, "weights, rates, counters and what was saved are the same to the last bit"
    for mine, theirs in means.values():  # summed in double precision here
        assert mine == approximately(theirs)
    assert logged(tmp_path / "ours") == approximately(logged(tmp_path / "plain"))


def test_micro_batches_make_the_same_update_and_log_each_sample_once(tmp_path: Path, strategy: Strategies) -> None:
    args: dict[str, Any] = {"trainer": {"gradient_clip_val": 0.2}}
    plain, ours = trained("auto", tmp_path / "plain", args), trained(strategy(BATCH, 5), tmp_path / "ours", args)
    assert ours["weights"] == pytest.approx(plain["weights"], abs=1e-6)
    assert ours["metrics"] == pytest.approx(plain["metrics"], abs=1e-6)
    assert ours["epoch_losses"] == pytest.approx(plain["epoch_losses"], abs=1e-6)
    assert (ours["seen"], ours["global_step"]) == (plain["seen"], plain["global_step"])


def test_lightnings_own_small_example_runs_unchanged_but_for_the_strategy(strategy: Strategies) -> None:
    def run(chosen: Any) -> tuple[list[float], int]:
        pl.seed_everything(1, verbose=False)
        model, example = BoringModel(), trainer(chosen, max_epochs=2)
        example.fit(model, datamodule=BoringDataModule())
        example.validate(model, datamodule=BoringDataModule(), verbose=False)
        example.test(model, datamodule=BoringDataModule(), verbose=False)
        return flat(model), example.global_step

    assert run(strategy(1, None)) == run("auto")


@pytest.mark.parametrize("steps", [7, 10])
def test_a_resumed_training_is_the_uninterrupted_one(tmp_path: Path, strategy: Strategies, steps: int) -> None:
    args: dict[str, Any] = {"module": {"schedule": "epoch"}, "average": True, "every": steps}
    whole = trained(strategy(), tmp_path / "whole", args)
    halves = tmp_path / "halves"
    trained(strategy(), halves, {**args, "trainer": {"max_steps": steps}})
    every = str(next((halves / "every").glob("*.ckpt")))
    rest = trained(strategy(), halves, {**args, "ckpt_path": every, "weights": 5})
    names = ("weights", "global_step", "epoch", "rate", "metrics", "best")
    assert {name: rest[name] for name in names} == {name: whole[name] for name in names}
    assert rest["seen"] == 450 - (150 + 64 if steps == 7 else 300)


def test_a_checkpoint_of_plain_lightning_is_gone_on_from_at_an_epochs_end_alone(
    tmp_path: Path, strategy: Strategies
) -> None:
    args: dict[str, Any] = {"module": {"schedule": "epoch"}}
    whole = trained("auto", tmp_path / "whole", args)
    trained("auto", tmp_path / "one", {**args, "trainer": {"max_steps": 5}})
    trained("auto", tmp_path / "middle", {**args, "trainer": {"max_steps": 7}, "every": 7})
    last = [str(next(tmp_path.glob(name))) for name in ("one/saved/last.ckpt", "middle/every/*.ckpt")]
    assert trained(strategy(), tmp_path / "one", {**args, "ckpt_path": last[0]})["weights"] == whole["weights"]
    with pytest.raises(ValueError, match="in the middle of an epoch, by a strategy other than PacelineStrategy"):
        trained(strategy(), tmp_path / "middle", {**args, "ckpt_path": last[1]})


def test_an_epoch_that_max_steps_left_is_left_when_training_goes_on(tmp_path: Path, strategy: Strategies) -> None:
    args: dict[str, Any] = {"module": {"schedule": "epoch"}}
    trained(strategy(), tmp_path, {**args, "trainer": {"max_steps": 7}})
    args["ckpt_path"] = str(tmp_path / "saved" / "last.ckpt")
    with pytest.raises(ValueError, match="written with global_batch 32, and it is 16 now"):
        trained(strategy(16), tmp_path, args)
    later = trained(strategy(), tmp_path, args)
    assert later["global_step"] == 12, "the second epoch was left after two steps, and the third is whole"


def test_several_validation_loaders_are_each_gone_through_once(strategy: Strategies) -> None:
    class Several(Module):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            x, y = batch
            self.log("val", nn.functional.cross_entropy(self.net(x), y))
            self.log("n", float(len(x)), reduce_fx="sum")

        def on_validation_end(self) -> None:
            pass

    def run(chosen: Any) -> dict[str, float]:
        torch.manual_seed(0)
        one = trainer(chosen)
        one.fit(Several(), loader(), [DataLoader(data(70), batch_size=16), DataLoader(data(9), batch_size=4)])
        return {name: float(value) for name, value in one.callback_metrics.items()}

    plain = run("auto")
    assert run(strategy()) == approximately(plain), "Lightning adds up means of batches in float32"
    assert plain["n/dataloader_idx_1"] == 9


def test_a_fast_dev_run_makes_one_step(strategy: Strategies) -> None:
    one = trainer(strategy(), fast_dev_run=True)
    one.fit(Module(), loader(), loader())
    assert one.global_step == 1


class Sorted(BatchSampler):
    """A batch sampler of the user's own."""


@pytest.mark.parametrize(
    ("options", "global_batch", "steps"),
    [
        ({"drop_last": True}, 32, 4),
        ({"sampler": WeightedRandomSampler([1.0] * 150, 70)}, 32, 3),
        ({"sampler": DistributedSampler(data(), num_replicas=2, rank=0)}, 32, 5),
        ({"batch_sampler": Sorted(SequentialSampler(data()), 10, drop_last=False), "batch_size": 1}, 4, 4),
    ],
    ids=["drop_last", "drawn", "DistributedSampler", "batches"],
)
def test_an_epoch_has_as_many_steps_as_lightning_was_told(
    strategy: Strategies, options: dict[str, Any], global_batch: int, steps: int
) -> None:
    one = trainer(strategy(global_batch, None), max_epochs=2)
    one.fit(module := Module(), loader(**options), loader())
    assert (one.num_training_batches, one.global_step, len(module.counted)) == (steps, 2 * steps, 2)
    schedule: Any = module.lr_schedulers()
    assert schedule.last_epoch == schedule.total_steps == 2 * steps


# -- hooks -------------------------------------------------------------------------------------------------------------


class Watched(Module):
    """A module that records what its hooks get."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.norms: list[float] = []
        self.losses: list[float] = []

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        self.sizes += [len(x)] if self.trainer.training else []
        return x, y

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return 2 * x, y

    def on_after_backward(self) -> None:
        self.norms.append(float(nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def test_hooks_for_batches_see_micro_batches_and_hooks_for_updates_see_the_mean(strategy: Strategies) -> None:
    def run(chosen: Any) -> Watched:
        torch.manual_seed(0)
        trainer(chosen, max_epochs=1).fit(module := Watched(), loader())
        assert "optimizer_zero_grad" not in vars(module)
        return module

    plain, ours = run("auto"), run(strategy(BATCH, 8))
    assert plain.sizes == [32, 32, 32, 32, 22]
    assert ours.sizes == [*[8] * 18, 6] or sum(ours.sizes) == 150
    assert ours.norms == pytest.approx(plain.norms, abs=1e-6)
    assert ours.losses == pytest.approx(plain.losses, abs=1e-6)


def test_a_micro_batch_without_a_loss_counts_as_done_without_a_gradient(strategy: Strategies) -> None:
    class Skips(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else {"loss": loss}

        def on_train_epoch_end(self) -> None:
            pass

    made = strategy()
    one = trainer(made, max_epochs=1)
    one.fit(module := Skips(), loader())
    assert (one.global_step, module.seen) == (5, 150)
    assert [record.weight for record in made.fleet.history][:2] == [32.0, 0.0]


def test_the_loss_is_weighted_as_asked(strategy: Strategies) -> None:
    made = strategy(BATCH, 4, weight=lambda batch: batch[1].sum())
    trainer(made, max_epochs=1).fit(Module(), loader())
    positive = data().tensors[1].split(BATCH)
    assert [record.weight for record in made.fleet.history] == [float(part.sum()) for part in positive]


def test_the_name_of_a_sum_says_how_it_was_logged(strategy: Strategies) -> None:
    made = strategy()
    trainer(made, max_epochs=1).fit(module := Module(), loader())
    sums = made.fleet.history[0].sums
    assert sums["loss [mean, samples]sel"] == 32
    assert sums["positive [sum]el"] == float(data().tensors[1][:32].sum())
    results = module.trainer.fit_loop.epoch_loop._results
    for key in ("training_step.loss", "training_step.positive"):
        meta = meta_of(name_of(results[key].meta))
        assert meta is not None
        assert meta["name"] == key.split(".")[1]
        assert meta_of(weight_name("loss [mean]se")) is None
    assert meta_of("correct") is None


# -- refused -----------------------------------------------------------------------------------------------------------


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Backward(Module):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)


class TwoOptimisers(Module):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[0].parameters()), torch.optim.SGD(self.net[2].parameters())]


class Lbfgs(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class LogsMetric(Module):
    def __init__(self) -> None:
        super().__init__()
        self.train_accuracy = MulticlassAccuracy(2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.train_accuracy(self.net(batch[0]), batch[1])
        self.log("accuracy", self.train_accuracy)
        return super().training_step(batch, batch_idx)


class LogsExtreme(Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("largest", batch[0].max(), reduce_fx="max")
        return super().training_step(batch, batch_idx)


class Gathers(Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.all_gather(batch[0])
        return super().training_step(batch, batch_idx)


class Reduces(Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trainer.strategy.reduce(batch[0])
        return super().training_step(batch, batch_idx)


class EverySecond(Module):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        else:
            optimizer_closure()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from data()


class Part(DistributedSampler[Any]):
    """A sampler of the user's own for one worker's part."""


@pytest.mark.parametrize(
    ("options", "module", "said"),
    [
        ({"accumulate_grad_batches": 2}, Module, "use global_batch"),
        ({"devices": 2}, Module, r"write devices=1, each worker is a process.*paceline run -n 2"),
        ({"num_nodes": 2}, Module, "leave num_nodes out"),
        ({"sync_batchnorm": True}, Module, "leave it out, batch norm's running statistics are the fleet's"),
        ({"precision": "16-true"}, Module, 'use precision="bf16-mixed"'),
        ({"plugins": [MixedPrecision("16-mixed", "cuda")]}, Module, 'use precision="bf16-mixed"'),
        ({"overfit_batches": 2}, Module, r"torch.utils.data.Subset\(dataset, range\(n\)\) instead"),
        ({"limit_train_batches": 3}, Module, "an epoch deals every sample once"),
        ({"reload_dataloaders_every_n_epochs": 1}, Module, "a run deals one dataset"),
        ({"val_check_interval": "00:00:01:00"}, Module, "workers' clocks differ"),
        ({"callbacks": [StochasticWeightAveraging(0.1)]}, Module, "use EMAWeightAveraging or WeightAveraging"),
        ({}, Manual, "set automatic_optimization = True"),
        ({}, Backward, "PacelineStrategy calls backward itself"),
        ({}, TwoOptimisers, "gives several optimisers, and a step of PacelineStrategy has one"),
        ({}, Lbfgs, "choose an optimiser whose step"),
        ({}, LogsMetric, r"log its value for the batch, self.log\('accuracy', metric\(...\)\)"),
        ({}, LogsExtreme, "log a mean or a sum there"),
        ({}, Gathers, "use self.log, a torchmetrics metric in validation_step, or strategy.fleet.predict"),
        ({}, EverySecond, "step 0 had no update: optimizer_step must call optimizer.step"),
        ({}, Reduces, r"self.log\(...\) gives the fleet's mean or sum"),
    ],
)
def test_what_contradicts_a_fleet_is_refused_with_what_to_write(
    strategy: Strategies, options: dict[str, Any], module: type[Module], said: str
) -> None:
    with pytest.raises(Exception, match=said):
        trainer(strategy(), **options).fit(module(), loader(), loader())


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (DataLoader(Stream(), batch_size=4), "for a stream write the loop with paceline.join"),
        ([loader(), loader()], "several training DataLoaders"),
        (loader(batch_size=None), "batch_size=None gives whole batches"),
        (loader(sampler=Part(data(), num_replicas=2, rank=0)), "draws one worker's part, and Paceline deals the parts"),
    ],
    ids=["a stream", "several", "whole batches", "a sampler of a part"],
)
def test_data_that_cannot_be_dealt_is_refused(strategy: Strategies, train: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        trainer(strategy()).fit(Module(), train)


def test_a_strategy_fits_once_and_not_after_it_was_closed(strategy: Strategies) -> None:
    made = strategy()
    one = trainer(made, max_epochs=1)
    one.fit(module := Module(), loader())
    with pytest.raises(MisuseError, match="a second fit with one PacelineStrategy"):
        one.fit(module, loader())
    with pytest.raises(MisuseError, match="this PacelineStrategy has left the fleet, in close"):
        one.test(module, loader())


def test_averages_and_other_devices_are_refused(strategy: Strategies, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r'use "gradients", or a loop with paceline.join\(\)'):
        strategy(combine="average")
    monkeypatch.setenv("PACELINE_COMBINE", "average")
    with pytest.raises(ValueError, match="weights differ between"):
        strategy()


def test_another_version_of_lightning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.5.1")
    with pytest.raises(ImportError, match=r"works with Lightning 2.6, and 2.5.1 is installed: pip install"):
        check_version()


def test_the_launchers_variables_are_hidden_once_the_fleet_is_joined(strategy: Strategies) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    strategy()
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} & set(os.environ)


def test_a_new_leader_goes_on_with_the_columns_of_the_csv_file(tmp_path: Path) -> None:
    first, second = (CSVLogger(tmp_path, version="same") for _ in range(2))

    def log(logger: CSVLogger, step: int, **figures: float) -> None:
        logger.log_metrics(figures, step)
        logger.save()

    log(first, 1, loss=1.0, val=2.0)
    continue_csv_files([second])
    log(second, 2, loss=3.0, accuracy=0.5)
    continue_csv_files([first])
    log(first, 3, val=4.0)
    with open(tmp_path / "lightning_logs" / "same" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    found = [{name: float(value) for name, value in row.items() if value} for row in rows]
    assert found == [
        {"loss": 1.0, "val": 2.0, "step": 1},
        {"loss": 3.0, "accuracy": 0.5, "step": 2},
        {"val": 4.0, "step": 3},
    ]
