"""Transformers' Trainer on a fleet of one: it makes what the plain one makes, and refuses what it cannot."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="needs pip install 'paceline[transformers]'")

from transformers import EarlyStoppingCallback, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments
from transformers_cases import (
    BATCH,
    SAMPLES,
    Classifier,
    Counting,
    accuracy,
    arguments,
    flat,
    gpt,
    plain_arguments,
    points,
    rates,
    texts,
)

import paceline
from lone import join
from paceline.adapters.transformers import PacelineArguments, PacelineTrainer, check_version
from paceline.adapters.transformers.trainer import check_hooks
from paceline.errors import MisuseError
from paceline.training.join import as_if_alone


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[paceline.Fleet]:
    with join(tmp_path, seed=42, device="cpu") as fleet:
        yield fleet


def apart(one: nn.Module, other: nn.Module) -> float:
    return max(abs(a - b) for a, b in zip(flat(one), flat(other), strict=True))


def smoothed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return a loss of the user's own, as the Trainer's pages show it: a sum over the number of items."""
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    total = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum", label_smoothing=0.1)
    return total / num_items_in_batch


@pytest.mark.parametrize(
    "options",
    [
        {"eval_strategy": "epoch", "per_device_eval_batch_size": 5},
        {"lr_scheduler_type": "linear", "max_grad_norm": 0.0, "optim": "sgd", "max_steps": 4},
        {"label_smoothing_factor": 0.1, "dataloader_drop_last": True, "num_train_epochs": 1.5},
        {"compute_loss_func": smoothed, "num_train_epochs": 1},
        {"train_sampling_strategy": "sequential", "gradient_checkpointing": True, "dataloader_num_workers": 1},
        {"train_sampling_strategy": "group_by_length", "num_train_epochs": 3},
        {"train_sampling_strategy": "group_by_length", "num_train_epochs": 3, "eval_strategy": "epoch"},
        {
            "train_sampling_strategy": "group_by_length",
            "num_train_epochs": 3,
            "eval_strategy": "steps",
            "eval_steps": 2,
        },
    ],
    ids=[
        "evaluated",
        "max_steps",
        "label smoothing",
        "a loss of one's own",
        "in order",
        "grouped",
        "grouped, and evaluated each epoch",
        "grouped, and evaluated by steps",
    ],
)
def test_unequal_micro_batches_of_tokens_equal_the_plain_trainer(
    tmp_path: Path, fleet: paceline.Fleet, options: dict[str, Any]
) -> None:
    options = dict(options)
    more = {"train_dataset": texts(), "eval_dataset": texts(13, seed=9)}
    more["compute_loss_func"] = options.pop("compute_loss_func", None)
    theirs = Trainer(gpt(), plain_arguments(tmp_path / "plain", **options), **more)
    wanted = theirs.train()
    ours = PacelineTrainer(gpt(), arguments(tmp_path / "ours", **options), fleet=fleet, **more)
    got = ours.train()
    assert apart(ours.model, theirs.model) < 1e-6
    assert got.global_step == wanted.global_step
    assert got.training_loss == pytest.approx(wanted.training_loss, abs=1e-6)
    for mine, other in zip(rates(ours), rates(theirs), strict=True):
        assert mine == pytest.approx(other, rel=2e-5), "loss, norm before clipping, rate, epoch, step, eval_loss"


