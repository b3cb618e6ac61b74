"""Emulated machines: the time that one takes for its samples, the sleep that makes a worker take it; their notation.

The time of a step's samples is::

    seconds = cost_s(step) + samples * sample_s * factor(step) * jitter(step)

``sample_s`` is the reference machine's time for a sample and ``factor`` how many times slower this one is. ``cost_s``
is a constant cost of every step in which the machine works (kernel launches, a slow loader, P0's artificial delay): it
does not depend on the samples, and neither factor nor jitter changes it. ``jitter`` is lognormal with mean 1,
``exp(sigma * z - sigma**2 / 2)`` with z standard normal, and depends on nothing but the seed, the rank and the step, so
a replay is exact.

A fleet is written as ``1,1+50ms,2@40:8~0.2,4!16``: machines are separated by commas, one per worker in rank order::

    FACTOR[+COST][@STEP:FACTOR[+COST]]...[~JITTER][!MEMORY]

FACTOR is how many times SLOWER than the reference machine; ``+50ms`` is a constant cost of every step in which the
machine works, whatever its share; ``@40:8`` makes the factor 8 from step 40 on, and ``@40:8+20ms`` the cost 20 ms as
well; ``~0.2`` is lognormal jitter of the samples' time from step to step; ``!16`` is memory for micro-batches of 16
samples. A text that ends in ``.csv`` or holds a slash is the path of a trace (`paceline.machines.trace`), and its
columns are the machines; ``cluster.csv+50ms`` gives each of them the cost on top.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

from paceline import concurrency
from paceline.machines.trace import read_trace

CARRY_S = 0.05
"""The most oversleeping that later pads make up for.

Anything beyond (the process was stopped, the host was overloaded) is a shortfall: catching up would make the machine
look fast for a while.
"""


class Slowness(Protocol):
    """A machine's slowness against the reference machine, and its constant cost, step by step."""

    def factor(self, step: int) -> float: ...

    def cost_s(self, step: int) -> float: ...

    def describe(self) -> str: ...


@dataclass(frozen=True)
class Changing:
    """A factor and a cost that change at given steps.

    ``factors[i]`` and ``costs_s[i]`` hold from ``steps[i]`` on; ``steps[0]`` is 0.
    """

    steps: tuple[int, ...]
    factors: tuple[float, ...]
    costs_s: tuple[float, ...]

    def factor(self, step: int) -> float:
        return self.factors[bisect_right(self.steps, step) - 1]

    def cost_s(self, step: int) -> float:
        return self.costs_s[bisect_right(self.steps, step) - 1]

    def describe(self) -> str:
        words, before = [], 0.0
        for step, factor, cost_s in zip(self.steps, self.factors, self.costs_s):
            from_step = f" from step {step}" if step else ""
            words.append(f"{factor:g}x{from_step or ' slower'}")
            if cost_s != before:
                words.append(f"{_milliseconds(cost_s)} per step{from_step}")
            before = cost_s
        return ", ".join(words)


@dataclass(frozen=True)
class Recorded:
    """A factor per recorded step, repeated after the last one, and the constant cost of each step."""

    factors: tuple[float, ...]
    source: str
    constant_s: float = 0.0

    def factor(self, step: int) -> float:
        return self.factors[step % len(self.factors)]

    def cost_s(self, step: int) -> float:
        return self.constant_s

    def describe(self) -> str:
        slower = f"{self.source}, {min(self.factors):.2g}x to {max(self.factors):.2g}x slower"
        return slower + (f", {_milliseconds(self.constant_s)} per step" if self.constant_s else "")


