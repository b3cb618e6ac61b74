"""Trainings on computers of their own, which write down every step that they commit and what they then hold."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import sys
import time
from typing import Any

import elastic_cases
import netns
import switch
import torch
from torch import nn

import paceline
from paceline.roster import client, wire
from paceline.transport import Elastic, heartbeat
from paceline.transport.engines import small_sums
from paceline.transport.group import Already


def train(args: dict[str, Any]) -> dict[str, Any]:
    """As `elastic_cases.train`, with a witness of every commit; on the computer that COMPUTER names."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    move()
    shift_clock(float(os.environ.get("CLOCK_AHEAD_S", "0")))
    hold_before(args.get("hold_before", {}).get(os.environ["PACELINE_WORKER"]))
    witness = elastic_cases.beside(f"commits.{os.environ['PACELINE_WORKER']}")
    with paceline.join(args.get("pace", "adaptive")) as fleet, witness.open("a", buffering=1) as file:
        model = fleet.model(elastic_cases.network())
        optimizer = torch.optim.SGD(model.parameters(), lr=elastic_cases.RATE, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
        fleet.track(optimizer=optimizer, scheduler=scheduler)
        data, batch = elastic_cases.data(), elastic_cases.BATCH
        steps = fleet.steps(data, global_batch=batch, micro_batch=4, epochs=args["epochs"])._loop
        if "trap" in args:
            steps.membership.give_state = lambda held: with_code(args["trap"])
        scissors = Scissors(args.get("cut_in_round"))
        for step in steps:
            scissors.step = step.index
            for x, y in step:
                elastic_cases.pause(args.get("pause_s", 0.02))
                step.backward(nn.functional.cross_entropy(model(x), y))
            step.commit(optimizer)
            scheduler.step()
            if step.applied:  # not so when the fleet went on without this worker
                file.write(json.dumps([step.index, step.record.generation, digest(model), time.time()]) + "\n")
            be_busy(args, step.index)
    return {
        "weights": elastic_cases.flat(model.parameters()),
        "momentum": [float(v) for s in optimizer.state.values() for v in s["momentum_buffer"].flatten()],
        "schedule": scheduler.state_dict()["last_epoch"],
    }


def move() -> None:
    """To a computer of its own: the roster then sees nothing of this process but what comes over the network."""
    wire.DEAD_PATH_MS = int(os.environ.get("DEAD_PATH_MS", wire.DEAD_PATH_MS))
    heartbeat.SILENT_S = float(os.environ.get("SILENT_S", heartbeat.SILENT_S))
    if "COMPUTER" in os.environ:
        of_switch = ":" in os.environ["COMPUTER"]
        (switch.enter if of_switch else netns.enter)(os.environ["COMPUTER"])
        client.computer = lambda: os.environ["COMPUTER"]


def shift_clock(seconds: float) -> None:
    """This computer's clock is ahead by so much."""
    true = time.time
    time.time = lambda: true() + seconds


def hold_before(label: str | None) -> None:
    """This worker waits before that call until its cable is cut, says so by a file *held*, and goes on at *go*."""
    make = Elastic.gather

    def gather(transport: Elastic, called: str, value: Any) -> list[Any]:
        if called == label and not elastic_cases.beside("held").exists():
            elastic_cases.beside("held").touch()
            elastic_cases.wait_for(elastic_cases.beside("go"))
        return make(transport, called, value)

    Elastic.gather = gather  # type: ignore[method-assign]


class Scissors:
    """Cuts the leader's own cable in the round of a step, when it has everybody's part and right before it sends its
    own: the leader then has the sum, and the others have not."""

    def __init__(self, when: int | None) -> None:
        self.step = 0
        self._when = when
        if when is not None and os.environ["PACELINE_WORKER"] == "0":
            self._send, small_sums.SmallExchange._send = (
                small_sums.SmallExchange._send,
                lambda *args: self._watch(*args),
            )

    def _watch(self, exchange: small_sums.SmallExchange, others: Any) -> None:
        if self.step == self._when:
            for work in exchange.works[0]:  # of three in one turn, each hears from all
                work.wait(lambda: None)
            exchange.works[0] = [Already() for _ in exchange.works[0]]  # the engine tells it once
            netns.ip(*json.loads(os.environ["CABLE"]))
        self._send(exchange, others)


class Trap:
    """Unpickled by a careless reader, it makes a file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


def with_code(path: str) -> list[torch.Tensor]:
    buffer = io.BytesIO()
    torch.save({"structure": {"agreed": {}, "models": Trap(path)}, "places": []}, buffer)
    return [torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)]


def digest(model: nn.Module) -> str:
    held = hashlib.sha256()
    for parameter in model.parameters():
        held.update(parameter.detach().numpy().tobytes())
    return held.hexdigest()[:16]


def be_busy(args: dict[str, Any], step: int) -> None:
    """This worker does something of its own: one call that keeps the interpreter, or until it is *enough*."""
    if str(args.get("busy")) != os.environ["PACELINE_WORKER"] or step != args["busy_at"]:
        return
    if args["holds"]:
        sum(range(int(args["busy_s"] * additions_per_second())))
        return
    while not elastic_cases.beside("enough").exists():
        time.sleep(0.05)


def additions_per_second() -> float:
    """In one call into the library, in which no other thread of this process gets to run."""
    best = 0.0
    for _ in range(10):  # others may have the processor in between
        began = time.perf_counter()
        sum(range(1_000_000))
        best = max(best, 1_000_000 / (time.perf_counter() - began))
    return best
