"""Random scripts of several loops, under random schedules and faults: calls before, in, behind and between loops.

`scheduled_fleets` plays one loop. Here a script makes up to three, leaves some with ``break``, calls between a step's
round and its commit, saves by itself, loads, tracks more between loops, and fails on one worker alone. The judgement is
the same, but for epochs that were left.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from memory_fleet import CRASHED, Verdict, World, fleet_of
from scheduled_fleets import (
    BATCH,
    BOUNDED,
    CODES,
    COMBINES,
    FAULTS,
    FEW_BYTES,
    MICRO,
    PACES,
    TOO_LATE,
    Ledger,
    data,
    play_fleet,
    shuffled,
    touched,
)
from torch import nn

from paceline import concurrency
from paceline.step.late import catch_up

LENGTH = 16
EPOCHS = 8
"""More than any script trains."""
OUTSIDE = ("evaluate", "evaluate", "any", "barrier", "save", "track", "state", "predict", "load")
INSIDE = ("evaluate", "predict", "any", "barrier", "save", "state", "log")


class OwnMistake(Exception):
    """An error of the script's own, on one worker."""


@dataclass(frozen=True)
class Loop:
    """One loop of a script."""

    epochs: int
    leave: int | None
    """The number of its step behind which it is left."""
    calls: Mapping[int, str]
    """By step of the loop: what the script does behind it."""
    between: Mapping[int, str]
    """By step of the loop: what it does between the round and the commit."""
    behind: tuple[str, ...]
    """What it does behind the loop."""


@dataclass(frozen=True)
class Script:
    """A script and what happens to it."""

    seed: int
    size: int
    minimum: int
    pace: str
    combine: str
    order: bool
    before: tuple[str, ...]
    loops: tuple[Loop, ...]
    autosave: bool
    adds: bool
    slow: tuple[float, ...]
    stalls: float
    most_bytes: int
    mistake: tuple[int, int, str] | None
    """Slot, micro-batch and kind of an error on that worker alone, in its first life."""
    faults: tuple[tuple[int, str, int, str], ...] = field(default=())


def draw_script(seed: int) -> Script:
    """Draw a script from its seed."""
    dice = random.Random(f"script {seed}")
    size = dice.choice((2, 3, 3, 4))
    combine = dice.choice(("gradients",) * 5 + ("average", "period", "elastic"))
    gradients = combine == "gradients"
    pace = dice.choice(list(PACES) if dice.random() < 0.5 else list(BOUNDED)) if gradients else "adaptive"
    often = dice.choice((0.0, 0.3, 0.6)) if gradients else 0.0

    without = dice.choice(("load", "track"))
    outside = tuple(kind for kind in OUTSIDE if kind != without)  # a file fits what was tracked

    def some(kinds: tuple[str, ...], most: int) -> tuple[str, ...]:
        return tuple(dice.choice(kinds) for _ in range(dice.randrange(most + 1)))

    loops = []
    for _ in range(dice.choice((1, 2, 2, 3))):
        epochs = dice.choice((1, 1, 2))
        steps = epochs * LENGTH // BATCH
        reduces = gradients and dice.random() < 0.3
        loops.append(
            Loop(
                epochs=epochs,
                leave=dice.randrange(steps) if gradients and dice.random() < 0.3 else None,
                calls={step: dice.choice(INSIDE) for step in range(steps + 1) if dice.random() < often},
                between={step: dice.choice(("any", "barrier", "")) for step in range(steps + 1) if reduces},
                behind=some(outside, 3),
            )
        )
    faults = []
    for _ in range(dice.choice((0, 1, 1, 2, 2, 3))):
        thread = dice.choice(("", "", "", "call", "user", "paceline-proxy", "received"))
        point = (
            100 + int(dice.random() ** 1.3 * 8000)
            if not thread
            else dice.randrange(1, 600 if thread != "received" else 50)
        )
        faults.append((point, dice.choice(FAULTS), dice.randrange(size), thread))
    ends = {"kill", "kill for good", "leave"}  # fewer than the minimum wait for ever
    mistake = None
    if dice.random() < 0.15:
        mistake = dice.randrange(size), dice.randrange(12), dice.choice(("own", "interrupt", "misuse", "exit"))
    return Script(
        seed=seed,
        size=size,
        minimum=dice.choice((1, 1, 2)) if ends.isdisjoint(kind for _, kind, _, _ in faults) and mistake is None else 1,
        pace=pace,
        combine=combine,
        order=dice.random() < 0.3,
        before=some(tuple(kind for kind in outside if kind != "load"), 3),
        loops=tuple(loops),
        autosave=dice.random() < 0.3,
        adds=dice.random() < 0.3,
        slow=tuple(dice.choice((0.005, 0.01, 0.02, 0.04)) for _ in range(size + 2)),
        stalls=dice.choice((0.0, 0.05, 0.2)),
        most_bytes=dice.choice((catch_up.MOST_BYTES, catch_up.MOST_BYTES, FEW_BYTES, 0)),
        mistake=mistake,
        faults=tuple(sorted(faults)),
    )


