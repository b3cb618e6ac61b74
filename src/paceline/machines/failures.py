"""Failures as ``--failures`` writes them: random ones of a worker's exchange, by round, and events at a given step.

Entries are separated by commas. Three kinds strike at random, seeded, each in bursts of complete rounds::

    lost:P[xROUNDS]              (A) the worker trains on, but its exchange is lost
    frozen:P[xROUNDS]            (B) the worker stands still, then goes on from where it was
    restart:P[xROUNDS][:stale]   (C) the worker is gone, then returns with its initial weights, or (stale) with those
                                 it had when it went; its optimiser starts anew

P is the probability per round that such a burst begins for a worker that is well; ROUNDS is its length, 1 when left
out. So ``lost:0.33`` loses a third of all exchanges, and ``restart:0.02x20`` takes a worker away for 20 rounds, on
average 49 rounds after it came back.

The same worker, round and seed always give the same result, in whatever order they are queried.

>>> failures = parse_failures("lost:0.33,restart:0.02x20", seed=7)
>>> failures.describe()
'exchange lost with p 0.33; restart from initial weights after 20 rounds away, p 0.02; seed 7'
>>> failures.at(worker=1, round=5) == failures.at(worker=1, round=5)
True

An entry that holds an ``@`` is an event, which hits a real process of an elastic fleet::

    kill:WORKER@STEP[:stay]     kill -9 when the step has been logged; the worker is restarted, or (stay) is not
    freeze:WORKER@STEP:TIME     stopped (SIGSTOP) for TIME, such as 5s or 500ms
    leave:WORKER@STEP           asked to leave (SIGTERM), as a spot machine is
    join@STEP                   a new worker is started

WORKER is its number, or ``?`` for one at random among those that are alive then.

>>> [event.text for event in parse_events("kill:2@30,join@80")]
['kill:2@30', 'join@80']
>>> split("lost:0.1,kill:?@30")
('lost:0.1', 'kill:?@30')
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, cast

import numpy as np

MOST_ROUNDS = 10**6


@dataclass(frozen=True)
class Trouble:
    """The effect of failures on one worker in one round."""

    trains: bool = True
    exchanges: bool = True
    returns_with: Literal["initial", "stale"] | None = None
    """The weights with which the worker starts this round; set in the first round after an outage of kind C."""


WELL = Trouble()


class Failure(Protocol):
    """One entry of ``--failures``, and its effect on a worker in a round."""

    def describe(self) -> str: ...

    def at(self, *, worker: int, round: int) -> Trouble: ...


@dataclass(frozen=True)
class Outages:
    """A worker's outages: well for a while (geometric, P per round), then out for ``rounds`` rounds, and so on."""

    probability: float
    rounds: int
    key: tuple[int, ...]
    """The seed of the draws: the run's seed and the entry's position in the list."""
    _found: dict[int, tuple[np.random.Generator, list[int]]] = field(default_factory=dict, repr=False, compare=False)

    def out_since(self, worker: int, round: int) -> int | None:
        """Return the first round of the outage that covers ``round``, if any."""
        starts = self._starts(worker, round)
        last = bisect_right(starts, round) - 1
        return starts[last] if last >= 0 and round < starts[last] + self.rounds else None

    def just_over(self, worker: int, round: int) -> bool:
        """Return whether ``round`` is the first after an outage (and not the first of the next)."""
        return round > 0 and self.out_since(worker, round) is None and self.out_since(worker, round - 1) is not None

    def _starts(self, worker: int, round: int) -> list[int]:
        if self.probability == 0:
            return []
        if worker not in self._found:
            self._found[worker] = (np.random.default_rng([*self.key, worker]), [])
        generator, starts = self._found[worker]
        while not starts or starts[-1] <= round:
            free = starts[-1] + self.rounds if starts else 0
            starts.append(free + int(generator.geometric(self.probability)) - 1)
        return starts


@dataclass(frozen=True)
class Lost:
    """Failure (A): the exchange is lost, the worker trains on."""

    outages: Outages

    def describe(self) -> str:
        return f"exchange lost{_burst(self.outages)}"

    def at(self, *, worker: int, round: int) -> Trouble:
        return WELL if self.outages.out_since(worker, round) is None else Trouble(exchanges=False)


