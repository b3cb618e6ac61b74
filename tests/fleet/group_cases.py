"""Trainings on workers of several processes, which divide the model among them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from exact_cases import whole
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import paceline
from paceline.checkpoint.shards import local

LENGTH, BATCH, WIDTH = 96, 20, 96


def data(length: int = LENGTH) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(length, 12, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 4, (length,), generator=generator))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(12, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(2)])
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        result: torch.Tensor = self.last(x)
        return result


def divided(fleet: paceline.Fleet, args: dict[str, Any]) -> nn.Module:
    net = Net().double()
    if not args.get("by_hand"):
        return fleet.model(net, shard=args.get("shard", True))
    from torch.distributed.fsdp import fully_shard

    for block in net.blocks:
        fully_shard(block, mesh=fleet.mesh)
    return fleet.model(fully_shard(net, mesh=fleet.mesh))


def train(args: dict[str, Any] | None) -> dict[str, Any]:
    """AdamW, clipping and a schedule, in unequal shares; saves, and goes on from what was saved."""
    args = args or {}
    with paceline.join(args.get("pace", "fixed:1,3"), quiet=True) as fleet:
        model = divided(fleet, args)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        fleet.track(optimizer=optimizer, schedule=schedule)
        if args.get("autosave"):
            fleet.autosave(args["autosave"], every_steps=3)
        if args.get("load"):
            fleet.load(args["load"])
        losses, rows = [], []
        for step in fleet.steps(data(), global_batch=BATCH, micro_batch=7, epochs=2):
            for x, y in step:
                step.add(rows=len(x), right=(y == 0).sum())
                step.backward(nn.functional.cross_entropy(model(x), y))
            step.commit(optimizer, clip_norm=0.5)
            schedule.step()
            losses.append(step.loss)
            rows.append(step.sums["rows"])
            if step.index == args.get("save_at"):
                fleet.save(args["save"])
                break
        evaluated = fleet.evaluate(score(model), data(37), batch_size=8, sums="right")
        predicted = fleet.predict(lambda x, y: model(x), data(37), batch_size=8)
        parameters = torch.cat([whole(p.detach()).flatten() for p in model.parameters()])
        held = [local(p) for p in model.parameters()]
        held += [local(v) for state in optimizer.state.values() for v in state.values() if v.dim()]
        return {
            "parameters": parameters.tolist(),
            "losses": losses,
            "rows": rows,
            "norms": [record.grad_norm for record in fleet.history],
            "evaluated": evaluated,
            "predicted": predicted.tolist(),
            "bytes": sum(tensor.numel() * tensor.element_size() for tensor in held),
            "leader": fleet.is_leader,
            "place": [fleet.rank, fleet.world_size],
        }


def score(model: nn.Module) -> Any:
    def sums(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        out = model(x)
        return {"right": (out.argmax(1) == y).sum(), "loss": nn.functional.cross_entropy(out, y, reduction="none")}

    return sums


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from ()


def refused(args: dict[str, Any]) -> list[str]:
    """What is refused in a worker of several processes, and how."""
    said = []

    def attempt(call: Any) -> None:
        try:
            call()
        except (ValueError, OSError, paceline.MisuseError) as error:
            said.append(str(error))
        else:
            said.append("not refused")

    for pace, combine in (("joint", "gradients"), ("adaptive", "average")):
        attempt(lambda pace=pace, combine=combine: paceline.join(pace, combine=combine, quiet=True))
    with paceline.join("adaptive", quiet=True) as fleet:
        attempt(lambda: fleet.model(nn.Linear(2, 2)))
        attempt(lambda: fleet.model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), shard=True))
        model = fleet.model(Net().double(), shard=True)
        attempt(lambda: fleet.steps(Stream(), global_batch=4, micro_batch=2))
        attempt(lambda: fleet.steps(data(), global_batch=4, micro_batch="auto"))
        attempt(lambda: fleet.save("/proc/none/saved"))
        held = list(model.parameters())
        for step in fleet.steps(data(), global_batch=8, micro_batch=4):
            for x, y in step:
                loss = nn.functional.cross_entropy(model(x), y)
                if len(said) == 7:  # the first
                    attempt(step.skip)
                    attempt(lambda loss=loss, step=step: step.backward(loss, models=model))
                    attempt(lambda loss=loss, step=step: step.backward(loss * float("nan"), weight=0))
                    penalty: Any = sum((p**2).sum() for p in held)
                    both = loss + penalty.full_tensor()
                    attempt(lambda both=both, step=step: step.backward(both))
                    break
            break
    for wrong in (_clips, _branches, _steps_its_schedule_alone, _orders_by_itself):
        attempt(lambda wrong=wrong: _trained(wrong))
    return said


def _trained(wrong: Any) -> None:
    """A few steps of a script that goes wrong."""
    with paceline.join("adaptive", quiet=True) as fleet:
        model = fleet.model(Net().double(), shard=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        fleet.track(optimizer=optimizer, schedule=schedule)
        order = _own_order if wrong is _orders_by_itself else None
        for step in fleet.steps(data(), global_batch=8, micro_batch=4, order=order):
            for x, y in step:
                loss = nn.functional.cross_entropy(model(x), y)
                if wrong is _branches:
                    block = model.blocks[int(os.environ["PACELINE_SHARD"])]
                    loss = loss.detach() + block(torch.ones(1, WIDTH, dtype=torch.float64)).mean()
                step.backward(loss)
                wrong(model, schedule)
            step.commit(optimizer)
            if step.index == 3:
                break


def _clips(model: nn.Module, schedule: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def _branches(model: nn.Module, schedule: Any) -> None:
    """Each process goes through a block of its own."""


def _steps_its_schedule_alone(model: nn.Module, schedule: Any) -> None:
    if int(os.environ["PACELINE_SHARD"]) == 0 and schedule.last_epoch < 1:
        schedule.step()


def _orders_by_itself(model: nn.Module, schedule: Any) -> None:
    """Its order is each process's own."""


def _own_order(epoch: int) -> Any:
    return torch.randperm(LENGTH, generator=torch.Generator().manual_seed(os.getpid())).numpy()


def astray(args: dict[str, Any]) -> None:
    """A call that one process makes and the other does not."""
    with paceline.join("adaptive", quiet=True) as fleet:
        fleet.model(Net().double(), shard=True)
        if fleet.is_leader:
            fleet.any(True)
        fleet.evaluate(lambda x, y: {"n": len(x)}, data(), sums="n")


def newest(folder: str) -> str:
    return str(max(Path(folder).iterdir(), key=os.path.getmtime))
