"""``paceline run``: the options are checked, then `paceline.launcher` starts and supervises the workers."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import (
    Labels,
    PerWorker,
    Ray,
    RuntimeEnv,
    Size,
    check_names,
    check_network,
    check_ray_script,
    check_script,
    ray_count,
    read_devices,
    read_faults,
    read_groups,
    read_ray,
    read_size,
)
from paceline.cli.terminal import about, leave_with, refuse
from paceline.launcher.tokens import check_host, invitation, own_token, printable, their_token
from paceline.observe import new_run_dir
from paceline.transport.formats import choice_text

if TYPE_CHECKING:
    from paceline.cli.options import OnRay
    from paceline.launcher.faults import Faults
    from paceline.launcher.roster import Roster
    from paceline.launcher.supervise import Order
    from paceline.page.server import LivePage

of_workers = partial(typer.Option, rich_help_panel="Workers")
of_elastic = partial(typer.Option, rich_help_panel="Elastic fleets: workers come and go")
of_network = partial(typer.Option, rich_help_panel="Network")
of_emulation = partial(typer.Option, rich_help_panel="Emulation on this computer")
of_output = partial(typer.Option, rich_help_panel="Output")

Script = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="Training script (with -m: a module).", show_default=False)
]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")]

Count = Annotated[str | None, of_workers("-n", metavar="N|MIN:MAX", help="Workers; MIN:MAX lets them come and go.")]
Devices = Annotated[str | None, of_workers(metavar="LIST", help="Device of each, such as cuda:0,cpu.")]
ProcsPerWorker = Annotated[str | None, of_workers(metavar="N|LIST", help="Processes that shard each model.")]
Pace = Annotated[str | None, of_workers(metavar="NAME", help="Used instead of the script's pace.")]
Combine = Annotated[str | None, of_workers(metavar="NAME", help="Used instead of the script's combine.")]
Seed = Annotated[int | None, of_workers(metavar="N", help="Seed of emulation (PACELINE_SEED).")]
Module = Annotated[bool, of_workers("-m", help="SCRIPT is a module, as in python -m.")]

Join = Annotated[str | None, of_elastic(metavar="HOST:PORT#KEY", help="Join the fleet of this roster.")]
TokenFile = Annotated[Path | None, of_elastic(metavar="FILE", help="Token file (or PACELINE_TOKEN).")]
Host = Annotated[str | None, of_elastic(metavar="ADDRESS", help="Let other computers join here.")]
Port = Annotated[int | None, of_elastic(metavar="N", min=1, max=65535, help="Port of the roster.")]

CommDtype = Annotated[str | None, of_network(metavar="NAME", help=f"Format of sums: {choice_text()}.")]
Network = Annotated[str | None, of_network(metavar="LINK", help="Emulate a link such as 100mbit,20ms.")]

Emulate = Annotated[str | None, of_emulation(metavar="LIST", help="Times SLOWER: 1,1,2+50ms, or a trace.csv.")]
SampleMs = Annotated[
    float, of_emulation(metavar="MS", help="Milliseconds per sample of a 1 (2.0).", show_default=False)
]
Fail = Annotated[
    str | None, of_emulation("--failures", metavar="LIST", help="Such as kill:2@30,freeze:1@50:5s,join@80.")
]
Spot = Annotated[Path | None, of_emulation(metavar="FILE.csv", help="Rows of milliseconds,add|remove,node.")]
SpeedUp = Annotated[float | None, of_emulation(metavar="X", help="Play --spot X times faster.")]
SpotNotice = Annotated[str | None, of_emulation(metavar="TIME", help="SIGTERM to kill in --spot, such as 2s.")]

Name = Annotated[str | None, of_output(metavar="NAME", help="Name of the run.")]
OutputDir = Annotated[
    Path, of_output(metavar="DIR", help="Folder for the run's own folder (runs).", show_default=False)
]
Quiet = Annotated[bool, of_output("-q", "--quiet", help="No view and no verdict.")]
Watch = Annotated[bool, of_output("--watch", help="Serve a live page meanwhile.")]


def run(
    script: Script,
    args: Arguments = None,
    n: Count = None,
    devices: Devices = None,
    procs_per_worker: ProcsPerWorker = None,
    pace: Pace = None,
    combine: Combine = None,
    seed: Seed = None,
    module: Module = False,
    join: Join = None,
    token_file: TokenFile = None,
    host: Host = None,
    port: Port = None,
    comm_dtype: CommDtype = None,
    network: Network = None,
    emulate: Emulate = None,
    sample_ms: SampleMs = 2.0,
    failures: Fail = None,
    spot: Spot = None,
    speed_up: SpeedUp = None,
    spot_notice: SpotNotice = None,
    ray: Ray = None,
    per_worker: PerWorker = None,
    labels: Labels = None,
    runtime_env: RuntimeEnv = None,
    name: Name = None,
    output_dir: OutputDir = Path("runs"),
    quiet: Quiet = False,
    watch: Watch = False,
) -> None:
    """Start a training script on every worker of a fleet, on this computer or on a Ray cluster."""
    try:
        device_list = read_devices(devices)
        n = ray_count(ray, n)
        groups = read_groups(procs_per_worker, on_ray=ray is not None)
        size = read_size(
            n, devices=device_list, emulate=emulate, sample_ms=sample_ms, joining=join is not None, groups=groups
        )
        elsewhere = {"devices": devices, "join": join, "host": host, "port": port}
        on_ray = read_ray(ray, size, per_worker=per_worker, labels=labels, runtime_env=runtime_env, **elsewhere)
        check_ray_script(on_ray, script, module) if on_ray else check_script(script, module)
        check_names(pace, combine, comm_dtype, size.start)
        chances, faults = read_faults(failures, size=size, seed=seed, spot=spot, speed_up=speed_up, notice=spot_notice)
        check_network(network)
        if on_ray is None:
            roster = _roster(size, host=host, port=port, join=join, token_file=token_file)
        else:
            roster, secret = None, own_token(token_file)
        run_name = name or (script if module else Path(script).stem)
        run_dir = new_run_dir(output_dir, run_name).resolve()
        page = _live_page(run_dir) if watch else None
    except ValueError as error:
        refuse(str(error))
    called = (*(["-m"] if module else []), script, *(args or []))

    from paceline.launcher.supervise import Order, worker_settings

    settings = worker_settings(
        name=run_name,
        run_dir=run_dir,
        pace=pace,
        combine=combine,
        comm_dtype=comm_dtype,
        emulate=emulate,
        sample_ms=f"{sample_ms:g}" if emulate else None,
        failures=chances,
        network=network,
        seed=seed,
    )
    command = called if on_ray else (sys.executable, "-u", *called)
    order = Order(command, size.start, settings, run_dir, tuple(device_list), quiet=quiet, groups=groups)
    if on_ray is not None:
        code = _on_ray(on_ray, order, faults, secret)
    elif roster is None:
        from paceline.launcher.fixed_fleet import launch_fixed

        code = launch_fixed(order)
    else:
        from paceline.launcher.elastic_fleet import launch_elastic

        shown = printable(roster.token, file=token_file)
        invites = "" if join else invitation(roster.address, shown, called, loopback=roster.loopback)
        code = launch_elastic(order, roster, faults=faults, invitation=invites)
    if page is not None:
        page.close()
    leave_with(code)


def _roster(
    size: Size, *, host: str | None, port: int | None, join: str | None, token_file: Path | None
) -> Roster | None:
    """Return the roster of an elastic fleet, its own or that of the fleet to join; None for a fixed fleet."""
    from paceline.launcher.roster import OwnRoster, remote_roster
    from paceline.roster.persistence import beside

    if join is not None:
        if host or port:
            raise ValueError("--host and --port say where a roster of one's own listens: leave them out with --join")
        return remote_roster(join, their_token(token_file))
    if size.bounds is None:
        own = {"--host": host, "--port": port, "--token-file": token_file}
        if given := [option for option, value in own.items() if value is not None]:
            raise ValueError(f"{given[0]} is for fleets that others may join: give -n MIN:MAX, such as -n 2:8")
        return None
    minimum, maximum = size.bounds
    where = check_host(host or "127.0.0.1")
    secret, kept = own_token(token_file), beside(token_file) if token_file else None
    return OwnRoster(minimum=minimum, maximum=maximum, token=secret, host=where, port=port or 0, certificate=kept)


def _on_ray(on_ray: OnRay, order: Order, faults: Faults, token: str) -> int:
    try:
        return on_ray.launch(order, token=token, faults=faults)
    except ValueError as error:
        refuse(str(error))


def _live_page(run_dir: Path) -> LivePage:
    """Serve and return the run's live page, also while its folder is empty; raise ValueError without the extra."""
    from paceline.launcher.screen import remove_empty
    from paceline.page.server import LivePage

    with about("--watch"):
        try:
            page = LivePage(run_dir)
        except ValueError:
            remove_empty(run_dir)
            raise
    typer.echo(f"paceline: live page at {page.url}", err=True)
    return page
