"""Trainings whose workers come and go, and the same trainings on one machine, replayed from the log."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from exact_cases import many_cores, whole
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.checkpoint import parts
from paceline.feed import Feed
from paceline.observe import read_log
from paceline.transport import Elastic
from paceline.transport.elastic import handover
from paceline.transport.elastic.handover import STATE_TAGS, SendingState
from paceline.transport.engines import small_sums

LENGTH, BATCH, EPOCHS, RATE = 160, 16, 4, 0.05


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(LENGTH, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (LENGTH,), generator=generator)
    return TensorDataset(x, y)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def flat(tensors: Iterable[torch.Tensor]) -> list[float]:
    """Their numbers, whole where processes hold parts."""
    return [float(value) for tensor in tensors for value in whole(tensor.detach()).flatten()]


def beside(name: str) -> Path:
    """A file beside the run's folder, by which workers and the test tell each other things."""
    return Path(os.environ["PACELINE_RUN_DIR"]).with_name(name)


def pause(seconds: float) -> None:
    """Work takes time; none any more once there is a file *hurry*."""
    if not beside("hurry").exists():
        time.sleep(seconds)


def wait_for(file: Path) -> None:
    until = time.monotonic() + 60
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.005)


class Ghost:
    """Kills this very process at a given point of a given step, once for each worker that is told to."""

    def __init__(self, args: dict[str, Any]) -> None:
        self.points = args.get("die", {}).get(os.environ["PACELINE_WORKER"], [])

    def at(self, point: str, step: int) -> None:
        for entry in self.points:
            name, when = entry
            mark = beside(f"died.{os.environ['PACELINE_WORKER']}.{name}.{when}")
            if name == point and step >= when and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)


def train(args: dict[str, Any]) -> dict[str, Any]:
    """Plain SGD with momentum, a schedule and slow micro-batches; dies where it is told to."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    if args.get("many_cores"):
        many_cores()
    if args.get("no_small_sums"):
        small_sums.MOST_BYTES = 0
    ghost, steps_seen, slot = Ghost(args), [], os.environ["PACELINE_WORKER"]
    with paceline.join(args.get("pace", "adaptive"), combine=args.get("combine", "gradients")) as fleet:
        net = network()
        if "frozen" in args:
            net.frozen = frozen(args["frozen"], slot)
        model = fleet.model(net, shard=bool(args.get("shard")))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=RATE, momentum=0.9)
        scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
        steps = fleet.steps(data(), global_batch=BATCH, micro_batch=4, epochs=args.get("epochs", EPOCHS))._loop
        if args.get("one_cycle"):
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=len(steps))
        fleet.track(optimizer=optimizer, scheduler=scheduler)
        haunt(ghost, steps)
        left_out = watch_what_is_left_out(steps)
        for step in steps:
            ghost.at("before work", step.index)
            for x, y in step:
                pause(args.get("pause_s", 0.01))
                ghost.at("in work", step.index)
                step.backward(nn.functional.cross_entropy(model(x), y))
            if args.get("asks"):  # when the sums that began in backward are over
                time.sleep(0.05)
                ghost.at("before asking", step.index)
                fleet.any(False)
            ghost.at("before round", step.index)
            step.commit(optimizer)
            ghost.at("after commit", step.index)
            if step.index == args.get("frozen", {}).get("moves"):
                model.frozen.data.add_(1.0)  # no version counts this
            scheduler.step()
            steps_seen.append(step.index)
            if args.get("evaluate") and step.index % args["evaluate"] == 0:
                found = fleet.evaluate(lambda x, y: {"n": len(x)}, data(), sums="n")
                assert found["n"] == found["count"] == LENGTH, found
            if args.get("save") and step.index % args["save"] == 0:
                ghost.at("before saving", step.index)
                fleet.save(Path(os.environ["PACELINE_RUN_DIR"]) / "last.paceline")
        ghost.at("after the loop", 0)
        size = fleet.world_size
        weights, momentum = flat(trained), flat(s["momentum_buffer"] for s in optimizer.state.values())
    return {
        "weights": weights,
        "momentum": momentum,
        "schedule": scheduler.state_dict()["last_epoch"],
        "steps": steps_seen,
        "size": size,
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        **({"frozen": flat([model.frozen]), "left_out": left_out} if "frozen" in args else {}),
    }


def frozen(args: dict[str, Any], slot: str) -> nn.Parameter:
    """A part that is the same on all workers, except for those whose script ``differs``."""
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(5))
    return nn.Parameter(numbers + args.get("differs", {}).get(slot, 0.0), requires_grad=False)


def watch_what_is_left_out(steps: Any) -> list[int]:
    """For each part of each state that this worker gives: its bytes if it is left out, and else 0."""
    holding, sizes = steps.loop.replica.holding, []
    leave_out = holding.leave_out

    def watched(part: Any, held: Any) -> Any:
        digest = leave_out(part, held)
        sizes.append(part.memory.numel() if digest else 0)
        return digest

    holding.leave_out = watched
    return sizes


def haunt(ghost: Ghost, steps: Any) -> None:
    """Points inside the engine: between the round and the commit, and while a newcomer is given or takes its state."""
    gradients, members = steps.gradients, steps.membership
    mean, give, take = gradients.mean, members.give_state, members.take_over

    def after_round(*args: Any, **more: Any) -> Any:
        ghost.at("after round", steps.index)
        return mean(*args, **more)

    def giving(*args: Any) -> Any:
        ghost.at("giving", steps.index)
        return give(*args)

    def taking(*args: Any) -> Any:
        ghost.at("taking", 0)
        return take(*args)

    gradients.mean, members.give_state, members.take_over = after_round, giving, taking
    start = gradients._start_sum

    def in_round(flat: Any) -> Any:
        start(flat)
        ghost.at("in round", steps.index)

    gradients.buckets._start = in_round
    haunt_messages(ghost)


def haunt_messages(ghost: Ghost) -> None:
    """Points inside a state's way to a newcomer, by the number of the message; the state travels in many of them."""
    put, start_receive = SendingState.put, Elastic.start_receive

    def sending(self: SendingState, piece: torch.Tensor) -> None:
        put(self, piece)
        ghost.at("sending", self._number)

    def receiving(self: Elastic, tensor: torch.Tensor, source: int, tag: int) -> Any:
        ghost.at("receiving", tag - STATE_TAGS)
        return start_receive(self, tensor, source, tag)

    handover.PIECE, parts.LEAST = 1 << 10, 16
    SendingState.put, Elastic.start_receive = sending, receiving  # type: ignore[method-assign]


def replay(folder: Path) -> list[float]:
    """The run's committed steps on one machine: from the positions in its log."""
    run = read_log(folder / "run")
    model, samples = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    feed = Feed(LENGTH, workers=1, seed=0)
    for number, record in enumerate(run.records):
        if feed.epoch != record.epoch:
            feed.open(record.epoch)
        if not record.applied:  # nobody had done anything by the deadline
            assert not any(record.ranges)
            continue
        where = feed.indices([piece for mine in record.ranges for piece in mine])
        x, y = samples[where.tolist()]
        optimizer.param_groups[0]["lr"] = RATE * 0.99**number
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return flat(model.parameters())
