"""``paceline report RUN``: a run's header, its workers and its verdict, from the log alone.

It also writes them as a page for a browser, as a trace, or as figures for other tools. Several runs are compared,
as a table and as a page.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.terminal import refuse
from paceline.observe import RunLog, Verdict, latest, read_log, verdict
from paceline.observe.log import sanitise
from paceline.observe.words.lines import last_places, places_text, run_words
from paceline.observe.words.verdict import WorkerTable, steps_text, worker_table

if TYPE_CHECKING:
    from paceline.page.side_by_side import Comparison

RUNS = Path("runs")
PAGE = "report.html"
GAP = 2
"""Spaces between two columns."""
LEAST_MISSED = ("last in", "cut off", "adds", "samples", "waiting", "stuck")
"""Columns that are left out, in this order, where a terminal is too narrow for all."""

Run = Annotated[
    Path | None, typer.Argument(help="A run's folder or its events.jsonl; the latest under runs/ when left out.")
]
Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="RUN",
        help="Folders of runs, or their events.jsonl; the latest under runs/ when left out. Two or more are compared.",
    ),
]
Loss = Annotated[
    float | None,
    typer.Option(help="With several runs: the loss to time. Default: the lowest that every run reached."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the numbers as one line of JSON.")]
Html = Annotated[
    bool, typer.Option("--html", help=f"Draw {PAGE} beside the log, for any browser (needs the extra 'view').")
]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Draw it into this file.")]
Perfetto = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev.")]
TensorBoard = Annotated[
    Path | None,
    typer.Option("--tensorboard", metavar="DIR", help="Write TensorBoard's files (needs the extra 'tensorboard')."),
]
Csv = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a table, one line per step and worker.")]


def report(
    runs: Runs = None,
    as_json: AsJson = False,
    html: Html = False,
    output: Output = None,
    perfetto: Perfetto = None,
    tensorboard: TensorBoard = None,
    csv: Csv = None,
    loss: Loss = None,
) -> None:
    """Report what a run achieved: its workers, and the verdict in plain words; or draw, export or compare."""
    exports = {"--perfetto": perfetto, "--tensorboard": tensorboard, "--csv": csv}
    if runs and len(runs) > 1:
        _check_several(runs, html=html and output is None, exports=exports)
        report_several(runs, loss=loss, page=output, as_json=as_json)
        return
    if loss is not None:
        refuse("report: --loss compares runs: name two or more")
    run = runs[0] if runs else None
    from paceline.observe.exports import write_csv, write_perfetto, write_tensorboard
    from paceline.page import write_report

    with _no_search_for_cycles():
        log = read_run(run)
        page = output or (log.path.parent / PAGE if html else None)
        wanted = {write_report: page, write_perfetto: perfetto, write_tensorboard: tensorboard, write_csv: csv}
        written = [_write(log, path, write, quietly=as_json) for write, path in wanted.items() if path is not None]
        if as_json:
            name = log.run.get("name")
            head = {"run": str(log.path.parent), "name": name if isinstance(name, str) else None}
            typer.echo(json.dumps({**head, **verdict(log).to_json()}))
        elif not written:
            _print(log, verdict(log))


def _check_several(runs: Sequence[Path], *, html: bool, exports: Mapping[str, Path | None]) -> None:
    """Refuse what a report of several runs cannot do; ``html``: a page is asked for, and not where."""
    if given := [option for option, path in exports.items() if path is not None]:
        refuse(f"report: {given[0]} is of one run: name one")
    page = next((run for run in runs if run.suffix == ".html"), None)
    if page is not None or html:
        refuse(f"report: the page of several runs needs its name: write -o {page or 'compared.html'}")


@contextmanager
def _no_search_for_cycles() -> Iterator[None]:
    """Switch the garbage collector off: searching a long log's millions of tuples takes a fifth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _write(log: RunLog, path: Path, write: Callable[[RunLog, Path], Path], *, quietly: bool) -> Path:
    """Write one file and print its path (``quietly``: on stderr); an error is one line and exit code 2."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = write(log, path)
    except ValueError as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"cannot write {path} ({error.strerror or error})")
    typer.echo(f"wrote {written}", err=quietly)
    return written


def _print(log: RunLog, judged: Verdict) -> None:
    console = Console(highlight=False)
    console.print(_header(log, judged))
    console.print()
    _print_workers(console, worker_table(judged))
    console.print(Text(judged.text))


def run_folder(run: Path | None) -> Path:
    """Return the run's folder, or the latest one's when none was named."""
    folder = run or latest(RUNS)
    if folder is None:
        raise ValueError(f"no runs under {RUNS}/: name a run's folder")
    return folder


def read_run(run: Path | None) -> RunLog:
    """Return the run's log; without one, print one line on stderr and exit with code 2."""
    try:
        log = read_log(run_folder(run))
    except ValueError as error:
        refuse(str(error))
    if not log.run and not log.records:
        refuse(f"{log.path} holds no events" + (" that can be read" if log.unreadable else ""))
    return log


