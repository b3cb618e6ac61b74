"""Loops that try to break rounds with a deadline: left early, entered again, misused, saved and scored in mid-step."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from deadline_cases import Deadline, Stalls, bound_kept_sums
from exact_cases import Net, Tokens
from failure_cases import hear_everybody_out
from torch import nn
from torch.utils.data import DataLoader, Dataset

import paceline

RANK = int(os.environ.get("RANK", "0"))


class Numbered(Dataset[Any]):
    """Sample i is (features, class, i)."""

    def __init__(self, length: int) -> None:
        self.tokens = Tokens(torch.float64, length)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.tokens.x[index], self.tokens.y[index], index


class Tight(torch.autograd.Function):
    """The identity; its backward runs out of memory with more than ``most`` samples at once."""

    most = 6

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> torch.Tensor:
        if len(grads[0]) > Tight.most:
            raise torch.OutOfMemoryError("out of memory, for the test")
        return grads[0]


def net() -> Net:
    torch.manual_seed(1)
    return Net().double()


def flat(model: nn.Module) -> list[float]:
    values: list[float] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return values


def pace(case: dict[str, Any]) -> Deadline:
    return Deadline(**case.get("pace", {}))


# -- whole trainings ---------------------------------------------------------------------------------------------------


def train(case: dict[str, Any]) -> dict[str, Any]:
    """A training; ``case`` says what is unusual about its loop. Tells what each step counted and trained on."""
    bound_kept_sums(case)
    with paceline.join(pace(case), quiet=True, device="cpu") as fleet:
        model = fleet.model(net())
        if case.get("tight"):
            model.norm.register_forward_hook(lambda layer, inputs, output: Tight.apply(output))
        called = torch.compile(model, backend="eager") if case.get("compiled") else model
        half = len(list(model.parameters())) // 2
        groups = [list(model.parameters())[:half], list(model.parameters())[half:]]
        optimizers = [torch.optim.SGD(group, lr=0.1, momentum=0.9) for group in groups]
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3, enabled="overflow" in case)
        fleet.track(first=optimizers[0], second=optimizers[1], scaler=scaler)
        data: Any = Numbered(case["length"])
        if case.get("loaders"):
            data = DataLoader(data, batch_size=case["micro_batch"], num_workers=case["loaders"], shuffle=True)
        steps = fleet.steps(
            data,
            global_batch=case["global_batch"],
            micro_batch=case["micro_batch"],
            epochs=case.get("epochs", 1),
            fixed_micro_batch=case.get("fixed_micro_batch"),
            order=(lambda epoch: list(range(case["length"]))[:: -1 if epoch % 2 else 1]) if "order" in case else None,
        )._loop
        stalls, told, trained = Stalls(fleet.rank, case, steps), [], []
        for step in steps:
            stalls.begin(step.index)
            taken = 0
            for x, y, numbers in step:
                stalls.wait()
                taken += 1
                Tight.most = 6 if step.index < 2 or taken == 1 else 2  # at first, and after one that went well
                if case.get("skip") and taken % case["skip"] == 0:
                    step.skip()
                    continue
                loss = nn.functional.cross_entropy(called(x), y)
                if case.get("overflow") == [fleet.rank, step.index]:
                    loss = loss * 1e308
                step.backward(loss)
                trained += [(step.index, number) for number in numbers.tolist()]
            if case.get("combine"):
                step.reduce()
                if step.applied:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                step.commit(*optimizers)
            else:
                step.commit(*optimizers, clip_norm=0.5)
            told.append([step.index, step.epoch, step.record.ranges, step.applied, sum(step.record.samples)])
            if case.get("evaluate_after") == step.index:
                fleet.evaluate(lambda x, y, n: {"hit": model(x).argmax(1) == y}, Numbered(50))
        return {"parameters": flat(model), "steps": told, "trained": trained, "scale": scaler.get_scale()}


# -- loops that are left -----------------------------------------------------------------------------------------------


def leave_and_begin_again(case: dict[str, Any]) -> dict[str, Any]:
    """Leave a loop in the middle of a step, and make a new one, or enter the same one again."""
    with paceline.join(pace(case), quiet=True, device="cpu") as fleet:
        model = fleet.model(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fleet.track(optimizer=optimizer)
        data = Numbered(case["length"])
        options = {"global_batch": case["global_batch"], "micro_batch": case["micro_batch"]}
        stalls, began = Stalls(fleet.rank, case), time.monotonic()

        def work(step: Any) -> None:
            stalls.begin(step.index)
            for x, y, _ in step:
                stalls.wait()
                step.backward(nn.functional.cross_entropy(model(x), y))

        steps = fleet.steps(data, **options)._loop
        for step in steps:
            if step.index == case["leave_at"]:
                if fleet.rank in case.get("dawdle", ()):
                    time.sleep(0.15)
                elif case.get("half_done"):
                    work(step)
                break
            work(step)
            step.commit(optimizer)
        told = []
        again = steps if case.get("same") else fleet.steps(data, **options) if case.get("again") else ()
        for step in again:
            work(step)
            step.commit(optimizer)
            told.append([step.index, step.epoch, step.record.ranges])
        agreed = fleet.any(False)
    seconds, proxy_lives = time.monotonic() - began, steps.combine._deadlines.proxy._thread.is_alive()
    return {
        "parameters": flat(model),
        "steps": told,
        "seconds": seconds,
        "proxy_lives": proxy_lives,
        "agreed": agreed,
    }


# -- between the begin of a step and its work --------------------------------------------------------------------------


class SlowSave:
    """Something to track whose state takes long to write: until the round of the step under way has closed."""

    steps: Any = None
    """The loop in whose step it is saved; None before that: then it takes no time."""

    def state_dict(self) -> dict[str, Any]:
        given_up = time.monotonic() + 60.0
        while self.steps is not None and self.steps.training.index == self.steps.index:
            assert time.monotonic() < given_up, f"the round of step {self.steps.index} waits for a checkpoint"
            time.sleep(0.005)
        return {}

    def load_state_dict(self, state: Any) -> None:
        return


def save_before_the_work(case: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint written at the top of a step, which takes longer than the step's deadline."""
    with paceline.join(pace(case), quiet=True, device="cpu") as fleet:
        model = fleet.model(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        slow = SlowSave()
        fleet.track(optimizer=optimizer, slow=slow)
        if case.get("load"):
            fleet.load(case["load"])
        told = []
        steps = fleet.steps(
            Numbered(case["length"]), global_batch=case["global_batch"], micro_batch=case["micro_batch"]
        )._loop
        for step in steps:
            due = step.index == case["save_at"] and not case.get("load")
            slow.steps = steps if due else None
            if due and fleet.is_leader:
                fleet.save(case["save"])
            for x, y, _ in step:
                time.sleep(0.004)
                step.backward(nn.functional.cross_entropy(model(x), y))
            if due and not fleet.is_leader:  # it has worked before it comes here
                fleet.save(case["save"])
            step.commit(optimizer)
            told.append([step.index, step.epoch, step.record.ranges])
        return {"steps": told}


def score_before_the_work(case: dict[str, Any]) -> list[Any]:
    """Evaluations at the top of a step, while its clock runs and shares change."""
    results = []
    with paceline.join(Uneven(**case["pace"]), quiet=True, device="cpu") as fleet:
        model = fleet.model(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scored = Numbered(997)
        for step in fleet.steps(
            Numbered(case["length"]), global_batch=case["global_batch"], micro_batch=case["micro_batch"]
        ):
            if step.index % 3 == 2:
                time.sleep(0.013 * fleet.rank)
                result = fleet.evaluate(lambda x, y, n: {"sum": n.sum()}, scored, batch_size=100, sums="sum")
                results.append([result["sum"], result["count"]])
            for x, y, _ in step:
                time.sleep(0.004)
                step.backward(nn.functional.cross_entropy(model(x), y))
            step.commit(optimizer)
    return results


class Uneven(Deadline):
    """Shares that differ from step to step."""

    def plan(self, ask: Any) -> Any:
        plan = super().plan(ask)
        moved = min(plan.samples[-1], 3 * (ask.step % 4))
        samples = (plan.samples[0] + moved, *plan.samples[1:-1], plan.samples[-1] - moved)
        return type(plan)(**(vars(plan) | {"samples": samples}))


# -- misuse ------------------------------------------------------------------------------------------------------------


def misuse(case: dict[str, Any]) -> str:
    """The error that the given misuse raises under a deadline that never comes."""
    try:
        with paceline.join(Deadline(60.0), quiet=True, device="cpu") as fleet:
            model = fleet.model(net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in fleet.steps(Numbered(64), global_batch=32, micro_batch=4):
                for number, (x, y, _) in enumerate(step):
                    step.backward(nn.functional.cross_entropy(model(x), y))
                    if number == case["at"] and step.index == 1:
                        _misuse(case["do"], model, optimizer)
                step.commit(optimizer)
    except paceline.MisuseError as error:
        return str(error)
    except paceline.FleetError as error:
        return f"another's: {error}"
    return "no error"


def _misuse(what: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if what == "zero":
        optimizer.zero_grad()
    elif what == "zero in place":
        optimizer.zero_grad(set_to_none=False)
    elif what == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    elif what == "update":
        optimizer.step()


def unlike_orders(case: dict[str, Any]) -> str:
    """Workers whose custom orders part in the second epoch."""
    try:
        with paceline.join(pace(case), quiet=True, device="cpu") as fleet:
            model = fleet.model(net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            steps = fleet.steps(
                Numbered(96),
                global_batch=32,
                micro_batch=4,
                epochs=3,
                order=lambda epoch: [(i + (RANK if epoch == 1 else 0)) % 96 for i in range(96)],
            )._loop
            for step in steps:
                for x, y, _ in step:
                    time.sleep(0.002)
                    step.backward(nn.functional.cross_entropy(model(x), y))
                step.commit(optimizer)
    except ValueError as error:
        return str(error)
    return "no error"


# -- ends --------------------------------------------------------------------------------------------------------------


def end(case: dict[str, Any]) -> dict[str, Any]:
    """One worker comes to an end in the middle of a step; what the others say."""
    if case["how"] in ("raise", "interrupt"):  # all live to hear of it
        hear_everybody_out()
    try:
        with paceline.join(pace(case), quiet=True, device="cpu") as fleet:
            model = fleet.model(net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in fleet.steps(Numbered(4000), global_batch=48, micro_batch=4):
                for number, (x, y, _) in enumerate(step):
                    time.sleep(0.004)
                    if step.index >= 5 and number >= 1 and fleet.rank in case["who"]:
                        Path(case["folder"], f"ends.{fleet.rank}").touch()
                        _end(case["how"])
                    step.backward(nn.functional.cross_entropy(model(x), y))
                step.commit(optimizer)
    except (paceline.FleetError, ValueError, KeyboardInterrupt) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": "none"}


def _end(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60.0)
    elif how == "raise":
        raise ValueError("a bug in the script")
