"""Goodput under failures: what is left of a fleet whose machines fail and are replaced.

Goodput is the useful work over the work that the same machines would do in the same time without failures and without
checkpoints. Three rules are played against the same failures, drawn from a seed:

- *Paceline*: the others go on without the machine that failed, and pause when it goes and when another takes its place.
- *restart*: all processes stop, the machine is waited for, all start again from the last checkpoint and repeat the work
  done since (plain ``torchrun``, a fixed number of machines).
- *restart, any size*: all processes start again from the last checkpoint whenever a machine goes or comes, with those
  that are there (``torchrun`` with a range of ``--nnodes``).

Time is continuous: work is done at the sum of the speeds of those that train. See docs/research.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from heapq import heappop, heappush
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from paceline.observe.words.numbers import duration, number, percent
from paceline.simulate.comparison import empty_table
from paceline.simulate.play import Floats

if TYPE_CHECKING:
    from rich.table import Table


NOTICED_S, MESH_S, ROSTER_S = 0.08, 1e-4, 1.6e-6
"""Coefficients of the seconds until n members have formed a new group, ``NOTICED_S + MESH_S n + ROSTER_S n^2``.

A loss is noticed and the round repeated (`benchmarks/kill.py`), each worker connects to all others, and at every
member's message the roster checks whether all have answered (`benchmarks/roster_scale.py`).
"""
JOIN_BYTES_PER_S = 600e6
"""Bytes of state per second that a newcomer takes over while the others wait.

Measured on two cores with Adam (`benchmarks/join_stall.py`): states of 300 MB stopped the others for 0.4 and 0.6 s.
"""
START_S = 5.7
"""Seconds until processes have started and commit a step: torchrun's restart of four small ones (`benchmarks/kill.py`).

A large model takes minutes: its libraries, its compilation and its data.
"""
COPY_BYTES_PER_S, DISK_BYTES_PER_S = 3.2e9, 250e6
"""Speeds at which a state is copied into memory, and written to a disk or read from it (docs/checkpoints.md)."""
FAILURES, LONGEST_S = 2000, 1e9
"""Failures that are played where no length is given, and the most seconds."""


@dataclass(frozen=True)
class FailureCosts:
    """Seconds that failures, newcomers and checkpoints cost a fleet."""

    kill_s: float
    """The others' pause when a machine is lost under Paceline."""
    join_s: float
    """The others' pause when a newcomer takes the state over."""
    start_s: float
    """Seconds until a machine's processes train: a newcomer's under Paceline, everybody's in a restart."""
    load_s: float
    """Seconds that reading the checkpoint takes."""
    save_s: float
    """The training's pause for a checkpoint of Paceline, which copies the state and writes the copy in a thread."""
    write_s: float
    """The training's pause for a checkpoint of the other rules, which write it (``torch.save``)."""
    every_s: float
    """Seconds of training between two checkpoints."""
    step_s: float = 0.0
    """Seconds per step: a machine that is lost loses its part of half a step."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0 or (math.isinf(value) and name != "every_s"):
                raise ValueError(f"{name} is {value:g}: seconds, at least 0")
        if not self.every_s > 0:
            raise ValueError("every_s is 0: training needs time between two checkpoints")


def usual_costs(
    machines: int, *, state_bytes: float, fleet_mtbf_s: float, step_s: float = 0.0, **known: float | None
) -> FailureCosts:
    """Return the costs that were measured with Paceline, for a fleet and a state of this size.

    ``known`` replaces single ones; a None is ignored. The interval between checkpoints is Young's for ``write_s``.
    """
    given = {name: value for name, value in known.items() if value is not None}
    moved_s = state_bytes / DISK_BYTES_PER_S
    costs = FailureCosts(
        kill_s=reform_s(machines),
        join_s=reform_s(machines) + state_bytes / JOIN_BYTES_PER_S,
        start_s=START_S,
        load_s=moved_s,
        save_s=state_bytes / COPY_BYTES_PER_S,
        write_s=moved_s,
        every_s=math.inf,
        step_s=step_s,
    )
    costs = replace(costs, **given)
    return costs if "every_s" in given else replace(costs, every_s=young_s(costs.write_s, fleet_mtbf_s))


def reform_s(workers: int) -> float:
    """Return the seconds until ``workers`` members have formed a new group.

    >>> round(reform_s(4), 2), round(reform_s(1000), 1)
    (0.08, 1.8)
    """
    return NOTICED_S + MESH_S * workers + ROSTER_S * workers**2


# -- closed forms ------------------------------------------------------------------------------------------------------


def young_s(write_s: float, fleet_mtbf_s: float) -> float:
    """Return Young's interval between checkpoints, ``sqrt(2 C M)`` (1974).

    It is at least a second and at least as long as the checkpoint takes.

    >>> young_s(2.0, 3600.0)
    120.0
    """
    return max(math.sqrt(2 * write_s * fleet_mtbf_s) if write_s else 0.0, write_s, 1.0)


# -- failures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A machine that fails, or the one that takes its place."""

    at_s: float
    machine: int
    comes: bool


