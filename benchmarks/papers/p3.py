"""P3, the predicted cut-off: throughput of the rules in one table, and loss over wall-clock time on real workers.

**Convergence.** Eight processes play eight machines (a sample takes so many milliseconds; after the computation a
worker sleeps until its machine would be done) in four nodes of two, which slow down together: in *bursts* a node turns
1.8 times slower with probability 0.03 a step and recovers with 0.1, in *periodic* it is twice as slow for 3 of every 12
steps. They train a small network on Fashion-MNIST, every sample counted once, with one learning rate and, by larger
shares after a cut, one batch under every rule:
naive (everybody is waited for), the best static cut-off in hindsight, Elfving, deep (trained beforehand on another
600 steps of the same kind of cluster, and used from the first step), joint. Loss is that of the leader's weights on
test images, scored after the training. The clock starts when the second step ends: workers that do not wait for each
other connect once more before, which takes a moment and belongs to no rule. Time to target is read where the mean of
three evaluations first is at or below the target.

**Throughput**, simulated: shares a second over naive's, on the same two scenarios with 158 and with 2,175 workers and,
with --traces, on recorded ones widened to 158: copies of the recorded job, each of which begins elsewhere in the
recording and comes round. Models learn from other seeds, of a recording from its first half; its second half is played.
Every rule sees only what its own cut-offs leave; the first 20 steps are not scored.

**At scale** (--workers): the same with 32 or more real processes, shares of 0.32 s in sixteen micro-batches, without
Elfving. *real_over_naive* is the samples per second of these fleets over naive's, beside the simulator's for as many
workers.

    python benchmarks/papers/p3.py [--traces DIR]    # three seeds: under 4 minutes on 16 cores, 25 on two
    python benchmarks/papers/p3.py --quick           # one seed, 158 workers, short trainings: two minutes on two cores
    python benchmarks/papers/p3.py --workers 32      # three seeds: about 6 minutes on 16 cores

Trainings and the table run in one process a core. Fleets run at the same time as far as the cores carry them.
``host_shortfall`` in the last line is by what part the host was too slow to play its machines, at worst: above a few
per cent the times are the host's.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import _chart
import _data
import numpy as np
import torch
from _cutoff_table import SHOWN, Cluster, Played, Row, measure, model_file, say, seconds, train
from _smoke import pool_context, smoke, smoking
from common import emulate, is_worker, leave_result, run_workers
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.machines import read_trace
from paceline.observe import read_log
from paceline.pace import Joint, Pacer
from paceline.pace.forecast import best_static_count
from paceline.research.cutoff import Cutoff
from paceline.research.deep.deep_forecast import Deep
from paceline.research.deep.model import load_model

SCENARIOS = ("bursts", "periodic")
WORKERS, SHARE, RATE = 8, 16, 0.02
"""Real workers, the samples of an equal share, and the learning rate for as many workers."""
WAYS = ("naive", "static", "Elfving", "deep", "joint")
SCALE_WAYS = ("naive", "static", "deep", "joint")
KEEP_EVERY, TEST_IMAGES = 3, 2000


@dataclass(frozen=True)
class Size:
    """How much is run."""

    seeds: int
    steps: int
    """Steps of an epoch on real workers: a count that falls short is made up for later, under every rule."""
    sample_ms: float
    target: float
    """Test loss to be reached."""
    updates: int
    fleets: dict[int, int]
    """Simulated workers, and the seeds of each."""
    played: int
    together: bool = False
    """One model for the real and the simulated workers of a scenario, learned from both."""
    workers: int = WORKERS
    micro: int = 2
    """Samples of a micro-batch."""
    ways: tuple[str, ...] = WAYS
    fleet_cores: float = 8.0
    """Cores that a real fleet wants for itself."""

    @property
    def batch(self) -> int:
        return self.workers * SHARE

    @property
    def rate(self) -> float:
        """The learning rate: it grows with the square root of the batch."""
        return RATE * math.sqrt(self.workers / WORKERS)


FULL = Size(seeds=3, steps=120, sample_ms=2.0, target=0.55, updates=1000, fleets={158: 3, 2175: 2}, played=220)
QUICK = Size(seeds=1, steps=36, sample_ms=5.0, target=0.8, updates=300, fleets={158: 1}, played=120, together=True)
MOST_PROCESSES = 16
"""Models that learn, and clusters that are played, at the same time."""
SMOKE = Size(
    seeds=1,
    steps=10,
    sample_ms=0.05,
    target=2.5,
    updates=1,
    fleets={10: 1},
    played=12,
    together=True,
    workers=2,
    ways=("naive", "deep", "joint"),
)
globals().update(smoke(SCENARIOS=("bursts",), FULL=SMOKE, TEST_IMAGES=20))


def at_scale(workers: int, seeds: int) -> Size:
    """Return the size of a run with many real workers."""
    return Size(
        seeds=seeds,
        steps=90,
        sample_ms=20.0,
        target=0.55,
        updates=600,
        fleets={workers: 1},
        played=220,
        together=True,
        workers=workers,
        micro=1,
        ways=SCALE_WAYS,
        fleet_cores=workers / 12,
    )


def size_of(name: str) -> Size:
    """Return the size that ``name`` stands for on a worker's command line: full, quick, or WORKERS:SEEDS."""
    if ":" in name:
        workers, seeds = map(int, name.split(":"))
        return at_scale(workers, seeds)
    return QUICK if name == "quick" else FULL