def play_script(seed: int, *, script: Script | None = None) -> Verdict:
    """Run the script of this seed, and judge it."""
    script = script or draw_script(seed)
    verdict = play_fleet(
        f"script schedule {seed}",
        lambda world, slot: run(script, world, slot),
        size=script.size,
        minimum=script.minimum,
        faults=script.faults,
        most_bytes=script.most_bytes,
    )
    judge(script, verdict)
    return verdict


def run(script: Script, world: World, slot: int) -> dict[str, Any]:
    """The script of every worker."""
    dice, gradients = random.Random(f"{script.seed}/{slot}"), script.combine == "gradients"
    dataset, life = data(LENGTH), world.newest[slot].life
    mistake = script.mistake if script.mistake is not None and script.mistake[0] == slot and life == 0 else None
    done = 0
    with fleet_of(PACES[script.pace](), COMBINES[script.combine](), world.folder) as fleet:
        net = nn.Linear(3, 1, dtype=torch.float64)
        with torch.no_grad():
            net.weight.copy_(torch.arange(1.0, 4.0, dtype=torch.float64).view(1, 3))
            net.bias.zero_()
        model = fleet.model(net)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)]
        ledger = fleet.model(Ledger(EPOCHS, LENGTH)) if gradients else None
        if ledger is not None:
            optimizers.append(torch.optim.SGD(ledger.parameters(), lr=1.0))
        fleet.track(**{f"optimizer{number}": one for number, one in enumerate(optimizers)})
        fleet.state.seen = 0
        tracked = 0
        order = partial(shuffled, LENGTH) if script.order else None
        if script.autosave:
            fleet.autosave(world.folder / "auto", every_steps=1)

        def make(what: str, number: int) -> None:
            nonlocal tracked
            world.scheduler.count_from_here("call")
            if what == "evaluate":
                found = fleet.evaluate(lambda x, y, numbers: {"seen": numbers}, dataset, sums="seen")
                assert (found["seen"], found["count"]) == (LENGTH * (LENGTH - 1) / 2, LENGTH), f"evaluated {found}"
            elif what == "predict":
                got = fleet.predict(lambda x, y, numbers: numbers.double(), dataset)
                assert got.tolist() == list(range(LENGTH)), f"gathered {got}"
            elif what == "save":
                fleet.save(world.folder / "saved.pt")
            elif what == "load":
                fleet.load(world.folder / "saved.pt", missing_ok=True)
            elif what == "any":
                fleet.any(number % 2 == 0)
            elif what == "barrier":
                fleet.barrier()
            elif what == "state":
                fleet.state.seen += 1
            elif what == "log":
                fleet.log(seen=1.0)
            elif what == "track":
                fleet.track(**{f"more{tracked}": torch.optim.swa_utils.AveragedModel(model)})
                tracked += 1

        for number, what in enumerate(script.before):
            make(what, number)
        for loop in script.loops:
            steps = fleet.steps(dataset, global_batch=BATCH, micro_batch=MICRO, epochs=loop.epochs, order=order)
            fleet.state.first = steps.index  # one that joins in this loop takes it over
            for step in steps:
                at = step.index - fleet.state.first
                for x, y, numbers in step:
                    done += 1
                    if mistake is not None and done == mistake[1] + 1:
                        fail(mistake[2], step)
                    concurrency.sleep(
                        script.slow[slot] * (20.0 if dice.random() < script.stalls else 1.0 + dice.random())
                    )
                    if script.adds:
                        step.add(**{f"rows{step.index % 3}": len(x)})
                    loss = nn.functional.mse_loss(model(x), y)
                    step.backward(loss + ledger(numbers) if ledger is not None else loss)
                if at in loop.between:
                    step.reduce()
                    if step.applied:
                        for optimizer in optimizers:
                            optimizer.step()
                    if loop.between[at]:
                        make(loop.between[at], at)
                    step.commit()
                else:
                    step.commit(*optimizers)
                if ledger is not None:
                    ledger.book(step)
                if at in loop.calls:
                    make(loop.calls[at], at)
                if loop.leave == at:
                    break
            for what in loop.behind:
                make(what, 0)
        return {
            "weights": [float(value) for p in model.parameters() for value in p.detach().flatten()],
            "counted": ledger.counted.tolist() if ledger is not None else None,
            "state": fleet.state.seen,
        }


