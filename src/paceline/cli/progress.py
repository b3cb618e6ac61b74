"""A progress bar on standard error, for commands that work for a while."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(label: str, *, wanted: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """Yields what moves the bar: called with how much is done and the total. None in a pipe, or unless ``wanted``."""
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
