"""Random programs of elastic fleets under random schedules and faults, each the same for the same seed.

`play(seed)` draws a program (a pace, a combine, an order, calls between steps), a schedule and faults, runs them on a
`World`, and judges the run: everybody ends within a bound of virtual time, with a documented exit code, and with 0
where no fault touched it; nobody's thread fails; every sample of every epoch counts exactly once; those who ended well
hold the same weights, bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # the first optimiser imports it, for seconds: here it is imported before processes are forked
from memory_fleet import KILLED, Folder, Verdict, World, fleet_of
from scheduler import Scheduler
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import TensorDataset

import paceline
from paceline import concurrency
from paceline.checkpoint import parts
from paceline.errors import FLEET_FAILED
from paceline.pace import Ask
from paceline.records import Plan, StepRecord
from paceline.step.late import catch_up
from paceline.worker_exit import LEFT

LENGTH, LONG, BATCH, MICRO = 16, 64, 8, 2
"""Samples of an epoch in most programs, and in those where a loop falls far behind: near an epoch's end all wait."""
EPOCHS, MORE_EPOCHS = 2, 4
"""Epochs of most programs, and of a quarter of them: there a dropped worker comes back before the others end."""
FROZEN, SMALL_PARTS = 0.3, 64
"""The part of programs with a frozen part, and the bytes from which on a tensor is a part of a state there."""
FAR_BEHIND, FEW_BYTES = 0.2, 2000
"""The part of programs in which loops fall far behind, and the bytes of the sums of three of their steps."""
CODES = (0, KILLED, FLEET_FAILED, LEFT)
"""Exit codes that are documented, or were a fault's own."""
TOO_LATE = "the run has ended"
"""The error of a worker that came when all were done: it joined, or was dropped because the schedule kept it still."""
PACES: dict[str, Callable[[], Any]] = {
    "adaptive": lambda: "adaptive",
    "equal": lambda: "equal",
    "epoch": lambda: "epoch",
    "joint": lambda: paceline.Joint(least_gain=0.0),
    "auto": lambda: "auto",
    "cutoff": lambda: "cutoff",
    "deadline": lambda: Deadline(0.05, over=1.3),
    "floor": lambda: Deadline(0.02, over=1.0, least_count=0.9),
    "count": lambda: Deadline(None, wait_for=2, over=1.3),
    "calm": lambda: Deadline(0.04, over=1.3, calm=2),
}
COMBINES: dict[str, Callable[[], Any]] = {
    "gradients": lambda: "gradients",
    "average": lambda: paceline.Averaging(every_steps=2),
    "period": lambda: paceline.Averaging(period_s=0.06),
    "elastic": lambda: paceline.research.ElasticAverage(),
}
BOUNDED = ("deadline", "floor", "count", "calm", "joint")
"""Paces with a deadline or a count in nearly every step."""
PROXY, USER, CALL, RECEIVED = "paceline-proxy", "user", "call", "received"
"""Where faults are counted: at points of these threads, in a call of the script, or by what another has received."""
WITHIN = {PROXY: (1, 400), USER: (250, 1200), CALL: (1, 120), RECEIVED: (4, 40)}
FAULTS = ("kill", "kill for good", "freeze", "leave", "join", "roster", "store", "peers", "wedge", "roster restarts")


NEWCOMERS = ("join", "kill", "freeze")
"""Faults after which a worker enters."""


