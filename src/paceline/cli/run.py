"""``paceline run``: check what was asked, then start the workers and stay with them (`paceline.launcher`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.errors import about, leave_with, refuse
from paceline.cli.host import TOKEN_HELP
from paceline.cli.options import (
    Size,
    check_names,
    check_network,
    check_script,
    read_devices,
    read_faults,
    read_groups,
    read_size,
)
from paceline.cli.ray_options import Labels, PerWorker, Ray, RuntimeEnv, check_ray_script, ray_count, read_ray
from paceline.launcher.tokens import own_token
from paceline.observe import new_run_dir

if TYPE_CHECKING:
    from paceline.cli.ray_options import OnRay
    from paceline.launcher.faults import Faults
    from paceline.launcher.roster import Roster
    from paceline.launcher.supervise import Order
    from paceline.observe.serve.server import LivePage

COMING = "Workers that come and go"

Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="The training script (with -m: a module's name).")]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="Everything after the script goes to it untouched.")
]
Count = Annotated[
    str | None,
    typer.Option(
        "-n",
        metavar="N|MIN:MAX",
        help="Workers to start (default: one for each device or machine). MIN:MAX lets them come and go: the dead are "
        "started again, others may join, and the rest go on.",
    ),
]
Devices = Annotated[
    str | None,
    typer.Option(
        metavar="LIST", help="A device for each worker, with --group for each process, such as cuda:0,cuda:1,cpu."
    ),
]
Group = Annotated[
    str | None,
    typer.Option(
        metavar="N|LIST",
        help="Each worker is a group of so many processes, which shard the model. A list, such as 1,2, has an entry "
        "for each worker, and begins again for those that come later.",
    ),
]
Emulate = Annotated[
    str | None,
    typer.Option(
        metavar="LIST", help="Pad each worker to a machine so many times SLOWER: 1,1,2+50ms,4, or a trace.csv."
    ),
]
SampleMs = Annotated[float, typer.Option(help="With --emulate: the reference machine's milliseconds a sample.")]
Pace = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Who does how much (adaptive unless the script says); overrides the script's own."
    ),
]
Combine = Annotated[str | None, typer.Option(metavar="NAME", help="How work merges; overrides the script's own.")]
Wire = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="How rounds cross the network: float32, bf16, fp16, or int8 with averages; overrides the script's own.",
    ),
]
Fail = Annotated[
    str | None,
    typer.Option(
        "--failures",
        metavar="LIST",
        help="With -n MIN:MAX, at steps: kill:2@30 (kill -9; kill:2@30:stay does not return), freeze:1@50:5s, "
        "leave:3@60, join@80; ? is any worker. With averages: emulate lost:P, frozen:PxR, restart:PxR (R rounds).",
    ),
]
Network = Annotated[str | None, typer.Option(metavar="LINK", help="Pad rounds to a link such as 100mbit,20ms.")]
Name = Annotated[str | None, typer.Option(help="Name of the run. Default: the script's.")]
Runs = Annotated[Path, typer.Option(help="Folder in which the run's own folder is made.")]
Seed = Annotated[
    int | None, typer.Option(help="Seed of emulated jitter and of faults; the script finds it in PACELINE_SEED.")
]
Quiet = Annotated[
    bool, typer.Option("-q", "--quiet", help="No view and no verdict: only what the script prints, and warnings.")
]
Watch = Annotated[bool, typer.Option("--watch", help="Serve a live page of the run meanwhile, on this computer.")]
Module = Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as in python -m.")]

Host = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Where the roster listens: an address of this computer, or 0.0.0.0 for all. Default: loopback, so that "
        "only this computer can join.",
        rich_help_panel=COMING,
    ),
]
Port = Annotated[
    int | None, typer.Option(min=1, max=65535, help="The roster's port. Default: any free one.", rich_help_panel=COMING)
]
Join = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT#FINGERPRINT",
        help="Start workers that join this fleet elsewhere; HOST:PORT alone trusts whoever knows the token.",
        rich_help_panel=COMING,
    ),
]
Token = Annotated[str | None, typer.Option(metavar="TEXT", help=TOKEN_HELP, rich_help_panel=COMING)]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="The token is in this file; made if it is missing, unless joining.", rich_help_panel=COMING
    ),
]
Spot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.csv",
        help="Play the comings and goings of spot machines, once the fleet stands: rows of "
        "milliseconds,add|remove,node.",
        rich_help_panel=COMING,
    ),
]
SpeedUp = Annotated[
    float | None, typer.Option(help="With --spot: so many times faster than recorded.", rich_help_panel=COMING)
]
SpotNotice = Annotated[
    str | None,
    typer.Option(
        metavar="TIME", help="With --spot: SIGTERM so long before the kill, such as 2s.", rich_help_panel=COMING
    ),
]


def run(
    script: Script,
    args: Arguments = None,
    n: Count = None,
    devices: Devices = None,
    group: Group = None,
    emulate: Emulate = None,
    sample_ms: SampleMs = 2.0,
    pace: Pace = None,
    combine: Combine = None,
    wire: Wire = None,
    failures: Fail = None,
    network: Network = None,
    name: Name = None,
    runs: Runs = Path("runs"),
    seed: Seed = None,
    quiet: Quiet = False,
    watch: Watch = False,
    module: Module = False,
    host: Host = None,
    port: Port = None,
    join: Join = None,
    token: Token = None,
    token_file: TokenFile = None,
    spot: Spot = None,
    speed_up: SpeedUp = None,
    spot_notice: SpotNotice = None,
    ray: Ray = None,
    per_worker: PerWorker = None,
    labels: Labels = None,
    runtime_env: RuntimeEnv = None,
) -> None:
    """Start a training script on every worker of a fleet, on this computer or on a Ray cluster."""
    try:
        device_list = read_devices(devices)
        n = ray_count(ray, n)
        groups = read_groups(group, on_ray=ray is not None)
        size = read_size(
            n, devices=device_list, emulate=emulate, sample_ms=sample_ms, joining=join is not None, groups=groups
        )
        elsewhere = {"devices": devices, "join": join, "host": host, "port": port}
        on_ray = read_ray(ray, size, per_worker=per_worker, labels=labels, runtime_env=runtime_env, **elsewhere)
        check_ray_script(on_ray, script, module) if on_ray else check_script(script, module)
        check_names(pace, combine, wire, size.start)
        chances, faults = read_faults(failures, size=size, seed=seed, spot=spot, speed_up=speed_up, notice=spot_notice)
        check_network(network)
        if on_ray is None:
            roster = _roster(size, host=host, port=port, join=join, token=token, token_file=token_file)
        else:
            roster, secret = None, own_token(token, token_file)
        run_name = name or (script if module else Path(script).stem)
        run_dir = new_run_dir(runs, run_name).resolve()
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
        wire=wire,
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
        from paceline.launcher.fixed import launch_fixed

        code = launch_fixed(order)
    else:
        from paceline.launcher.elastic import launch_elastic
        from paceline.launcher.tokens import invitation, printable

        shown = printable(roster.token, option=token, file=token_file)
        invites = "" if join else invitation(roster.address, shown, called, loopback=roster.loopback)
        code = launch_elastic(order, roster, faults=faults, invitation=invites)
    if page is not None:
        page.close()
    leave_with(code)


def _roster(
    size: Size, *, host: str | None, port: int | None, join: str | None, token: str | None, token_file: Path | None
) -> Roster | None:
    """The roster of a fleet that comes and goes, its own or that of the fleet to join; None for a fixed fleet."""
    from paceline.launcher.roster import OwnRoster, remote_roster
    from paceline.launcher.tokens import check_host, their_token
    from paceline.roster.persistence import beside

    if join is not None:
        if host or port:
            raise ValueError("--host and --port say where a roster of one's own listens: leave them out with --join")
        return remote_roster(join, their_token(token, token_file))
    if size.bounds is None:
        own = {"--host": host, "--port": port, "--token": token, "--token-file": token_file}
        if given := [option for option, value in own.items() if value is not None]:
            raise ValueError(f"{given[0]} is for fleets that others may join: give -n MIN:MAX, such as -n 2:8")
        return None
    minimum, maximum = size.bounds
    where = check_host(host or "127.0.0.1")
    secret, kept = own_token(token, token_file), beside(token_file) if token_file else None
    return OwnRoster(minimum=minimum, maximum=maximum, token=secret, host=where, port=port or 0, certificate=kept)


def _on_ray(on_ray: OnRay, order: Order, faults: Faults, token: str) -> int:
    try:
        return on_ray.launch(order, token=token, faults=faults)
    except ValueError as error:
        refuse(str(error))


def _live_page(run_dir: Path) -> LivePage:
    """The run's live page, being served; its folder may still be empty. Raises ValueError when something is missing."""
    from paceline.launcher.screen import remove_empty
    from paceline.observe.serve.server import LivePage

    with about("--watch"):
        try:
            page = LivePage(run_dir)
        except ValueError:
            remove_empty(run_dir)
            raise
    typer.echo(f"paceline: live page at {page.url}", err=True)
    return page
