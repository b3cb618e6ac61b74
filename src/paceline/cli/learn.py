"""``paceline learn``: the deep forecast from recorded traces and run logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.errors import refuse
from paceline.cli.progress import progress_bar
from paceline.machines.trace import read_trace
from paceline.observe import read_log

if TYPE_CHECKING:
    from paceline.deep.learning.recordings import Recording

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
    try:
        read = _read(sources)
        _check(output, seed)
        scores = _learn(read, output, updates, seed)
    except ValueError as error:
        refuse(f"learn: {error}")
    size = {"steps": sum(part.steps for part in read), "workers": max(part.workers for part in read)}
    if as_json:
        typer.echo(json.dumps({"model": str(output), **size, "held_out": scores}))
        return
    _tell(scores, size["steps"], output)


def _read(sources: list[Path]) -> list[Recording]:
    if missing := next((source for source in sources if not source.exists()), None):
        raise ValueError(f"there is no {missing}: give runs' folders, event logs or traces")
    return [recorded for source in sources for recorded in recordings(source)]


def recordings(source: Path) -> list[Recording]:
    """Those in a trace (CSV) or in a run's folder or event log; ValueError for anything else."""
    from paceline.deep.learning.recordings import from_records, recording

    if source.is_dir() or source.suffix == ".jsonl":
        return from_records(source.name, read_log(source).records)
    return [recording(source.name, read_trace(source).seconds)]


def _check(output: Path, seed: int) -> None:
    """Before a minute of work, not after it."""
    if not output.resolve().parent.is_dir() or output.is_dir():
        raise ValueError(f"the model cannot be written to {output}: name a file in a folder that exists")
    if seed < 0:
        raise ValueError(f"--seed is a whole number from 0, not {seed}")


def _learn(recordings: list[Recording], output: Path, updates: int, seed: int) -> dict[str, float]:
    from paceline.deep.learning.fit import Training, fit
    from paceline.deep.learning.held_out import held_out_scores, split
    from paceline.deep.model_file import save_model

    with progress_bar("learning") as progress:
        model = fit(
            [part.until(split(part)) for part in recordings],
            training=Training(updates=updates, seed=seed),
            progress=progress,
        )
    scores = held_out_scores(model, recordings)
    save_model(model, output, about={"held_out": scores, "learned_from": [part.name for part in recordings]})
    return scores


def _tell(scores: dict[str, float], steps: int, output: Path) -> None:
    typer.echo(f"Error of the forecast over the last fifth of {steps:,} steps, which training did not see:")
    for name, value in scores.items():
        typer.echo(f"  {name:<11}{value:7.2%}")
    if scores["deep"] < scores["general"]:
        less = 1 - scores["deep"] / scores["general"]
        typer.echo(f"{less:.0%} less than the general forecast's: a run that loads the model uses it while that holds.")
    else:
        typer.echo("The model does not win here: a run that loads it will answer with the general forecast.")
    typer.echo(f'Written to {output}. Use it with forecast="deep:{output}".')
