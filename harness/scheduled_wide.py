"""Random scripts beyond `scheduled_scripts`: large fleets, deadlines of all lengths, and faults in calls of every kind.

Faults are counted from a call's beginning: while a loop is made, a checkpoint loaded or written, the fleet left. With
averages, workers are at local steps of their own: the script calls where a round has ended, which all see alike. A
fleet may die as a whole, and begin anew from its last checkpoint. The judgement also compares the workers' histories.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from memory_fleet import CRASHED, Verdict, World, fleet_of
from scheduled_fleets import CODES, COMBINES, MICRO, PACES, TOO_LATE, Deadline, Ledger, data, play_fleet
from torch import nn

from paceline import concurrency
from paceline.step.late import catch_up

EPOCHS = 8
CALLS = ("evaluate", "predict", "any", "barrier", "save")
PARTS = ("model", "load", "autosave", "construct", "first", "between", "call", "end", "leave")
"""Where faults are counted from, each by its first occurrence in a worker's life."""
THREADS = ("", "paceline-proxy", "received")
FAULTS = (
    "kill",
    "kill",
    "kill for good",
    "freeze",
    "freeze",
    "leave",
    "leave",
    "interrupt",
    "interrupt",
    "join",
    "store",
    "peers",
    "wedge",
    "roster",
)
RARE = ("roster restarts", "kill all")


@dataclass(frozen=True)
class Wide:
    """A script and what happens to it."""

    seed: int
    size: int
    minimum: int
    length: int
    batch: int
    pace: str
    deadline: Callable[[], Any] | None
    combine: str
    epochs: tuple[int, ...]
    """Of each loop."""
    leave: tuple[int | None, ...]
    """Of each loop, the number of its step behind which it is left."""
    calls: tuple[str, ...]
    """One after another, each when ``gaps`` steps or rounds have passed since the one before."""
    gaps: tuple[int, ...]
    autosave: int
    loads: bool
    slow: tuple[float, ...]
    stalls: float
    most_bytes: int
    faults: tuple[tuple[int, str, int, str], ...] = field(default=())

    def __str__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if name not in ("slow", "deadline")}
        return ", ".join(f"{name}={value}" for name, value in shown.items())