def fail(kind: str, step: Any) -> None:
    if kind == "own":
        raise OwnMistake("a mistake of the script's own")
    if kind == "interrupt":
        raise KeyboardInterrupt
    if kind == "exit":
        raise SystemExit(3)
    step.commit()  # in the middle of its micro-batches: it is refused


def judge(script: Script, verdict: Verdict) -> None:
    """Add to the verdict what is wrong with how the run ended."""
    own = ("OwnMistake", "KeyboardInterrupt", "MisuseError", "step.commit needs")
    if script.mistake is not None:
        verdict.problems[:] = [
            text
            for text in verdict.problems
            if not (text.startswith(f"CRASH worker {script.mistake[0]}.0") and any(one in text for one in own))
        ]
    wrong = touched(script) | ({script.mistake[0]} if script.mistake is not None else set())  # type: ignore[arg-type]
    for slot, outcome in verdict.outcomes.items():
        expected = outcome.code in CODES or (
            script.mistake is not None and slot == script.mistake[0] and outcome.code in (CRASHED, 3)
        )
        if not expected:
            verdict.problems.append(f"CODE worker {slot} ended with {outcome.code}: {outcome.error}")
        elif outcome.code != 0 and slot not in wrong and outcome.error != TOO_LATE:
            text = f"CODE worker {slot}, which no fault touched, ended with {outcome.code}: {outcome.error}"
            verdict.problems.append(text)
    values = [one.value for one in verdict.outcomes.values() if one.code == 0 and one.value is not None]
    for key in ("weights", "counted", "state"):
        if any(value[key] != values[0][key] for value in values):
            verdict.problems.append(f"UNEQUAL {key}")
    loads = any("load" in loop.behind for loop in script.loops)
    if not values or values[0]["counted"] is None or loads:
        return
    whole, left = set(), set()
    first = 0
    for loop in script.loops:
        last = loop.epochs if loop.leave is None else loop.leave // (LENGTH // BATCH) + 1
        for epoch in range(first, first + last):
            (left if loop.leave is not None and epoch == first + last - 1 else whole).add(epoch)
        first += last
    for epoch, row in enumerate(values[0]["counted"]):
        for sample, count in enumerate(row):
            good = abs(count - 1.0) < 1e-9
            if epoch in whole and not left and not good:
                verdict.problems.append(f"LEDGER epoch {epoch} sample {sample}: {count}")
                return
            if not good and abs(count) > 1e-9:
                verdict.problems.append(f"LEDGER epoch {epoch} sample {sample}: {count}")
                return
