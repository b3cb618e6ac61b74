"""What all commands share on a terminal: one-line errors, exit codes, and a progress bar."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

USAGE = 2
"""Exit code of a command that was not understood; nothing was started."""


def refuse(message: str) -> NoReturn:
    """Print ``paceline: message`` to stderr, as one line, and exit with code 2."""
    typer.echo("paceline: " + " ".join(message.split()), err=True)
    raise typer.Exit(USAGE)


@contextlib.contextmanager
def about(option: str) -> Iterator[None]:
    """Put the option's name before the text of a ValueError that the block raises."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def leave_with(code: int) -> NoReturn:
    """End the process at once: a thread that still imports torch could delay the interpreter's end, or crash it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextmanager
def progress_bar(label: str, *, wanted: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar on stderr, and yield the function that moves it: called with (done, total).

    Yields None if stderr is not a terminal, or unless ``wanted``.
    """
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
