"""Trainings with random shares, weights and tails, and the same trainings on one machine without Paceline."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import paceline
from paceline.feed import Feed
from paceline.pace import Ask
from paceline.records import Plan, StepRecord
from paceline.transport.engines import small_sums


class Scripted:
    """A pacer that deals at random, zeros included."""

    name = "scripted"

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def check(self, workers: int) -> None:
        return

    def observe(self, record: StepRecord) -> None:
        return

    def plan(self, ask: Ask) -> Plan:
        dice = random.Random(f"{self._seed}/{ask.step}")
        shares = [0] * len(ask.workers)
        eager = [rank for rank in range(len(shares)) if dice.random() < 0.7] or [dice.randrange(len(shares))]
        for _ in range(ask.total // ask.unit):
            shares[dice.choice(eager)] += ask.unit
        shares[dice.choice(eager)] += ask.total % ask.unit
        return Plan(generation=ask.generation, step=ask.step, samples=tuple(shares))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        return


class Tokens(Dataset):
    """Sequences of unequal length: (input, target, number of tokens)."""

    def __init__(self, dtype: torch.dtype, length: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(length, 6, generator=generator, dtype=torch.float64).to(dtype)
        self.y = torch.randint(0, 3, (length,), generator=generator)
        self.n = torch.randint(1, 9, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index], self.n[index]


class Net(nn.Module):
    """Shared, frozen and unused parameters beside ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.twice = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = self.twice(torch.tanh(self.twice(self.norm(x))))
        return self.last(torch.tanh(self.frozen(x)))


def build(dtype: torch.dtype) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def micro_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, n: torch.Tensor, weighted: bool) -> torch.Tensor:
    losses = nn.functional.cross_entropy(model(x), y, reduction="none")
    return (losses * n).sum() / n.sum() if weighted else losses.mean()


def whole(tensor: Any) -> torch.Tensor:
    """All of it, where processes hold parts."""
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def train(case: dict[str, Any]) -> dict[str, Any]:
    """One training in the fleet: final parameters, losses, and which samples each step had."""
    dtype = getattr(torch, case["dtype"])
    data = Tokens(dtype, case["length"])
    with paceline.join(Scripted(case["seed"]), seed=case["seed"], quiet=True) as fleet:
        model = fleet.model(build(dtype), shard=bool(case.get("shard")))
        optimizer = make_optimizer(case["optimizer"], model)
        losses = []
        steps = fleet.steps(data, global_batch=case["global_batch"], micro_batch=case["micro_batch"], epochs=99)
        for step in steps:
            if step.index == 5:
                model.frozen.requires_grad_(True)  # from here on it learns
            for x, y, n in step:
                weight = int(n.sum()) if case["weighted"] else None
                step.backward(micro_loss(model, x, y, n, case["weighted"]), weight=weight)
            step.commit(optimizer, clip_norm=case["clip"])
            losses.append(step.loss)
            if step.index == 9:
                break
        parameters = torch.cat([whole(p.detach()).flatten().double() for p in model.parameters()])
        assert all(p.grad is None for p in model.parameters())
        return {
            "parameters": parameters.tolist(),
            "losses": losses,
            "batches": [[record.epoch, record.ranges] for record in fleet.history],
            "shares": [record.samples for record in fleet.history],
        }


def train_all(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [train(case) for case in cases]


def many_cores() -> None:
    """As on a computer with cores to spare: sums, however small, travel side by side over several of Gloo's devices."""
    os.sched_getaffinity = lambda _: set(range(16))
    small_sums.is_small = lambda *_: False


def train_all_on_many_cores(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    many_cores()
    return train_all(cases)


def batches_of(case: dict[str, Any], told: list[Any]) -> Iterator[list[int]]:
    """The dataset indices of each step, worked out from what the records say."""
    feed = Feed(case["length"], workers=1, seed=case["seed"])
    for epoch, ranges in told:
        feed.open(epoch)
        yield feed.indices([tuple(part) for worker in ranges for part in worker]).tolist()


def one_machine(case: dict[str, Any], batches: list[list[int]], *, pieces: int = 1) -> tuple[torch.Tensor, list[float]]:
    """The same training in plain torch: each step's whole batch at once, or added up in so many pieces."""
    dtype = getattr(torch, case["dtype"])
    data, model = Tokens(dtype, case["length"]), build(dtype)
    optimizer = make_optimizer(case["optimizer"], model)
    losses = []
    for index, batch in enumerate(batches):
        if index == 5:
            model.frozen.requires_grad_(True)
        total = float(data.n[batch].sum()) if case["weighted"] else float(len(batch))
        optimizer.zero_grad()
        loss_sum = 0.0
        for part in reversed(torch.tensor(batch).chunk(pieces)):
            loss = micro_loss(model, data.x[part], data.y[part], data.n[part], case["weighted"])
            weight = float(data.n[part].sum()) if case["weighted"] else float(len(part))
            (loss * (weight / total)).backward()
            loss_sum += float(loss.detach()) * weight
        if case["clip"] is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case["clip"])
        optimizer.step()
        losses.append(loss_sum / total)
    return torch.cat([p.detach().flatten().double() for p in model.parameters()]), losses


# -- replicas, exactly once, resume --------------------------------------------------------------------------------


class Numbers(Dataset):
    """Sample i is i: to count what was seen."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


def count_samples(args: dict[str, Any]) -> dict[str, Any]:
    """Train on numbers for some epochs, saving or resuming on the way; returns the samples this worker saw."""
    seen: dict[int, list[int]] = {}
    with paceline.join(args.get("pace") or Scripted(5), quiet=True) as fleet:
        model = fleet.model(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        fleet.track(optimizer=optimizer)
        extra = fleet.load(args["load"]) if args.get("load") else None
        for step in fleet.steps(
            Numbers(args["length"]), global_batch=args["global_batch"], micro_batch=7, epochs=args["epochs"]
        ):
            for (x,) in ((batch,) for batch in step):
                seen.setdefault(step.epoch, []).extend(int(value) for value in x.flatten())
                step.backward(model(x).mean())
            step.commit(optimizer)
            if step.index == args.get("stop_after"):
                fleet.save(args["save"], extra={"note": "half-way"})
                break
        return {"seen": seen, "extra": extra, "steps": len(fleet.history), "index": step.index}


def replicas(args: dict[str, Any]) -> str:
    """A training with batch norm and dropout; returns the exact bits of everything in the model's state."""
    torch.manual_seed(fleet_rank())  # unlike starts: the leader's weights must win
    x = torch.randn(300, 5, generator=torch.Generator().manual_seed(1))
    with paceline.join(Scripted(2), quiet=True) as fleet:
        net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
        model = fleet.model(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in fleet.steps(TensorDataset(x, x.sum(1, keepdim=True)), global_batch=50, micro_batch=8, epochs=4):
            for inputs, targets in step:
                step.backward(nn.functional.mse_loss(model(inputs), targets))
            step.commit(optimizer, clip_norm=1.0)
        tracked = int(model[1].num_batches_tracked)
        micro_batches = sum(sum(record.micro_batches) for record in fleet.history)
        assert tracked == micro_batches, (tracked, micro_batches)
        state = [t.detach().double().flatten() for t in model.state_dict().values()]
        return torch.cat(state).numpy().tobytes().hex()


def fleet_rank() -> int:
    import os

    return int(os.environ.get("RANK", "0"))