Curve = list[tuple[float, float]]
"""Seconds and test loss."""
Curves = dict[str, dict[str, list[Curve]]]
"""By scenario and way, one a seed."""
Trained = tuple[str, int, str, dict[str, Any]]
"""Scenario, seed, way, and the fields of a `Training`."""


# -- loss over wall-clock time, real workers -------------------------------------------------------------------------


def network(pixels: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 64), nn.ReLU(), nn.Linear(64, 10))


def pacer(way: str, own: np.ndarray, model: Path) -> str | Pacer:
    if way == "static":
        return Cutoff(static=best_static_count(np.sort(own, axis=1)) / own.shape[1])
    if way == "deep":
        return Cutoff(Deep(load_model(model), always=True))
    return {"naive": "equal", "Elfving": Cutoff("elfving"), "joint": Joint()}[way]


@dataclass(frozen=True)
class Training:
    """A training under one rule, as the leader saw it."""

    curve: Curve
    samples_s: float
    """Samples per second after the second step."""
    shortfall: float
    """By what part the host was too slow for its machines."""


def trained(way: str, scenario: str, seed: int, size: Size, folder: str) -> Training | None:
    """Train under this rule; return what the leader saw, and None on the others."""
    data = torch.load(Path(folder) / "images.pt", weights_only=True, mmap=True)
    own = read_trace(_trace(folder, scenario, seed)).seconds[: size.steps]
    emulate(str(_trace(folder, scenario, seed)), size.sample_ms)
    torch.manual_seed(seed)
    kept: list[tuple[int, dict[str, torch.Tensor]]] = []
    with paceline.join(pacer(way, own, model_file(folder, scenario, size.workers, 0)), seed=seed, quiet=True) as fleet:
        model = fleet.model(network(data["train_x"][0].numel()))
        optimizer = torch.optim.SGD(model.parameters(), lr=size.rate, momentum=0.9)
        train_set = TensorDataset(data["train_x"], data["train_y"])
        epochs = -(-size.batch * size.steps // len(train_set))
        for step in fleet.steps(train_set, global_batch=size.batch, micro_batch=size.micro, epochs=epochs):
            for x, y in step:
                step.backward(nn.functional.cross_entropy(model(x), y))
            step.commit(optimizer)
            if fleet.rank == 0 and step.index % KEEP_EVERY == 1:
                kept.append((step.index, {name: value.clone() for name, value in model.state_dict().items()}))
    if fleet.rank != 0:
        return None
    log = read_log(fleet.run_dir)
    times = {record.step: moment for record, moment in zip(log.records, log.times, strict=True)}
    shortfall = sum(sum(one.shortfall_s) for one in log.records) / sum(sum(one.seconds) for one in log.records)
    samples = sum(sum(one.samples) for one in log.records if one.step > 1)
    curve = [(times[index] - times[1], loss(weights, data)) for index, weights in kept]
    return Training(curve, samples / (max(times.values()) - times[1]), shortfall)


def loss(weights: dict[str, torch.Tensor], data: dict[str, torch.Tensor]) -> float:
    model = network(data["test_x"][0].numel())
    model.load_state_dict(weights)
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(data["test_x"]), data["test_y"]))