def failures(
    machines: int, *, mtbf_s: float | Sequence[float], replace_s: float | Sequence[float], seed: int = 0
) -> Iterator[Change]:
    """Yield, in order of time and without end, who fails and who takes its place ``replace_s`` later.

    Each machine that is there fails after an exponential time of mean ``mtbf_s``, whatever the others do. Both are one
    number for all machines, or one for each.
    """
    draws, rates = np.random.default_rng(seed), 1 / np.broadcast_to(np.asarray(mtbf_s, dtype=float), machines)
    fleet = float(rates.sum())
    if not fleet:
        return iter(())
    reached = np.cumsum(rates) / fleet

    def anybody(_: set[int]) -> int:
        # Nothing comes of one that is away: exponential times have no memory, so its next one begins when it is back.
        return min(int(np.searchsorted(reached, draws.random(), side="right")), machines - 1)

    return changes_of(lambda: float(draws.exponential(1 / fleet)), anybody, np.broadcast_to(replace_s, machines))


def changes_of(gap_s: Callable[[], float], who: Callable[[set[int]], int], replace_s: Floats) -> Iterator[Change]:
    """Yield what follows when, after each ``gap_s()``, the machine ``who(those away)`` fails unless it is away."""
    at_s, away, back = 0.0, set[int](), list[tuple[float, int]]()
    while True:
        at_s += gap_s()
        while back and back[0][0] <= at_s:
            back_s, machine = heappop(back)
            away.discard(machine)
            yield Change(back_s, machine, comes=True)
        machine = who(away)
        if machine not in away:
            away.add(machine)
            heappush(back, (at_s + float(replace_s[machine]), machine))
            yield Change(at_s, machine, comes=False)


# -- rules -------------------------------------------------------------------------------------------------------------


class FailureRule(Protocol):
    """A rule that is played against failures: time passes, machines go and come."""

    spent: Spent

    def advance(self, to_s: float) -> None:
        """Let the time until ``to_s`` pass."""

    def lost(self, machine: int) -> None:
        """Lose a machine at this moment."""

    def came(self, machine: int) -> None:
        """Have a machine back at this moment."""


@dataclass
class Spent:
    """Seconds of all machines, each weighted by its speed, by what they went into."""

    useful: float = 0.0
    away: float = 0.0
    """Machines that failed and are not back, or whose processes start while the others train."""
    stopped: float = 0.0
    """Machines that are there and wait: pauses and restarts."""
    saving: float = 0.0
    redone: float = 0.0
    """Work that a failure undid."""

    @property
    def total(self) -> float:
        return self.useful + self.away + self.stopped + self.saving + self.redone

    def undo(self, work: float) -> None:
        """Turn useful work into work that has to be done again."""
        undone = min(work, self.useful)
        self.useful -= undone
        self.redone += undone


@dataclass
class Checkpoints:
    """A training that stops for ``save_s`` after every ``every_s`` of work; a failure undoes what came after."""

    every_s: float
    save_s: float
    unsaved: float = 0.0
    position_s: float = 0.0
    """Seconds since the last checkpoint was complete."""

    def run(self, seconds: float, speed: float) -> tuple[float, float]:
        """Train for ``seconds`` at this speed, and return the seconds of work and of saving in it."""
        if math.isinf(self.every_s):
            self.unsaved += speed * seconds
            return seconds, 0.0
        before = min(self.position_s, self.every_s)
        complete, self.position_s = divmod(self.position_s + seconds, self.every_s + self.save_s)
        since = min(self.position_s, self.every_s)
        worked_s = complete * self.every_s + since - before
        self.unsaved = speed * since if complete else self.unsaved + speed * worked_s
        return worked_s, seconds - worked_s

    def fall_back(self) -> float:
        """Return to the last checkpoint; returns the work that is undone."""
        undone, self.unsaved, self.position_s = self.unsaved, 0.0, 0.0
        return undone


