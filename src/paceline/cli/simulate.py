"""``paceline simulate``: every rule of pace against a recorded trace, a run's own log or a seeded scenario."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.errors import refuse
from paceline.cli.progress import progress_bar

if TYPE_CHECKING:
    from paceline.simulate.comparison import Progress
    from paceline.simulate.outcome import Floats, Outcome

WORKERS, STEPS, SCENARIO = 158, 300, "bursts"
LONG = 1_000_000
"""Steps times workers from which a progress bar is worth its flicker."""
KNOWN = "calm, skewed, drifting, bursts, periodic, stalls, long-sequences, stuck"
STUCK = "stuck"
"""The scenario of stalls inside micro-batches, which is played by its own rules."""

TraceFile = Annotated[Path | None, typer.Option(metavar="FILE", help="A recorded trace: CSV, a line a step.")]
Run = Annotated[Path | None, typer.Option(metavar="RUN", help="A run's folder or its events.jsonl.")]
Scenario = Annotated[str | None, typer.Option(metavar="NAME", help=f"{KNOWN}. The default is {SCENARIO}.")]
Workers = Annotated[int | None, typer.Option(help=f"Workers of a scenario; {WORKERS} when left out.")]
Steps = Annotated[int | None, typer.Option(help=f"Steps of a scenario; {STEPS} when left out.")]
Seed = Annotated[int, typer.Option(help="Seed of the scenario and of the forecasts' draws.")]
OverheadMs = Annotated[float, typer.Option(help="The round's own cost in milliseconds: communication and update.")]
WarmUp = Annotated[int, typer.Option(help="First steps that are played but not scored.")]
Model = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A model of `paceline learn`: adds P3's deep forecast.")
]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots (needs the extra 'view').")]
Link = Annotated[
    str | None,
    typer.Option("--network", metavar="LINK", help="When averaging pays on links such as 100mbit,30ms (one way)."),
]
Parameters = Annotated[str | None, typer.Option(metavar="N", help="With --network: the model's size, such as 25M.")]
Megabytes = Annotated[float | None, typer.Option(metavar="MB", help="With --network: the same in megabytes.")]
Batch = Annotated[
    int | None, typer.Option(metavar="N", help="With --network: the global batch; a run's own, or 32 a worker.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as one line of JSON.")]


def simulate(
    trace: TraceFile = None,
    run: Run = None,
    scenario: Scenario = None,
    workers: Workers = None,
    steps: Steps = None,
    seed: Seed = 0,
    overhead_ms: OverheadMs = 0.0,
    warm_up: WarmUp = 0,
    model: Model = None,
    network: Link = None,
    parameters: Parameters = None,
    megabytes: Megabytes = None,
    batch: Batch = None,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Compare the rules of pace on recorded or made-up machines: throughput, waiting and wasted work, no processes."""
    from paceline.simulate.plot import page
    from paceline.simulate.table import figures, table

    try:
        _check_network(network, parameters, megabytes, batch, overhead_ms, model, scenario)
        source, seconds = _seconds(trace, run, scenario, workers, steps, seed)
        if network is not None:
            asked = Asked(network, parameters, megabytes, batch, run, warm_up)
            _simulate_network(source, seconds, asked, html, as_json)
            return
        settings = {"overhead_s": overhead_ms / 1000, "warm_up": warm_up, "seed": seed}
        with progress_bar("simulating", wanted=seconds.size >= LONG) as progress:
            outcomes = _contest(seconds, scenario == STUCK, model, progress, **settings)
        rows = figures(outcomes)
        if html is not None:
            _write_page(html, page(_title(source), outcomes))
    except ValueError as error:
        refuse(f"simulate: {error}")
    size = {"source": source, "steps": len(seconds), "workers": seconds.shape[1]}
    if as_json:
        told = {"seed": seed, "overhead_ms": overhead_ms, "warm_up": warm_up}
        typer.echo(json.dumps({**size, **told, "rules": rows}))
        return
    from rich.console import Console

    console = Console(highlight=False)
    unscored = f", the first {warm_up} not scored" if warm_up else ""
    console.print(f"{source}: {len(seconds):,} steps{unscored}, {seconds.shape[1]:,} workers\n", markup=False)
    console.print(table(rows))


@dataclass(frozen=True)
class Asked:
    """What --network and the options that go with it say."""

    link: str
    parameters: str | None
    megabytes: float | None
    batch: int | None
    run: Path | None
    warm_up: int