def draw_wide(seed: int) -> Wide:
    """Draw a script from its seed."""
    dice = random.Random(f"wide {seed}")
    size = dice.choice((2, 2, 3, 3, 4, 5)) if dice.random() < 0.9 else dice.randrange(16, 33)
    combine = dice.choice(("gradients",) * 4 + ("average", "average", "period", "elastic"))
    gradients = combine == "gradients"
    deadline, pace = None, dice.choice(list(PACES)) if gradients else dice.choice(("adaptive", "equal"))
    if gradients and dice.random() < 0.5:
        pace = "deadline"
        deadline_s = dice.choice((1e-4, 0.002, 0.02, 0.2, 5.0, None))
        asked: dict[str, Any] = {
            "over": dice.choice((1.0, 1.3, 3.0)),
            "calm": dice.choice((0, 0, 2, 3)),
            "least_count": dice.choice((0.0, 0.0, 0.5, 1.0)) if deadline_s is not None else 0.0,
            "wait_for": dice.randrange(1, size + 1) if deadline_s is None or dice.random() < 0.3 else None,
        }
        pace, deadline = f"deadline {deadline_s} {asked}", partial(Deadline, deadline_s, **asked)
    length, batch = dice.choice(((16, 8), (16, 8), (20, 16), (48, 24)) if size < 8 else ((16, 8), (96, 48)))
    epochs = tuple(dice.choice((1, 1, 2)) for _ in range(dice.choice((1, 2, 3))))
    faults = []
    for _ in range(dice.choice((0, 1, 1, 2, 2, 3)) + (size > 8)):
        kind = dice.choice(RARE) if dice.random() < 0.1 else dice.choice(FAULTS)
        thread = dice.choice(PARTS) if dice.random() < 0.6 else dice.choice(THREADS)
        point = dice.randrange(1, 40 if thread == "received" else 150 if thread in PARTS else 600)
        if not thread:
            point = 100 + int(dice.random() ** 1.3 * 2500 * size)
        faults.append((point, kind, dice.randrange(size), thread))
    ends = {"kill", "kill for good", "leave", "kill all", "interrupt"}  # fewer than the minimum wait for ever
    return Wide(
        seed=seed,
        size=size,
        minimum=dice.choice((1, 1, 2)) if ends.isdisjoint(kind for _, kind, _, _ in faults) else 1,
        length=length,
        batch=batch,
        pace=pace,
        deadline=deadline,
        combine=combine,
        epochs=epochs,
        leave=tuple(
            dice.randrange(number * -(-length // batch)) if gradients and dice.random() < 0.25 else None
            for number in epochs
        ),
        calls=tuple(dice.choice(CALLS) for _ in range(dice.choice((0, 3, 8)))),
        gaps=tuple(dice.randrange(1, 3) for _ in range(9)),
        autosave=dice.choice((0, 0, 1, 2)),
        loads=dice.random() < 0.4,
        slow=tuple(dice.choice((0.001, 0.005, 0.02, 0.04, 0.5)) for _ in range(size + 2)),
        stalls=dice.choice((0.0, 0.05, 0.2)),
        most_bytes=dice.choice((catch_up.MOST_BYTES, catch_up.MOST_BYTES, 2000, 0)),
        faults=tuple(sorted(faults)),
    )


def play_wide(seed: int, *, wide: Wide | None = None) -> Verdict:
    """Run the script of this seed, and judge it."""
    wide = wide or draw_wide(seed)
    verdict = play_fleet(
        f"wide schedule {seed}",
        lambda world, slot: run(wide, world, slot),
        size=wide.size,
        minimum=wide.minimum,
        faults=wide.faults,
        most_bytes=wide.most_bytes,
    )
    judge(wide, verdict)
    return verdict


def run(wide: Wide, world: World, slot: int) -> dict[str, Any]:
    """The script of every worker."""
    dice, gradients, dataset = random.Random(f"{wide.seed}/{slot}"), wide.combine == "gradients", data(wide.length)
    here = world.scheduler.count_from_here
    pace = wide.deadline() if wide.deadline is not None else PACES[wide.pace]()
    with fleet_of(pace, COMBINES[wide.combine](), world.folder) as fleet:
        net = nn.Linear(3, 1, dtype=torch.float64)
        with torch.no_grad():
            net.weight.copy_(torch.arange(1.0, 4.0, dtype=torch.float64).view(1, 3))
            net.bias.zero_()
        here("model")
        model = fleet.model(net)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)]
        ledger = fleet.model(Ledger(EPOCHS, wide.length)) if gradients else None
        if ledger is not None:
            optimizers.append(torch.optim.SGD(ledger.parameters(), lr=1.0))
        fleet.track(**{f"optimizer{number}": one for number, one in enumerate(optimizers)})
        fleet.state.called, fleet.state.due, fleet.state.first = 0, 1, 0
        here("load")
        if wide.loads:
            fleet.load(world.folder / "auto", missing_ok=True, loops="all")
        if wide.autosave:
            fleet.autosave(world.folder / "auto", every_steps=wide.autosave)

        def call(steps: Any, step: Any) -> None:
            now = steps.index if gradients else steps.rounds
            if fleet.state.called == len(wide.calls) or now < fleet.state.due:
                return
            what = wide.calls[fleet.state.called]
            here("call")
            if what == "evaluate":
                found = fleet.evaluate(lambda x, y, numbers: {"seen": numbers}, dataset, sums="seen")
                assert (found["seen"], found["count"]) == (wide.length * (wide.length - 1) / 2, wide.length), (
                    f"evaluated {found}"
                )
            elif what == "predict":
                got = fleet.predict(lambda x, y, numbers: numbers.double(), dataset)
                assert got.tolist() == list(range(wide.length)), f"gathered {got}"
            elif what == "save":
                fleet.save(world.folder / "saved.pt")
            elif what == "any":
                fleet.any(True)
            elif what == "barrier":
                fleet.barrier()
            fleet.state.called += 1
            fleet.state.due = (steps.index if gradients else steps.rounds) + wide.gaps[fleet.state.called]

        for number, epochs in enumerate(wide.epochs):
            here("construct")
            steps = fleet.steps(dataset, global_batch=wide.batch, micro_batch=MICRO, epochs=epochs)
            fleet.state.first = steps.index  # one that joins in this loop takes it over
            here("first")
            for step in steps:
                at = step.index - fleet.state.first
                for x, y, numbers in step:
                    concurrency.sleep(wide.slow[slot] * (20.0 if dice.random() < wide.stalls else 1.0 + dice.random()))
                    loss = nn.functional.mse_loss(model(x), y)
                    step.backward(loss + ledger(numbers) if ledger is not None else loss)
                step.commit(*optimizers)
                if ledger is not None:
                    ledger.book(step)
                here("autosave")
                call(steps, step)
                if wide.leave[number] == at:
                    break
            here("between")
        here("end")
        records = [vars(record) for record in fleet.history]
        here("leave")
        return {
            "weights": [float(value) for p in model.parameters() for value in p.detach().flatten()],
            "counted": ledger.counted.tolist() if ledger is not None else None,
            "called": fleet.state.called,
            "records": [
                {name: one[name] for name in ("step", "epoch", "generation", "workers", "samples", "ranges")}
                for one in records
            ],
        }


