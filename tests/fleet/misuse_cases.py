"""Two workers that are given bad input or do what would be averaged in silently; each case joins a fleet of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from feature_cases import BATCH, RANK, data, flat, join, loop, mse, net, sgd
from torch import nn

import paceline


def told(function: Callable[[], Any]) -> str:
    """What a call raised, in words."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# -- bad input before any work: the same fleet goes on -------------------------------------------------------------

BAD_SETTINGS: dict[str, dict[str, Any]] = {
    "global_batch=0": {"global_batch": 0},
    "micro_batch too large": {"micro_batch": BATCH + 1},
    "one micro_batch too large": {"micro_batch": [1, BATCH + 1]},
    "one entry missing": {"micro_batch": [4]},
    "epochs=-1": {"epochs": -1},
    "bad order": {"order": lambda epoch: [99]},
    "all dropped": {"global_batch": 64, "drop_last": True},
}


def settings(args: Any) -> dict[str, Any]:
    errors: dict[str, Any] = {}
    with join() as fleet:
        model = fleet.model(net())
        for name, options in BAD_SETTINGS.items():
            call = {"global_batch": BATCH} | options
            errors[name] = told(lambda call=call: fleet.steps(data(), **call))
        step = next(iter(fleet.steps(data(), global_batch=BATCH, micro_batch=3, shuffle=False)))
        for x, y in step:
            errors["not a scalar"] = told(lambda x=x: step.backward(model(x)))
            errors["weight"] = told(lambda x=x, y=y: step.backward(mse(model, x, y), weight=-1.0))
            step.backward(mse(model, x, y))
        errors["foreign"] = told(lambda: step.commit(sgd(nn.Linear(1, 1))))
        errors["clip_norm"] = told(lambda: step.commit(sgd(model), clip_norm=0))
        errors["no optimizer"] = told(step.commit)
        step.commit(sgd(model))
        expected = net()
        mse(expected, *(tensor[:BATCH] for tensor in data().tensors)).backward()
        sgd(expected).step()
        difference = torch.tensor(flat(model)) - torch.tensor(flat(expected))
        errors["difference"] = float(difference.abs().max())
    return errors


def at_join(args: Any) -> dict[str, str]:
    errors = {
        "three ratios": told(lambda: join("fixed:1,1,2")),
        "unknown pace": told(lambda: join("fastest")),
        "unknown combine": told(lambda: join("equal", combine="mean")),
    }
    folder = os.environ["PACELINE_RUN_DIR"]
    os.environ["PACELINE_RUN_DIR"] = "/proc/nowhere"
    errors["folder"] = told(join)
    os.environ["PACELINE_RUN_DIR"] = folder
    with join() as fleet:
        errors["afterwards"] = str(fleet.any(True))
    return errors


def sync_batch_norm(args: Any) -> dict[str, str]:
    results = {}
    for name, pace, options in (
        ("no default group", "equal", {"micro_batch": 3}),
        ("equal counts", "equal", {"micro_batch": 3}),
        ("unlike micro-batches", "equal", {"micro_batch": [3, 6]}),
        ("a tail", "equal", {"micro_batch": 3, "data": data(50)}),
        ("a share that is not whole", "equal", {"micro_batch": 4}),
        ("moving shares", "adaptive", {"micro_batch": 3}),
    ):
        if name == "equal counts":
            torch.distributed.init_process_group("gloo")
        with join(pace) as fleet:
            fleet.model(nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)))
            dataset = options.pop("data", data())
            results[name] = told(
                lambda d=dataset, o=options: fleet.steps(d, global_batch=BATCH, **o)  # type: ignore[misc]
            )
    torch.distributed.destroy_process_group()
    return results


# -- misuse in mid-step: the fleet ends with words that say what to do ---------------------------------------------


def begin(fleet: paceline.Fleet) -> tuple[nn.Module, torch.optim.Optimizer, paceline.Step, Iterator[Any]]:
    model = fleet.model(net())
    step = next(iter(fleet.steps(data(), global_batch=BATCH, micro_batch=2)))
    return model, sgd(model), step, iter(step)


def clears(set_to_none: bool, when: str) -> None:
    with join() as fleet:
        model, optimizer, step, batches = begin(fleet)
        step.backward(mse(model, *next(batches)))
        if when == "mid-step":
            optimizer.zero_grad(set_to_none=set_to_none)
        for x, y in batches:
            step.backward(mse(model, x, y))
        if when == "before commit":
            optimizer.zero_grad(set_to_none=set_to_none)
        step.commit(optimizer)


def plain_backward(before: int) -> None:
    with join() as fleet:
        model, _, step, batches = begin(fleet)
        for _ in range(before):
            step.backward(mse(model, *next(batches)))
        mse(model, *data().tensors).backward()


def half_done() -> None:
    with join() as fleet:
        model, optimizer, step, batches = begin(fleet)
        step.backward(mse(model, *next(batches)))
        step.commit(optimizer)


def no_backward() -> None:
    with join() as fleet:
        list(begin(fleet)[3])


def commits_twice() -> None:
    with join() as fleet:
        model = fleet.model(net())
        next(loop(fleet, model)).commit(sgd(model))


def not_committed() -> None:
    with join() as fleet:
        model = fleet.model(net())
        for step in fleet.steps(data(), global_batch=BATCH):
            for x, y in step:
                step.backward(mse(model, x, y))


def enters_again() -> None:
    """Leaves the loop in mid-step and enters it again: an error, or as if it had not."""
    with join() as fleet:
        model = fleet.model(net())
        optimizer = sgd(model)
        steps = fleet.steps(data(BATCH), global_batch=BATCH, micro_batch=2, shuffle=False)
        for step in steps:
            step.backward(mse(model, *next(iter(step))))
            break
        for step in steps:
            for x, y in step:
                step.backward(mse(model, x, y))
            step.commit(optimizer)
        expected = net()
        mse(expected, *data(BATCH).tensors).backward()
        sgd(expected).step()
        error = (torch.tensor(flat(model)) - torch.tensor(flat(expected))).abs().max()
        assert error < 1e-12, "half a gradient was kept"


MISUSES: dict[str, Callable[[], None]] = {
    "zero_grad to None in mid-step": lambda: clears(True, "mid-step"),
    "zero_grad to zero in mid-step": lambda: clears(False, "mid-step"),
    "zero_grad to None before commit": lambda: clears(True, "before commit"),
    "zero_grad to zero before commit": lambda: clears(False, "before commit"),
    "plain backward first": lambda: plain_backward(0),
    "plain backward after one": lambda: plain_backward(1),
    "plain backward after all": lambda: plain_backward(2),
    "half done": half_done,
    "no backward": no_backward,
    "commit twice": commits_twice,
    "not committed": not_committed,
    "enters again": enters_again,
}


def misuses(args: Any) -> dict[str, str]:
    return {name: told(misuse) for name, misuse in MISUSES.items()}


def one_misuses(args: Any) -> None:
    """Only worker 1 runs a plain backward: it says what it did, and worker 0 names it."""
    with join() as fleet:
        model = fleet.model(net())
        for step in loop(fleet, model):
            if step.index == 1 and RANK == 1:
                mse(model, *data().tensors).backward()


def everything(args: Any) -> dict[str, Any]:
    return {case.__name__: case(args) for case in (settings, at_join, sync_batch_norm, misuses)}
