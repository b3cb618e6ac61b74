"""``paceline watch RUN``: the run as a live page in a browser."""

from __future__ import annotations

import signal
import webbrowser
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from paceline import concurrency
from paceline.cli.report import Run, run_folder
from paceline.cli.terminal import refuse
from paceline.launcher.tokens import read_token
from paceline.observe.log.reader import Event

Connect = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Follow the run that `paceline watch` shows there.")
]
Host = Annotated[
    str, typer.Option(help="Address to serve on. Other than this computer's own, a token guards the page.")
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to serve on; 0: any that is free.")]
TokenFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File of the token to ask for, instead of a random one.")
]
Browse = Annotated[bool, typer.Option("--open", help="Open the page in a browser.")]


def watch(
    run: Run = None,
    connect: Connect = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
    token_file: TokenFile = None,
    browse: Browse = False,
) -> None:
    """Show a run as a live page: while it trains, and afterwards. Ctrl-C ends the page, never the run.

    Needs the extra 'view' (starlette, uvicorn and plotly).
    """
    from paceline.page.server import LivePage

    try:
        path, source = _source(run, connect)
        token = read_token(token_file) if token_file is not None else None
        page = LivePage(path, host=host, port=port, token=token, source=source)
    except ValueError as error:
        refuse(f"watch: {error}")
    typer.echo(f"{connect or path} is at {page.url} (Ctrl-C ends the page, not the run)")
    if browse:
        webbrowser.open(page.url)
    _wait_for_a_signal()
    page.close()


def _wait_for_a_signal() -> None:
    ended = concurrency.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as for a page in the background of a shell
            signal.signal(number, lambda *_: ended.set())
    while not ended.wait(timeout=3600):
        pass


def _source(
    run: Path | None, connect: str | None
) -> tuple[Path, Callable[[concurrency.Event], Iterator[Event]] | None]:
    """Return where the events come from: a path on this computer, or a page on another one."""
    from paceline.page.remote import address, check, remote_events

    if connect is not None:
        if run is not None:
            raise ValueError("give a RUN on this machine or --connect HOST:PORT, not both")
        where = address(connect)
        check(*where)
        return Path(f"{where[0]}-{where[1]}"), partial(remote_events, *where)
    folder = run_folder(run)
    if not folder.exists():
        raise ValueError(f"there is no {folder}: give a run's folder or its events.jsonl")
    return folder, None
