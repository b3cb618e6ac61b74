"""``paceline learn``: the deep forecast from recorded traces and run logs."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.terminal import progress_bar, refuse

PLUG_IN = "paceline.research.deep"
Sources = Annotated[
    list[Path],
    typer.Argument(metavar="RUN_OR_TRACE", help="Run folders, event logs or CSV traces.", show_default=False),
]
Output = Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Where the model goes.")]
Updates = Annotated[int, typer.Option(help="Steps of training; fewer is quicker.")]
Seed = Annotated[int, typer.Option(help="Seed of the training.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the scores as one line of JSON.")]


def learn(
    sources: Sources,
    output: Output = Path("model.pt"),
    updates: Updates = 2000,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Learn to forecast step times (for --pace cutoff or joint with forecast "deep:FILE") and say how well it does."""
    recordings, fit = (import_module(f"{PLUG_IN}.{part}") for part in ("recordings", "fit"))
    try:
        read = recordings.read(sources)
        _check(output, seed)
        with progress_bar("learning") as progress:
            scores = fit.learn(read, output, updates=updates, seed=seed, progress=progress)
    except ValueError as error:
        refuse(f"learn: {error}")
    size = {"steps": sum(part.steps for part in read), "workers": max(part.workers for part in read)}
    if as_json:
        typer.echo(json.dumps({"model": str(output), **size, "held_out": scores}))
        return
    _print(scores, size["steps"], output)


def _check(output: Path, seed: int) -> None:
    """Check output and seed before a minute of work, not after it."""
    if not output.resolve().parent.is_dir() or output.is_dir():
        raise ValueError(f"the model cannot be written to {output}: name a file in a folder that exists")
    if seed < 0:
        raise ValueError(f"--seed is a whole number from 0, not {seed}")


def _print(scores: dict[str, float], steps: int, output: Path) -> None:
    typer.echo(f"Error of the forecast over the last fifth of {steps:,} steps, which training did not see:")
    for name, value in scores.items():
        typer.echo(f"  {name:<11}{value:7.2%}")
    if scores["deep"] < scores["general"]:
        less = 1 - scores["deep"] / scores["general"]
        typer.echo(f"{less:.0%} less than the general forecast's: a run that loads the model uses it while that holds.")
    else:
        typer.echo("The model does not win here: a run that loads it will answer with the general forecast.")
    typer.echo(f'Written to {output}. Use it with forecast="deep:{output}".')