def test_a_loss_that_is_a_mean_over_samples_equals_the_plain_trainer(tmp_path: Path, fleet: paceline.Fleet) -> None:
    theirs = Trainer(Classifier(), plain_arguments(tmp_path / "plain"), train_dataset=points())
    ours = PacelineTrainer(Classifier(), arguments(tmp_path / "ours"), fleet=fleet, train_dataset=points())
    theirs.train()
    ours.train()
    assert apart(ours.model, theirs.model) < 1e-6


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad to the longest of the batch: predictions then have unlike sizes."""
    longest = max(int(row["labels"].ne(-100).sum()) for row in rows)
    return {name: torch.stack([row[name][:longest] for row in rows]) for name in rows[0]}


def test_predictions_of_unlike_length_come_in_order_as_the_plain_trainer_pads_them(
    tmp_path: Path, fleet: paceline.Fleet
) -> None:
    options = {"per_device_eval_batch_size": 3, "include_for_metrics": ["inputs", "loss"]}
    more: dict[str, Any] = {"data_collator": padded, "compute_metrics": accuracy}
    theirs = Trainer(gpt(), plain_arguments(tmp_path / "plain", **options), **more)
    ours = PacelineTrainer(gpt(), arguments(tmp_path / "ours", **options), fleet=fleet, **more)
    wanted, got = theirs.predict(texts(10)), ours.predict(texts(10))
    assert got.predictions.shape == wanted.predictions.shape
    assert abs(got.predictions - wanted.predictions).max() < 1e-6
    assert (got.label_ids == wanted.label_ids).all()
    for name in ("test_hits", "test_loss"):
        assert got.metrics[name] == pytest.approx(wanted.metrics[name], rel=1e-6)
    assert got.metrics["test_hits"] == ours.evaluate(texts(10))["eval_hits"]


def test_steps_are_counted_once_and_callbacks_called_once_a_step(tmp_path: Path, fleet: paceline.Fleet) -> None:
    counting = Counting()
    args = arguments(tmp_path, include_num_input_tokens_seen="all")
    trainer = PacelineTrainer(gpt(), args, fleet=fleet, train_dataset=texts(), callbacks=[counting])
    metrics = trainer.train().metrics
    assert counting.steps == [1, 2, 3, 4, 5, 6]
    assert trainer.state.num_input_tokens_seen == 2 * SAMPLES * 16
    counted = metrics["train_samples_per_second"] * metrics["train_runtime"]
    assert counted == pytest.approx(2 * SAMPLES, rel=0.01), "the fleet's samples, not one worker's batches"
    assert trainer.state.total_flos == trainer.floating_point_ops({"input_ids": torch.zeros(2 * SAMPLES, 16)}) > 0


def test_a_second_training_begins_anew(tmp_path: Path, fleet: paceline.Fleet) -> None:
    counting = Counting()
    trainer = PacelineTrainer(gpt(), arguments(tmp_path), fleet=fleet, train_dataset=texts(), callbacks=[counting])
    trainer.train()
    trainer.train()
    assert counting.steps == [1, 2, 3, 4, 5, 6] * 2
    assert trainer.state.epoch == 2.0
    theirs = Trainer(gpt(), plain_arguments(tmp_path / "plain"), train_dataset=texts())
    theirs.train()
    theirs.train()
    assert apart(trainer.model, theirs.model) < 2e-6, "the order begins anew too"


def test_early_stopping_stops_and_the_best_weights_come_back(tmp_path: Path, fleet: paceline.Fleet) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    options |= {"load_best_model_at_end": True, "learning_rate": 3.0, "num_train_epochs": 10, "warmup_steps": 0}
    trainer = PacelineTrainer(
        gpt(),
        arguments(tmp_path / "out", **options),
        fleet=fleet,
        train_dataset=texts(),
        eval_dataset=texts(13, seed=9),
        callbacks=[EarlyStoppingCallback(3)],
    )
    trainer.train()
    state = trainer.state
    assert state.best_global_step is not None
    assert state.global_step == state.best_global_step + 3 < state.max_steps
    assert Path(state.best_model_checkpoint).name == f"checkpoint-{state.best_global_step}"
    assert trainer.evaluate()["eval_loss"] == pytest.approx(state.best_metric, rel=1e-6)


def test_a_training_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    def trained(name: str, *callbacks: TrainerCallback, resume: bool = False) -> Any:
        args = arguments(tmp_path / name, save_strategy="steps", save_steps=2)
        with join(tmp_path / f"{name}{resume}", seed=42, device="cpu") as fleet:
            trainer = PacelineTrainer(gpt(), args, fleet=fleet, train_dataset=texts(), callbacks=list(callbacks))
            trainer.train(resume_from_checkpoint=resume)
            return trainer

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 4

    whole, counting = trained("whole"), Counting()
    assert trained("parts", Stop()).state.global_step == 4
    files = {file.name for file in (tmp_path / "parts" / "checkpoint-4").iterdir()}
    assert files >= {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "paceline.pt"}
    rest = trained("parts", counting, resume=True)
    assert counting.steps == [5, 6]
    assert apart(rest.model, whole.model) == 0
    assert rates(rest)[:-1] == rates(whole)[:-1], "the log goes on too; the last entry is of this call"


def test_a_checkpoint_of_the_plain_trainer_is_not_gone_on_from(tmp_path: Path, fleet: paceline.Fleet) -> None:
    trainer = PacelineTrainer(gpt(), arguments(tmp_path / "out"), fleet=fleet, train_dataset=texts())
    with pytest.raises(ValueError, match=r"paceline\.pt.*from_pretrained, and train anew"):
        trainer.train(resume_from_checkpoint=str(tmp_path))


def test_bf16_trains(tmp_path: Path, fleet: paceline.Fleet) -> None:
    args = arguments(tmp_path, bf16=True, num_train_epochs=12, learning_rate=1e-2, warmup_steps=0)
    trainer = PacelineTrainer(gpt(), args, fleet=fleet, train_dataset=texts(16))
    trainer.train()
    seen = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert seen[-1] < 0.95 * seen[0]
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {"train_sampling_strategy": "group_by_length", "neftune_noise_alpha": 5.0},
        {"micro_batch": "auto", "lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
        {"save_strategy": "best", "metric_for_best_model": "loss", "eval_strategy": "epoch", "save_total_limit": 1},
    ],
    ids=["by length, with noise", "sizes that are found, a plateau", "the best is saved"],
)
def test_each_sample_is_trained_on_once_an_epoch(
    tmp_path: Path, fleet: paceline.Fleet, options: dict[str, Any]
) -> None:
    seen: list[int] = []

    def noting(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        seen.extend(int(row["input_ids"][0]) for row in rows)
        return torch.utils.data.default_collate(rows)

    rows = [{name: part.clone() for name, part in row.items()} for row in texts(20)]
    for number, row in enumerate(rows):
        row["input_ids"][0] = number
    args = arguments(tmp_path / "out", global_batch=8, **options)
    trainer = PacelineTrainer(gpt(), args, fleet=fleet, train_dataset=rows, data_collator=noting, eval_dataset=texts(3))
    trainer.train()
    trained = seen if args.eval_strategy == "no" else seen[:20]
    assert sorted(trained) == sorted([*range(20)] * (len(trained) // 20))
    assert trainer.state.global_step == 6
    assert all(torch.tensor(flat(trainer.model)).isfinite())


def test_an_optimiser_and_a_schedule_of_ones_own_are_tracked(tmp_path: Path, fleet: paceline.Fleet) -> None:
    def own(model: nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    one, other = Classifier(), Classifier()
    theirs = Trainer(one, plain_arguments(tmp_path / "plain"), train_dataset=points(), optimizers=own(one))
    ours = PacelineTrainer(
        other, arguments(tmp_path / "ours"), fleet=fleet, train_dataset=points(), optimizers=own(other)
    )
    theirs.train()
    ours.train()
    assert apart(one, other) < 1e-6
    fleet.save(tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["tracked"].keys() == {"optimizer", "scheduler", "trainer"}
    assert state["tracked"]["optimizer"]["state"], "its momentum"
    assert state["tracked"]["scheduler"]["last_epoch"] == 6
    assert not state["untracked"]


def test_an_epoch_is_not_left_in_the_middle(tmp_path: Path, fleet: paceline.Fleet) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop = True

    trainer = PacelineTrainer(gpt(), arguments(tmp_path), fleet=fleet, train_dataset=texts(), callbacks=[Stop()])
    with pytest.raises(MisuseError, match=r"set control\.should_training_stop"):
        trainer.train()


def test_a_compiled_model_gets_whole_micro_batches(tmp_path: Path, fleet: paceline.Fleet) -> None:
    theirs = Trainer(Classifier(), plain_arguments(tmp_path / "plain"), train_dataset=points(48))
    args = arguments(tmp_path / "ours", micro_batch=4, torch_compile=True, torch_compile_backend="eager")
    ours = PacelineTrainer(Classifier(), args, fleet=fleet, train_dataset=points(48))
    theirs.train()
    ours.train()
    assert apart(ours.model, theirs.model) < 1e-6


class Shifting(nn.Module):
    """A model that predicts the next token without declaring it: its loss counts one label less per row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.inner(input_ids, labels=labels).loss}