class Deadline:
    """A pace that deals ``over`` times what is needed, equally, and closes rounds at a deadline or a count."""

    name = "deadline"
    deadlines = True

    def __init__(
        self,
        deadline_s: float | None,
        *,
        wait_for: int | None = None,
        over: float = 1.0,
        calm: int = 0,
        least_count: float = 0.0,
    ) -> None:
        self.deadline_s, self.wait_for, self.over = deadline_s, wait_for, over
        self.calm, self.least_count = calm, least_count

    def check(self, workers: int) -> None:
        return

    def observe(self, record: StepRecord) -> None:
        return

    def plan(self, ask: Ask) -> Plan:
        calm = bool(self.calm) and ask.step % self.calm == 0
        total = ask.total if calm or ask.last else round(ask.total * self.over)
        size = len(ask.workers)
        samples = tuple(total // size + (rank < total % size) for rank in range(size))
        plan = Plan(generation=ask.generation, step=ask.step, samples=samples)
        if calm:
            return plan
        wait_for = min(self.wait_for, size) if self.wait_for else None
        return replace(plan, deadline_s=self.deadline_s, wait_for=wait_for, least_count=self.least_count)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        return


@dataclass(frozen=True)
class Case:
    """A program and what happens to it."""

    seed: int
    size: int
    pace: str
    combine: str
    order: bool
    calls: Mapping[int, str]
    """By step: what the script does after it."""
    slow: tuple[float, ...]
    """By slot: seconds of one micro-batch."""
    stalls: float
    """How likely a micro-batch takes very long."""
    epochs: int = EPOCHS
    length: int = LENGTH
    most_bytes: int = catch_up.MOST_BYTES
    """Bytes of sums that are kept for a late loop: with few, it takes over a copy of a peer's state."""
    frozen: str = ""
    """What becomes of a frozen part: "same" everywhere, "differs" in newcomers' scripts, "moves"; "": there is none."""
    faults: tuple[tuple[int, str, int, str], ...] = field(default=())
    """Point, kind, slot, and the worker's thread whose points are counted; without one, all points of the schedule."""

    def __str__(self) -> str:
        faults = ", ".join(f"{kind} {slot} at {point} {thread}".strip() for point, kind, slot, thread in self.faults)
        calls = ", ".join(f"{what} after {step}" for step, what in self.calls.items())
        return (
            f"seed {self.seed}: {self.size} workers, {self.pace}, {self.combine}{', own order' if self.order else ''}, "
            f"{self.epochs} epochs of {self.length}, {self.most_bytes} bytes for late loops; {calls or 'no calls'}; "
            f"{f'a frozen part: {self.frozen}; ' if self.frozen else ''}"
            f"{faults or 'no faults'}"
        )


def draw(seed: int) -> Case:
    """Draw a case from its seed.

    Half of them are about faults in rounds with deadlines and in calls beside them, where a worker's threads meet; in a
    part of all, a loop falls so far behind that it takes over a copy of a peer's state.
    """
    dice = random.Random(f"case {seed}")
    size, narrow = dice.choice((2, 3, 3, 4)), dice.random() < 0.5
    combine = "gradients" if narrow else dice.choice(("gradients",) * 4 + ("average", "period", "elastic"))
    paces = BOUNDED if narrow else list(PACES) if combine == "gradients" else ("adaptive", "equal")
    often = 0.6 if narrow else 0.25 if combine in ("gradients", "average") else 0.0  # else steps are each worker's own
    calls = {
        step: dice.choice(("evaluate", "evaluate", "predict", "save", "any", "barrier"))
        for step in range(LENGTH // BATCH * EPOCHS + 1)
        if dice.random() < often
    }
    case = Case(
        seed=seed,
        size=size,
        pace=dice.choice(paces),
        combine=combine,
        order=dice.random() < 0.4,
        calls=calls,
        slow=tuple(dice.choice((0.005, 0.01, 0.02, 0.04)) for _ in range(size + 2)),
        stalls=dice.choice((0.0, 0.05, 0.2)),
        faults=_draw_narrow(dice, size) if narrow else _draw_wide(dice, size),
        epochs=dice.choice((EPOCHS, EPOCHS, EPOCHS, MORE_EPOCHS)),
    )
    if combine == "average" and any(kind in NEWCOMERS for _, kind, _, _ in case.faults):
        case = replace(case, calls={})  # one that enters may make fewer local steps than the others: none of that index
    other = random.Random(f"frozen {seed}")  # whatever else a seed stands for stays the same
    if combine == "gradients" and other.random() < FROZEN:
        case = replace(case, frozen=other.choice(("same", "differs", "moves")))
    if dice.random() < FAR_BEHIND:
        pace, most_bytes = dice.choice(("deadline", "count", "calm")), dice.choice((FEW_BYTES, 0, 0))
        far: dict[str, Any] = {"pace": pace, "combine": "gradients", "stalls": 0.3, "length": LONG, "epochs": 1}
        return replace(case, most_bytes=most_bytes, **far)
    return case


def _draw_wide(dice: random.Random, size: int) -> tuple[tuple[int, str, int, str], ...]:
    """Faults of every kind, anywhere."""
    points = [200 + int(dice.random() ** 1.3 * 6000) for _ in range(dice.choice((0, 1, 1, 2, 2, 3)))]
    return tuple(sorted((point, dice.choice(FAULTS), dice.randrange(size), "") for point in points))


def _draw_narrow(dice: random.Random, size: int) -> tuple[tuple[int, str, int, str], ...]:
    """Faults in a worker's own rounds and calls."""
    faults = []
    for _ in range(dice.choice((1, 1, 2))):
        thread = dice.choice((PROXY, PROXY, USER, CALL, CALL, RECEIVED))
        point = dice.randrange(*WITHIN[thread])
        kind = dice.choice(("kill for good", "kill", "freeze", "freeze", "leave"))
        faults.append((point, kind, dice.randrange(size), thread))
    return tuple(faults)


def play(seed: int, *, case: Case | None = None) -> Verdict:
    """Run the case of this seed, and judge it."""
    case = case or draw(seed)
    verdict = play_fleet(
        f"schedule {seed}",
        lambda world, slot: train(case, world, slot),
        size=case.size,
        faults=case.faults,
        most_bytes=case.most_bytes,
        least_part=SMALL_PARTS if case.frozen else parts.LEAST,
    )
    judge(case, verdict)
    return verdict


def play_fleet(
    name: str,
    program: Callable[[World, int], Any],
    *,
    size: int,
    faults: Iterable[tuple[int, str, int, str]],
    most_bytes: int,
    least_part: int = parts.LEAST,
    minimum: int = 1,
) -> Verdict:
    """Run a program on each worker of a fleet, in the order of threads that ``name`` draws, and let faults happen.

    Args:
        name: What the scheduler's random numbers follow from.
        program: Called by each worker with the world and its slot.
        size: The number of workers.
        faults: Of each, the point, the kind, the slot, and the thread by whose points it counts; "": by all.
        most_bytes: The bytes of sums that are kept for a late loop.
        least_part: The bytes from which on a tensor is a part of a state.
        minimum: The workers without which a fleet waits.
    """
    torch.set_num_threads(1)
    scheduler = Scheduler(name, limit_points=600_000 + 200_000 * max(0, size - 5))
    with (
        Folder() as folder,
        mock.patch.object(catch_up, "MOST_BYTES", most_bytes),
        mock.patch.object(parts, "LEAST", least_part),
        # A worker that is killed leaves its hooks behind, which would look at every later optimiser of this process.
        mock.patch.dict(_global_optimizer_pre_hooks),
        mock.patch.dict(_global_optimizer_post_hooks),
    ):
        world = World(scheduler, program, size=size, minimum=minimum, folder=folder)
        for point, kind, slot, thread in faults:
            happens = partial(inject, world, kind, slot)
            if thread == RECEIVED:
                world.after_received(f"worker {(slot + 1) % size}.0", point, happens)
            elif thread:
                scheduler.at_point_of(f"worker {slot}.0", thread, point, happens)
            else:
                scheduler.at_point(point, happens)
        return world.run()


def inject(world: World, kind: str, slot: int) -> None:
    """Let a fault happen."""
    dice = world.scheduler.rng
    if kind == "kill":
        world.kill(slot, again=dice.random() < 0.6, told=dice.random() < 0.8)
    elif kind == "restart":
        world.kill(slot, again=True)
    elif kind == "kill for good":
        world.kill(slot, again=False, told=dice.random() < 0.5)
    elif kind == "freeze":
        dropped = dice.random() < 0.4
        world.freeze(
            slot, dice.choice((0.0, 0.02, 0.1) if dropped else (0.01, 0.1, 0.5, 2.0, 4.0, 15.0)), dropped=dropped
        )
    elif kind == "leave":
        world.ask_to_leave(slot)
    elif kind == "interrupt":
        world.interrupt(slot)
    elif kind == "join":
        world.join(world.size + slot % 2)
    elif kind == "roster":
        world.cut_roster(slot)
    elif kind == "store":
        world.cut_store(slot)
    elif kind == "peers":
        world.cut_peers(slot, (slot + 1) % world.size)
    elif kind == "wedge":
        world.wedge(slot)
    elif kind == "kill all":
        for one in list(world.newest):
            world.kill(one, again=True)
    elif kind == "roster restarts":
        world.restart_roster(dice.choice((0.05, 0.5, 3.0)))


# -- the program -------------------------------------------------------------------------------------------------------


class Ledger(nn.Module):
    """Counts how often each sample was trained on: by a gradient of its own, so through everything gradients go."""

    def __init__(self, epochs: int, length: int) -> None:
        super().__init__()
        self.entries = nn.Parameter(torch.zeros(length, dtype=torch.float64))
        self.register_buffer("counted", torch.zeros(epochs, length, dtype=torch.float64))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.entries[numbers].mean()

    @torch.no_grad()
    def book(self, step: Any) -> None:
        """Enter what a step counted, after its commit."""
        if step.applied:
            self.counted[step.epoch] -= self.entries * step.record.weight
            self.entries.zero_()


@cache
def data(length: int) -> TensorDataset:
    """Return the samples, which nobody changes."""
    x = torch.randn(length, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True), torch.arange(length))


def shuffled(length: int, epoch: int) -> list[int]:
    """Return a script's own order."""
    return [int(number) for number in torch.randperm(length, generator=torch.Generator().manual_seed(epoch))]


def train(case: Case, world: World, slot: int) -> dict[str, Any]:
    """The script of every worker."""
    dice, gradients = random.Random(f"{case.seed}/{slot}"), case.combine == "gradients"
    dataset = data(case.length)
    with fleet_of(PACES[case.pace](), COMBINES[case.combine](), world.folder) as fleet:
        weights = torch.arange(1.0, 4.0, dtype=torch.float64).view(1, 3)
        net = nn.Linear(3, 1, dtype=torch.float64)
        with torch.no_grad():
            net.weight.copy_(weights)
            net.bias.zero_()
        model = fleet.model(net)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)]
        ledger = Ledger(case.epochs, case.length) if gradients else None
        if ledger is not None:
            ledger.frozen = frozen(dice if case.frozen == "differs" else None) if case.frozen else None
            ledger = fleet.model(ledger)
            optimizers.append(torch.optim.SGD([ledger.entries], lr=1.0))
        fleet.track(**{f"optimizer{number}": one for number, one in enumerate(optimizers)})
        order = partial(shuffled, case.length) if case.order else None
        for step in fleet.steps(dataset, global_batch=BATCH, micro_batch=MICRO, epochs=case.epochs, order=order):
            for x, y, numbers in step:
                concurrency.sleep(case.slow[slot] * (20.0 if dice.random() < case.stalls else 1.0 + dice.random()))
                loss = nn.functional.mse_loss(model(x), y)
                step.backward(loss + ledger(numbers) if ledger is not None else loss)
            step.commit(*optimizers)
            if ledger is not None:
                ledger.book(step)
            if case.frozen == "moves" and step.index % 3 == 1:
                ledger.frozen.data.mul_(1.5)
            call(case, fleet, step, dataset, world)
        return {
            "weights": [float(value) for p in model.parameters() for value in p.detach().flatten()],
            "counted": ledger.counted.tolist() if ledger is not None else None,
            "frozen": ledger.frozen.tolist() if case.frozen else None,
        }