class _Fleet:
    """A fleet under a rule: the machines that train, its checkpoints, and the time until which it stands still."""

    def __init__(self, speeds: Sequence[float], costs: FailureCosts, *, save_s: float) -> None:
        self.spent = Spent()
        self._speeds, self._costs, self._total = list(speeds), costs, sum(speeds)
        self._checkpoints = Checkpoints(costs.every_s, save_s)
        self._training, self._speed = set(range(len(self._speeds))), self._total
        self._now, self._still_until = 0.0, 0.0

    def _let_pass(self, to_s: float) -> None:
        seconds = to_s - self._now
        self.spent.away += seconds * (self._total - self._speed)
        still_s = min(seconds, max(0.0, self._still_until - self._now))
        worked_s, saved_s = self._checkpoints.run(seconds - still_s, self._speed) if self._training else (0.0, 0.0)
        self.spent.stopped += still_s * self._speed
        self.spent.useful += worked_s * self._speed
        self.spent.saving += saved_s * self._speed
        self._now = to_s

    def _enter(self, machine: int) -> None:
        self._training.add(machine)
        everybody = len(self._training) == len(self._speeds)
        self._speed = self._total if everybody else self._speed + self._speeds[machine]

    def _leave(self, machine: int) -> None:
        self._training.remove(machine)
        self._speed = self._speed - self._speeds[machine] if self._training else 0.0


class ElasticRule(_Fleet):
    """Paceline's elastic fleet: those that are there go on, and a newcomer enters when its process has started."""

    name = "Paceline"

    def __init__(self, speeds: Sequence[float], costs: FailureCosts) -> None:
        super().__init__(speeds, costs, save_s=costs.save_s)
        self._entering: deque[tuple[float, int]] = deque()

    def advance(self, to_s: float) -> None:
        while self._entering and self._entering[0][0] <= to_s:
            ready_s, machine = self._entering.popleft()
            self._let_pass(ready_s)
            self._pause(self._costs.join_s if self._training else self._costs.load_s)
            self._enter(machine)
        self._let_pass(to_s)

    def lost(self, machine: int) -> None:
        if machine not in self._training:
            self._entering = deque(entry for entry in self._entering if entry[1] != machine)
            return
        self._leave(machine)
        if not self._training:
            self.spent.undo(self._checkpoints.fall_back())
            return
        self.spent.undo(self._speeds[machine] * self._costs.step_s / 2)
        self._pause(self._costs.kill_s)

    def came(self, machine: int) -> None:
        self._entering.append((self._now + self._costs.start_s, machine))

    def _pause(self, seconds: float) -> None:
        self._still_until = max(self._now, self._still_until) + seconds


class RestartRule(_Fleet):
    """A restart of all processes from the last checkpoint, once all machines are there again."""

    name = "restart"

    def __init__(self, speeds: Sequence[float], costs: FailureCosts) -> None:
        super().__init__(speeds, costs, save_s=costs.write_s)

    def advance(self, to_s: float) -> None:
        self._let_pass(to_s)

    def lost(self, machine: int) -> None:
        self._leave(machine)
        self._stop()

    def came(self, machine: int) -> None:
        self._enter(machine)
        self._stop()

    def _stop(self) -> None:
        self.spent.undo(self._checkpoints.fall_back())
        self._still_until = self._now + self._costs.start_s + self._costs.load_s if self._enough() else math.inf

    def _enough(self) -> bool:
        return len(self._training) == len(self._speeds)


class RestartAnySizeRule(RestartRule):
    """A restart with the machines that are there, whenever one goes or comes."""

    name = "restart, any size"

    def _enough(self) -> bool:
        return bool(self._training)


RULES: tuple[type[ElasticRule] | type[RestartRule], ...] = (ElasticRule, RestartRule, RestartAnySizeRule)


# -- playing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goodput:
    """The result of a rule for a fleet: parts of the machines' time, weighted by speed; the five parts add up to 1."""

    rule: str
    goodput: float
    away: float
    stopped: float
    checkpoints: float
    redone: float


def play(rule: FailureRule, changes: Iterable[Change], *, until_s: float) -> Spent:
    """Play a rule against changes until a time, and return what the machines' time went into."""
    for change in takewhile(lambda change: change.at_s < until_s, changes):
        rule.advance(change.at_s)
        (rule.came if change.comes else rule.lost)(change.machine)
    rule.advance(until_s)
    return rule.spent


