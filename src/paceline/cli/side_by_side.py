"""``paceline report RUN RUN …``: several runs side by side, as a table and as a page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.terminal import refuse
from paceline.observe import read_log
from paceline.observe.analysis import compared_runs as comparing


def report_several(runs: Sequence[Path], *, loss: float | None, page: Path | None, as_json: bool) -> None:
    """Compare runs: time to a loss, throughput, per cent of the limit; ``page``: file of the drawing."""
    from paceline.page.side_by_side import comparison_page

    try:
        compared = comparing.compare([read_log(run) for run in runs], target=loss)
        if page is not None:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(comparison_page(compared), encoding="utf-8")
    except ValueError as error:
        refuse(f"report: {error}")
    except OSError as error:
        refuse(f"report: cannot write {page} ({error.strerror or error})")
    if as_json:
        typer.echo(json.dumps(figures(compared)))
        return
    _print(compared)
    if page is not None:
        typer.echo(f"\nwrote {page}")


def figures(compared: comparing.Comparison) -> dict[str, Any]:
    """Return plain numbers per run, None where a run has none."""
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
    from paceline.page.side_by_side import cells, in_words

    head, rows = cells(compared)
    table = Table("", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for row in rows:  # one column per run: names may be long, and there are more figures than runs
        table.add_column(Text(row[0]), justify="right")
    for number, name in enumerate(head[1:], start=1):
        table.add_row(Text(name), *(Text(row[number]) for row in rows))
    console = Console(highlight=False)
    console.print(table)
    console.print()
    console.print(Text(in_words(compared)))