@dataclass
class Machine:
    """A worker's emulated machine."""

    slowness: Slowness
    rank: int
    sample_s: float
    """Seconds per sample on the reference machine."""
    jitter: float = 0.0
    """Sigma of the lognormal jitter from step to step."""
    memory_samples: int | None = None
    """Emulated memory: more samples than this in one micro-batch do not fit."""
    seed: int = 0
    _ahead_s: float = field(default=0.0, init=False, repr=False, compare=False)

    def seconds(self, step: int, samples: int, *, begins: bool = True) -> float:
        """Return the seconds that this machine takes for ``samples`` samples at step ``step``; 0 for none.

        With ``begins`` the samples are its first in this step, so the step's constant cost is included.
        """
        cost_s = self.slowness.cost_s(step) if begins and samples else 0.0
        return cost_s + samples * self.sample_s * self.slowness.factor(step) * self._jitter(step)

    def pad(self, step: int, samples: int, started: float, *, begins: bool = True) -> float:
        """Sleep until ``started + seconds(step, samples, begins=begins)`` on the clock of `concurrency.perf_counter`.

        Every sleep lasts a little too long; the next sleep is shorter by the excess, so that the average is right.
        Returns the seconds by which the host was too slow to emulate this machine, else 0.
        """
        owed = self._ahead_s
        due = started + self.seconds(step, samples, begins=begins) - owed
        left = due - concurrency.perf_counter()
        if left > 0:
            concurrency.sleep(left)
            over = max(0.0, concurrency.perf_counter() - due)
            self._ahead_s = min(over, CARRY_S)
            return over - self._ahead_s
        self._ahead_s = min(-left, owed)
        return -left - self._ahead_s

    def check_memory(self, samples: int) -> None:
        """Raise torch.OutOfMemoryError when a micro-batch of ``samples`` does not fit this machine."""
        if self.memory_samples is not None and samples > self.memory_samples:
            import torch

            raise torch.OutOfMemoryError(
                f"emulated out of memory: a micro-batch of {samples} samples on a machine that holds "
                f"{self.memory_samples}"
            )

    def describe(self) -> str:
        """Return one line for the log and the view, such as ``2x slower, 8x from step 40, jitter 0.2``."""
        jitter = [f"jitter {self.jitter:g}"] if self.jitter else []
        memory = [f"memory for {self.memory_samples} samples"] if self.memory_samples is not None else []
        return ", ".join([self.slowness.describe(), *jitter, *memory])

    def _jitter(self, step: int) -> float:
        if not self.jitter:
            return 1.0
        return math.exp(self.jitter * _standard_normal(self.seed, self.rank, step) - self.jitter**2 / 2)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:g} ms"


def _standard_normal(seed: int, rank: int, step: int) -> float:
    """Return a normal number that is the same on every system and version, since it is drawn from a hash."""
    digest = blake2b(f"{seed}/{rank}/{step}".encode(), digest_size=8).digest()
    uniform = ((int.from_bytes(digest, "big") >> 12) + 0.5) / 2**52  # strictly between 0 and 1
    return NormalDist().inv_cdf(uniform)


MAX_JITTER = 3.0
"""Greatest jitter: beyond it a lognormal's mean depends on steps that practically never occur."""

ENTRY = re.compile(
    r"(?P<factor>[^@~!]*)(?P<changes>(?:@[^@~!]*)*)(?:~(?P<jitter>[^@~!]*))?(?:!(?P<memory>[^@~!]*))?", re.ASCII
)
COST = re.compile(r"\s*(?P<number>.*?)\s*(?P<unit>ms|s)\s*", re.ASCII)
TRACE = re.compile(r"(?P<path>.*?)(?:\+(?P<cost>[0-9.]*\s*(?:ms|s)))?", re.ASCII | re.DOTALL)
SHAPE = "FACTOR[+COST][@STEP:FACTOR[+COST]]...[~JITTER][!MEMORY]"


def parse_fleet(text: str, *, sample_ms: float, seed: int = 0, workers: int | None = None) -> list[Machine]:
    """Return the machines that ``text`` describes; ``sample_ms`` is the reference machine's milliseconds per sample.

    With ``workers``, returns exactly that number: a trace may have more columns (the first are used), a list may not.

    >>> [machine.describe() for machine in parse_fleet("1+50ms,2@40:8~0.2", sample_ms=2.0)]
    ['1x slower, 50 ms per step', '2x slower, 8x from step 40, jitter 0.2']
    """
    if not (math.isfinite(sample_ms) and sample_ms > 0):
        raise ValueError(f"sample_ms is {sample_ms:g}; it is the reference machine's milliseconds per sample, above 0")
    text = text.strip()
    if not text:
        raise ValueError("no machines to emulate: write one factor for each worker, such as 1,1,2,4")
    fleet = _from_trace(text, sample_ms, seed) if is_trace(text) else _from_list(text, sample_ms, seed)
    if workers is None or workers == len(fleet) or (is_trace(text) and workers < len(fleet)):
        return fleet[:workers]
    kind = "columns" if is_trace(text) else "machines"
    raise ValueError(f"{text!r} has {len(fleet)} {kind} for {workers} workers: give one for each")