def touched(wide: Wide) -> set[int]:
    """Return the slots whose workers a fault may end with another code than 0."""
    slots = {slot for _, _, slot, _ in wide.faults}
    slots |= {(slot + 1) % wide.size for _, kind, slot, _ in wide.faults if kind == "peers"}
    everybody = any(kind in ("roster restarts", "kill all") for _, kind, _, _ in wide.faults)
    return slots | (set(range(wide.size + 2)) if everybody else set())


def judge(wide: Wide, verdict: Verdict) -> None:
    """Add to the verdict what is wrong with how the run ended."""
    stopped = {slot for _, kind, slot, _ in wide.faults if kind == "interrupt"}
    verdict.problems[:] = [text for text in verdict.problems if not is_own(text, stopped)]
    for slot, outcome in verdict.outcomes.items():
        if outcome.code not in (*CODES, *((CRASHED,) if slot in stopped else ())):
            verdict.problems.append(f"CODE worker {slot} ended with {outcome.code}: {outcome.error}")
        elif outcome.code != 0 and slot not in touched(wide) and outcome.error != TOO_LATE:
            text = f"CODE worker {slot}, which no fault touched, ended with {outcome.code}: {outcome.error}"
            verdict.problems.append(text)
    values = [one.value for one in verdict.outcomes.values() if one.code == 0 and one.value is not None]
    if not values:
        return
    for key in ("weights", "counted", "called"):
        if any(value[key] != values[0][key] for value in values):
            verdict.problems.append(f"UNEQUAL {key}")
    judge_records([value["records"] for value in values], verdict)
    if values[0]["counted"] is not None:
        judge_ledger(wide, values[0]["counted"], verdict)


def is_own(text: str, stopped: set[int]) -> bool:
    """Return whether this is the traceback of a worker that Ctrl-C has ended."""
    ours = any(text.startswith(f"CRASH worker {slot}.") for slot in stopped)
    return ours and text.splitlines()[-1].startswith("KeyboardInterrupt")


def judge_records(histories: list[list[dict[str, Any]]], verdict: Verdict) -> None:
    """Compare what workers have in common of their histories."""
    known: dict[int, dict[str, Any]] = {}
    for records in histories:
        for record in records:
            before = known.setdefault(record["step"], record)
            if before != record:
                verdict.problems.append(f"UNEQUAL records: {before} and {record}")
                return


def judge_ledger(wide: Wide, counted: list[list[float]], verdict: Verdict) -> None:
    whole, left = set(), set()
    first = 0
    for epochs, leave in zip(wide.epochs, wide.leave, strict=True):
        last = epochs if leave is None else leave // -(-wide.length // wide.batch) + 1
        for epoch in range(first, first + last):
            (left if leave is not None and epoch == first + last - 1 else whole).add(epoch)
        first += last
    for epoch, row in enumerate(counted):
        for sample, count in enumerate(row):
            good = abs(count - 1.0) < 1e-9
            if (epoch in whole and not left and not good) or (not good and abs(count) > 1e-9):
                verdict.problems.append(f"LEDGER epoch {epoch} sample {sample}: {count}, {Counter(map(round, row))}")
                return