def _check_network(
    network: str | None,
    parameters: str | None,
    megabytes: float | None,
    batch: int | None,
    overhead_ms: float,
    model: Path | None,
    scenario: str | None,
) -> None:
    """Options that make no sense together."""
    if network is None:
        for name, value in (("--parameters", parameters), ("--megabytes", megabytes), ("--batch", batch)):
            if value is not None:
                raise ValueError(f"{name} goes with --network, such as --network 100mbit,30ms")
        return
    if overhead_ms:
        raise ValueError("--overhead-ms and --network exclude each other: the link says what a round costs")
    if model is not None:
        raise ValueError("--model is for cut-offs, and --network compares rounds at every step with averages")
    if scenario == STUCK:
        raise ValueError(f"--network needs seconds a step, and scenario {STUCK!r} is played by micro-batches")


def _simulate_network(source: str, seconds: Floats, asked: Asked, html: Path | None, as_json: bool) -> None:
    """When averaging pays: a table, and sentences that say from which period on the network no longer matters."""
    from paceline.machines.link import parse_link
    from paceline.simulate import network_table as words
    from paceline.simulate.network import compare_network, enough
    from paceline.simulate.traffic import Network

    link, size = parse_link(asked.link), words.model_bytes(asked.parameters, asked.megabytes)
    share = _equal_share(asked.batch, asked.run, seconds.shape[1])
    with progress_bar("simulating", wanted=seconds.size >= LONG) as progress:
        outcomes = compare_network(
            seconds, link, model_bytes=size, share=share, warm_up=asked.warm_up, progress=progress
        )
    period = enough(seconds, link, model_bytes=size, warm_up=asked.warm_up)
    said = words.verdict(outcomes, Network(link, seconds.shape[1], size), period)
    if html is not None:
        _write_page(html, words.page(_title(source), outcomes, [*said, words.NOT_MODELLED]))
    rows, told = words.figures(outcomes), {"steps": len(seconds), "workers": seconds.shape[1]}
    if as_json:
        network = {"network": asked.link, "model_bytes": size, "equal_share": share, "warm_up": asked.warm_up}
        says = {"enough": period and asdict(period), "verdict": said, "not_modelled": words.NOT_MODELLED}
        typer.echo(json.dumps({"source": source, **told, **network, "rules": rows, **says}))
        return
    from rich.console import Console

    console = Console(highlight=False)
    title = f"{source}: {len(seconds):,} steps, {seconds.shape[1]:,} workers, {share:,} samples an equal share\n"
    console.print(title, markup=False)
    console.print(words.table(rows))
    console.print("\n" + "\n".join([*said, words.NOT_MODELLED]), markup=False)


def _equal_share(batch: int | None, run: Path | None, workers: int) -> int:
    """Samples of an equal share of the global batch."""
    from paceline.simulate.network import SHARE

    if run is not None:
        from paceline.observe import read_log

        log = read_log(run)
        if log.run.get("combine", "gradients") != "gradients":
            raise ValueError("--network needs seconds a step, and this run's log has a line a round: it was averaged")
        batch = batch if batch is not None else int(median(record.total for record in log.records))
    if batch is None:
        return SHARE
    if batch < workers:
        raise ValueError(f"--batch is the global batch, at least one sample for each of {workers} workers, not {batch}")
    return round(batch / workers)


def _contest(
    seconds: Floats, stuck: bool, model: Path | None, progress: Progress | None, **settings: Any
) -> list[Outcome]:
    from paceline.simulate import compare, compare_stuck

    if not stuck:
        return compare(seconds, model=model, progress=progress, **settings)
    if model is not None:
        raise ValueError(f"--model is for cut-offs, and scenario {STUCK!r} is played without them")
    return compare_stuck(seconds, progress=progress, **settings)


def _title(source: str) -> str:
    return f"paceline simulate: {source}"


def _write_page(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {file}: {error.strerror or error}") from None


def _seconds(
    trace: Path | None, run: Path | None, scenario: str | None, workers: int | None, steps: int | None, seed: int
) -> tuple[str, Floats]:
    """Where the seconds come from, in words, and the steps x workers matrix."""
    if sum(choice is not None for choice in (trace, run, scenario)) > 1:
        raise ValueError("--trace, --run and --scenario exclude each other: give one of them")
    if seed < 0:
        raise ValueError(f"--seed is a whole number from 0, not {seed}")
    if (trace or run) and (workers is not None or steps is not None):
        raise ValueError("--workers and --steps are for scenarios: what was recorded has its own")
    if trace is not None:
        from paceline.machines.trace import read_trace

        return f"trace {trace.name}", read_trace(trace).seconds
    if run is not None:
        from paceline.observe import read_log
        from paceline.simulate.recorded import equal_share_seconds

        return f"run {run}", equal_share_seconds(read_log(run).records)
    from paceline.simulate import make

    name, many = scenario or SCENARIO, STEPS if steps is None else steps
    source = f"scenario {name}, seed {seed}"
    if name == STUCK:
        from paceline.simulate import stuck

        few = stuck.WORKERS if workers is None else workers
        return source, stuck.machines(steps=many, workers=few, seed=seed)
    return source, make(name, steps=many, workers=WORKERS if workers is None else workers, seed=seed)