def is_trace(text: str) -> bool:
    """Return whether ``text`` is the path of a trace and not a list of machines."""
    path, _ = _path_and_cost(text)
    return "/" in path or "\\" in path or path.lower().endswith(".csv")


def _from_trace(text: str, sample_ms: float, seed: int) -> list[Machine]:
    path, cost = _path_and_cost(text)
    trace = read_trace(Path(path))
    factors, cost_s = trace.factors(), 0.0 if cost is None else _cost_s(cost)
    return [
        Machine(
            Recorded(tuple(factors[:, rank].tolist()), source=f"{name} of {Path(path).name}", constant_s=cost_s),
            rank=rank,
            sample_s=sample_ms / 1000,
            seed=seed,
        )
        for rank, name in enumerate(trace.workers)
    ]


def _path_and_cost(text: str) -> tuple[str, str | None]:
    match = TRACE.fullmatch(text)
    return (match["path"], match["cost"]) if match is not None else (text, None)


def _from_list(text: str, sample_ms: float, seed: int) -> list[Machine]:
    return [_machine(entry.strip(), rank, sample_ms, seed) for rank, entry in enumerate(text.split(","))]


def _machine(entry: str, rank: int, sample_ms: float, seed: int) -> Machine:
    try:
        match = ENTRY.fullmatch(entry)
        if match is None:
            raise ValueError(f"the parts of a machine are {SHAPE}, in this order")
        return Machine(
            _changing(match["factor"], match["changes"]),
            rank=rank,
            sample_s=sample_ms / 1000,
            jitter=_jitter(match["jitter"]),
            memory_samples=_memory(match["memory"]),
            seed=seed,
        )
    except ValueError as error:
        raise ValueError(f"emulated machine {rank + 1} ({entry!r}): {error}") from None


def _changing(factor: str, changes: str) -> Changing:
    slowness, cost = _split(factor)
    steps, factors, costs = [0], [_factor(slowness)], [0.0 if cost is None else _cost_s(cost)]
    for change in changes.split("@")[1:]:
        step, colon, factor = change.partition(":")
        if not colon:
            raise ValueError(f"'@{change}' should read @STEP:FACTOR, such as @40:8")
        slowness, cost = _split(factor)
        steps.append(_whole_number("a step", step))
        factors.append(_factor(slowness))
        costs.append(costs[-1] if cost is None else _cost_s(cost))
        if steps[-1] <= steps[-2]:
            raise ValueError(f"the change at step {steps[-1]} must come after step {steps[-2]}")
    return Changing(tuple(steps), tuple(factors), tuple(costs))


def _split(text: str) -> tuple[str, str | None]:
    """Split a factor from its constant cost, as in 2+50ms; 1e+3 is a number."""
    if "+" not in text or _is_number(text):
        return text, None
    factor, _, cost = text.rpartition("+")
    return factor, cost


def _cost_s(text: str) -> float:
    match = COST.fullmatch(text)
    if match is None or not _is_number(match["number"]):
        raise ValueError(f"'+{text.strip()}' should read +COST with its unit, such as +50ms or +0.05s")
    cost = float(match["number"])
    if cost < 0:
        raise ValueError(f"a constant cost of a step is at least 0, not {text.strip()}")
    return cost * {"ms": 1e-3, "s": 1.0}[match["unit"]]


def _factor(text: str) -> float:
    if not text.strip():
        raise ValueError("a factor is missing (times slower than the reference, such as 2)")
    factor = _number("a factor", text)
    if factor <= 0:
        raise ValueError(f"a factor is how many times slower the machine is, above 0, not {text.strip()}")
    return factor


def _jitter(text: str | None) -> float:
    if text is None:
        return 0.0
    jitter = _number("the jitter", text)
    if not 0 <= jitter <= MAX_JITTER:
        raise ValueError(f"the jitter after ~ lies between 0 and {MAX_JITTER:g}, not at {text.strip()}")
    return jitter


def _memory(text: str | None) -> int | None:
    if text is None:
        return None
    memory = _whole_number("the memory after ! (samples in a micro-batch)", text)
    if memory < 1:
        raise ValueError("the memory after ! must hold at least 1 sample")
    return memory


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _number(what: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{what} is a number, not {text.strip()!r}") from None
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite, not {text.strip()}")
    return number


def _whole_number(what: str, text: str) -> int:
    if not re.fullmatch(r"\s*[0-9]+\s*", text):
        raise ValueError(f"{what} is a whole number from 0, not {text.strip()!r}")
    return int(text)
