"""Trainings with local steps, and what each worker saw."""

from __future__ import annotations

from typing import Any

import torch
from exact_cases import Net, Tokens
from torch import nn

import paceline


def make(case: dict[str, Any]) -> Any:
    if case["combine"] == "gradients":
        return "gradients"
    outer = paceline.Outer(**case["outer"]) if case.get("outer") else None
    if case["combine"] == "average":
        return paceline.Averaging(**case.get("settings", {}), **({"outer": outer} if outer else {}))
    return paceline.ElasticAverage(**case.get("settings", {}))


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
            if step.ends_epoch or (case.get("every") and step.index % case["every"] == 0):
                hit = fleet.evaluate(lambda x, y, n: {"hit": (model(x).argmax(1) == y).sum()}, data)
                evaluations.append([hit["hit"], hit["count"]])
            if case.get("save") and step.ends_epoch and step.epoch == 0:
                fleet.save(case["save"], extra={"epoch": step.epoch})
        return {
            "parameters": torch.cat([p.detach().flatten() for p in model.state_dict().values()]).tolist(),
            "evaluations": evaluations,
            "rounds": rounds,
            "local": local,
            "extra": extra,
            "records": [
                {"epoch": r.epoch, "ranges": r.ranges, "samples": r.samples, "sums": dict(r.sums)}
                for r in fleet.history
            ],
        }


def overlap_counts(case: dict[str, Any]) -> list[int]:
    """Which samples this worker saw in one epoch."""
    seen: list[int] = []
    with paceline.join("equal", combine=paceline.ElasticAverage(overlap=case["overlap"]), quiet=True) as fleet:
        model = fleet.model(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        data = torch.utils.data.TensorDataset(torch.arange(case["length"], dtype=torch.float32).unsqueeze(1))
        for step in fleet.steps(data, global_batch=8, micro_batch=4):
            for (x,) in step:
                seen += [int(value) for value in x.flatten()]
                step.backward(model(x).mean())
            step.commit(optimizer)
    return seen
