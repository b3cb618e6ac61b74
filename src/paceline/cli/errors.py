"""How a command ends: with one line for what a user typed wrongly, or at once with an exit code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
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
    """A ValueError from inside says which option it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def leave_with(code: int) -> NoReturn:
    """End at once: a thread that still imports torch would hold the interpreter's own end up, or crash it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
