"""Trainings on scikit-learn's digits whose rounds cross the network in one format or another."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from _computers import sent_bytes
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import paceline

FEATURES, CLASSES = 64, 10
RATE = 0.1


@dataclass(frozen=True)
class Job:
    """What is trained."""

    hidden: int
    batch: int
    """Over all workers."""
    epochs: int
    target: float
    """Test accuracy whose time is measured."""
    period_s: float | None = None
    every_steps: int | None = None
    """Between averages, one of the two."""


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,000 to train on and 797 to test with, the same split everywhere."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    return TensorDataset(x[:1000], y[:1000]), TensorDataset(x[1000:], y[1000:])


def network(hidden: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)
    )


def model_bytes(hidden: int) -> int:
    return 4 * sum(p.numel() for p in network(hidden, 0).parameters())


def scores(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """How many are right, and the loss summed."""
    loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
    return {"right": (logits.argmax(1) == labels).sum(), "loss": loss}


def rate(progress: float) -> float:
    return RATE * (1 - 0.95 * progress)


def ours(job: Job, seed: int, *, combine: str, wire: str, pace: str = "adaptive") -> dict[str, float]:
    """One training with Paceline: samples a second between evaluations, seconds to the target, the final accuracy, and
    bytes that this worker's computer sent for each round."""
    data, test = digits()
    clock, averages = Clock(job), combine == "average"
    merge: Any = paceline.Averaging(period_s=job.period_s, every_steps=job.every_steps) if averages else combine
    with paceline.join(pace, combine=merge, comm_dtype=wire, seed=seed, quiet=True) as fleet:
        model = fleet.model(network(job.hidden, seed))
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
        steps = fleet.steps(data, global_batch=job.batch, micro_batch=16, epochs=job.epochs)
        clock.start()
        for step in steps:
            for group in optimizer.param_groups:
                group["lr"] = rate(steps.progress)
            for x, y in step:
                step.backward(nn.functional.cross_entropy(model(x), y))
            step.commit(optimizer, clip_norm=5.0)
            if step.ends_epoch:
                with clock.evaluation() as told:
                    said = fleet.evaluate(lambda x, y: scores(model(x), y), test, sums=("right", "loss"))
                    told.accuracy, told.loss = said["right"] / said["count"], said["loss"] / said["count"]
        rounds = len(fleet.history)
    return clock.figures(len(data), rounds)


def in_bfloat16(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and not as text
    """DDP's own hook, by another name: by its own DDP refuses it without a GPU."""
    return bf16_compress_hook(state, bucket)


def ddp(job: Job, seed: int, *, hook: bool) -> dict[str, float]:
    """The same with plain torch DDP over Gloo, with its bfloat16 hook or without."""
    if not dist.is_initialized():
        port = int(os.environ["MASTER_PORT"]) + 1
        where = f"tcp://{os.environ['MASTER_ADDR']}:{port}"
        dist.init_process_group("gloo", where, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    (data, test), clock, workers = digits(), Clock(job), dist.get_world_size()
    model = DistributedDataParallel(network(job.hidden, seed), gradient_as_bucket_view=True)
    if hook:
        model.register_comm_hook(None, in_bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    sampler = DistributedSampler(data, seed=seed)
    loader = DataLoader(data, batch_size=job.batch // workers, sampler=sampler)
    number, last = 0, job.epochs * len(loader)
    dist.barrier()
    clock.start()
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            for group in optimizer.param_groups:
                group["lr"] = rate(number / last)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            number += 1
        with clock.evaluation() as told, torch.no_grad():
            said = scores(model.module(test.tensors[0]), test.tensors[1])
            told.accuracy, told.loss = float(said["right"]) / len(test), float(said["loss"]) / len(test)
    return clock.figures(len(data), number)


class Clock:
    """Seconds and bytes of one training; what passes in an evaluation does not count."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.accuracy, self.loss, self._reached_s, self._away_s = 0.0, 0.0, float("inf"), 0.0

    def start(self) -> None:
        self._began, self._bytes = time.perf_counter(), sent_bytes()

    def evaluation(self) -> Clock:
        return self

    def __enter__(self) -> Clock:
        self._entered, self._sent = time.perf_counter(), sent_bytes()
        return self

    def __exit__(self, *_: object) -> None:
        self._away_s += time.perf_counter() - self._entered
        self._bytes += sent_bytes() - self._sent
        if self.accuracy >= self._job.target:
            self._reached_s = min(self._reached_s, self._entered - self._began - (self._away_s - self._last_s()))

    def _last_s(self) -> float:
        return time.perf_counter() - self._entered

    def figures(self, samples: int, rounds: int) -> dict[str, float]:
        seconds = time.perf_counter() - self._began - self._away_s
        return {
            "samples_per_s": samples * self._job.epochs / seconds,
            "reached_s": self._reached_s,
            "accuracy": self.accuracy,
            "loss": self.loss,
            "round_bytes": (sent_bytes() - self._bytes) / rounds,
            "rounds": rounds,
        }
