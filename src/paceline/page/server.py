"""The live page's server: starlette and server-sent events. It reads the run's log and nothing else.

Its messages are made as often as their cost allows, and sent to every viewer (`Publisher`).

Addresses: ``/`` the page, ``/events`` its messages, ``/report`` the whole report, ``/metrics`` for Prometheus, ``/log``
the raw log (what ``paceline watch --connect`` follows), ``/static/…`` four known files. Anything else is not found.
Every request needs the token when there is one; without one, only requests for a name of this computer are answered, so
that no other web site can have a browser read the page.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import concurrency
from paceline.observe.log.reader import Event, follow, read_log
from paceline.observe.log.run_folder import log_file
from paceline.page.html import asset, plotly_js, report_page
from paceline.page.live import CONTENT_TYPE, LiveRun, live_page, metrics, server_sent_event
from paceline.roster.door import reached_at

logger = logging.getLogger("paceline.observe")

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
CHUNK = 1 << 18
KINDS = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "live.js": "text/javascript",
    "plotly.js": "text/javascript",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
INLINE = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Content policy of the report: all that it needs is in its one file."""


MISSING = "the live page needs starlette and uvicorn: pip install 'paceline[view]'"


def make_app(live: LiveRun, publisher: Publisher, *, token: str | None, log: Path | None) -> Starlette:
    """Return the pages of one run; ``log`` is its file, or None when the run is followed through another server."""
    try:
        from starlette.applications import Starlette
        from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
        from starlette.routing import Route
    except ImportError:
        raise ValueError(MISSING) from None
    plotly = plotly_js()
    query = f"?token={token}" if token else ""
    making = asyncio.Lock()

    async def page(request: Request) -> Response:
        return HTMLResponse(live_page(query=query), headers=HEADERS)

    async def events(request: Request) -> Response:
        return StreamingResponse(publisher.stream(), media_type="text/event-stream", headers=HEADERS)

    async def report(request: Request) -> Response:
        if log is None:
            return PlainTextResponse("the log is on another machine: ask there", 404, headers=HEADERS)
        async with making:  # a long log takes seconds and memory: one at a time
            text = await asyncio.to_thread(lambda: report_page(read_log(log)))
        return HTMLResponse(text, headers=HEADERS | {"Content-Security-Policy": INLINE})

    async def prometheus(request: Request) -> Response:
        return Response(metrics(live), headers=HEADERS | {"Content-Type": CONTENT_TYPE})

    async def raw(request: Request) -> Response:
        start = position(request.query_params.get("from", "0"))
        if log is None or start is None:
            return PlainTextResponse("there is no such log here", 404, headers=HEADERS)
        return StreamingResponse(tail(log, start), media_type="application/x-ndjson", headers=HEADERS)

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in KINDS:
            return PlainTextResponse("not found", 404, headers=HEADERS)
        text = plotly if name == "plotly.js" else asset(name)
        return Response(text, media_type=KINDS[name], headers=HEADERS)

    routes = {
        "/": page,
        "/events": events,
        "/report": report,
        "/metrics": prometheus,
        "/log": raw,
        "/static/{name}": static,
    }
    app = Starlette(routes=[Route(path, answer, methods=["GET"]) for path, answer in routes.items()])
    app.add_middleware(AccessCheck, token=token)
    return app