def _header(log: RunLog, judged: Verdict) -> Text:
    lines = [": ".join(run_words(log.run, judged.figures)), f"log {log.path}"]
    if (started := sanitise.timestamp(log.run.get("started", log.run.get("t")))) == started:
        lines.append(f"started {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(started))}, {_ending(log)}")
    if where := places_text(last_places(log.run, log.others)):
        lines.append(where)
    if log.records:
        steps = f"{steps_text(len(log.records))}, {sum(record.total for record in log.records):,} samples"
        lines.append(steps + (f"; the first {judged.warm_up} left out below as warm-up" if judged.warm_up else ""))
    if log.unreadable:
        lines.append(f"lines that could not be read: {log.unreadable}")
    return Text("\n".join(lines))


def _ending(log: RunLog) -> str:
    if log.end is None:
        return "no end in the log (still running, or killed)"
    text = log.end.get("text")
    return str(log.end.get("reason") or "ended") + (f": {text}" if text else "")


def _print_workers(console: Console, table: WorkerTable) -> None:
    """Print the columns of the table that fit the terminal, and the names of those that do not."""
    if not table.rows:
        return
    table = _shortened(table)
    shown = fitted(table, console.width)
    drawn = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
    for number, name in enumerate(shown.names):
        figure = number >= shown.words
        drawn.add_column(name, justify="right" if figure else "left", no_wrap=name != "machine")
    for row in shown.rows:
        drawn.add_row(*map(Text, row))
    console.print(drawn)
    left_out = [name for name in table.names if name not in shown.names]
    if left_out:
        console.print(Text(f"No room here for: {', '.join(left_out)}. A wider terminal or --html shows them."))
    console.print()


def _shortened(table: WorkerTable) -> WorkerTable:
    """Shorten ``cpu, emulated 4x slower, jitter 0.6`` to ``cpu 4x slower ~0.6``, as ``--emulate`` writes jitter."""
    short = [machine.replace(", emulated ", " ").replace(", jitter ", " ~") for _, machine, *_ in table.rows]
    rows = tuple((row[0], machine, *row[2:]) for machine, row in zip(short, table.rows))
    return WorkerTable(table.names, rows, table.words)


def fitted(table: WorkerTable, width: int) -> WorkerTable:
    """Return the table with as many columns as fit ``width`` characters, without those that are missed least."""
    for count in range(len(LEAST_MISSED) + 1):
        shown = table.without(LEAST_MISSED[:count])
        columns = zip(shown.names, *shown.rows)
        if sum(max(map(len, column)) + GAP for column in columns) - GAP <= width:
            break
    return shown


def report_several(runs: Sequence[Path], *, loss: float | None, page: Path | None, as_json: bool) -> None:
    """Compare runs: time to a loss, throughput, per cent of the limit; ``page``: file of the drawing."""
    from paceline.page.side_by_side import compare, comparison_page

    try:
        compared = compare([read_log(run) for run in runs], target=loss)
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
    _print_several(compared)
    if page is not None:
        typer.echo(f"\nwrote {page}")


def figures(compared: Comparison) -> dict[str, Any]:
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


def _print_several(compared: Comparison) -> None:
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
