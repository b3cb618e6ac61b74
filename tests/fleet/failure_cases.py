"""Fleets in which something goes wrong."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.transport import fixed

RANK = int(os.environ.get("RANK", "0"))
STORE_GONE = "the leader or launcher that holds the fleet's store is gone"
"""What a worker says that is slow to listen: worker 0, which holds the store, stays a few seconds after a failure."""


def data(length: int = 400) -> TensorDataset:
    x = torch.randn(length, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def training(fleet: paceline.Fleet, model: nn.Module, *, epochs: int = 1, **options: Any) -> Any:
    """A plain training loop, as a generator of committed steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in fleet.steps(data(), global_batch=16, micro_batch=4, epochs=epochs, **options):
        for x, y in step:
            step.backward(nn.functional.mse_loss(model(x), y))
        step.commit(optimizer)
        yield step


def note(args: dict[str, Any], name: str) -> None:
    (Path(args["folder"]) / name).write_text(str(time.time()))


def hear_everybody_out() -> None:
    """Where all are alive, worker 0 can stay until the last has heard of a failure."""
    fixed.HEARING_S = 20.0


def train_forever(args: dict[str, Any]) -> None:
    """Trains until somebody ends it; says when it has begun."""
    with paceline.join(quiet=True) as fleet:
        model = fleet.model(nn.Linear(4, 1))
        for step in training(fleet, model, epochs=10_000):
            time.sleep(0.005)
            if step.index == 5 and fleet.is_leader:
                note(args, "begun")


def one_raises(args: dict[str, Any]) -> None:
    hear_everybody_out()
    with paceline.join(quiet=True) as fleet:
        model = fleet.model(nn.Linear(4, 1))
        for step in training(fleet, model, epochs=100):
            if step.index == 3 and fleet.rank == args["who"]:
                raise KeyError("a bug in the script")


def leader_calls_alone(args: dict[str, Any]) -> None:
    hear_everybody_out()
    with paceline.join(quiet=True) as fleet:
        model = fleet.model(nn.Linear(4, 1))
        for step in training(fleet, model, epochs=100):
            if step.index == 3 and fleet.is_leader:
                began = time.monotonic()
                try:
                    call(fleet, args["call"], args["folder"])
                finally:
                    (Path(args["folder"]) / "took").write_text(str(time.monotonic() - began))


def call(fleet: paceline.Fleet, name: str, folder: str) -> None:
    if name == "evaluate":
        fleet.evaluate(lambda x, y: {"sum": x.sum()}, data(20), sums="sum")
    elif name == "save":
        fleet.save(Path(folder) / "x.pt")
    elif name == "barrier":
        fleet.barrier()
    else:
        fleet.any(True)


def one_leaves_early(args: dict[str, Any]) -> None:
    hear_everybody_out()
    with paceline.join(quiet=True) as fleet:
        model = fleet.model(nn.Linear(4, 1))
        for step in training(fleet, model, epochs=100):
            if step.index == 3 and fleet.rank == 1:
                break


def leader_is_busy(args: dict[str, Any]) -> int:
    """The leader does something of its own for a while: it is waited for."""
    with paceline.join("adaptive", quiet=True) as fleet:
        model = fleet.model(nn.Linear(4, 1))
        for step in training(fleet, model):
            if step.index == 3 and fleet.is_leader:
                time.sleep(args["seconds"])
        return len(fleet.history)


def disagree(args: dict[str, Any]) -> dict[str, str]:
    """Workers that bring unlike things; every worker must get the same clear error."""
    errors = {}

    def attempt(name: str, function: Any) -> None:
        try:
            with paceline.join(quiet=True) as fleet:
                function(fleet)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"

    def model_shape(fleet: paceline.Fleet) -> None:
        fleet.model(nn.Linear(4, 1 + fleet.rank))

    def dataset_length(fleet: paceline.Fleet) -> None:
        fleet.model(nn.Linear(4, 1))
        fleet.steps(data(400 + fleet.rank), global_batch=16)

    def settings(fleet: paceline.Fleet) -> None:
        fleet.model(nn.Linear(4, 1))
        fleet.steps(data(), global_batch=16 + fleet.rank)

    def frozen(fleet: paceline.Fleet) -> None:
        model = fleet.model(nn.Linear(4, 1))
        for _ in training(fleet, model):
            model.bias.requires_grad_(fleet.rank == 0)

    for name, function in [
        ("model", model_shape),
        ("length", dataset_length),
        ("settings", settings),
        ("frozen", frozen),
    ]:
        attempt(name, function)
    try:
        with paceline.join("equal" if RANK else "adaptive", quiet=True):
            pass
    except Exception as error:
        errors["pace"] = f"{type(error).__name__}: {error}"
    return errors


def nan_on_one(args: dict[str, Any]) -> dict[str, Any]:
    with paceline.join("equal", nonfinite=args["nonfinite"], quiet=True) as fleet:
        model = fleet.model(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        before = None
        applied = []
        for step in fleet.steps(data(80), global_batch=16, micro_batch=4):
            for x, y in step:
                loss = nn.functional.mse_loss(model(x), y)
                if step.index == 2 and fleet.rank == 1:
                    loss = (
                        loss * float("nan")
                        if args["where"] == "loss"
                        else loss + 0 * model.weight.sub(model.weight.detach()).abs().sqrt().sum()
                    )
                step.backward(loss)
            if step.index == 2:
                before = model.weight.detach().clone()
            step.commit(optimizer)
            applied.append(step.applied)
            if step.index == 2:
                assert torch.equal(before, model.weight), "the update was applied"
        samples = sum(record.total for record in fleet.history)
        return {"applied": applied, "samples": samples, "finite": bool(model.weight.isfinite().all())}


def checkpoint_of_another_length(args: dict[str, Any]) -> str:
    path = Path(args["folder"]) / "c.pt"
    with paceline.join(quiet=True) as fleet:
        model = fleet.model(nn.Linear(4, 1))
        for step in training(fleet, model):
            if step.index == 3:
                fleet.save(path)
                break
    try:
        with paceline.join(quiet=True) as fleet:
            fleet.model(nn.Linear(4, 1))
            fleet.load(path)
            fleet.steps(data(399), global_batch=16, micro_batch=4)
    except ValueError as error:
        return str(error)
    return "no error"


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.arange(6.0).reshape(6, 1) + 10 * RANK)


def stream_with_an_idle_worker(args: dict[str, Any]) -> dict[str, Any]:
    """A worker that never gets a sample must not keep the epoch open for ever; and nobody shares dropout noise."""
    noise = []
    with paceline.join(args["pace"], quiet=True) as fleet:
        model = fleet.model(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        ends = []
        micro_batch = min(2, args["global_batch"])
        for step in fleet.steps(Stream(), global_batch=args["global_batch"], micro_batch=micro_batch, epochs=2):
            for x in step:
                noise.append(float(torch.rand(())))
                step.backward(model(x).mean())
            step.commit(optimizer)
            ends.append(step.ends_epoch)
            assert step.index < 100, "the epoch never ends"
        return {"ends": ends, "noise": noise, "samples": sum(record.total for record in fleet.history)}


def unlike_orders(args: dict[str, Any]) -> str:
    try:
        with paceline.join(quiet=True) as fleet:
            fleet.model(nn.Linear(4, 1))
            for _ in fleet.steps(data(), global_batch=16, order=lambda epoch: [(i + RANK) % 400 for i in range(400)]):
                pass
    except ValueError as error:
        return str(error)
    return "no error"