class AccessCheck:
    """Middleware that refuses requests without the token, or, if there is none, for a name of another computer."""

    def __init__(self, app: Any, *, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse

        if scope["type"] == "http" and not self._allowed(Request(scope)):
            refused = PlainTextResponse(
                "not allowed: use the address that `paceline watch` printed", 403, headers=HEADERS
            )
            await refused(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, request: Request) -> bool:
        if self._token is None:
            host = request.headers.get("host", "")
            return host.rpartition(":")[0] in LOOPBACK or host in LOOPBACK
        header = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = request.query_params.get("token") or header
        return secrets.compare_digest(given.encode(), self._token.encode())


LARGEST = (1 << 63) - 1
"""The largest position that a file has."""


def position(text: str) -> int | None:
    """Return the position in a file that a request names; None when no file has it.

    >>> position("120"), position("-1"), position("9" * 5000)
    (120, None, None)
    """
    if not (text.isascii() and text.isdecimal()) or len(text) > len(str(LARGEST)):
        return None
    return number if (number := int(text)) <= LARGEST else None


async def tail(log: Path, position: int) -> AsyncIterator[bytes]:
    """Yield the bytes of a growing file, until the reader goes away."""
    while True:
        data = await asyncio.to_thread(_read, log, position)
        position += len(data)
        if data:
            yield data
        else:
            await asyncio.sleep(0.3)


def _read(log: Path, position: int) -> bytes:
    try:
        with log_file(log).open("rb") as file:
            file.seek(position)
            return file.read(CHUNK)
    except OSError:
        return b""


class LivePage:
    """The live page of a run, served by threads of this process until `close`.

    ``source`` yields the run's events until its argument is set; by default the log at ``path`` is followed. A ``host``
    other than this computer's own gets a token, unless one is given.
    """

    def __init__(
        self,
        path: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        source: Callable[[concurrency.Event], Iterator[Event]] | None = None,
    ) -> None:
        outside = host not in (*LOOPBACK, "::1")
        self.token = token or (secrets.token_urlsafe(16) if outside else None)
        self.live = LiveRun(path)
        self._stop = concurrency.Event()
        self._publisher = Publisher(self.live)
        app = make_app(self.live, self._publisher, token=self.token, log=None if source else path)
        bound = _listen(host, port)
        self.url = self._address(host, bound.getsockname()[1])
        self._server = _server(app)
        events = source(self._stop) if source else follow(path, stop=self._stop, poll_s=0.2)
        work = (
            lambda: self._follow(events),
            lambda: self._publisher.run(self._stop),
            lambda: self._server.run(sockets=[bound]),
        )
        self._threads = [concurrency.Thread(target=each, name="paceline-page", daemon=True) for each in work]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop serving; open pages show that the connection is lost."""
        self._stop.set()
        self._server.should_exit = True
        self._publisher.close()
        follower, *others = self._threads
        follower.join(timeout=0.5)  # it may be waiting for bytes from another machine, and dies with the process
        for thread in others:
            thread.join(timeout=3.0)

    def _address(self, host: str, port: int) -> str:
        host = reached_at(host)
        shown = f"[{host}]" if ":" in host and not host.startswith("[") else host
        return f"http://{shown}:{port}/" + (f"?token={self.token}" if self.token else "")

    def _follow(self, events: Iterator[Event]) -> None:
        for event in events:
            try:
                self.live.add(event)
            except (TypeError, ValueError, KeyError) as error:  # a foreign log: one odd line does not end the page
                logger.warning("an event of kind %r could not be understood (%s)", event.get("event"), error)


def _server(app: Starlette) -> Any:
    try:
        import uvicorn
    except ImportError:
        raise ValueError(MISSING) from None
    # A page that stays open would delay the shutdown: one second is enough to close its connection.
    return uvicorn.Server(
        uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    )


def _listen(host: str, port: int) -> socket.socket:
    """Return an open socket, so that the address is known, or refused, before anything runs."""
    bare = host.strip("[]")
    bound = socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((bare, port))
        bound.listen(128)  # a request before the server is up waits, and is not refused
    except OSError as error:
        bound.close()
        raise ValueError(f"cannot serve on {host}:{port} ({error.strerror or error}): give another --port") from None
    return bound


QUICK_S, FULL_S = 0.4, 2.0
"""Least seconds between two messages of a kind."""
CALM = 100
"""Pause before the next message of a kind, as a multiple of the last one's cost."""
SLOWEST_QUICK_S = 0.6
"""Longest pause between quick messages: a step is on the screen within a second, whatever that costs."""
STILL_HERE_S = 15.0
"""Seconds of silence after which a comment is sent, so that neither side takes the other for gone."""


class Publisher:
    """The newest messages. One thread makes them (`run`); each viewer gets those it has not seen (`stream`)."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        self._lock = concurrency.Lock()
        self._viewers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self._wanted = concurrency.Event()
        self._closed = False
        self._full, self._quick = (0, b""), (0, b"")
        """The newest messages, numbered."""

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    def run(self, stop: concurrency.Event) -> None:
        """Publish until ``stop``: a full message for each new viewer, then quick ones, and a full one now and then."""
        full_revision = quick_revision = -1
        full_at, full_pause = 0.0, FULL_S
        while not stop.is_set():
            started, revision = concurrency.monotonic(), self._live.revision
            new_viewer = self._wanted.is_set()
            self._wanted.clear()
            if self.viewers and (new_viewer or (revision != full_revision and started - full_at >= full_pause)):
                self._publish(full=self._encoded(self._live.full))
                full_revision = quick_revision = revision
                full_at = concurrency.monotonic()
                full_pause = max(FULL_S, CALM * (full_at - started))
            elif self.viewers and revision != quick_revision:
                self._publish(quick=self._encoded(self._live.quick))
                quick_revision = revision
            self._wanted.wait(min(SLOWEST_QUICK_S, max(QUICK_S, CALM * (concurrency.monotonic() - started))))

    def _encoded(self, make: Callable[[], Mapping[str, Any]]) -> bytes | None:
        """Return the message, or None when the log holds something that cannot be shown."""
        try:
            return server_sent_event(make())
        except (TypeError, ValueError, KeyError, IndexError) as error:
            logger.warning("the live page could not be drawn (%s: %s)", type(error).__name__, error)
            return None

    def close(self) -> None:
        """End every stream."""
        with self._lock:
            self._closed = True
            self._wake()
        self._wanted.set()

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield messages for one viewer, the first a full one; a slow viewer misses some, never the newest."""
        news = asyncio.Event()
        with self._lock:
            self._viewers[news] = asyncio.get_running_loop()
            seen_full = self._full[0]
        self._wanted.set()
        seen_quick = -1
        try:
            yield b"retry: 1000\n\n"
            while not self._closed:
                news.clear()
                full, quick = self._full, self._quick
                if full[0] > seen_full:
                    seen_full, seen_quick = full[0], max(quick[0], full[0])
                    yield full[1]
                elif seen_quick >= 0 and quick[0] > seen_quick:
                    seen_quick = quick[0]
                    yield quick[1]
                elif not await _within(news, STILL_HERE_S):
                    yield b": still here\n\n"
        finally:
            with self._lock:
                del self._viewers[news]

    def _publish(self, *, full: bytes | None = None, quick: bytes | None = None) -> None:
        with self._lock:
            number = max(self._full[0], self._quick[0]) + 1
            if full is not None:
                self._full = (number, full)
            if quick is not None:
                self._quick = (number, quick)
            self._wake()

    def _wake(self) -> None:
        for news, loop in self._viewers.items():
            loop.call_soon_threadsafe(news.set)


async def _within(news: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(news.wait(), seconds)
    except TimeoutError:
        return False
    return True
