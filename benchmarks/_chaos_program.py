"""What one run of chaos.py trains, and which faults it has, drawn from its seed. Pure: no process, clock or torch."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

from _smoke import smoke

WAITING = ("adaptive", "equal", "epoch", "fixed:2,1,1,3,1,2,1,1", "auto")
"""Paces that wait for everybody; auto may change to deadlines by itself."""
HASTY = ("joint", "cutoff", "deadline", "floor", "arrivals")
"""Paces with deadlines; the last three are those of `_chaos_worker.Hasty`, which sets one in every step."""
AVERAGES: tuple[dict[str, Any], ...] = (
    {"name": "average", "every_steps": 2},
    {"name": "average", "every_steps": 3, "weights": "uniform"},
    {"name": "average", "period_s": 0.05},
    {"name": "average", "period_s": 0.15},
    {"name": "elastic-average", "tau": 1},
    {"name": "elastic-average", "tau": 2},
)
CALLS = ("evaluate", "predict", "save", "any")
KINDS = ("kill", "freeze", "leave", "join", "roster", "cut roster", "cut store", "cut peer")
OFTEN = (5, 5, 2, 3, 2, 1, 1, 1)
"""How often each kind of fault is drawn, against the others."""
MOST_LIVING, SLOTS = 5, 8
EARLY_S, FIRST_S, SECONDS = (0.0, 0.8), (0.8, 1.3), (1.2, 2.6)
"""Seconds to the first fault, while the fleet forms or in its first steps, and from there to the last."""
FREEZE_S, AWAY_S, BACK_S = (0.05, 3.0), (0.05, 1.2), (0.1, 1.0)
"""Seconds of a freeze, of a roster's absence, and from a death to the restart of its slot."""
globals().update(smoke(KINDS=("kill", "join"), OFTEN=(1, 1), SECONDS=(0.8, 1.0)))


@dataclass(frozen=True)
class Fault:
    """One fault. Who is hit is decided when it is due, among those that may be hit then."""

    at_s: float
    """Seconds after the run's beginning."""
    kind: str
    seconds: float
    """How long it lasts; of a kill, after which time the slot is started again."""
    choice: float
    """Number from 0 to 1 that picks the target."""


@dataclass(frozen=True)
class Program:
    """One run: the workers' script, and what happens to them."""

    seed: int
    workers: int
    shards: int
    """Processes per worker; more than one make it a group."""
    pace: str
    combine: dict[str, Any]
    wire: str
    length: int
    batch: int
    micro: int | str
    epochs: int
    order: bool
    """Whether the script brings an order of its own."""
    sample_s: float
    """Seconds that one sample takes."""
    stalls: float
    """Part of the micro-batches that take up to 0.3 s longer."""
    calls: tuple[tuple[str, int, int], ...]
    """Calls between steps: name, every how many steps or epochs, and the remainder."""
    autosave_s: float | None
    seconds: float
    """After this time nothing more happens, and the script hurries to its end."""
    reported: bool
    """Whether the roster is informed of deaths, as by its own launcher, or must notice them by itself."""
    faults: tuple[Fault, ...]

    @property
    def averages(self) -> bool:
        """Whether workers step by themselves and their parameters are averaged."""
        return bool(self.combine["name"] != "gradients")

    def as_order(self) -> dict[str, Any]:
        """Return what a worker needs, as plain data."""
        return {name: value for name, value in asdict(self).items() if name != "faults"}

    def __str__(self) -> str:
        settings = ",".join(f"{name}={value}" for name, value in self.combine.items() if name != "name")
        parts = [self.pace.partition(":")[0], self.combine["name"] + (f"({settings})" if settings else "")]
        parts += [self.wire] if self.wire != "float32" else []
        parts += ["order"] if self.order else []
        return f"{self.workers} x {self.shards}: {' '.join(parts)}"


def draw_program(seed: int) -> Program:
    """Return the run of this seed, always the same."""
    dice = random.Random(f"chaos/{seed}")
    shards = 2 if dice.random() < 0.12 else 1
    averages = shards == 1 and dice.random() < 0.25
    combine = dict(dice.choice(AVERAGES)) if averages else {"name": "gradients"}
    pace = dice.choice(WAITING if averages or shards > 1 or dice.random() < 0.4 else HASTY)
    first_s = dice.uniform(*EARLY_S if dice.random() < 0.3 else FIRST_S)
    seconds = first_s + dice.uniform(*SECONDS)
    return Program(
        seed=seed,
        workers=2 if shards > 1 else dice.choice((2, 3, 3, 4)),
        shards=shards,
        pace=pace,
        combine=combine,
        wire=_wire(dice, combine["name"]) if shards == 1 and dice.random() < 0.2 else "float32",
        length=dice.randint(80, 120),
        batch=24,
        micro=dice.choice((2, 3, 4, 7) if shards > 1 else (2, 3, 4, 7, "auto")),
        epochs=dice.randint(5, 8) if shards > 1 else dice.randint(14, 22),  # a step of a group takes longer
        order=dice.random() < 0.3,
        sample_s=dice.uniform(0.002, 0.005),
        stalls=dice.choice((0.0, 0.02, 0.05)),
        calls=tuple((name, (every := dice.randint(5, 19)), dice.randrange(every)) for name in CALLS),
        autosave_s=dice.choice((None, 0.2, 0.5)),
        seconds=seconds,
        reported=dice.random() < 0.75,
        faults=tuple(_faults(dice, first_s, seconds)),
    )


def _wire(dice: random.Random, combine: str) -> str:
    choices = {"gradients": ("bf16", "fp16"), "average": ("bf16", "fp16", "int8")}
    return dice.choice(choices.get(combine, ("float32",)))


def _faults(dice: random.Random, at: float, seconds: float) -> list[Fault]:
    lasting = {"freeze": FREEZE_S, "roster": AWAY_S, "kill": BACK_S}
    faults = list[Fault]()
    while at < seconds:
        (kind,) = dice.choices(KINDS, OFTEN)
        low, high = lasting.get(kind, (0.0, 0.0))
        length = low * (high / low) ** dice.random() if low else 0.0  # short ones as often as long ones
        faults.append(Fault(at, kind, length, dice.random()))
        at += dice.choice((0.0, 0.02, 0.1, dice.uniform(0.2, 0.9), dice.uniform(0.2, 0.9)))
    return faults
