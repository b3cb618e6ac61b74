"""``paceline watch RUN``: the run as a live page in a browser, one on another machine through the live page there."""

from __future__ import annotations

import http.client
import logging
import re
import signal
import webbrowser
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qs, quote, urlsplit

import typer

from paceline import concurrency
from paceline.cli.report import Run, run_folder
from paceline.cli.terminal import refuse
from paceline.launcher.tokens import read_token
from paceline.observe.log.reader import Event, parse_line

logger = logging.getLogger("paceline.observe")

AGAIN_S = 1.0
"""Seconds before a retry of a lost connection."""
SILENCE_S = 5.0
"""Timeout of a read in seconds, after which it looks whether to stop."""
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


def address(text: str) -> tuple[str, int, str]:
    """Return host, port and token (may be empty) of ``HOST:PORT`` or of the complete address of a live page."""
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if parts.scheme != "http" or not host or not port or not re.fullmatch(r"[A-Za-z0-9.:_-]+", host):
        raise ValueError(f"{text!r} is not HOST:PORT, nor an address that `paceline watch` printed there")
    return host, port, parse_qs(parts.query).get("token", [""])[0]


def remote_events(host: str, port: int, token: str, stop: concurrency.Event) -> Iterator[Event]:
    """Yield the events of the log there, from its beginning; a lost connection is resumed at the same byte."""
    taken, warned = 0, False
    while not stop.is_set():
        try:
            for line in _lines(host, port, token, taken, stop):
                taken += len(line)
                if (event := parse_line(line)) is not None:
                    yield event
                warned = False
        except PermissionError as error:
            raise ValueError(str(error)) from None
        except (OSError, http.client.HTTPException) as error:
            if not warned:
                logger.warning("no connection to %s:%d (%s): trying on", host, port, error)
                warned = True
        stop.wait(AGAIN_S)


def check(host: str, port: int, token: str) -> None:
    """Raise ValueError when there is no live page, or it refuses the token."""
    connection = http.client.HTTPConnection(host, port, timeout=SILENCE_S)
    try:
        connection.request("GET", f"/metrics?token={quote(token)}")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"no live page at {host}:{port} ({error}): start `paceline watch` there") from None
    finally:
        connection.close()
    if status != 200:
        why = (
            "the token is missing or wrong: use the whole address printed there"
            if status == 403
            else f"status {status}"
        )
        raise ValueError(f"the live page at {host}:{port} refused ({why})")


def _lines(host: str, port: int, token: str, start: int, stop: concurrency.Event) -> Iterator[bytes]:
    """Yield complete lines from byte ``start`` on, until the connection ends."""
    connection = http.client.HTTPConnection(host, port, timeout=SILENCE_S)
    try:
        connection.request("GET", f"/log?from={start}&token={quote(token)}")
        answer = connection.getresponse()
        if answer.status != 200:
            raise ConnectionError(f"status {answer.status}")
        rest = b""
        while not stop.is_set():
            try:
                data = answer.read1(1 << 16)
            except TimeoutError:
                return  # a reader that timed out cannot go on: connect again at the same byte
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from (line + b"\n" for line in lines)
    finally:
        connection.close()