@dataclass(frozen=True)
class Frozen:
    """Failure (B): the worker stands still."""

    outages: Outages

    def describe(self) -> str:
        return f"worker frozen{_burst(self.outages)}"

    def at(self, *, worker: int, round: int) -> Trouble:
        return WELL if self.outages.out_since(worker, round) is None else Trouble(trains=False, exchanges=False)


@dataclass(frozen=True)
class Restart:
    """Failure (C): the worker is gone and returns with old weights."""

    outages: Outages
    returns_with: Literal["initial", "stale"] = "initial"

    def describe(self) -> str:
        rounds = self.outages.rounds
        away = f"{rounds} rounds" if rounds > 1 else "1 round"
        return f"restart from {self.returns_with} weights after {away} away, p {self.outages.probability:g}"

    def at(self, *, worker: int, round: int) -> Trouble:
        if self.outages.out_since(worker, round) is not None:
            return Trouble(trains=False, exchanges=False)
        return Trouble(returns_with=self.returns_with) if self.outages.just_over(worker, round) else WELL


@dataclass(frozen=True)
class Failures:
    """All entries together: a worker trains and exchanges when every entry allows it."""

    entries: tuple[Failure, ...]
    seed: int

    def at(self, *, worker: int, round: int) -> Trouble:
        each = [entry.at(worker=worker, round=round) for entry in self.entries]
        back = {trouble.returns_with for trouble in each} - {None}
        return Trouble(
            trains=all(trouble.trains for trouble in each),
            exchanges=all(trouble.exchanges for trouble in each),
            returns_with="initial" if "initial" in back else "stale" if back else None,
        )

    def describe(self) -> str:
        """Return all failures in words, for the head of every result."""
        return (
            "; ".join([*(entry.describe() for entry in self.entries), f"seed {self.seed}"]) if self.entries else "none"
        )


Parser = Callable[[str, tuple[int, ...]], Failure]
"""Function that makes an entry from the text after ``name:`` and the key of its draws."""


def parse_failures(text: str, *, seed: int = 0) -> Failures:
    """Return the failures that ``text`` describes; empty text describes none."""
    entries = [entry.strip() for entry in text.split(",")] if text.strip() else []
    return Failures(tuple(_entry(entry, (seed, number)) for number, entry in enumerate(entries)), seed)


def _entry(entry: str, key: tuple[int, ...]) -> Failure:
    name, _, rest = entry.partition(":")
    parser = PARSERS.get(name.strip())
    if parser is None and "@" in entry:
        raise ValueError(f"failure {entry!r}: what happens at a step is played by `paceline run -n MIN:MAX --failures`")
    if parser is None:
        raise ValueError(f"failure {entry!r}: {name.strip()!r} is not known; there are {', '.join(sorted(PARSERS))}")
    try:
        return parser(rest.strip(), key)
    except ValueError as error:
        raise ValueError(f"failure {entry!r}: {error}") from None


def _outages(text: str, key: tuple[int, ...]) -> Outages:
    match = re.fullmatch(r"(?P<probability>[^x]+)(?:x(?P<rounds>[^x]*))?", text)
    if match is None:
        raise ValueError("write its probability a round after a colon, and the rounds it lasts after an x: 0.1x5")
    return Outages(_probability(match["probability"]), _rounds(match["rounds"]), key)


def _probability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"the probability is a number, not {text.strip()!r}") from None
    if not (math.isfinite(value) and 0 <= value < 1):
        raise ValueError(f"the probability lies from 0 to below 1, not at {text.strip()}")
    if 0 < value < 1e-9:
        raise ValueError(f"a probability of {text.strip()} never strikes: leave the entry out")
    return value


def _rounds(text: str | None) -> int:
    if text is None:
        return 1
    if not re.fullmatch(r"[0-9]+", text, re.ASCII) or not 1 <= int(text) <= MOST_ROUNDS:
        raise ValueError(f"the rounds after x are a whole number from 1 to {MOST_ROUNDS:,}, not {text!r}")
    return int(text)


def _lost(rest: str, key: tuple[int, ...]) -> Failure:
    return Lost(_outages(rest, key))


def _frozen(rest: str, key: tuple[int, ...]) -> Failure:
    return Frozen(_outages(rest, key))