def fleet_trainings(folder: str, scenarios: Sequence[str], seeds: Sequence[int], size: Size) -> list[Trained]:
    """Train by every way, in turns; on the leader, return what it saw."""
    torch.set_num_threads(1)
    told: list[Trained] = []
    for scenario, seed, way in product(scenarios, seeds, size.ways):
        if (one := trained(way, scenario, seed, size, folder)) is not None:
            told.append((scenario, seed, way, asdict(one)))
            say(f"{scenario}, seed {seed}: {way} took {one.curve[-1][0]:.1f} s, {one.samples_s:.0f} samples/s")
    return told


def prepare(folder: str, size: Size) -> str:
    """What the workers read: images, and the machines of every scenario and seed. The name of the images."""
    images = _data.load("fashion").part(size.batch * size.steps, TEST_IMAGES)
    parts = ("train_x", "train_y", "test_x", "test_y")
    torch.save({part: getattr(images, part).clone() for part in parts}, Path(folder) / "images.pt")
    for scenario in SCENARIOS:
        for seed in range(size.seeds):
            own = seconds(scenario, size.workers, 4 * size.steps, seed, learned=False)
            with _trace(folder, scenario, seed).open("w", newline="") as lines:
                csv.writer(lines).writerows([step, *row] for step, row in enumerate(own.tolist()))
    return images.name


def _trace(folder: str, scenario: str, seed: int) -> Path:
    return Path(folder) / f"{scenario}-{seed}.csv"


def smoothed(curve: Curve) -> Curve:
    """The mean of three evaluations, at the last one's time: one evaluation's luck is not a target reached."""
    return [(curve[i][0], statistics.mean(value for _, value in curve[i - 2 : i + 1])) for i in range(2, len(curve))]


def time_to(curve: Curve, target: float) -> float:
    return next((moment for moment, value in smoothed(curve) if value <= target), math.nan)


# -- telling ---------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float], digits: int = 2) -> str:
    whole = f"{statistics.mean(values):.{digits}f}"
    return whole + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def tell_throughput(table: dict[str, list[Row]]) -> None:
    print(f"\n{'throughput over naive':<22}" + "".join(f"{name:>26}" for name in table))
    for rule in next(iter(table.values()))[0]:
        print(f"{rule:<22}" + "".join(f"{spread([row[rule] for row in rows]):>26}" for rows in table.values()))


def tell_convergence(reached: dict[str, dict[str, list[float]]], target: float, images: str) -> None:
    print(f"\n{f'seconds to loss {target:g}':<22}" + "".join(f"{name:>26}" for name in reached) + f"   ({images})")
    for way in next(iter(reached.values())):
        print(f"{way:<22}" + "".join(f"{spread(times[way]):>26}" for times in reached.values()))


def ratios(reached: dict[str, dict[str, list[float]]], way: str) -> dict[str, list[float]]:
    """Naive's time over this way's, seed by seed."""
    return {
        name: [slow / fast for slow, fast in zip(times["naive"], times[way], strict=True)]
        for name, times in reached.items()
    }


