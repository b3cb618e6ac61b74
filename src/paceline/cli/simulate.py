"""``paceline simulate``: every rule of pace, played against a recorded trace, a run's log or a seeded scenario."""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from paceline.cli.terminal import progress_bar, refuse
from paceline.observe import read_log
from paceline.observe.words.numbers import duration, number

if TYPE_CHECKING:
    from paceline.simulate.comparison import Progress
    from paceline.simulate.play import Floats, Outcome

WORKERS, STEPS, SCENARIO = 158, 300, "bursts"
LONG = 1_000_000
"""Steps times workers from which on a progress bar is shown."""
KNOWN = "calm, skewed, drifting, bursts, periodic, stalls, long-sequences, stuck"
STUCK = "stuck"
"""The scenario of stalls inside micro-batches, which is played by its own rules."""

Emulate = Annotated[
    str | None, typer.Option(metavar="MACHINES", help="Emulated machines, as in run --emulate: 1,1,2+50ms,4.")
]
SampleMs = Annotated[
    float | None, typer.Option(help="With --emulate: the reference machine's milliseconds per sample; 2 when left out.")
]
StepCostMs = Annotated[
    str | None,
    typer.Option(metavar="MS[,MS]...", help="Constant milliseconds per step on top: one for all, or one per worker."),
]
TraceFile = Annotated[Path | None, typer.Option(metavar="FILE", help="A recorded trace: CSV, one line per step.")]
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
Parameters = Annotated[
    str | None, typer.Option(metavar="N", help="With --network or --mtbf-h: the model's size, such as 25M.")
]
Megabytes = Annotated[float | None, typer.Option(metavar="MB", help="The same in megabytes.")]
MtbfH = Annotated[
    float | None,
    typer.Option(metavar="HOURS", help="Goodput under failures: mean hours between two of one machine."),
]
ReplaceS = Annotated[float | None, typer.Option(help="With --mtbf-h: seconds until a failed machine is replaced.")]
Costs = Annotated[
    str | None,
    typer.Option(metavar="NAME=S,...", help="With --mtbf-h: seconds of kill, join, start, load, save, write, every."),
]
Hours = Annotated[float | None, typer.Option(help="With --mtbf-h: hours to play; 2,000 failures when left out.")]
Batch = Annotated[
    int | None,
    typer.Option(metavar="N", help="With --network or --emulate: the global batch; a run's own, or 32 per worker."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as one line of JSON.")]


def simulate(
    trace: TraceFile = None,
    run: Run = None,
    scenario: Scenario = None,
    emulate: Emulate = None,
    sample_ms: SampleMs = None,
    workers: Workers = None,
    steps: Steps = None,
    seed: Seed = 0,
    overhead_ms: OverheadMs = 0.0,
    step_cost_ms: StepCostMs = None,
    warm_up: WarmUp = 0,
    model: Model = None,
    network: Link = None,
    parameters: Parameters = None,
    megabytes: Megabytes = None,
    batch: Batch = None,
    mtbf_h: MtbfH = None,
    replace_s: ReplaceS = None,
    costs: Costs = None,
    hours: Hours = None,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Compare the rules of pace on recorded or made-up machines: throughput, waiting and wasted work, no processes."""
    from paceline.simulate.comparison import figures, page, table

    try:
        alone = batch if emulate is None else None
        size = {"--parameters": parameters, "--megabytes": megabytes} if mtbf_h is None else {}
        _check_network(network, {**size, "--batch": alone}, overhead_ms, model, scenario)
        failing = FailuresAsked(mtbf_h, replace_s, costs, hours, parameters, megabytes, seed)
        _check_failures(failing, {"--network": network, "--model": model, "--html": html})
        machines = MachinesAsked(trace, run, scenario, emulate, workers, steps, batch, seed, sample_ms)
        source, seconds, cost_s = _seconds(machines)
        cost_s = _with_costs(cost_s, step_cost_ms, seconds.shape[1])
        if mtbf_h is not None:
            _simulate_failures(source, seconds[warm_up:] + cost_s, failing, as_json)
            return
        if network is not None:
            if cost_s.any():
                raise ValueError("--network knows no constant cost a step: leave --step-cost-ms and +COST out")
            asked = Asked(network, parameters, megabytes, batch, run, warm_up)
            _simulate_network(source, seconds, asked, html, as_json)
            return
        settings = {"overhead_s": overhead_ms / 1000, "cost_s": cost_s, "warm_up": warm_up, "seed": seed}
        with progress_bar("simulating", wanted=seconds.size >= LONG) as progress:
            outcomes = _contest(seconds, scenario == STUCK, model, progress, **settings)
        rows = figures(outcomes)
        if html is not None:
            _write_page(html, page(_title(source), outcomes))
    except ValueError as error:
        refuse(f"simulate: {error}")
    fleet = {"source": source, "steps": len(seconds), "workers": seconds.shape[1]}
    if as_json:
        given = {"seed": seed, "overhead_ms": overhead_ms, "step_cost_ms": step_cost_ms, "warm_up": warm_up}
        typer.echo(json.dumps({**fleet, **given, "rules": rows}))
        return
    console = Console(highlight=False)
    unscored = f", the first {warm_up} not scored" if warm_up else ""
    console.print(f"{source}: {len(seconds):,} steps{unscored}, {seconds.shape[1]:,} workers\n", markup=False)
    console.print(table(rows))


@dataclass(frozen=True)
class Asked:
    """The option --network and those that go with it."""

    link: str
    parameters: str | None
    megabytes: float | None
    batch: int | None
    run: Path | None
    warm_up: int


def _check_network(
    network: str | None, with_link: dict[str, Any], overhead_ms: float, model: Path | None, scenario: str | None
) -> None:
    """Raise ValueError for options that exclude each other.

    ``with_link`` holds, by name, the options that are valid with --network only.
    """
    if network is None:
        if given := [name for name, value in with_link.items() if value is not None]:
            raise ValueError(f"{given[0]} goes with --network, such as --network 100mbit,30ms")
        return
    if overhead_ms:
        raise ValueError("--overhead-ms and --network exclude each other: the link says what a round costs")
    if model is not None:
        raise ValueError("--model is for cut-offs, and --network compares rounds at every step with averages")
    if scenario == STUCK:
        raise ValueError(f"--network needs seconds per step, and scenario {STUCK!r} is played by micro-batches")


def _simulate_network(source: str, seconds: Floats, asked: Asked, html: Path | None, as_json: bool) -> None:
    """Print when averaging pays: a table, and sentences with the period from which on the network does not matter."""
    from paceline.machines.link import parse_link
    from paceline.simulate import network as words
    from paceline.simulate.network import Network, compare_network, enough

    link, size = parse_link(asked.link), words.model_bytes(asked.parameters, asked.megabytes)
    share = _equal_share(asked.batch, asked.run, seconds.shape[1])
    with progress_bar("simulating", wanted=seconds.size >= LONG) as progress:
        outcomes = compare_network(
            seconds, link, model_bytes=size, share=share, warm_up=asked.warm_up, progress=progress
        )
    period = enough(seconds, link, model_bytes=size, warm_up=asked.warm_up)
    sentences = words.verdict(outcomes, Network(link, seconds.shape[1], size), period)
    if html is not None:
        _write_page(html, words.page(_title(source), outcomes, [*sentences, words.NOT_MODELLED]))
    rows, fleet = words.figures(outcomes), {"steps": len(seconds), "workers": seconds.shape[1]}
    if as_json:
        network = {"network": asked.link, "model_bytes": size, "equal_share": share, "warm_up": asked.warm_up}
        found = {"enough": period and asdict(period), "verdict": sentences, "not_modelled": words.NOT_MODELLED}
        typer.echo(json.dumps({"source": source, **fleet, **network, "rules": rows, **found}))
        return
    console = Console(highlight=False)
    title = f"{source}: {len(seconds):,} steps, {seconds.shape[1]:,} workers, {share:,} samples an equal share\n"
    console.print(title, markup=False)
    console.print(words.table(rows))
    console.print("\n" + "\n".join([*sentences, words.NOT_MODELLED]), markup=False)


@dataclass(frozen=True)
class FailuresAsked:
    """The option --mtbf-h and those that go with it."""

    mtbf_h: float | None
    replace_s: float | None
    costs: str | None
    hours: float | None
    parameters: str | None
    megabytes: float | None
    seed: int


def _check_failures(asked: FailuresAsked, others: dict[str, Any]) -> None:
    """Raise ValueError for options that exclude each other, and for numbers that cannot be.

    ``others`` holds, by name, the options that are not valid with --mtbf-h.
    """
    if asked.mtbf_h is None:
        with_mtbf = {"--replace-s": asked.replace_s, "--costs": asked.costs, "--hours": asked.hours}
        if given := [name for name, value in with_mtbf.items() if value is not None]:
            raise ValueError(f"{given[0]} goes with --mtbf-h, a machine's mean hours between failures")
        return
    if given := [name for name, value in others.items() if value is not None]:
        raise ValueError(f"{given[0]} and --mtbf-h exclude each other: failures are played on machines alone")
    if asked.replace_s is None:
        raise ValueError("--mtbf-h needs --replace-s, the seconds until a machine that failed is replaced")
    for name, value in (("--mtbf-h", asked.mtbf_h), ("--hours", asked.hours)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value:g}: hours, above 0")
    if not (asked.replace_s >= 0 and math.isfinite(asked.replace_s)):
        raise ValueError(f"--replace-s is {asked.replace_s:g}: seconds, at least 0")


def _simulate_failures(source: str, seconds: Floats, asked: FailuresAsked, as_json: bool) -> None:
    """Print the goodput of Paceline and of restarts from a checkpoint on machines that fail."""
    from paceline.simulate import goodput as words
    from paceline.simulate.goodput import compare_goodput, fleet_mtbf_s, usual_costs
    from paceline.simulate.network import model_bytes
    from paceline.simulate.network import size as written

    speeds = (1 / seconds.mean(axis=0)).tolist()
    mtbf_s, hours = 3600 * (asked.mtbf_h or 0.0), asked.hours
    somebody_s = fleet_mtbf_s(len(speeds), mtbf_s)
    state = words.OPTIMISER_COPIES * model_bytes(asked.parameters, asked.megabytes, needed_by="--mtbf-h")
    known = {"step_s": len(speeds) / sum(speeds), **words.parse_costs(asked.costs)}
    costs = usual_costs(len(speeds), state_bytes=state, fleet_mtbf_s=somebody_s, **known)
    timing = {"mtbf_s": mtbf_s, "replace_s": asked.replace_s or 0.0, "until_s": None if hours is None else 3600 * hours}
    found = compare_goodput(speeds, costs, seed=asked.seed, **timing)  # type: ignore[arg-type]
    sentences = words.verdict(found, costs, fleet_mtbf_s=somebody_s)
    if as_json:
        given = {"mtbf_h": asked.mtbf_h, "replace_s": asked.replace_s, "seed": asked.seed, "state_bytes": state}
        head = {"source": source, "workers": len(speeds), **given}
        typer.echo(json.dumps({**head, **words.figures(found, costs), "verdict": sentences}))
        return
    console = Console(highlight=False)
    title = (
        f"{source}: {len(speeds):,} workers, each fails once in {number(asked.mtbf_h or 0.0)} h and is replaced after "
        f"{duration(asked.replace_s or 0.0)}; {written(state)} of state"
    )
    width = min(100, console.width)
    console.print(textwrap.fill(title, width) + "\n", markup=False)
    console.print(words.table(found))
    console.print()
    for line in sentences:
        console.print(textwrap.fill(line, width), markup=False)


def _equal_share(batch: int | None, run: Path | None, workers: int) -> int:
    """Return the number of samples of an equal share of the global batch."""
    from paceline.simulate.network import SHARE

    if run is not None:
        log = read_log(run)
        if log.run.get("combine", "gradients") != "gradients":
            raise ValueError(
                "--network needs seconds per step, and this run was averaged: its log has one line per round"
            )
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


@dataclass(frozen=True)
class MachinesAsked:
    """The options that choose where seconds come from; at most one of the first four is given."""

    trace: Path | None
    run: Path | None
    scenario: str | None
    emulate: str | None
    workers: int | None
    steps: int | None
    batch: int | None
    seed: int
    sample_ms: float | None


def _seconds(asked: MachinesAsked) -> tuple[str, Floats, Floats]:
    """Return the source of the seconds in words, the steps x workers matrix, and the constant costs on top of it."""
    import numpy as np

    if sum(choice is not None for choice in (asked.trace, asked.run, asked.scenario, asked.emulate)) > 1:
        raise ValueError("--trace, --run, --scenario and --emulate exclude each other: give one of them")
    if asked.seed < 0:
        raise ValueError(f"--seed is a whole number from 0, not {asked.seed}")
    if (asked.trace or asked.run) and (asked.workers is not None or asked.steps is not None):
        raise ValueError("--workers and --steps are for scenarios: what was recorded has its own")
    if asked.emulate is not None:
        return _emulated(asked, asked.emulate)
    if asked.sample_ms is not None:
        raise ValueError("--sample-ms goes with --emulate, such as --emulate 1,1,2,4")
    words, seconds = _recorded_or_made(asked)
    return words, seconds, np.zeros(seconds.shape[1])


def _recorded_or_made(asked: MachinesAsked) -> tuple[str, Floats]:
    if asked.trace is not None:
        from paceline.machines.trace import read_trace

        return f"trace {asked.trace.name}", read_trace(asked.trace).seconds
    if asked.run is not None:
        from paceline.simulate.matrices import equal_share_seconds

        return f"run {asked.run}", equal_share_seconds(read_log(asked.run).records)
    from paceline.simulate import make

    name, many = asked.scenario or SCENARIO, STEPS if asked.steps is None else asked.steps
    words = f"scenario {name}, seed {asked.seed}"
    if name == STUCK:
        from paceline.simulate import matrices

        few = matrices.STUCK_WORKERS if asked.workers is None else asked.workers
        return words, matrices.stuck_machines(steps=many, workers=few, seed=asked.seed)
    workers = WORKERS if asked.workers is None else asked.workers
    return words, make(name, steps=many, workers=workers, seed=asked.seed)


def _emulated(asked: MachinesAsked, text: str) -> tuple[str, Floats, Floats]:
    """Return the machines of ``run --emulate``: a name, seconds of an equal share, and costs, by step and worker."""
    from paceline.machines import SAMPLE_MS, parse_fleet
    from paceline.simulate.matrices import emulated_seconds

    sample_ms = SAMPLE_MS if asked.sample_ms is None else asked.sample_ms
    fleet = parse_fleet(text, sample_ms=sample_ms, seed=asked.seed, workers=asked.workers)
    steps, share = STEPS if asked.steps is None else asked.steps, _equal_share(asked.batch, None, len(fleet))
    return f"machines {text}, seed {asked.seed}", *emulated_seconds(fleet, steps, share=share)


def _with_costs(cost_s: Floats, text: str | None, workers: int) -> Floats:
    """Add the costs of --step-cost-ms to those of the machines."""
    import numpy as np

    if text is None:
        return cost_s
    try:
        costs = np.array([float(part) for part in text.split(",")])
    except ValueError:
        raise ValueError(
            f"--step-cost-ms is {text!r}; write milliseconds, such as 50, or one per worker: 0,100"
        ) from None
    if len(costs) not in (1, workers):
        raise ValueError(
            f"--step-cost-ms has {len(costs)} costs for {workers} workers: give one for all, or one for each"
        )
    return np.asarray(cost_s + costs / 1000)
