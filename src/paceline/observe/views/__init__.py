"""The views of a run on a terminal or in a pipe. A view is given the log's events and never disturbs the training."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import Any, Protocol, TextIO


class View(Protocol):
    """A display of events. ``show`` returns at once and never raises; ``close`` leaves the terminal as it was."""

    def show(self, event: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class SilentView:
    """A view that shows nothing."""

    def show(self, event: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


def make_view(stream: TextIO | None = None, *, quiet: bool = False) -> View:
    """Return a live table for a terminal, else a view of plain lines; ``stream`` is standard error by default."""
    if quiet:
        return SilentView()
    stream = stream if stream is not None else sys.stderr
    if is_terminal(stream) and importlib.util.find_spec("rich") is not None:
        from paceline.observe.views.terminal import LiveView

        return LiveView(stream)
    from paceline.observe.views.plain import PlainView

    return PlainView(stream)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a person reads this stream; nobody reads one that is closed or missing."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False
