"""Events that hit real processes at a given step, as ``--failures`` writes them for elastic fleets.

Entries are separated by commas; one that holds an ``@`` is an event, any other is a random failure of averages
(`paceline.machines.failures`)::

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

import re
from dataclasses import dataclass
from typing import Literal, cast

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
