"""Scripts that train twice with a Trainer: pre-train, then fine-tune."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import apart, elastic, results

pytestmark = pytest.mark.fleet

LIGHTNING = """
import logging, os, warnings
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from paceline.adapters.lightning import PacelineStrategy

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.manual_seed(3)
x = torch.randn(48, 4, dtype=torch.float64)
y = torch.randint(0, 3, (48,))

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.seen = []
    def training_step(self, batch, number):
        a, b = batch
        loss = nn.functional.cross_entropy(self.net(a), b)
        self.log("loss", loss, on_epoch=True)
        return loss
    def validation_step(self, batch, number):
        a, b = batch
        self.log("held_out", nn.functional.cross_entropy(self.net(a), b))
    def on_validation_epoch_end(self):
        self.seen.append(float(self.trainer.callback_metrics["held_out"]))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

def fit(model, data):
    strategy = PacelineStrategy(12, 5, pace=os.environ["PACE"], quiet=True)
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    trainer = pl.Trainer(strategy=strategy, max_epochs=2, accelerator="cpu", devices=1, precision="64-true", **quiet)
    held_out = DataLoader(TensorDataset(x[:13], y[:13]), batch_size=5)
    trainer.fit(model, DataLoader(data, batch_size=6, shuffle=True), held_out)
    return strategy, trainer

torch.manual_seed(5)
model = Net()
"""
PHASES = """
first, trainer = fit(model, TensorDataset(x, y))
sizes, leaders = [first.fleet.world_size], [first.fleet.is_leader]
second, _ = fit(model, TensorDataset(x[:24], y[:24]))  # fine-tune
sizes, leaders = [*sizes, second.fleet.world_size], [*leaders, second.fleet.is_leader]
second.close()
third, _ = fit(model, TensorDataset(x[24:], y[24:]))
sizes, leaders = [*sizes, third.fleet.world_size], [*leaders, third.fleet.is_leader]
try:
    trainer.validate(model, DataLoader(TensorDataset(x, y), batch_size=6), verbose=False)
except Exception as error:
    refused = f"{type(error).__name__}: {error}"
third.close()
with torch.no_grad():
    whole = float(nn.functional.cross_entropy(model.net(x[:13]), y[:13]))
weights = [value for p in model.parameters() for value in p.detach().flatten().tolist()]
found = {"seen": model.seen, "whole": whole, "refused": refused}
result = {"weights": weights, "sizes": sizes, "leaders": leaders, **found}
"""


def test_a_second_lightning_trainer_trains_with_the_same_workers(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="needs pip install 'paceline[lightning]'")
    (alone,) = results(tmp_path / "alone", PHASES, before=LIGHTNING, workers=1, PACE="equal")
    fleet = results(tmp_path / "fleet", PHASES, before=LIGHTNING, PACELINE_PACE="fixed:1,3", PACE="equal")
    assert [worker["leaders"] for worker in fleet] == [[True] * 3, [False] * 3]
    for worker in fleet:
        assert worker["sizes"] == [2, 2, 2]
        assert apart(worker["weights"], alone["weights"]) < 1e-12
        assert apart(worker["seen"], alone["seen"]) < 1e-6
        assert abs(worker["seen"][-1] - worker["whole"]) < 1e-6, "a mean over 13 samples, in batches of 5, 5 and 3"
        assert worker["refused"].startswith("MisuseError: this PacelineStrategy has left the fleet")


def test_a_second_lightning_trainer_is_refused_where_workers_come_and_go(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="needs pip install 'paceline[lightning]'")
    with elastic(tmp_path, PHASES, before=LIGHTNING, workers=1, env={"PACE": "equal"}) as fleet:
        ended = fleet.wait()[0]
    assert ended.code != 0
    assert "ValueError: a second PacelineStrategy in one script, where workers come and go" in ended.err


TRANSFORMERS = """
import os, sys, tempfile
import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from paceline.adapters.transformers import PacelineArguments, PacelineTrainer

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.out = nn.Embedding(29, 8), nn.Linear(8, 3)
    def forward(self, input_ids, labels=None):
        logits = self.out(self.embed(input_ids).mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

def rows():
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 17, (44,), generator=draw).tolist()
    return [{"input_ids": torch.randint(0, 29, (n,), generator=draw), "labels": torch.tensor(n % 3)} for n in lengths]

def padded(rows):
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    ids = nn.functional.pad(ids, (0, 17 - ids.shape[1]))
    return {"input_ids": ids, "labels": torch.stack([row["labels"] for row in rows])}

usual = dict(num_train_epochs=2, learning_rate=0.01, lr_scheduler_type="linear", save_strategy="no", report_to=[],
             use_cpu=True, disable_tqdm=True, logging_steps=1)
found = []
for sampling in ("random", "group_by_length"):
    ours = PacelineArguments(tempfile.mkdtemp(), global_batch=16, micro_batch=5, quiet=True,
                             train_sampling_strategy=sampling, **usual)
    trainer = PacelineTrainer(Net(), ours, train_dataset=rows(), data_collator=padded)
    trainer.train()
    once = [value for p in trainer.model.parameters() for value in p.detach().flatten().tolist()]
    trainer.train()
    twice = [value for p in trainer.model.parameters() for value in p.detach().flatten().tolist()]
    size = trainer.fleet.world_size
    trainer.end()
    kept = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ}
    plain = TrainingArguments(tempfile.mkdtemp(), per_device_train_batch_size=16,
                              train_sampling_strategy=sampling, **usual)
    theirs = Trainer(Net(), plain, train_dataset=rows(), data_collator=padded)
    theirs.train()
    wanted = [[value for p in theirs.model.parameters() for value in p.detach().flatten().tolist()]]
    theirs.train()
    wanted += [[value for p in theirs.model.parameters() for value in p.detach().flatten().tolist()]]
    os.environ.update(kept)
    found.append([size, [once, twice], wanted])
result = found
"""


def test_training_twice_and_grouping_by_length_equal_the_plain_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs pip install 'paceline[transformers]'")
    for worker in results(tmp_path, "", before=TRANSFORMERS, PACELINE_PACE="fixed:1,3"):
        for size, got, wanted in worker:
            assert size == 2
            assert [apart(one, other) for one, other in zip(got, wanted, strict=True)] == pytest.approx(
                [0, 0], abs=2e-6
            )
