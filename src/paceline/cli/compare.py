"""``paceline compare RUN RUN …``: several runs side by side, as a table and as a page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.errors import refuse
from paceline.observe import read_log
from paceline.observe.analysis import compare as comparing

Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Folders of runs or their events.jsonl, two or more.")
]
Loss = Annotated[float | None, typer.Option(help="The loss to time; by default the lowest that every run reached.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw them, for any browser (needs the extra 'view').")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as one line of JSON.")]


def compare(runs: Runs, loss: Loss = None, html: Html = None, as_json: AsJson = False) -> None:
    """Compare runs: time to a loss, throughput, per cent of the limit."""
    from paceline.observe.page.comparison import comparison_page

    try:
        compared = comparing.compare([read_log(run) for run in runs], target=loss)
        if html is not None:
            html.parent.mkdir(parents=True, exist_ok=True)
            html.write_text(comparison_page(compared), encoding="utf-8")
    except ValueError as error:
        refuse(f"compare: {error}")
    except OSError as error:
        refuse(f"compare: cannot write {html} ({error.strerror or error})")
    if as_json:
        typer.echo(json.dumps(figures(compared)))
        return
    _print(compared)
    if html is not None:
        typer.echo(f"\nwrote {html}")


def figures(compared: comparing.Comparison) -> dict[str, Any]:
    """Plain numbers, null where a run has none."""
    rows = [
        {
            "name": run.name,
            "run": str(run.log.path.parent),
            "pace": run.verdict.pace,
            "workers": len(run.verdict.figures.workers),
            "steps": len(run.log.records),
            "seconds": _known(run.seconds),
            "samples_per_s": run.verdict.figures.samples_per_s,
            "of_limit": run.verdict.figures.of_limit,
            "loss": _known(run.last_loss),
            "time_to_loss_s": _known(run.time_to_loss_s),
            "evaluated": dict([run.evaluated]) if run.evaluated else {},
        }
        for run in compared.runs
    ]
    return {"target_loss": _known(compared.target), "runs": rows}


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _print(compared: comparing.Comparison) -> None:
    from paceline.observe.page.comparison import cells, in_words

    head, rows = cells(compared)
    table = Table("", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for row in rows:  # a column a run: names may be long, and there are more figures than runs
        table.add_column(Text(row[0]), justify="right")
    for place, name in enumerate(head[1:], start=1):
        table.add_row(Text(name), *(Text(row[place]) for row in rows))
    console = Console(highlight=False)
    console.print(table)
    console.print()
    console.print(Text(in_words(compared)))
