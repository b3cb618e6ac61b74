"""The live page's messages: made as often as their cost allows, and sent to every viewer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from paceline import concurrency
from paceline.page.live import LiveRun, server_sent_event

logger = logging.getLogger("paceline.observe")

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
