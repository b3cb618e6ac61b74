"""Trainings that bring an elastic fleet into awkward places: half-finished rounds, scripts with code of their own."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from functools import partial
from typing import Any

import torch
from deadline_cases import Deadline
from elastic_cases import BATCH, LENGTH, RATE, Ghost, beside, data, flat, network, pause, wait_for
from torch import nn
from torch.utils.data import IterableDataset

import paceline
from paceline.transport.elastic import handover
from paceline.transport.elastic.transport import Elastic
from paceline.transport.engines import gloo, small_sums

ME = os.environ.get("PACELINE_WORKER", "")


def half_finish(steps: Any, *, at: int) -> None:
    """Worker 0 dies in the round of step ``at`` when worker 1 has its result and the others have not."""
    gradients, finished = steps.gradients, small_sums.SmallExchange.finish
    sent = small_sums.SmallExchange._send
    run, run_in_background = gradients.exchange.run, gradients.exchange.run_in_background
    armed_now = {"now": False}

    def arm(label: str) -> None:
        armed_now["now"] = ME == "0" and label == f"the round of step {at}"

    def armed(write: Any, samples: int, label: str) -> Any:
        arm(label)
        return told(label, run(write, samples, label))

    def armed_in_background(seal: Any, label: str) -> Any:
        arm(label)
        return told(label, run_in_background(seal, label))

    def told(label: str, ended: Any) -> Any:
        if ME == "1" and label == f"the round of step {at}":
            beside("told").touch()
        return ended

    def send(self: Any, others: Any) -> None:
        sent(self, [other for other in others if other == 1 or not armed_now["now"]])

    def finish(self: Any, check: Any) -> None:
        if armed_now["now"]:
            wait_for(beside("told"))
            os.kill(os.getpid(), signal.SIGKILL)
        finished(self, check)

    gradients.exchange.run, gradients.exchange.run_in_background = armed, armed_in_background
    small_sums.SmallExchange._send = send  # type: ignore[method-assign]
    small_sums.SmallExchange.finish = finish  # type: ignore[method-assign]


def hand_half_over() -> None:
    """Dies when it has handed a round's result to the first of those who lack it."""

    def give(self: Any, forming: Any, name: str, giver: int, behind: Any) -> None:
        if forming.group.rank != giver:
            hand_over(self, forming, name, giver, behind)
            return
        for number, tensor in enumerate(self._lanes[name].tensors):
            forming.group.send(handover.bytes_of(tensor), behind[0], number).wait(lambda: None)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)

    hand_over = handover.HandOver._tensors
    handover.HandOver._tensors = give  # type: ignore[method-assign]


def die_at_the_end() -> None:
    """Dies when all have ended the run's last call, and none comes back to it."""
    gather = Elastic.gather

    def gather_and_die(self: Any, label: str, value: Any) -> Any:
        answers = gather(self, label, value)
        if label == "the end of the run":
            os.kill(os.getpid(), signal.SIGKILL)
        return answers

    Elastic.gather = gather_and_die  # type: ignore[method-assign]


def begin(args: dict[str, Any]) -> Any:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    pace = args.get("pace", "adaptive")
    if args.get("doors"):
        open_doors_while_forming()
    if args.get("die_at_the_end") == ME:
        die_at_the_end()
    return paceline.join(Deadline(**pace) if isinstance(pace, dict) else pace)


