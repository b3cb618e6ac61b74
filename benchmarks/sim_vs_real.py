"""Does the simulator tell the truth? Four fleets run for real, on emulated machines, and in the simulator.

Four workers, each a process of its own. The simulator is given what the machines are (their seconds a sample in every
step, from their description) and what a round costs, measured beforehand on calm machines, once for rounds that wait
for everybody and once for rounds with a deadline. It is told nothing of the runs themselves. Both sides use the same
pacers: adaptive on machines of unlike speed with jitter and on drifting ones, joint on machines with bursts and stalls,
and a cut-off (P3's own rule, `keep_batch=False`) on machines that are slow from time to time.

The error of a fleet is that of its mean step time, real against simulated, after the first steps; the last step, which
ends the epoch, is not compared. "step by step" is the median over the steps of each one's own error.

    python benchmarks/sim_vs_real.py
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _smoke import smoke
from common import FEATURES, emulate, is_worker, leave_result, run_workers
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.machines import parse_fleet
from paceline.observe import read_log
from paceline.pace import Adaptive, Ask, Equal, Joint
from paceline.records import Plan
from paceline.research.cutoff import Cutoff
from paceline.simulate import Outcome, deadline_play, make, play

WORKERS, SHARE, MICRO = 4, 64, 8
BATCH = WORKERS * SHARE
SAMPLE_MS = 2.5
STEPS, SKIP, CALM_STEPS = 52, 6, 14
SKEWED = "1,1~0.1,2~0.1,4"
globals().update(smoke(WORKERS=2, BATCH=2 * SHARE, SAMPLE_MS=0.1, STEPS=14, SKIP=4, CALM_STEPS=6, SKEWED="1,2~0.1"))
CALM = ",".join("1" * WORKERS)
WAITING, BOUNDED = "waiting", "bounded"

Run = dict[str, list[float]]


@dataclass(frozen=True)
class Scenario:
    """A fleet as it is emulated, and the pace it runs under."""

    name: str
    machines: str
    pace: str


class Bounded(Equal):
    """Equal shares and a deadline nobody misses: what such a round costs on calm machines."""

    name = BOUNDED
    deadlines = True

    def plan(self, ask: Ask) -> Plan:
        return replace(super().plan(ask), deadline_s=10.0)


def scenarios(folder: Path) -> list[Scenario]:
    """The four fleets; what changes from step to step is written to traces in ``folder``."""
    rng = np.random.default_rng(5)
    drifting = make("drifting", steps=STEPS, workers=WORKERS, seed=3)
    stalled = np.where(rng.random((STEPS, WORKERS)) < 0.05, 20.0, 1.0)
    stalled[:SKIP] = 1.0  # before anything is known every stall is waited for, which would only take long
    bursts = make("bursts", steps=STEPS, workers=WORKERS, seed=4) * stalled
    periodic = make("periodic", steps=STEPS, workers=WORKERS, seed=2)
    return [
        Scenario("skewed, jitter", SKEWED, "adaptive"),
        Scenario("drifting", _trace(folder / "drifting.csv", drifting), "adaptive"),
        Scenario("bursts, stalls", _trace(folder / "bursts.csv", bursts), "joint"),
        Scenario("periodic", _trace(folder / "periodic.csv", periodic), "cutoff"),
    ]


def cutoff() -> Cutoff:
    """P3's rule with the simplest forecast: each worker as in the step before."""
    return Cutoff("last", keep_batch=False)


def _trace(file: Path, seconds: Any) -> str:
    with file.open("w", newline="") as lines:
        csv.writer(lines).writerows([step, *row] for step, row in enumerate(seconds.tolist()))
    return str(file)


# -- for real ----------------------------------------------------------------------------------------------------------