def _restart(rest: str, key: tuple[int, ...]) -> Failure:
    numbers, colon, weights = rest.partition(":")
    if colon and weights not in ("initial", "stale"):
        raise ValueError(f"a worker returns with its 'initial' or 'stale' weights, not {weights!r}")
    return Restart(_outages(numbers, key), "stale" if weights == "stale" else "initial")


PARSERS: dict[str, Parser] = {"lost": _lost, "frozen": _frozen, "restart": _restart}
"""Parsers of the entries, by name; events at a given step are parsed in `paceline.machines.failures`."""


def _burst(outages: Outages) -> str:
    during = f" for {outages.rounds} rounds" if outages.rounds > 1 else ""
    return f"{during} with p {outages.probability:g}"


Action = Literal["kill", "freeze", "leave", "join"]

EXAMPLES = {
    "kill": "kill:2@30 or kill:2@30:stay",
    "freeze": "freeze:1@50:5s",
    "leave": "leave:3@60",
    "join": "join@80",
}
"""An example of each action, for error messages."""

ENTRY = re.compile(r"(?P<action>\w+)(?::(?P<worker>[^@:]*))?@(?P<step>[^:]*)(?::(?P<more>.*))?", re.ASCII)
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0}


@dataclass(frozen=True)
class Event:
    """One event of ``--failures``."""

    action: Action
    step: int
    worker: int | None = None
    """The worker's number; None for one at random, and for a join."""
    seconds: float = 0.0
    """Seconds of a freeze."""
    stays: bool = False
    """Whether a killed worker stays away."""
    text: str = ""
    """The entry as it was written."""


def split(text: str) -> tuple[str, str]:
    """Split ``text`` into its random failures and its events, each as text again."""
    entries = [entry.strip() for entry in text.split(",")] if text.strip() else []
    return ",".join(e for e in entries if "@" not in e), ",".join(e for e in entries if "@" in e)


def parse_events(text: str) -> tuple[Event, ...]:
    """Return the events that ``text`` describes, sorted by step; within a step they keep their order."""
    entries = [entry.strip() for entry in text.split(",")] if text.strip() else []
    return tuple(sorted((_event(entry) for entry in entries), key=lambda event: event.step))


def _event(entry: str) -> Event:
    match = ENTRY.fullmatch(entry)
    action = match["action"] if match else re.split(r"[:@]", entry)[0]
    if action not in EXAMPLES:
        raise ValueError(f"event {entry!r}: {action!r} is not known; write {', '.join(EXAMPLES.values())}")
    try:
        if match is None:
            raise ValueError("it cannot be understood")
        return Event(
            cast(Action, action),
            _step(match["step"]),
            worker=_worker(action, match["worker"]),
            seconds=_freeze_s(action, match["more"]),
            stays=_stays(action, match["more"]),
            text=entry,
        )
    except ValueError as error:
        raise ValueError(f"event {entry!r}: {error}; write it as {EXAMPLES[action]}") from None


def _step(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,15}", text, re.ASCII):
        raise ValueError(f"the step after @ is a whole number from 0, not {text!r}")
    return int(text)


def _worker(action: str, text: str | None) -> int | None:
    if action == "join":
        if text is not None:
            raise ValueError("a new worker gets the next number by itself")
        return None
    if text == "?":
        return None
    if text is None or not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII):
        raise ValueError(f"the worker is its number, or ? for one at random, not {text or ''!r}")
    return int(text)


def _freeze_s(action: str, more: str | None) -> float:
    if action != "freeze":
        return 0.0
    if more is None:
        raise ValueError("it does not say how long")
    return seconds(more)


def _stays(action: str, more: str | None) -> bool:
    if action == "freeze" or more is None:
        return False
    if action == "kill" and more == "stay":
        return True
    raise ValueError(f"{more!r} after the step is not known")


def seconds(text: str) -> float:
    """Return the seconds of a duration above 0, as it is written on the command line.

    >>> seconds("5s"), seconds("500ms"), seconds("1.5m")
    (5.0, 0.5, 90.0)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m)", text.strip(), re.ASCII)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"a duration is a number above 0 with its unit, such as 5s, 500ms or 2m, not {text!r}")
    return float(match[1]) * UNITS[match[2]]
