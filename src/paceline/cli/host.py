"""``paceline host``: a roster by itself, for workers that other computers, Slurm, Ray or the user start."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline import concurrency
from paceline.cli.terminal import leave_with, refuse
from paceline.launcher.tokens import check_host, is_loopback, join_line, own_token, printable
from paceline.launcher.worker_process import Signals
from paceline.roster.door import reached_at

if TYPE_CHECKING:
    from paceline.roster import RosterServer

Fewest = Annotated[int, typer.Option("--min", min=1, help="Least number of workers; with fewer the training waits.")]
Most = Annotated[int, typer.Option("--max", min=1, help="Greatest number of workers at once.")]
Host = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="Where to listen: an address of this computer, or 0.0.0.0 for all. On loopback only this computer joins.",
    ),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File of the token that others join with; made if it is missing. Default: PACELINE_TOKEN, else a new one.",
    ),
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
        secret = own_token(token_file)
        server = RosterServer(
            minimum=minimum,
            maximum=maximum,
            token=secret,
            host=check_host(host),
            port=port,
            state=state,
            certificate=beside(token_file) if token_file and not state else None,
            on_event=log_event,
        )
    except ValueError as error:
        refuse(f"host: {error}")
    except OSError as error:
        refuse(f"host: cannot listen on {written(host, port)} ({error.strerror or error})")
    server.start()
    address = written(reached_at(host), server.port, server.fingerprint)
    shown = printable(secret, file=token_file)
    typer.echo(welcome(address, shown, minimum=minimum, maximum=maximum), err=True)
    code = serve(server)
    server.close()
    leave_with(code)


def welcome(address: str, token: str, *, minimum: int, maximum: int) -> str:
    """Return the roster's address and the two ways to join; ``token`` is a result of `tokens.printable`."""
    only = " (only this computer can join: --host opens it)" if is_loopback(address.rpartition(":")[0]) else ""
    return (
        f"paceline: roster at {address.partition('#')[0]} for {minimum} to {maximum} workers{only}; Ctrl-C ends it\n"
        f"with the launcher:          {join_line(address, token, ['train.py'])}\n"
        f"each worker by other means: PACELINE_ROSTER={address} PACELINE_TOKEN={token} PACELINE_WORKER=0 "
        "python train.py   (PACELINE_WORKER: a number of its own on its computer)"
    )


def serve(server: RosterServer) -> int:
    """Wait for a signal, or for the training's end, and return the exit code."""
    with Signals() as signals, selectors.DefaultSelector() as selector:
        selector.register(signals.waker, selectors.EVENT_READ)
        while True:
            selector.select(0.5)
            signals.drain()
            if stops := signals.take():
                return 0 if stops[0] == signal.SIGINT else 128 + stops[0]
            if server.snapshot()["finished"]:
                return 0


_printing = concurrency.Lock()


def log_event(kind: str, event: Mapping[str, Any]) -> None:
    """Print which workers come and go, with the time."""
    if text := words(kind, event):
        with _printing:
            typer.echo(f"{time.strftime('%H:%M:%S')} {text}", err=True)


def words(kind: str, event: Mapping[str, Any]) -> str:
    """Return an event of the roster in words; empty for an event that is not worth a line.

    >>> words("generation", {"number": 3, "workers": [0, 2]})
    'generation 3: workers 0, 2'
    """
    worker = f"worker {event.get('id')} ({event.get('name')})"
    if kind == "registered":
        return f"{worker} has come"
    if kind == "returned":
        return f"{worker} is back"
    if kind == "left":
        return f"{worker} {event['text']}"
    if kind == "generation":
        return f"generation {event['number']}: workers {', '.join(str(id) for id in event['workers'])}"
    if kind == "refused":
        return f"refused {event['name'] or event['from']}: {event['text']}"
    return "the training has finished" if kind == "finished" else str(event.get("text", ""))
