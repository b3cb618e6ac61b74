"""``paceline run``: check what was asked, then start the workers and stay with them (`paceline.cli.launch`)."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from paceline.cli.complain import refuse

if TYPE_CHECKING:
    from paceline.observe.server import LivePage

Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="The training script (with -m: a module's name).")]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="Everything after the script goes to it untouched.")
]
Count = Annotated[
    str | None, typer.Option("-n", metavar="N", help="Workers to start. Default: one for each device or machine.")
]
Devices = Annotated[
    str | None, typer.Option(metavar="LIST", help="A device for each worker, such as cuda:0,cuda:1,cpu.")
]
Emulate = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Pad each worker to a machine so many times SLOWER: 1,1,2,4, or a trace.csv."),
]
SampleMs = Annotated[float, typer.Option(help="With --emulate: the reference machine's milliseconds a sample.")]
Pace = Annotated[str | None, typer.Option(metavar="NAME", help="Who does how much; overrides the script's own.")]
Combine = Annotated[str | None, typer.Option(metavar="NAME", help="How work merges; overrides the script's own.")]
Fail = Annotated[
    str | None,
    typer.Option(
        "--failures", metavar="LIST", help="With averages: emulate lost:P, frozen:PxR, restart:PxR (R rounds)."
    ),
]
Network = Annotated[str | None, typer.Option(metavar="LINK", help="Pad rounds to a link such as 100mbit,20ms.")]
Name = Annotated[str | None, typer.Option(help="Name of the run. Default: the script's.")]
Runs = Annotated[Path, typer.Option(help="Folder in which the run's own folder is made.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the emulated jitter; the script finds it in PACELINE_SEED.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No view and no verdict: only what the script prints.")]
Watch = Annotated[bool, typer.Option("--watch", help="Serve a live page of the run meanwhile, on this computer.")]
Module = Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as in python -m.")]


def run(
    script: Script,
    args: Arguments = None,
    n: Count = None,
    devices: Devices = None,
    emulate: Emulate = None,
    sample_ms: SampleMs = 2.0,
    pace: Pace = None,
    combine: Combine = None,
    failures: Fail = None,
    network: Network = None,
    name: Name = None,
    runs: Runs = Path("runs"),
    seed: Seed = None,
    quiet: Quiet = False,
    watch: Watch = False,
    module: Module = False,
) -> None:
    """Start a training script on every worker of a fleet, on this computer."""
    try:
        _check_script(script, module)
        device_list = _devices(devices)
        workers = _workers(n, device_list, emulate, sample_ms)
        _check_names(pace, combine, workers)
        _check_emulated(failures, network)
        run_name = name or (script if module else Path(script).stem)
        run_dir = _run_dir(runs, run_name)
        page = _live_page(run_dir) if watch else None
    except ValueError as error:
        refuse(str(error))
    settings = {
        "PACELINE_NAME": run_name,
        "PACELINE_RUN_DIR": str(run_dir),
        "PACELINE_PACE": pace,
        "PACELINE_COMBINE": combine,
        "PACELINE_EMULATE": emulate,
        "PACELINE_SAMPLE_MS": f"{sample_ms:g}" if emulate else None,
        "PACELINE_FAILURES": failures,
        "PACELINE_NETWORK": network,
        "PACELINE_SEED": None if seed is None else str(seed),
    }
    given = {key: value for key, value in settings.items() if value is not None}
    command = (sys.executable, "-u", *(["-m"] if module else []), script, *(args or []))

    from paceline.cli.launch import Order, launch

    code = launch(Order(command, workers, given, run_dir, devices=tuple(device_list), quiet=quiet))
    if page is not None:
        page.close()
    leave_with(code)


def _run_dir(runs: Path, name: str) -> Path:
    from paceline.observe import new_run_dir

    return new_run_dir(runs, name).resolve()


def _live_page(run_dir: Path) -> LivePage:
    """The run's live page, being served; its folder may still be empty. Raises ValueError when something is missing."""
    from paceline.cli.watching import forget
    from paceline.observe.server import LivePage

    try:
        page = LivePage(run_dir)
    except ImportError as error:
        forget(run_dir)
        raise ValueError(f"--watch: the live page needs {error.name}: pip install 'paceline[view]'") from None
    except ValueError as error:
        forget(run_dir)
        raise ValueError(f"--watch: {error}") from None
    typer.echo(f"paceline: live page at {page.url}", err=True)
    return page


def leave_with(code: int) -> NoReturn:
    """End at once: a thread that still imports torch would hold the interpreter's own end up, or crash it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _check_script(script: str, module: bool) -> None:
    if module:
        sys.path.insert(0, os.getcwd())  # as `python -m` does in the workers
        top = script.partition(".")[0]
        if not top or importlib.util.find_spec(top) is None:
            raise ValueError(f"no module named {script!r} can be found from here")
        return
    path = Path(script)
    if path.is_dir() and (path / "__main__.py").exists():
        return
    if not path.is_file():
        kind = "is not a file" if path.exists() else "does not exist"
        raise ValueError(f"the script {script!r} {kind} (looked in {Path.cwd()})")
    if not os.access(path, os.R_OK):
        raise ValueError(f"the script {script!r} cannot be read")


def _devices(text: str | None) -> list[str]:
    """The names in ``cuda:0,cuda:1,cpu``; whether they exist is for the workers to find out."""
    if text is None:
        return []
    names = [name.strip() for name in text.split(",")]
    for position, name in enumerate(names, start=1):
        if not re.fullmatch(r"[a-z]+(:[0-9]+)?", name):
            raise ValueError(f"--devices entry {position} is {name!r}; write a device such as cpu, cuda or cuda:1")
    return names


def _workers(n: str | None, devices: list[str], emulate: str | None, sample_ms: float) -> int:
    """How many workers to start: as many as asked for, as devices, or as emulated machines; these must agree."""
    from paceline.machines import parse_fleet

    asked = None if n is None else _count(n)
    if asked and devices and asked != len(devices):
        raise ValueError(f"-n asks for {asked} workers, --devices names {len(devices)} devices: give one for each")
    if emulate is not None:
        try:
            return len(parse_fleet(emulate, sample_ms=sample_ms, workers=asked or len(devices) or None))
        except ValueError as error:
            raise ValueError(f"--emulate: {error}") from None
    return asked or len(devices) or 1


def _count(text: str) -> int:
    if ":" in text:
        raise ValueError(f"-n {text}: fleets whose workers come and go are not in this version; give one number")
    if not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise ValueError(f"-n is the number of workers, a whole number from 1, not {text!r}")
    return int(text)


def _check_emulated(failures: str | None, network: str | None) -> None:
    if failures is not None:
        from paceline.machines.failures import parse_failures

        try:
            parse_failures(failures)
        except ValueError as error:
            raise ValueError(f"--failures: {error}") from None
    if network is not None:
        from paceline.machines.link import parse_link

        try:
            parse_link(network)
        except ValueError as error:
            raise ValueError(f"--network: {error}") from None


def _check_names(pace: str | None, combine: str | None, workers: int) -> None:
    if pace is not None:
        from paceline.pace import make

        try:
            make(pace).check(workers)
        except ValueError as error:
            raise ValueError(f"--pace: {error}") from None
    if combine is not None:
        from paceline.combine import NAMES

        if combine not in NAMES:
            raise ValueError(f"--combine: unknown combine {combine!r}; known: {', '.join(NAMES)}")
