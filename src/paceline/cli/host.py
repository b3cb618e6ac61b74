"""``paceline host``: a roster by itself, for workers that other computers, Slurm, Ray or a hand start."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline import concurrency
from paceline.cli.errors import leave_with, refuse
from paceline.launcher.signals import Signals
from paceline.launcher.tokens import check_host, is_loopback, join_line, own_token, printable
from paceline.observe.serve.addresses import reached_at

if TYPE_CHECKING:
    from paceline.roster import RosterServer

TOKEN_HELP = (
    "Who knows it may join. Safer in PACELINE_TOKEN or --token-file: all users of a computer see the options of its "
    "processes. Default: a new one."
)

Fewest = Annotated[int, typer.Option("--min", min=1, help="Below so many workers the training waits.")]
Most = Annotated[int, typer.Option("--max", min=1, help="So many may be there at once.")]
Host = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="Where to listen: an address of this computer, or 0.0.0.0 for all. On loopback only this computer joins.",
    ),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")]
Token = Annotated[str | None, typer.Option(metavar="TEXT", help=TOKEN_HELP)]
TokenFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The token is in this file; made if it is missing.")
]
State = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="What must outlive the roster: started again with it, the fleet goes on."),
]


def host(
    minimum: Fewest = 1,
    maximum: Most = 64,
    host: Host = "127.0.0.1",
    port: Port = 0,
    token: Token = None,
    token_file: TokenFile = None,
    state: State = None,
) -> None:
    """Run a roster by itself: it says who is in a fleet whose workers are started elsewhere."""
    from paceline.roster import RosterServer
    from paceline.roster.persistence import beside
    from paceline.roster.wire import written

    try:
        if maximum < minimum:
            raise ValueError(f"--min {minimum} is more than --max {maximum}")
        secret = own_token(token, token_file)
        server = RosterServer(
            minimum=minimum,
            maximum=maximum,
            token=secret,
            host=check_host(host),
            port=port,
            state=state,
            certificate=beside(token_file) if token_file and not state else None,
            observe=say,
        )
    except ValueError as error:
        refuse(f"host: {error}")
    except OSError as error:
        refuse(f"host: cannot listen on {written(host, port)} ({error.strerror or error})")
    server.start()
    address = written(reached_at(host), server.port, server.fingerprint)
    shown = printable(secret, option=token, file=token_file)
    typer.echo(welcome(address, shown, minimum=minimum, maximum=maximum), err=True)
    code = serve(server)
    server.close()
    leave_with(code)


def welcome(address: str, token: str, *, minimum: int, maximum: int) -> str:
    """Where the roster is and the two ways to join; ``token`` as `paceline.launcher.tokens.printable` gives it."""
    only = " (only this computer can join: --host opens it)" if is_loopback(address.rpartition(":")[0]) else ""
    return (
        f"paceline: roster at {address.partition('#')[0]} for {minimum} to {maximum} workers{only}; Ctrl-C ends it\n"
        f"with the launcher:          {join_line(address, token, ['train.py'])}\n"
        f"each worker by other means: PACELINE_ROSTER={address} PACELINE_TOKEN={token} PACELINE_WORKER=0 "
        "python train.py   (PACELINE_WORKER: a number of its own on its computer)"
    )


def serve(server: RosterServer) -> int:
    """Wait for a signal, or for the training's end; returns the exit code."""
    with Signals() as signals, selectors.DefaultSelector() as selector:
        selector.register(signals.waker, selectors.EVENT_READ)
        while True:
            selector.select(0.5)
            signals.drain()
            if stops := signals.take():
                return 0 if stops[0] == signal.SIGINT else 128 + stops[0]
            if server.snapshot()["finished"]:
                return 0


_saying = concurrency.Lock()


def say(kind: str, said: Mapping[str, Any]) -> None:
    """Log who comes and goes, with the time."""
    if text := words(kind, said):
        with _saying:
            typer.echo(f"{time.strftime('%H:%M:%S')} {text}", err=True)


def words(kind: str, said: Mapping[str, Any]) -> str:
    """An event of the roster in words; empty for what is not worth a line.

    >>> words("generation", {"number": 3, "workers": [0, 2]})
    'generation 3: workers 0, 2'
    """
    worker = f"worker {said.get('id')} ({said.get('name')})"
    if kind == "registered":
        return f"{worker} has come"
    if kind == "returned":
        return f"{worker} is back"
    if kind == "left":
        return f"{worker} {said['text']}"
    if kind == "generation":
        return f"generation {said['number']}: workers {', '.join(str(id) for id in said['workers'])}"
    if kind == "refused":
        return f"refused {said['name'] or said['from']}: {said['text']}"
    return "the training has finished" if kind == "finished" else str(said.get("text", ""))