def figures(table: dict[str, list[Row]], reached: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    def over(rule: str) -> dict[str, float]:
        return {name: statistics.mean(row["deep"] / row[rule] for row in rows) for name, rows in table.items()}

    both = {f"deep_over_{key}": over(rule) for key, rule in (("static", "best static"), ("elfving", "Elfving"))}
    ways = [way for way in next(iter(reached.values())) if way != "naive"]
    times = {f"time_to_target_naive_over_{way}": ratios(reached, way) for way in ways}
    main = [name for name in table if name.partition(",")[0] in SCENARIOS]
    head = {name: statistics.mean(cells[cluster] for cluster in main) for name, cells in both.items()}
    head |= {name: statistics.mean(value for row in cells.values() for value in row) for name, cells in times.items()}
    each = {name: {key: written(value) for key, value in cells.items()} for name, cells in (both | times).items()}
    return {**{name: written(value) for name, value in head.items()}, "each": each}


def written(value: float | Sequence[float]) -> Any:
    """For JSON, which has no NaN: None where a target was not reached."""
    if isinstance(value, Sequence):
        return [written(one) for one in value]
    return round(value, 4) if math.isfinite(value) else None


def verdicts(told: dict[str, Any]) -> None:
    """What the claims come to, one line each; a result against a claim is said as such."""
    claims = {
        "deep_over_static": "more gradients a second than the best static cut-off",
        "deep_over_elfving": "more gradients a second than order statistics",
        "time_to_target_naive_over_deep": "convergence in less time than naive",
    }
    print()
    for key, claim in claims.items():
        lows = {name: np.min(np.array(value, dtype=np.float64)) for name, value in told["each"][key].items()}
        against = [f"{name} ({low:.2f})" for name, low in lows.items() if not low > 1]
        print(f"{claim}: {told[key]}; " + (f"NOT on {', '.join(against)}" if against else "on every cluster and seed"))


def charts(curves: Curves, counts: dict[str, list[float]], folder: Path, workers: int) -> Path:
    panels = [
        _chart.Chart(
            f"{scenario}, {workers} real workers",
            "seconds",
            "test loss",
            {way: _mean_curve(seeds) for way, seeds in ways.items()},
        )
        for scenario, ways in curves.items()
    ]
    steps = list(range(SHOWN.start, SHOWN.start + len(counts["deep"])))
    waited = {name: (steps, values) for name, values in counts.items()}
    panels.append(_chart.Chart("periodic, simulated", "step", "workers waited for", waited))
    return _chart.write(folder / "p3.svg", panels)


def _mean_curve(curves: list[Curve]) -> tuple[list[float], list[float]]:
    """The seeds' mean loss at common times, as long as all of them last."""
    moments = np.linspace(0, min(curve[-1][0] for curve in curves), 40)
    losses = [np.interp(moments, *np.array(smoothed(curve)).T) for curve in curves]
    return moments[2:].tolist(), np.mean(losses, axis=0)[2:].tolist()


# -- all of it -------------------------------------------------------------------------------------------------------


def trainings(size: Size, traces: Sequence[str]) -> list[tuple[str, tuple[int, ...], int]]:
    """Scenario or trace, sizes of its fleets and the seed of every model."""
    if size.together:
        return [(source, tuple(sorted({size.workers, *size.fleets})), 0) for source in SCENARIOS]
    simulated = [(source, (workers,), seed) for source, workers, seed in clusters(size, traces)]
    return [*simulated, *((source, (size.workers,), 0) for source in SCENARIOS)]


def clusters(size: Size, traces: Sequence[str]) -> list[Cluster]:
    """What the table has, the largest first: they take longest."""
    fleets = sorted(size.fleets.items(), reverse=True)
    made = [(source, workers, seed) for workers, seeds in fleets for source in SCENARIOS for seed in range(seeds)]
    return [*made, *((source, min(size.fleets), 0) for source in traces)]


def run(size: Size, name: str, traces: Sequence[str], folder: str, plots: Path | None) -> dict[str, Any]:
    images = prepare(folder, size)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    played = table_of(size, traces, folder, cores)
    together = 1 if smoking() else max(1, int(cores / size.fleet_cores))
    seeds = [str(seed) for seed in range(size.seeds)]
    jobs = [(",".join(SCENARIOS), ",".join(seeds))]  # few fleets: starting processes takes time
    if together > 1:
        one_each = together >= len(SCENARIOS) * len(seeds)
        jobs = list(product(SCENARIOS, seeds if one_each else [",".join(seeds)]))
    with ThreadPoolExecutor(min(together, len(jobs))) as pool:
        told_by = pool.map(lambda job: run_workers(__file__, size.workers, folder, *job, name), jobs)
        found = sorted((one for told in told_by for one in told), key=lambda one: one[:2])
    told = tell(size, played, found, images, plots)
    return told | {"host_shortfall": written(max(training["shortfall"] for *_, training in found))}


def table_of(size: Size, traces: Sequence[str], folder: str, cores: int) -> dict[Cluster, Played]:
    """Train every model, then play every cluster."""
    learned, asked = trainings(size, traces), clusters(size, traces)
    with ProcessPoolExecutor(min(cores, MOST_PROCESSES), mp_context=pool_context()) as pool:
        every = (lambda *job: list(map(*job))) if smoking() else (lambda *job: list(pool.map(*job)))
        every(train, *zip(*((*job, size.updates, folder) for job in learned), strict=True))
        return dict(zip(asked, every(measure, *zip(*((*one, size.played, folder) for one in asked), strict=True))))


def tell(
    size: Size,
    played: dict[Cluster, Played],
    found: Sequence[Trained],
    images: str,
    plots: Path | None,
) -> dict[str, Any]:
    curves: Curves = {scenario: {way: [] for way in size.ways} for scenario in SCENARIOS}
    speeds = {scenario: {way: [] for way in size.ways} for scenario in SCENARIOS}
    for scenario, _, way, training in found:
        curves[scenario][way].append(training["curve"])
        speeds[scenario][way].append(training["samples_s"])
    table: dict[str, list[Row]] = {}
    for (source, workers, _), (row, _) in played.items():
        table.setdefault(f"{Path(source).stem}, {workers}", []).append(row)
    target = size.target
    reached = {
        scenario: {way: [time_to(curve, target) for curve in seeds] for way, seeds in ways.items()}
        for scenario, ways in curves.items()
    }
    tell_throughput(table)
    tell_convergence(reached, target, images)
    told = figures(table, reached)
    verdicts(told)
    if plots:
        print(f"plots: {charts(curves, played[SCENARIOS[-1], min(size.fleets), 0][1], plots, size.workers)}")
    told["throughput_over_naive"] = {
        name: {rule: [written(row[rule]) for row in rows] for rule in rows[0]} for name, rows in table.items()
    }
    told["seconds_to_target"] = {
        scenario: {way: written(times) for way, times in ways.items()} for scenario, ways in reached.items()
    }
    told["real_over_naive"] = {
        scenario: {
            way: [written(ours / naive) for ours, naive in zip(values, ways["naive"], strict=True)]
            for way, values in ways.items()
        }
        for scenario, ways in speeds.items()
    }
    return {**told, "target": target, "images": images, "seeds": size.seeds, "workers": size.workers}


def main() -> None:
    if is_worker():
        folder, scenarios, seeds, name = sys.argv[1:]
        wanted = [int(seed) for seed in seeds.split(",")]
        leave_result(fleet_trainings(folder, scenarios.split(","), wanted, size_of(name)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, 158 workers, short trainings")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder of recorded traces (*.csv)")
    parser.add_argument("--plots", type=Path, help="folder for p3.svg; a whole run writes it to docs/images/papers")
    parser.add_argument("--workers", type=int, help="that many real workers, in longer steps")
    parser.add_argument("--seeds", type=int, default=3, help="seeds, with --workers (default: 3)")
    asked = parser.parse_args()
    name = f"{asked.workers}:{asked.seeds}" if asked.workers else "quick" if asked.quick else "full"
    plots = asked.plots or (_chart.PLOTS if name == "full" and not smoking() else None)
    traces = [] if asked.traces is None or name != "full" else _recorded(asked.traces)
    with TemporaryDirectory() as folder:
        print(json.dumps(run(size_of(name), name, traces, folder, plots)))


def _recorded(folder: Path) -> list[str]:
    """The traces of step times in a folder; others there are left out."""
    found = []
    for file in sorted(folder.glob("*.csv")):
        try:
            found += [str(file)] if len(read_trace(file).seconds) >= 8 else []
        except ValueError as error:
            say(f"skipped {file.name}, which is not a trace of step times ({error})")
    return found


if __name__ == "__main__":
    main()
