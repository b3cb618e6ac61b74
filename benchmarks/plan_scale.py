"""How long does the pacer think? One adaptive observe and plan for 10, 1,000 and 10,000 workers.

Plans are made while a step computes, so they cost nothing as long as they are shorter than a step; the line to hold is
1.5 ms at 10,000 workers. Machines are drawn at random (fixed cost and speed both differ, 5 % noise, some so slow that
they sit out), and the plan timed is one in mid-run, after the pacer has settled.

    python benchmarks/plan_scale.py
"""

from __future__ import annotations

import gc
import json
import statistics
import time

import numpy as np
from _smoke import smoke

from paceline.pace import Adaptive, Ask
from paceline.records import StepRecord

SIZES = (10, 1000, 10_000)
STEPS = 60
SETTLE = 10
globals().update(smoke(STEPS=12))


def measure(workers: int, *, seed: int = 0) -> tuple[float, float]:
    """Median milliseconds of one plan and of one observe."""
    rng = np.random.default_rng(seed)
    fixed_s, per_sample_s = 0.01 * rng.lognormal(0, 1, workers), 0.001 * rng.lognormal(0, 1, workers)
    pacer, members = Adaptive(), tuple(range(workers))
    plans_ms, observes_ms = [], []
    for step in range(STEPS):
        begin = time.perf_counter()
        plan = pacer.plan(Ask(step=step, total=32 * workers, workers=members))
        plans_ms.append(1e3 * (time.perf_counter() - begin))
        record = _play(step, plan.samples, members, fixed_s, per_sample_s, rng)
        begin = time.perf_counter()
        pacer.observe(record)
        observes_ms.append(1e3 * (time.perf_counter() - begin))
        assert sum(plan.samples) == 32 * workers
    return statistics.median(plans_ms[SETTLE:]), statistics.median(observes_ms[SETTLE:])


def _play(
    step: int,
    shares: tuple[int, ...],
    members: tuple[int, ...],
    fixed_s: np.ndarray,
    per_sample_s: np.ndarray,
    rng: np.random.Generator,
) -> StepRecord:
    """What the machines would report for these shares."""
    samples = np.array(shares)
    seconds = np.where(samples > 0, (fixed_s + per_sample_s * samples) * rng.lognormal(0, 0.05, len(samples)), 0.0)
    return StepRecord(
        step=step,
        epoch=0,
        generation=0,
        workers=members,
        planned=shares,
        samples=shares,
        seconds=tuple(seconds.tolist()),
    )


def main() -> None:
    gc.disable()  # a collection in another part of the program is not the pacer's time
    figures: dict[str, float] = {}
    print(f"{'workers':>8}  {'plan ms':>8}  {'observe ms':>10}")
    for workers in SIZES:
        plan_ms, observe_ms = measure(workers)
        print(f"{workers:>8,}  {plan_ms:>8.3f}  {observe_ms:>10.3f}")
        figures[f"ms_at_{workers}"] = round(plan_ms, 4)
    figures["observe_ms_at_10000"] = round(observe_ms, 4)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