def train(args: dict[str, Any]) -> dict[str, Any]:
    """The training of elastic_cases, with what ``args`` ask for besides."""
    ghost, slept, lines = Ghost(args), False, Lines() if args.get("lines") else None
    with begin(args) as fleet:
        model = fleet.model(normed() if args.get("norm") else network())
        options = args.get("sgd", {"momentum": 0.9})
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, **options)
        if not args.get("untracked"):
            fleet.track(optimizer=optimizer)
        if args.get("scaler"):
            fleet.track(scaler=torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3))
        order = (
            (lambda epoch: torch.randperm(LENGTH, generator=torch.Generator().manual_seed(epoch)).tolist())
            if (args.get("order"))
            else None
        )
        evaluations = []
        for epochs in args.get("loops", [args.get("epochs", 4)]):
            steps = fleet.steps(
                Stream() if args.get("stream") else data(),
                global_batch=BATCH,
                micro_batch=4,
                epochs=epochs,
                order=order,
                lr_scaling=args.get("varying", "none"),
            )._loop
            if "half" in args and ME in "01" and not os.environ.get("PACELINE_TEST_WHOLE"):
                half_finish(steps, at=args["half"])
            if args.get("hands_half_over") == ME:
                hand_half_over()
            if args.get("leave_while_settling") == ME:
                leave_while_settling(steps)
            if args.get("die_while_settling") == ME:
                die_while_settling(steps)
            for step in steps:
                if "freeze_at" in args and step.index >= args["freeze_at"]:
                    model[0].requires_grad_(False)
                for x, y in step:
                    pause(args.get("pause_s", 0.01))
                    if args.get("sleeps") == [ME, step.index] and not slept:
                        slept = True
                        beside("asleep").touch()
                        wait_for(beside("wake"))
                    ghost.at("in work", step.index)
                    if args.get("raises") == [ME, step.index]:
                        raise RuntimeError("the script's own mistake")
                    if step.index >= args.get("add_from", step.index + 1):
                        step.add(**{args.get("figure", "seen"): len(x)})
                    step.backward(nn.functional.cross_entropy(model(x), y))
                if args.get("own"):
                    own_code(args["own"], step, model, optimizer)
                else:
                    step.commit(optimizer)
                ghost.at("after commit", step.index)
                if args.get("evaluate") and step.index % args["evaluate"] == args["evaluate"] - 1:
                    beside(f"evaluating.{ME}.{step.index}").touch()
                    found = fleet.evaluate(partial(score, args, step.index), data(), sums="n")
                    evaluations.append([step.index, found["n"], found["count"]])
    return {
        "cut": lines.cut() if lines is not None else 0,
        "deaf": lines.deaf() if lines is not None else 0,
        "weights": flat(model.parameters()) + [float(v) for buffer in model.buffers() for v in buffer.flatten()],
        "scale": [thing.state_dict() for name, thing in fleet._context.tracking.things.items() if name == "scaler"],
        "evaluations": evaluations,
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }


def score(args: dict[str, Any], step: int, x: Any, y: Any) -> dict[str, int]:
    if "slow_score" in args:
        beside(f"scoring.{ME}.{step}").touch()
        time.sleep(args["slow_score"])
        beside(f"scored.{ME}.{step}").touch()
    return {"n": len(x)}


class Lines:
    """Connections that the script has for itself, a new one every few milliseconds, as loggers and loaders do."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._ends: list[socket.socket] = []
        self._doors: list[socket.socket] = []
        self._over = False
        self._thread = threading.Thread(target=self._open, daemon=True)
        self._thread.start()

    def _open(self) -> None:
        while not self._over and len(self._ends) < 600:
            self._ends += [socket.create_connection(self._server.getsockname()), self._server.accept()[0]]
            self._doors.append(socket.create_server(("127.0.0.1", 0)))
            time.sleep(0.005)

    def cut(self) -> int:
        """How many of them somebody shut."""
        self._over = True
        self._thread.join()
        shut = 0
        for end in self._ends:
            end.setblocking(False)
            try:
                shut += end.recv(1) == b""
            except BlockingIOError:
                continue
        return shut

    def deaf(self) -> int:
        """How many of its own listeners let nobody in any more."""
        return sum(not reachable(door.getsockname()) for door in self._doors)


def reachable(address: Any) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(address) == 0


def open_doors_while_forming() -> None:
    """Another thread of the script happens to open listeners while the group is built."""
    create, doors = gloo.gloo_device, []

    def meanwhile(host: str, port: int) -> Any:
        doors.extend(socket.create_server(("127.0.0.1", 0)) for _ in range(20))
        return create(host, port)

    gloo.gloo_device = meanwhile


def normed() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


class Stream(IterableDataset[Any]):
    """Every worker has a stream of its own, of the same length."""

    def __iter__(self) -> Any:
        return iter([data()[index] for index in range(LENGTH)])


def own_code(kind: str, step: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What a user may do with the fleet's mean gradient after ``step.reduce()``."""
    step.reduce()
    if kind == "clip":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        step.commit(optimizer)
    elif kind == "decay":
        for parameter in model.parameters():
            parameter.grad.add_(parameter.detach(), alpha=0.1)
        step.commit(optimizer)
    elif kind == "commit clips":
        step.commit(optimizer, clip_norm=0.1)
    elif kind == "zero":
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        step.commit()


def leave_while_settling(steps: Any) -> None:
    """SIGTERM comes while the fleet is formed anew at a step boundary."""
    facts = steps.membership.facts

    def late() -> Any:
        if steps.index > 0 and not steps.membership.leaving:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
        return facts()

    steps.membership.facts = late


def die_while_settling(steps: Any) -> None:
    """Dies when others have, and the generation without them has been formed."""
    facts = steps.membership.facts

    def late() -> Any:
        if steps.index > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return facts()

    steps.membership.facts = late
