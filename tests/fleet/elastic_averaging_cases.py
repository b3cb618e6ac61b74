"""Averages whose workers come and go, and a small one of them worked out by hand from its log."""

from __future__ import annotations

import logging
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from elastic_cases import BATCH, EPOCHS, LENGTH, Ghost, beside, data, network, pause, wait_for
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.averaging.weighted_average import Outer
from paceline.transport.engines.small_sums import SmallExchange

RATE = 0.05


def combine_of(args: dict[str, Any]) -> Any:
    settings = dict(args.get("settings", {}))
    if outer := args.get("outer"):
        settings["outer"] = Outer(**outer)
    return {"average": paceline.Averaging, "elastic-average": paceline.research.ElasticAverage}[args["combine"]](
        **settings
    )


def train(args: dict[str, Any]) -> dict[str, Any]:
    """Local SGD with momentum and rounds; dies where it is told to."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    ghost, evaluated = Ghost(args), []
    with paceline.join(args.get("pace", "equal"), combine=combine_of(args)) as fleet:
        model = fleet.model(normalised() if args.get("batch_norm") else network())
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
        fleet.track(optimizer=optimizer)
        steps: Any = fleet.steps(data(), global_batch=BATCH, micro_batch=6, epochs=args.get("epochs", EPOCHS))._loop
        haunt(ghost, steps)
        for step in steps:
            for x, y in step:
                pause(args.get("pause_s", 0.01))
                ghost.at("in work", step.round)
                step.backward(nn.functional.cross_entropy(model(x), y))
            step.commit(optimizer)
            ghost.at("after commit", step.round)
            if args.get("evaluate") and step.ends_epoch:
                scored = partial(score, model, lambda: ghost.at("evaluating", steps.rounds))
                found = fleet.evaluate(scored, data(), sums=("n", "sum"))
                assert found["n"] == found["count"] == LENGTH, found
                evaluated.append([step.epoch, found["sum"]])
        rounds = steps.rounds
    return {"weights": whole(model), "rounds": rounds, "evaluated": evaluated}


def normalised() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


def whole(model: nn.Module) -> list[float]:
    return [float(value) for tensor in model.state_dict().values() for value in tensor.flatten()]


def score(model: nn.Module, begin: Any, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    begin()
    return {"n": len(x), "sum": model(x).double().sum()}


def haunt(ghost: Ghost, steps: Any) -> None:
    """Points inside the engine: before a round, between its two sums, after it, and around a newcomer's state."""
    periods, members = steps.combine.periods, steps.membership
    merging = periods.merge
    write, part, take = periods._write_round, merging.part, merging.take
    give, taking = members.give_state, members.take_over

    def before_round(*args: Any) -> Any:
        ghost.at("before round", steps.rounds)
        return write(*args)

    def in_round(*args: Any) -> Any:
        ghost.at("in round", steps.rounds)
        return part(*args)

    def after_round(*args: Any) -> Any:
        ghost.at("after round", steps.rounds)
        return take(*args)

    def giving(*args: Any) -> Any:
        ghost.at("giving", 0)
        return give(*args)

    def taken(*args: Any) -> Any:
        ghost.at("taking", 0)
        return taking(*args)

    periods._write_round, merging.part, merging.take = before_round, in_round, after_round
    members.give_state, members.take_over = giving, taken
    _lose_the_second_sum(ghost, steps)


def _lose_the_second_sum(ghost: Ghost, steps: Any) -> None:
    """A leader that dies when the second worker has a round's result and the third has not."""
    transport, elements = steps.loop.transport, sum(p.numel() for p in steps.gradients.everything)
    sent, finished = SmallExchange._send, SmallExchange.finish
    dies = any(point == "half told" for point, _ in ghost.points)

    def averages(exchange: Any) -> bool:
        return transport.size > 2 and any(part.numel() == elements for part in exchange.wires.own.parts)

    def send(exchange: Any, others: Any) -> None:
        if not (dies and transport.rank == 0 and averages(exchange)):
            sent(exchange, others)
            return
        mark = beside(f"told.{steps.rounds}")
        for other in others:
            if other == 2:
                wait_for(mark)
                ghost.at("half told", steps.rounds)
            sent(exchange, [other])

    def finish(exchange: Any, check: Any) -> None:
        mark = beside(f"told.{steps.rounds}")
        finished(exchange, check)
        if transport.rank == 1 and averages(exchange):
            mark.touch()

    SmallExchange._send, SmallExchange.finish = send, finish  # type: ignore[method-assign]


def line_data(length: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(length, 2, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x @ torch.tensor([1.0, -2.0], dtype=torch.float64) + 0.5)


LINE = {"length": 72, "global_batch": 6, "lr": 0.1}


def line(args: dict[str, Any]) -> list[float]:
    """Least squares with plain SGD from zero, in the dataset's own order: small enough to be worked out by hand."""
    ghost = Ghost(args)
    with paceline.join("equal", combine=combine_of(args), quiet=True, device="cpu") as fleet:
        model = nn.Linear(2, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        model = fleet.model(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=LINE["lr"])
        fleet.track(optimizer=optimizer)
        steps: Any = fleet.steps(
            line_data(int(LINE["length"])), global_batch=int(LINE["global_batch"]), micro_batch=6, shuffle=False
        )._loop
        haunt(ghost, steps)
        for step in steps:
            for x, y in step:
                time.sleep(0.01)
                step.backward(((model(x).squeeze(1) - y) ** 2).mean() / 2)
            step.commit(optimizer)
        weight: list[float] = model.weight.flatten().tolist()
    return weight


def line_by_hand(folder: Path, *, alpha: float | None = None) -> list[float]:
    """What the committed rounds give: local steps over the positions in the log, then weights by samples (or springs
    with ``alpha``) over those who were in the round. A period is dealt to those who were in the round before it."""
    from paceline.observe import read_log

    x, y = line_data(int(LINE["length"])).tensors
    run = read_log(folder / "run")
    centre = torch.zeros(2, dtype=torch.float64)
    local = {worker: centre.clone() for worker in run.records[0].workers}
    for number, record in enumerate(run.records):
        moved, batch = {}, int(LINE["global_batch"]) // len(run.records[max(0, number - 1)].workers)
        for worker, ranges in zip(record.workers, record.ranges, strict=True):
            at = local[worker] if alpha is not None else centre.clone()
            where = torch.tensor([p for a, b in ranges for p in range(a, b)], dtype=torch.long)
            for piece in where.split(batch):
                at = at - LINE["lr"] * ((x[piece] @ at - y[piece]) @ x[piece]) / len(piece)
            moved[worker] = at
        apart = {worker: at - centre for worker, at in moved.items()}
        if alpha is None:
            weights = [samples / sum(record.samples) for samples in record.samples]
            centre = centre + sum(w * apart[worker] for w, worker in zip(weights, record.workers, strict=True))
        else:
            local = {worker: at - alpha * apart[worker] for worker, at in moved.items()}
            centre = centre + sum(alpha * d for d in apart.values())
    return [float(value) for value in centre]
