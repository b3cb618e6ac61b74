"""What was asked of ``paceline run``, checked before anything starts; errors say what to write instead."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.errors import about

if TYPE_CHECKING:
    from paceline.launcher.faults import Faults
    from paceline.machines.events import Event
    from paceline.machines.spot import Market


@dataclass(frozen=True)
class Size:
    """How many workers."""

    start: int
    """So many are started here."""
    bounds: tuple[int, int] | None = None
    """The fewest that train and the most that may be there, when they come and go."""


def check_script(script: str, module: bool, folder: Path | None = None) -> None:
    """Whether it is there, seen from ``folder``: the current one unless given."""
    if module:
        sys.path.insert(0, os.getcwd())  # as `python -m` does in the workers
        top = script.partition(".")[0]
        if not top or importlib.util.find_spec(top) is None:
            raise ValueError(f"no module named {script!r} can be found from here")
        return
    path = Path(script) if folder is None else folder / script
    if path.is_dir() and (path / "__main__.py").exists():
        return
    if not path.is_file():
        kind = "is not a file" if path.exists() else "does not exist"
        raise ValueError(f"the script {script!r} {kind} (looked in {folder or Path.cwd()})")
    if not os.access(path, os.R_OK):
        raise ValueError(f"the script {script!r} cannot be read")


def read_devices(text: str | None) -> list[str]:
    """The names in ``cuda:0,cuda:1,cpu``; whether they exist is for the workers to find out."""
    if text is None:
        return []
    names = [name.strip() for name in text.split(",")]
    for position, name in enumerate(names, start=1):
        if not re.fullmatch(r"[a-z]+(:[0-9]+)?", name):
            raise ValueError(f"--devices entry {position} is {name!r}; write a device such as cpu, cuda or cuda:1")
    return names


def read_size(
    n: str | None, *, devices: list[str], emulate: str | None, sample_ms: float, joining: bool = False
) -> Size:
    """How many workers to start: as many as asked for, as devices, or as emulated machines.

    With one number these must agree. With MIN:MAX, or when joining a fleet elsewhere, a list says how many to start
    and begins again for those that come later; without one, MAX are started (one, when joining).
    """
    bounds = _bounds(n) if n is not None and ":" in n else None
    if bounds and joining:
        raise ValueError(f"-n {n}: the fleet's bounds are set where it was started; with --join give one number")
    asked = None if n is None or bounds else _count(n)
    if not bounds and not joining:
        return Size(_agreed(asked, devices, emulate, sample_ms))
    listed = _listed(devices, emulate, sample_ms)
    most = bounds[1] if bounds else asked
    start = asked or min(listed or most or 1, most or listed or 1)
    return Size(start, bounds)


def _agreed(asked: int | None, devices: list[str], emulate: str | None, sample_ms: float) -> int:
    if asked and devices and asked != len(devices):
        raise ValueError(f"-n asks for {asked} workers, --devices names {len(devices)} devices: give one for each")
    if emulate is not None:
        return _machines(emulate, sample_ms, workers=asked or len(devices) or None)
    return asked or len(devices) or 1


def _listed(devices: list[str], emulate: str | None, sample_ms: float) -> int | None:
    """How many workers the lists are for; None without one."""
    machines = None if emulate is None else _machines(emulate, sample_ms, workers=None)
    if machines and devices and machines != len(devices):
        raise ValueError(f"--emulate has {machines} machines, --devices {len(devices)} devices: give one for each")
    return machines or len(devices) or None


def _machines(emulate: str, sample_ms: float, *, workers: int | None) -> int:
    from paceline.machines import parse_fleet

    with about("--emulate"):
        return len(parse_fleet(emulate, sample_ms=sample_ms, workers=workers))


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text, re.ASCII) or int(text) < 1:
        raise ValueError(f"-n is the number of workers, a whole number from 1, not {text!r}; or MIN:MAX, such as 2:8")
    return int(text)


def _bounds(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", text.strip(), re.ASCII)
    if match is None:
        raise ValueError(f"-n {text}: write the fewest and the most workers as MIN:MAX, such as 2:8")
    low, high = int(match[1]), int(match[2])
    if low < 1:
        raise ValueError(f"-n {text}: a fleet needs at least one worker; write {max(1, low)}:{max(1, high)}")
    if high < low:
        raise ValueError(f"-n {text}: the fewest come first; write {high or 1}:{low}")
    return low, high


def read_faults(
    failures: str | None, *, size: Size, seed: int | None, spot: Path | None, speed_up: float | None, notice: str | None
) -> tuple[str | None, Faults]:
    """The random failures, which are the engine's to play, and the faults that the launcher plays."""
    from paceline.launcher.faults import Faults

    if (speed_up is not None or notice is not None) and spot is None:
        option = "--spot-notice" if speed_up is None else "--speed-up"
        raise ValueError(f"{option} belongs to a trace: give --spot FILE")
    with about("--failures"):
        chances, events = _read_failures(failures)
    if events and size.bounds is None:
        raise ValueError(f"--failures {events[0].text}: only a fleet of -n MIN:MAX, started here, outlives this")
    if spot is None:
        return chances, Faults(events, seed=seed or 0)
    if size.bounds is None:
        raise ValueError("--spot: only a fleet of -n MIN:MAX, started here, lets its workers come and go")
    market, notice_s = _market(spot, size.bounds[1], 1.0 if speed_up is None else speed_up, notice)
    return chances, Faults(events, seed=seed or 0, market=market, notice_s=notice_s)


def _read_failures(text: str | None) -> tuple[str | None, tuple[Event, ...]]:
    from paceline.machines.events import parse_events, split
    from paceline.machines.failures import parse_failures

    if text is None:
        return None, ()
    chances, events = split(text)
    if chances or not events:
        parse_failures(chances)
    return (chances or None if events else chances), parse_events(events)


def _market(spot: Path, room: int, speed_up: float, notice: str | None) -> tuple[Market, float]:
    from paceline.machines.events import seconds
    from paceline.machines.spot import Market, read_spot

    with about("--spot-notice"):
        notice_s = 0.0 if notice is None else seconds(notice)
    with about("--spot"):
        return Market(read_spot(spot), room=room, speed_up=speed_up), notice_s


def check_network(network: str | None) -> None:
    if network is not None:
        from paceline.machines.link import parse_link

        with about("--network"):
            parse_link(network)


def check_names(pace: str | None, combine: str | None, wire: str | None, workers: int) -> None:
    if pace is not None:
        from paceline.pace import make

        with about("--pace"):
            make(pace).check(workers)
    if combine is not None:
        from paceline.combine.choose import names

        if combine not in names():
            raise ValueError(f"--combine: unknown combine {combine!r}; known: {', '.join(names())}")
    if wire is not None:
        from paceline.combine.wire import format_of

        with about("--wire"):
            format_of(wire)
