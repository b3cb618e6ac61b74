"""Trainings with local steps, and what each worker saw."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from exact_cases import Net, Tokens
from torch import nn

import paceline
from paceline.averaging.parameter_round import ParameterRound


def make(case: dict[str, Any]) -> Any:
    if case["combine"] == "gradients":
        return "gradients"
    outer = paceline.Outer(**case["outer"]) if case.get("outer") else None
    if case["combine"] == "average":
        return paceline.Averaging(**case.get("settings", {}), **({"outer": outer} if outer else {}))
    return paceline.research.ElasticAverage(**case.get("settings", {}))


def train(case: dict[str, Any]) -> dict[str, Any]:
    """One training with plain SGD; returns parameters at the end and after every epoch, and the records."""
    with paceline.join(case.get("pace", "equal"), combine=make(case), quiet=True, device="cpu") as fleet:
        torch.manual_seed(1)
        model = fleet.model(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
            if case.get("batch_norm")
            else Net().double()
        )
        data = Tokens(torch.float64, case["length"])
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=case.get("momentum", 0.0), weight_decay=case.get("weight_decay", 0.0)
        )
        fleet.track(optimizer=optimizer)
        extra = fleet.load(case["load"]) if case.get("load") else None
        evaluations, rounds, local = [], [], 0
        steps = fleet.steps(
            data, global_batch=case["global_batch"], micro_batch=case["micro_batch"], epochs=case.get("epochs", 1)
        )
        for step in steps:
            for x, y, _ in step:
                step.backward(nn.functional.cross_entropy(model(x), y))
                step.add(seen=len(x))
            step.commit(optimizer)
            local += 1
            rounds.append(step.round)
            due = case.get("every") and step.index % case["every"] == 0
            if step.ends_epoch or due or step.index == case.get("at"):
                hit = fleet.evaluate(lambda x, y, n: {"hit": model(x).argmax(1) == y}, data, sums="hit")
                evaluations.append([hit["hit"], hit["count"]])
            if case.get("save") and step.ends_epoch and step.epoch == 0:
                fleet.save(case["save"], extra={"epoch": step.epoch})
            if case.get("leave_after") == step.index:
                break
        return {
            "parameters": torch.cat([p.detach().flatten() for p in model.state_dict().values()]).tolist(),
            "evaluations": evaluations,
            "rounds": rounds,
            "local": local,
            "extra": extra,
            "waited": [record.round_s for record in fleet.history],
            "records": [
                {
                    "epoch": r.epoch,
                    "ranges": r.ranges,
                    "planned": r.planned,
                    "samples": r.samples,
                    "seconds": r.seconds,
                    "sums": dict(r.sums),
                }
                for r in fleet.history
            ],
        }


def against_twin(case: dict[str, Any]) -> dict[str, Any]:
    """A training that benchmarks/papers/_p4_fleet.py knows to repeat in one process."""
    sys.path[:0] = case["benchmarks"]
    from _p4_fleet import train as noted

    return noted(case)


def samples_seen(case: dict[str, Any]) -> list[int]:
    """Which samples this worker was given, in one epoch or more."""
    seen: list[int] = []
    with paceline.join("equal", combine=make(case), quiet=True) as fleet:
        model = fleet.model(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        data = torch.utils.data.TensorDataset(torch.arange(case["length"], dtype=torch.float32).unsqueeze(1))
        for step in fleet.steps(data, global_batch=8, micro_batch=4, epochs=case.get("epochs", 1)):
            for (x,) in step:
                seen += [int(value) for value in x.flatten()]
                step.backward(model(x).mean())
            step.commit(optimizer)
            if case.get("every") and step.index % case["every"] == 0:
                fleet.any(False)
    return seen


def line_data(length: int) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(length, 2, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, x @ torch.tensor([1.0, -2.0], dtype=torch.float64) + 0.5)


def line(case: dict[str, Any]) -> dict[str, Any]:
    """Least squares with plain SGD from zero, in the dataset's own order: small enough to be worked out by hand."""
    if case.get("lands_late"):  # a round beside local steps is taken over when the next is due, and no earlier
        ParameterRound.over = property(lambda round: False)  # type: ignore[assignment,method-assign]
    with paceline.join("equal", combine=make(case), quiet=True, device="cpu") as fleet:
        model = nn.Linear(2, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        model = fleet.model(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=case["lr"])
        data, seen = line_data(case["length"]), []
        for step in fleet.steps(data, global_batch=case["global_batch"], micro_batch=3, shuffle=False):
            for x, y in step:
                step.backward(((model(x).squeeze(1) - y) ** 2).mean() / 2)
            step.commit(optimizer)
            seen.append([step.loss, sum(step.record.samples), step.share])
            time.sleep(case.get("sleep", 0.0))
        return {
            "weight": model.weight.flatten().tolist(),
            "ranges": [record.ranges for record in fleet.history],
            "seen": seen,
        }


def group_facts(case: dict[str, Any]) -> list[Any]:
    """What the members of this worker's group say of themselves, and the sum of their squares, small and large."""
    from paceline.transport import FixedTransport

    transport = FixedTransport(torch.device("cpu"))
    mine = next(group for group in case["groups"] if transport.rank in group)
    group = transport.subgroup(mine)
    small = torch.full((3,), float(transport.rank) ** 2)
    large = torch.full((case["large"],), float(transport.rank) ** 2)
    with group.round("two sums"):
        for pending in [group.sum(small), group.sum(large)]:
            pending.wait()
    said = group.gather("names", {"name": f"worker {transport.rank}" * (transport.rank + 1)})
    again = transport.subgroup(mine)
    result = [group.rank, group.size, said, small.tolist(), [float(large.min()), float(large.max())], again is group]
    transport.close()
    return result


def a_member_fails(case: dict[str, Any]) -> None:
    """Worker 1, of the group of 0 and 1, is killed or makes a call by itself."""
    combine = paceline.Averaging(every_steps=200, groups=[[0, 1], [2]])
    with paceline.join("equal", combine=combine, quiet=True, device="cpu") as fleet:
        model = fleet.model(nn.Linear(2, 1).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in fleet.steps(line_data(60_000), global_batch=6, micro_batch=2):
            for x, y in step:
                step.backward(((model(x).squeeze(1) - y) ** 2).mean())
            step.commit(optimizer)
            time.sleep(0.005)
            if step.index == 5 and fleet.rank == 0:
                (Path(case["folder"]) / "begun").write_text(str(os.getpid()))
            if step.index == 8 and fleet.rank == 1 and case["how"] == "agrees alone":
                fleet.any(True)
            if step.index == 8 and fleet.rank == 1 and case["how"] == "bad gradient":
                model.weight.data.fill_(float("nan"))


def meets(case: dict[str, Any]) -> list[float]:
    """Each worker asks the others to come after a number of local steps of its own; then all leave."""
    with paceline.join("equal", combine=make(case), quiet=True, device="cpu") as fleet:
        model = fleet.model(nn.Linear(2, 1, bias=False).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in fleet.steps(line_data(case["length"]), global_batch=8, micro_batch=4):
            for x, y in step:
                step.backward(((model(x).squeeze(1) - y) ** 2).mean())
            step.commit(optimizer)
            time.sleep(case.get("sleep", 0.0))
            if step.index == case["at"][fleet.rank]:
                fleet.any(False)
                met: list[float] = model.weight.flatten().tolist()
                return met
    return []
