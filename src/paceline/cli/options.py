"""The options of ``paceline run``, checked before anything starts; errors tell the user what to write instead.

Those for workers on a Ray cluster come last; without ``--ray`` nothing of Ray is imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.terminal import about
from paceline.launcher.process_group import processes

if TYPE_CHECKING:
    from paceline.adapters.ray.demand import Demand
    from paceline.launcher.faults import Faults
    from paceline.launcher.supervise import Order
    from paceline.machines.failures import Event
    from paceline.machines.spot import Market


@dataclass(frozen=True)
class Size:
    """The number of workers."""

    start: int
    """Workers that are started here."""
    bounds: tuple[int, int] | None = None
    """The least and the greatest number of workers in an elastic fleet; None in a fixed one."""


def check_script(script: str, module: bool, folder: Path | None = None) -> None:
    """Raise ValueError unless the script is found from ``folder``, the current one unless given."""
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
    """Return the names in ``cuda:0,cuda:1,cpu``; the workers check whether these devices exist."""
    if text is None:
        return []
    names = [name.strip() for name in text.split(",")]
    for position, name in enumerate(names, start=1):
        if not re.fullmatch(r"[a-z]+(:[0-9]+)?", name):
            raise ValueError(f"--devices entry {position} is {name!r}; write a device such as cpu, cuda or cuda:1")
    return names


def read_groups(text: str | None, *, on_ray: bool = False) -> tuple[int, ...]:
    """Return the number of processes per worker, from ``2`` or ``1,2``; empty without the option."""
    if text is None:
        return ()
    if on_ray:
        raise ValueError("--procs-per-worker does not work with --ray yet: leave one of the two out")
    sizes = [size.strip() for size in text.split(",")]
    for position, size in enumerate(sizes, start=1):
        if not re.fullmatch(r"[0-9]{1,4}", size, re.ASCII) or int(size) < 1:
            entry = f"--procs-per-worker entry {position} is {size!r}"
            raise ValueError(f"{entry}; write how many processes a worker has, from 1 on")
    return tuple(map(int, sizes))


def read_size(
    n: str | None,
    *,
    devices: list[str],
    emulate: str | None,
    sample_ms: float,
    joining: bool = False,
    groups: Sequence[int] = (),
) -> Size:
    """Return the number of workers to start: as asked for, or one per device or emulated machine.

    With one number these must agree. With MIN:MAX, or when joining a remote fleet, the length of a list is the number
    to start, and the list begins again for workers that come later; without a list, MAX are started (one, when
    joining). With ``groups``, the number of processes per worker, each process has a device.
    """
    bounds = _bounds(n) if n is not None and ":" in n else None
    if bounds and joining:
        raise ValueError(f"-n {n}: the fleet's bounds are set where it was started; with --join give one number")
    asked = None if n is None or bounds else _count(n)
    if not bounds and not joining:
        return Size(_agreed(asked, devices, emulate, sample_ms, groups))
    listed = _listed(devices, emulate, sample_ms, groups) or (None if bounds else len(groups) or None)
    most = bounds[1] if bounds else asked
    start = asked or min(listed or most or 1, most or listed or 1)
    return Size(start, bounds)


def _agreed(asked: int | None, devices: list[str], emulate: str | None, sample_ms: float, groups: Sequence[int]) -> int:
    if asked and devices:
        _check_devices(f"-n asks for {asked} workers", asked, devices, groups)
    workers = asked or _workers_on(devices, groups)
    if emulate is not None:
        workers = _machines(emulate, sample_ms, workers=workers)
    workers = workers or len(groups) or 1
    if len(groups) > workers:
        raise ValueError(f"--procs-per-worker has {len(groups)} entries, for {workers} workers: give at most one each")
    return workers


def _listed(devices: list[str], emulate: str | None, sample_ms: float, groups: Sequence[int]) -> int | None:
    """Return the number of workers for which the lists have entries; None without a list."""
    machines = None if emulate is None else _machines(emulate, sample_ms, workers=None)
    if machines and devices:
        _check_devices(f"--emulate has {machines} machines", machines, devices, groups)
    return machines or _workers_on(devices, groups)


def _check_devices(asked: str, workers: int, devices: list[str], groups: Sequence[int]) -> None:
    """Raise ValueError unless there is one device per worker or, in groups, per process."""
    wanted = processes(groups or (1,), workers)
    if wanted != len(devices):
        asked, each = (f"{asked} of {wanted} processes", "each process") if groups else (asked, "each")
        raise ValueError(f"{asked}, --devices names {len(devices)} devices: give one for {each}")


def _workers_on(devices: list[str], groups: Sequence[int]) -> int | None:
    """Return the number of workers that use these devices; None without devices."""
    sizes, workers = groups or (1,), 0
    while processes(sizes, workers) < len(devices):
        workers += 1
    if processes(sizes, workers) == len(devices):
        return workers or None
    fewer, more = processes(sizes, workers - 1), processes(sizes, workers)
    raise ValueError(
        f"--devices names {len(devices)} devices, and workers of --procs-per-worker {','.join(map(str, groups))} have "
        f"{f'{fewer} or ' if fewer else ''}{more} processes: give one for each process"
    )


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
    """Return the random failures, which the workers play, and the faults, which the launcher plays."""
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
    from paceline.machines.failures import parse_events, parse_failures, split

    if text is None:
        return None, ()
    chances, events = split(text)
    if chances or not events:
        parse_failures(chances)
    return (chances or None if events else chances), parse_events(events)


def _market(spot: Path, room: int, speed_up: float, notice: str | None) -> tuple[Market, float]:
    from paceline.machines.failures import seconds
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


def check_names(pace: str | None, combine: str | None, comm_dtype: str | None, workers: int) -> None:
    if pace is not None:
        from paceline.pace import make

        with about("--pace"):
            make(pace).check(workers)
    if combine is not None:
        from paceline.training.combines import names

        if combine not in names():
            raise ValueError(f"--combine: unknown combine {combine!r}; known: {', '.join(names())}")
    if comm_dtype is not None:
        from paceline.transport.formats import format_of

        with about("--comm-dtype"):
            format_of(comm_dtype)


of_ray = partial(typer.Option, rich_help_panel="On a Ray cluster")

Ray = Annotated[str | None, of_ray("--ray", metavar="auto|ADDRESS", help="Start the workers on this cluster.")]
PerWorker = Annotated[str | None, of_ray(metavar="LIST", help="Needs of each: gpus=1,cpus=4.")]
Labels = Annotated[str | None, of_ray(metavar="LIST", help="Labels of nodes: spot=true,zone!=b.")]
RuntimeEnv = Annotated[str | None, of_ray(metavar="JSON|FILE", help="Ray's runtime_env, or a file of it.")]


@dataclass(frozen=True)
class OnRay:
    """The Ray cluster on which the workers run, and what they need there."""

    address: str
    bounds: tuple[int, int]
    demand: Demand
    runtime_env: Mapping[str, Any] | None

    def launch(self, order: Order, *, token: str, faults: Faults) -> int:
        from paceline.adapters.ray import launch

        return launch(
            order,
            self.bounds,
            self.demand,
            token=token,
            faults=faults,
            address=self.address,
            runtime_env=self.runtime_env,
        )


def read_ray(
    ray: str | None,
    size: Size,
    *,
    per_worker: str | None,
    labels: str | None,
    runtime_env: str | None,
    **others: object,
) -> OnRay | None:
    """Return what ``--ray`` asks for, None without it; ``others`` are options, by name, without a meaning on Ray."""
    if ray is None:
        belong = {"--per-worker": per_worker, "--labels": labels, "--runtime-env": runtime_env}
        if given := [option for option, value in belong.items() if value is not None]:
            raise ValueError(f"{given[0]} is for workers on a Ray cluster: give --ray auto, or its address")
        return None
    from paceline.adapters.ray import check_installed
    from paceline.adapters.ray.demand import read_demand

    if unfit := [name for name, value in others.items() if value]:
        option = f"--{unfit[0].replace('_', '-')}"
        raise ValueError(f"{option} has no meaning with --ray, where Ray finds the nodes: leave it out")
    if size.bounds is None:
        raise ValueError("--ray needs the number of workers: give -n MIN:MAX, such as -n 2:8")
    check_installed("--ray")
    return OnRay(ray, size.bounds, read_demand(per_worker, labels), _read_runtime_env(runtime_env))


def ray_count(ray: str | None, n: str | None) -> str | None:
    """Turn ``-n 4`` into ``-n 4:4`` on Ray, where workers return, too.

    >>> ray_count("auto", "4"), ray_count(None, "4")
    ('4:4', '4')
    """
    return f"{n}:{n}" if ray is not None and n is not None and n.isdigit() else n


def check_ray_script(on_ray: OnRay, script: str, module: bool) -> None:
    """Run `check_script` in the folder that Ray copies to the nodes; one that Ray itself fetches is not checked."""
    brought = (on_ray.runtime_env or {}).get("working_dir")
    if brought is None:
        check_script(script, module)
    elif not module and Path(str(brought)).is_dir():
        check_script(script, module, Path(str(brought)))


def _read_runtime_env(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        if text.lstrip().startswith("{"):
            read = json.loads(text)
        else:
            import yaml  # comes with Ray; JSON is YAML too

            read = yaml.safe_load(Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--runtime-env: {text} cannot be read ({error})") from None
    except Exception as error:  # yaml's own errors
        raise ValueError(f"--runtime-env: {text} is not YAML ({next(iter(str(error).splitlines()), '')})") from None
    if not isinstance(read, dict):
        raise ValueError(f'--runtime-env: {text} is not a mapping; write such as {{"working_dir": "."}}')
    return read