class Same(torch.autograd.Function):
    """An identity that hides from autograd's graph what the loss was divided by."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class Hidden(Shifting):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": Same.apply(super().forward(input_ids, labels)["loss"])}


def class_weighted(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return a loss with weights for rare tokens, as many write it: no mean over the Trainer's number of items."""
    logits, rarity = outputs["logits"][:, :-1].flatten(0, 1), torch.linspace(0.1, 3.0, outputs["logits"].shape[-1])
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), weight=rarity.to(logits.dtype))


def test_what_a_loss_was_divided_by_is_read_from_its_graph(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="paceline"):
        for model, more in ((gpt, {"compute_loss_func": class_weighted}), (Shifting, {})):
            folder = tmp_path / model.__name__
            theirs = Trainer(model(), plain_arguments(folder / "plain"), train_dataset=texts(), **more)
            theirs.train()
            with join(folder, seed=42, device="cpu") as fleet:
                ours = PacelineTrainer(model(), arguments(folder), fleet=fleet, train_dataset=texts(), **more)
                ours.train()
            assert apart(ours.model, theirs.model) < 1e-6
    assert "is no mean" not in caplog.text


def test_a_loss_that_is_no_mean_over_what_is_counted_is_told_of(
    tmp_path: Path, fleet: paceline.Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    class Counts(PacelineTrainer):
        def loss_weight(self, batch: Any, num_items: Any = None) -> Any:
            return batch["labels"][:, 1:].ne(-100).sum()

    with caplog.at_level(logging.WARNING, logger="paceline"):
        right = Counts(Hidden(), arguments(tmp_path, max_steps=1), fleet=fleet, train_dataset=texts())
        right.train()
        assert "is no mean" not in caplog.text
    with join(tmp_path / "wrong", device="cpu") as other, caplog.at_level(logging.WARNING, logger="paceline"):
        args = arguments(tmp_path, max_steps=1)
        PacelineTrainer(Hidden(), args, fleet=other, train_dataset=texts()).train()
        assert "the loss of Hidden is no mean over its label tokens" in caplog.text
        assert "override PacelineTrainer.loss_weight" in caplog.text


EXAMPLE = """
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
import torch

class Toy(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        ids = torch.tensor([index % 7 + 1, index % 3 + 1, 5, 6])
        return {"input_ids": ids, "attention_mask": torch.ones(4, dtype=torch.long), "label": index % 2}

torch.manual_seed(1)
model = BertForSequenceClassification(BertConfig(
    vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
args = TrainingArguments(
    output_dir=folder, num_train_epochs=2, per_device_train_batch_size=8, eval_strategy="epoch", report_to="none",
    save_strategy="no", use_cpu=True, disable_tqdm=True)
trainer = Trainer(
    model=model, args=args, train_dataset=Toy(), eval_dataset=Toy(),
    compute_metrics=lambda p: {"accuracy": (p.predictions.argmax(1) == p.label_ids).mean()})
trainer.train()
figures = trainer.evaluate()
"""
"""A script like those of Transformers' pages, with a model made here and not downloaded."""


def test_a_script_for_the_trainer_runs_unchanged_but_for_the_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ours = EXAMPLE.replace("Trainer, TrainingArguments", "Trainer").replace("= Trainer(", "= PacelineTrainer(")
    ours = ours.replace("TrainingArguments(", "PacelineArguments(global_batch=8, quiet=True, ")
    theirs: dict[str, Any] = {"folder": str(tmp_path)}
    mine = theirs | {"PacelineTrainer": PacelineTrainer, "PacelineArguments": PacelineArguments}
    exec(EXAMPLE, theirs)
    exec(ours, mine)
    mine["trainer"].end()
    assert apart(mine["model"], theirs["model"]) < 1e-6
    for name in ("eval_accuracy", "eval_loss", "epoch"):
        assert mine["figures"][name] == pytest.approx(theirs["figures"][name], rel=1e-5)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"global_batch": None}, "needs global_batch="),
        ({"global_batch": 0}, "global_batch must be at least 1"),
        ({"gradient_accumulation_steps": 4}, "leave it at 1 and set global_batch"),
        ({"micro_batch": 4, "per_device_train_batch_size": 16}, "contradict"),
        ({"micro_batch": "auto", "per_device_train_batch_size": 16}, "contradict"),
        ({"micro_batch": "some"}, "micro_batch must be a whole number"),
        ({"deepspeed": {"a": 1}}, "leave deepspeed out"),
        ({"fsdp": "full_shard"}, "leave fsdp out"),
        ({"ddp_find_unused_parameters": False}, "unused parameters need no setting"),
        ({"ddp_backend": "gloo"}, "over the network that it finds"),
        ({"fp16": True}, "use bf16=True"),
        ({"auto_find_batch_size": True}, 'use micro_batch="auto"'),
        ({"ignore_data_skip": True}, "goes on where its data stood"),
        ({"batch_eval_metrics": True}, "gets all predictions"),
        ({"train_sampling_strategy": "batch_rebalance"}, "Paceline deals the parts"),
        ({"optim": "galore_adamw_layerwise"}, "before the fleet has combined"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
        ({"save_only_model": True, "load_best_model_at_end": True, "eval_strategy": "no"}, "give one of them"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_contradict_are_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PacelineArguments(str(tmp_path), **{"global_batch": BATCH, "use_cpu": True, **given})


def test_what_the_trainer_cannot_do_is_refused(tmp_path: Path, fleet: paceline.Fleet) -> None:
    args = arguments(tmp_path)
    with pytest.raises(ValueError, match=r"needs args=PacelineArguments\(.*got TrainingArguments"):
        PacelineTrainer(gpt(), TrainingArguments(str(tmp_path), use_cpu=True), fleet=fleet)
    with pytest.raises(ValueError, match=r"write model=model_init\(\)"):
        PacelineTrainer(args=args, fleet=fleet, model_init=gpt)

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(texts(3))

    class OwnLoader(PacelineTrainer):
        def get_train_dataloader(self) -> Any:
            super().get_train_dataloader()
            return torch.utils.data.DataLoader(self.train_dataset, 4)

    with pytest.raises(ValueError, match="Stream has no length"):
        PacelineTrainer(gpt(), args, fleet=fleet, train_dataset=Stream())
    trainer = PacelineTrainer(gpt(), args, fleet=fleet)
    with pytest.raises(ValueError, match="needs a train_dataset"):
        trainer.train()
    with pytest.raises(ValueError, match="no hyper-parameter search"):
        trainer.hyperparameter_search()
    with pytest.raises(MisuseError, match="do not override get_train_dataloader"):
        OwnLoader(trainer.model, args, fleet=fleet, train_dataset=texts()).train()


def test_a_fleet_that_averages_is_refused(tmp_path: Path) -> None:
    with (
        join(tmp_path, combine="average", device="cpu") as fleet,
        pytest.raises(ValueError, match=r"write the loop over fleet\.steps"),
    ):
        PacelineTrainer(gpt(), arguments(tmp_path), fleet=fleet, train_dataset=texts())


def test_accelerate_launch_with_an_engine_of_its_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="not by accelerate launch"):
        arguments(tmp_path)


@pytest.mark.parametrize("version", ["4.57.1", "6.0.0.dev0"])
def test_another_version_of_transformers_is_refused(version: str) -> None:
    with pytest.raises(ImportError, match=f"is for Transformers 5, and {version} is installed"):
        check_version(version)


def test_a_trainer_without_a_method_that_is_needed_is_refused() -> None:
    class Older:
        create_scheduler = get_batch_samples = set_initial_training_values = None

    with pytest.raises(ImportError, match="has no _get_num_items_in_batch, which PacelineTrainer needs"):
        check_hooks(Older)


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_arguments_come_from_a_command_line_and_go_into_a_file(tmp_path: Path) -> None:
    parser = HfArgumentParser(PacelineArguments)
    line = ["--output_dir", str(tmp_path), "--global_batch", "32", "--micro_batch", "4", "--pace", "equal", "--use_cpu"]
    (args,) = parser.parse_args_into_dataclasses(line)
    assert (args.global_batch, args.micro_batch, args.pace) == (32, 4, "equal")
    assert args.per_device_train_batch_size == 4
    assert pickle.loads(pickle.dumps(args)).to_dict() == args.to_dict()


def test_accelerate_sees_no_other_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    args = arguments(tmp_path)
    assert (args.world_size, args.device.type, args.n_gpu) == (1, "cpu", 0)
    with as_if_alone():
        import os

        assert "RANK" not in os.environ
    assert os.environ["RANK"] == "1", "Paceline needs it"
