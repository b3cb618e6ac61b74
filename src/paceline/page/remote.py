"""The log of a run on another machine, followed through the live page's server there."""

from __future__ import annotations

import http.client
import logging
import re
from collections.abc import Iterator
from urllib.parse import parse_qs, quote, urlsplit

from paceline import concurrency
from paceline.observe.log.reader import Event, parse_line

logger = logging.getLogger("paceline.observe")

AGAIN_S = 1.0
"""Seconds before a retry of a lost connection."""
SILENCE_S = 5.0
"""Timeout of a read in seconds, after which it looks whether to stop."""


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
