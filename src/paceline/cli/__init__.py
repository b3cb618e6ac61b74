"""The command ``paceline``: one file a command, each holding a function of the same name.

Help and errors of the command line come at once: nothing here imports torch. A command imports what it needs when it
runs.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Annotated

import typer

COMMANDS = ("run", "demo", "simulate", "plan", "learn", "report", "watch", "compare", "host", "doctor", "examples")
"""In the order of the help. A command whose file is not there is left out."""

app = typer.Typer(
    name="paceline",
    help="Train one PyTorch model on machines that are not alike, at the sum of their speeds.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"paceline {version('paceline')}")
        except PackageNotFoundError:
            typer.echo("paceline (running from its source folder)")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _add(name: str) -> None:
    module = f"paceline.cli.{name}"
    if importlib.util.find_spec(module) is None:
        return
    # What follows the script on `paceline run` belongs to the script, options included.
    settings = {"allow_interspersed_args": False} if name == "run" else {}
    app.command(name, context_settings=settings)(getattr(importlib.import_module(module), name))


for _name in COMMANDS:
    _add(_name)


def main() -> None:
    """Entry point of the command ``paceline``."""
    app()
