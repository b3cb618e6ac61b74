"""What a person sees while a run goes on. A view is fed with the log's events and never disturbs the training."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import Any, Protocol, TextIO


class View(Protocol):
    """Shows events. ``show`` returns at once and never raises; ``close`` leaves the terminal as it was."""

    def show(self, event: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class SilentView:
    """Shows nothing."""

    def show(self, event: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


def make_view(stream: TextIO | None = None, *, quiet: bool = False) -> View:
    """A live table when ``stream`` (standard error by default) is a terminal and rich is there; else plain lines."""
    if quiet:
        return SilentView()
    stream = stream if stream is not None else sys.stderr
    if is_terminal(stream) and importlib.util.find_spec("rich") is not None:
        from paceline.observe.views.live import LiveView

        return LiveView(stream)
    from paceline.observe.views.plain import PlainView

    return PlainView(stream)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person reads this stream; a closed or missing one is read by nobody."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False
