"""One-line errors: what a user typed wrongly needs no stack trace."""

from __future__ import annotations

from typing import NoReturn

import typer

USAGE = 2
"""Exit code of a command that was not understood; nothing was started."""


def refuse(message: str) -> NoReturn:
    """Print ``paceline: message`` to stderr, as one line, and exit with code 2."""
    typer.echo("paceline: " + " ".join(message.split()), err=True)
    raise typer.Exit(USAGE)
