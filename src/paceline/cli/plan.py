"""``paceline plan``: how fast a fleet that is described in a file would train, and how to start it."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline.cli.terminal import about, progress_bar, refuse
from paceline.observe import read_log

File = Annotated[Path, typer.Argument(metavar="FLEET.toml", help="Machines, sites, links and the model; docs/spot.md.")]
From = Annotated[
    Path | None,
    typer.Option("--from", metavar="RUN", help="Fill in what the file leaves out and this run's log has measured."),
]
Samples = Annotated[str | None, typer.Option(metavar="N", help="Time and cost of this number of samples, such as 50M.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Steps that are played; 40 to 200 when left out.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of jitter and stalls.")]
MtbfH = Annotated[
    float | None,
    typer.Option(metavar="HOURS", help="Mean hours between two failures of a machine of which the file says nothing."),
]
ReplaceS = Annotated[float | None, typer.Option(help="With --mtbf-h: seconds until such a machine is replaced.")]
Costs = Annotated[
    str | None,
    typer.Option(metavar="NAME=S,...", help="Seconds of failures: kill, join, start, load, save, write, every."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print all figures as one line of JSON.")]


def plan(
    fleet: File,
    run: From = None,
    samples: Samples = None,
    steps: Steps = None,
    seed: Seed = 0,
    mtbf_h: MtbfH = None,
    replace_s: ReplaceS = None,
    costs: Costs = None,
    as_json: AsJson = False,
) -> None:
    """Plan a training on any fleet: samples/s, time and cost of each pace, combine, number format and topology."""
    from paceline.simulate.goodput import parse_costs
    from paceline.simulate.planning import advice
    from paceline.simulate.planning.advice import fleet_goodput, with_failures
    from paceline.simulate.planning.choices import Player, choices
    from paceline.simulate.planning.fleet_file import read_fleet
    from paceline.simulate.planning.measured import compare_with_run, measure

    try:
        log = read_log(run) if run is not None else None
        with about("--from"):
            measured = measure(log) if log is not None else None
        spec = read_fleet(fleet, measured)
        if samples is not None:
            spec = replace(spec, training=replace(spec.training, samples=_count(samples)))
        spec = with_failures(spec, mtbf_h=mtbf_h, replace_s=replace_s)
        player = Player(spec, steps=steps, seed=seed)
        with progress_bar("planning", wanted=True) as progress:
            found = choices(player, tick=progress)
        chosen = advice.advised(found)
        worth = advice.worth(spec, chosen, steps=steps, seed=seed)
        failing = fleet_goodput(spec, chosen, seed=seed, known=parse_costs(costs))
        same = measured is not None and len(measured.sample_s) == spec.workers
        against = compare_with_run(found, log) if log is not None and same else None
    except ValueError as error:
        refuse(f"plan: {error}")
    sentences = advice.verdict(spec, found, worth, player)
    sentences += failing.sentences if failing is not None else []
    sentences += [advice.meets(against)] if against is not None else []
    typed = advice.commands(spec, chosen)
    if as_json:
        figures = advice.figures(spec, found)
        head = {"workers": spec.workers, "limit_samples_per_s": player.limit_per_s, "choices": figures}
        brought = [
            {"machines": one.kind.name, "count": one.kind.count, "brings": one.brings, "one_more": one.one_more}
            for one in worth
        ]
        told = {"verdict": sentences, "commands": typed, "run": against}
        goodput = failing.figures if failing is not None else None
        typer.echo(json.dumps({**head, "worth": brought, "goodput": goodput, **told}))
        return
    console = Console(highlight=False)
    width = min(100, console.width)
    for line in advice.head(spec, player):
        console.print(textwrap.fill(line, width), markup=False)
    console.print()
    console.print(advice.table(found))
    console.print()
    for line in (*sentences, advice.NOT_MODELLED):
        console.print(textwrap.fill(line, width), markup=False)
    console.print("\n" + "\n".join(typed), markup=False, soft_wrap=True)


def _count(text: str) -> float:
    from paceline.simulate.planning.fleet_file import count

    if not (many := count(text)):
        raise ValueError(f"--samples is a count such as 50M, above 0, not {text!r}")
    return float(many)