def compare_goodput(
    speeds: Sequence[float],
    costs: FailureCosts,
    *,
    mtbf_s: float | Sequence[float],
    replace_s: float | Sequence[float],
    until_s: float | None = None,
    seed: int = 0,
) -> list[Goodput]:
    """Play every rule against the same failures; as long as the fleet needs for 2,000 of them, unless ``until_s`` says.

    ``speeds`` are the machines', in any unit; ``mtbf_s`` is the mean time between failures of each.
    """
    machines = len(speeds)
    length_s = until_s if until_s is not None else min(FAILURES * fleet_mtbf_s(machines, mtbf_s), LONGEST_S)
    found = []
    for kind in RULES:
        drawn = failures(machines, mtbf_s=mtbf_s, replace_s=replace_s, seed=seed)
        spent = play(kind(speeds, costs), drawn, until_s=length_s)
        parts = (spent.useful, spent.away, spent.stopped, spent.saving, spent.redone)
        found.append(Goodput(kind.name, *(part / spent.total for part in parts)))
    return found


def fleet_mtbf_s(machines: int, mtbf_s: float | Sequence[float]) -> float:
    """Return the mean time between two failures of a fleet, ``1 / sum(1 / M_i)``; infinite where nobody fails.

    >>> fleet_mtbf_s(4, 100.0), fleet_mtbf_s(2, [100.0, math.inf])
    (25.0, 100.0)
    """
    rate = float((1 / np.broadcast_to(np.asarray(mtbf_s, dtype=float), machines)).sum())
    return 1 / rate if rate else math.inf


OPTIMISER_COPIES = 3
"""Parameters and two numbers for each of them: the state of a training with Adam."""
NOT_MODELLED = (
    "Simulated, not run. Not modelled: machines that stand still, several that fail for one reason, and what a smaller "
    "batch does to the training."
)


def parse_costs(text: str | None) -> dict[str, float]:
    """Return the costs of ``start=120,join=0.5``, in seconds, by the names of `FailureCosts`.

    >>> parse_costs("start=120,join=0.5")
    {'start_s': 120.0, 'join_s': 0.5}
    """
    known = [field.name.removesuffix("_s") for field in fields(FailureCosts)]
    found: dict[str, float] = {}
    for part in text.split(",") if text is not None else ():
        name, _, value = part.partition("=")
        if name.strip() not in known:
            raise ValueError(
                f"--costs has {part!r}: write seconds such as start=120,join=0.5; there are {', '.join(known)}"
            )
        try:
            found[f"{name.strip()}_s"] = seconds = float(value)
        except ValueError:
            seconds = -1.0
        if not (seconds >= 0 and math.isfinite(seconds)):
            raise ValueError(f"--costs has {part!r}: {name.strip()} is a number of seconds, at least 0")
    return found


def figures(found: Sequence[Goodput], costs: FailureCosts) -> dict[str, Any]:
    """Return every rule's parts and the costs."""
    finite = {name: value if math.isfinite(value) else None for name, value in asdict(costs).items()}
    return {"rules": [asdict(one) for one in found], "costs": finite}


def table(found: Sequence[Goodput]) -> Table:
    """Return the parts as a table for a terminal. Needs rich."""
    drawn = empty_table(["rule"], ["goodput", "away", "stopped", "checkpoints", "redone"])
    for one in found:
        parts = (one.goodput, one.away, one.stopped, one.checkpoints, one.redone)
        drawn.add_row(one.rule, *(f"{100 * part:.1f} %" for part in parts))
    return drawn


def verdict(found: Sequence[Goodput], costs: FailureCosts, *, fleet_mtbf_s: float) -> list[str]:
    """Return what the figures mean, and what they rest on, in sentences."""
    by_rule = {one.rule: one for one in found}
    ours, others = by_rule["Paceline"], [one for one in found if one.rule != "Paceline"]
    best = max(others, key=lambda one: one.goodput)
    saved = f"every {duration(costs.every_s)}" if math.isfinite(costs.every_s) else "at no time"
    ratio = f": {ours.goodput / best.goodput:.2f} times as much" if best.goodput else ""
    size = "with the machines that are there" if best.rule.endswith("any size") else "once the machine is replaced"
    listed = ", ".join(
        f"{field.name.removesuffix('_s')}={number(getattr(costs, field.name))}"
        for field in fields(costs)
        if math.isfinite(getattr(costs, field.name))
    )
    return [
        f"Somebody fails every {duration(fleet_mtbf_s)}: Paceline does {percent(ours.goodput)} of what these machines "
        f"do without failures, a restart from a checkpoint taken {saved}, {size}, {percent(best.goodput)}{ratio}.",
        f"Costs in seconds: {listed}; --costs replaces them.",
        NOT_MODELLED,
    ]
