"""Trainings of small models by Transformers' Trainer: the plain one, and the fleet's."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from paceline.adapters.transformers import PacelineArguments, PacelineTrainer

SAMPLES, BATCH, VOCABULARY, LONGEST = 44, 16, 29, 16

USUAL: dict[str, Any] = {
    "num_train_epochs": 2,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "max_grad_norm": 0.5,
    "weight_decay": 0.01,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}


def gpt(seed: int = 0) -> GPT2LMHeadModel:
    """Its loss is the mean over the label tokens; no noise, so that micro-batches may be of any size."""
    torch.manual_seed(seed)
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    size = {"vocab_size": VOCABULARY, "n_positions": LONGEST, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(loss_type="ForCausalLM", **size, **still))


def texts(count: int = SAMPLES, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Rows of unequal length: labels beyond it do not count."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        length = int(torch.randint(3, LONGEST, (1,), generator=generator))
        ids = torch.randint(0, VOCABULARY, (LONGEST,), generator=generator)
        rows.append({"input_ids": ids, "labels": torch.where(torch.arange(LONGEST) < length, ids, -100)})
    return rows


class Classifier(nn.Module):
    """A module of one's own, whose loss is a plain mean over samples, and which takes no further arguments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"logits": logits} | ({} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)})


def points(count: int = SAMPLES) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, 4, generator=generator)
    return [{"x": row, "labels": (row.argmax() % 3)} for row in x]


def arguments(folder: Path, **more: Any) -> PacelineArguments:
    return PacelineArguments(str(folder), **{"global_batch": BATCH, "micro_batch": 5, "quiet": True, **USUAL, **more})


def plain_arguments(folder: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), **{"per_device_train_batch_size": BATCH, **USUAL, **more})


def flat(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def accuracy(prediction: Any) -> dict[str, float]:
    counted = prediction.label_ids != -100
    return {"hits": float((prediction.predictions.argmax(-1) == prediction.label_ids)[counted].mean())}


def rates(trainer: Any) -> list[dict[str, float]]:
    """The log without seconds."""
    hidden = ("runtime", "per_second")
    return [{k: v for k, v in entry.items() if not k.endswith(hidden)} for entry in trainer.state.log_history]


# -- run by real workers -----------------------------------------------------------------------------------------------


def tokens(args: dict[str, Any]) -> dict[str, Any]:
    """With unlike weights at first on every worker."""
    trainer = PacelineTrainer(
        gpt(seed=int(os.environ.get("RANK", "0"))),
        arguments(
            Path(args["folder"]),
            pace=args["pace"],
            eval_strategy="epoch",
            per_device_eval_batch_size=5,
            save_strategy="epoch",
            include_num_input_tokens_seen="all",
        ),
        train_dataset=texts(),
        eval_dataset=texts(13, seed=9),
        compute_metrics=accuracy,
    )
    output = trainer.train(resume_from_checkpoint=args.get("resume"))
    result = {"weights": flat(trainer.model), "log": rates(trainer), "step": output.global_step}
    result["samples"] = output.metrics["train_samples_per_second"] * output.metrics["train_runtime"]
    result["predictions"] = trainer.predict(texts(7, seed=4)).predictions.sum(-1).tolist()
    trainer.end()
    return result


def classifier(args: dict[str, Any]) -> list[float]:
    trainer = PacelineTrainer(
        Classifier(), arguments(Path(args["folder"]), pace=args["pace"], optim="sgd"), train_dataset=points()
    )
    trainer.train()
    trainer.end()
    return flat(trainer.model)


class Slow(TrainerCallback):
    """Steps take time, until there is a file *hurry*; a worker may be told a step in which it dies."""

    def __init__(self, die: dict[str, int]) -> None:
        self._last = die.get(os.environ["PACELINE_WORKER"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._last:
            os.kill(os.getpid(), signal.SIGKILL)
        if not Path(os.environ["PACELINE_RUN_DIR"]).with_name("hurry").exists():
            time.sleep(0.05)


class Counting(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.epochs = 0

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.epochs += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(state.global_step)


def elastic(args: dict[str, Any]) -> dict[str, Any]:
    """A long training in which workers come and go."""
    from transformers import EarlyStoppingCallback

    counting, patience = Counting(), EarlyStoppingCallback(10**6)
    trainer = PacelineTrainer(
        gpt(),
        arguments(
            Path(args["folder"]),
            pace="adaptive",
            num_train_epochs=args["epochs"],
            eval_strategy="steps",
            eval_steps=7,
            eval_on_start=True,
            save_strategy="steps",
            save_steps=14,
            save_total_limit=1,
            metric_for_best_model="eval_loss",
            logging_steps=4,
        ),
        train_dataset=texts(),
        eval_dataset=texts(6, seed=9),
        callbacks=[Slow(args.get("die", {})), counting, patience],
    )
    trainer.train()
    state = trainer.state
    result = {"weights": flat(trainer.model), "step": state.global_step, "epoch": state.epoch, "steps": counting.steps}
    result |= {"max_steps": state.max_steps, "log": rates(trainer), "rate": trainer.lr_scheduler.get_last_lr()}
    result["epochs"], result["worse"] = counting.epochs, patience.early_stopping_patience_counter
    trainer.end()
    return result


class Stalling(TrainerCallback):
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        time.sleep(self._seconds if state.global_step == 20 and os.environ["RANK"] == "1" else 0.02)


def stalling(args: dict[str, Any]) -> dict[str, Any]:
    """One worker does nothing for a while."""
    trainer = PacelineTrainer(
        gpt(),
        arguments(Path(args["folder"]), pace=args["pace"], num_train_epochs=args["epochs"]),
        train_dataset=texts(),
        callbacks=[Stalling(args["stall_s"])],
    )
    trainer.train()
    state = trainer.state
    result = {"weights": flat(trainer.model), "step": state.global_step, "epoch": state.epoch}
    trainer.end()
    return result | {"rate_step": trainer.lr_scheduler.last_epoch}