def run(name: str, machines: str, pace: str | Equal | Cutoff, *, steps: int) -> Run:
    """A training on these machines; on worker 0, what its log says from the second step on."""
    emulate(machines, SAMPLE_MS)
    with paceline.join(pace, quiet=True) as fleet:
        if fleet.is_leader:
            print(f"for real: {name}, {steps} steps", file=sys.stderr, flush=True)
        model = fleet.model(nn.Linear(FEATURES, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in fleet.steps(_data(BATCH * steps), global_batch=BATCH, micro_batch=MICRO):
            for x, y in step:
                step.backward(nn.functional.cross_entropy(model(x), y))
            step.commit(optimizer)
    if fleet.rank != 0:
        return {}
    log = read_log(fleet.run_dir)
    return {
        "step_s": np.diff(log.times).tolist(),  # rounds end on the leader's clock, also while its own loop is stuck
        "work_s": [max(record.seconds) for record in log.records[1:]],
        "counts": [record.total for record in log.records[1:]],
        "deadlines": [(record.deadline_s or record.wait_for) is not None for record in log.records[1:]],
        "shortfall": [sum(record.shortfall_s) / sum(record.seconds) for record in log.records[1:]],
    }


def measure(folder: Path) -> dict[str, Run]:
    found = {
        WAITING: run("calm, rounds that wait", CALM, "equal", steps=CALM_STEPS),
        BOUNDED: run("calm, rounds with a deadline", CALM, Bounded(), steps=CALM_STEPS),
    }
    for each in scenarios(folder):
        pace = cutoff() if each.pace == "cutoff" else each.pace
        found[each.name] = run(f"{each.name}, {each.pace}", each.machines, pace, steps=STEPS)
    return found


def _data(length: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(length, FEATURES, generator=generator)
    return TensorDataset(features, torch.randint(10, (length,), generator=generator))


# -- in the simulator --------------------------------------------------------------------------------------------------


def simulate(scenario: Scenario, overhead_s: float) -> Outcome:
    machines = parse_fleet(scenario.machines, sample_ms=SAMPLE_MS)
    own = np.array([[machine.seconds(step, SHARE) for machine in machines] for step in range(STEPS)])
    if scenario.pace == "adaptive":
        return play.shares(own, Adaptive(), overhead_s=overhead_s, share=SHARE)
    if scenario.pace == "cutoff":
        return play.arrivals(own, cutoff(), overhead_s=overhead_s, share=SHARE, micro_batches=SHARE // MICRO)
    settings = {"share": SHARE, "micro_batches": SHARE // MICRO, "noise": lambda _, shape: np.ones(shape)}
    return deadline_play.play(own, Joint(), overhead_s=overhead_s, **settings)


def overhead(calm: Run) -> float:
    """What a step takes beyond its longest work: seconds, the median over calm steps."""
    return float(np.median(np.subtract(calm["step_s"], calm["work_s"])[2:-1]))


def compare(scenario: Scenario, real: Run, overhead_s: float) -> dict[str, float]:
    """Mean step times and their error; and how the steps agree one by one."""
    scored = slice(SKIP, STEPS - 1)
    outcome = simulate(scenario, overhead_s)
    real_s, simulated_s = np.array([np.nan, *real["step_s"]])[scored], outcome.seconds[scored]
    counts, simulated_counts = np.array([0, *real["counts"]])[scored], outcome.shares[scored] * SHARE
    return {
        "real_ms": 1000 * float(real_s.mean()),
        "simulated_ms": 1000 * float(simulated_s.mean()),
        "error": abs(float(simulated_s.mean() / real_s.mean()) - 1),
        "step_by_step": float(np.median(np.abs(simulated_s / real_s - 1))),
        "count_error": abs(float(simulated_counts.sum() / counts.sum()) - 1),
        "with_deadline": float(np.mean(real["deadlines"])),
        "host_shortfall": float(np.mean(real["shortfall"])),
    }


def report(folder: Path) -> None:
    found = run_workers(__file__, WORKERS, str(folder))
    cost_s = {"adaptive": overhead(found[WAITING]), "joint": overhead(found[BOUNDED])}
    cost_s["cutoff"] = cost_s["joint"]
    print(f"{WORKERS} workers; a round costs {1000 * cost_s['adaptive']:.1f} ms, with a deadline", end=" ")
    print(f"{1000 * cost_s['joint']:.1f} ms (calm machines, measured)")
    figures = {}
    for scenario in scenarios(folder):
        row = figures[scenario.name] = compare(scenario, found[scenario.name], cost_s[scenario.pace])
        print(
            f"  {scenario.name + ', ' + scenario.pace:<25} real {row['real_ms']:5.1f} ms, simulated "
            f"{row['simulated_ms']:5.1f} ms a step: error {row['error']:.1%}, step by step {row['step_by_step']:.1%}; "
            f"{row['with_deadline']:.0%} of the steps had a deadline"
        )
    worst = {f"worst_{key}": max(row[key] for row in figures.values()) for key in ("error", "step_by_step")}
    rows = {name: {key: round(value, 4) for key, value in row.items()} for name, row in figures.items()}
    print(json.dumps({**{key: round(value, 4) for key, value in worst.items()}, "scenarios": rows}))


def main() -> None:
    if is_worker():
        leave_result(measure(Path(sys.argv[1])))
        return
    with tempfile.TemporaryDirectory() as folder:
        report(Path(folder))


if __name__ == "__main__":
    main()