def frozen(dice: random.Random | None) -> nn.Parameter:
    """Return a frozen part: everybody's, or with ``dice`` one of this script's own."""
    numbers = torch.arange(float(SMALL_PARTS))
    return nn.Parameter(numbers + (dice.choice((0.0, 1.0)) if dice else 0.0), requires_grad=False)


def call(case: Case, fleet: Any, step: Any, dataset: TensorDataset, world: World) -> None:
    """What the script does between two steps."""
    what = case.calls.get(step.index)
    if what is not None:
        world.scheduler.count_from_here(CALL)
    if what == "evaluate":
        found = fleet.evaluate(lambda x, y, numbers: {"seen": numbers}, dataset, sums="seen")
        expected = case.length * (case.length - 1) / 2, case.length
        assert (found["seen"], found["count"]) == expected, f"evaluated {found}"
    elif what == "predict":
        got = fleet.predict(lambda x, y, numbers: numbers.double(), dataset)
        assert got.tolist() == list(range(case.length)), f"gathered {got}"
    elif what == "save":
        fleet.save(world.folder / "saved.pt")
    elif what == "any":
        fleet.any(step.index > 1)
    elif what == "barrier":
        fleet.barrier()


# -- judgement ---------------------------------------------------------------------------------------------------------


def touched(case: Case) -> set[int]:
    """Return the slots whose workers a fault may end with another code than 0; all others end well in their last life.

    A restart of the roster is everybody's; a connection that is cut is of the workers at both of its ends.
    """
    slots = {slot for _, _, slot, _ in case.faults}
    slots |= {(slot + 1) % case.size for _, kind, slot, _ in case.faults if kind == "peers"}
    everybody = any(kind == "roster restarts" for _, kind, _, _ in case.faults)
    return slots | (set(range(case.size + 2)) if everybody else set())


def judge(case: Case, verdict: Verdict) -> None:
    """Add to the verdict what is wrong with how the run ended."""
    for slot, outcome in verdict.outcomes.items():
        if outcome.code not in CODES:
            verdict.problems.append(f"CODE worker {slot} ended with {outcome.code}: {outcome.error}")
        elif outcome.code != 0 and slot not in touched(case) and outcome.error != TOO_LATE:
            text = f"CODE worker {slot}, which no fault touched, ended with {outcome.code}: {outcome.error}"
            verdict.problems.append(text)
    values = [one.value for one in verdict.outcomes.values() if one.code == 0 and one.value is not None]
    if any(value["weights"] != values[0]["weights"] or value["frozen"] != values[0]["frozen"] for value in values):
        verdict.problems.append("UNEQUAL replicas")
    for value in values:
        if value["counted"] is not None:
            wrong = [
                (epoch, sample, round(count, 6))
                for epoch, row in enumerate(value["counted"])
                for sample, count in enumerate(row)
                if abs(count - 1.0) > 1e-9
            ]
            if wrong:
                verdict.problems.append(f"LEDGER {len(wrong)} samples: {wrong[:6]}")
                break
