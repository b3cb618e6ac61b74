"""Is a round at every step too much for a slow network?

Four workers, emulated 1, 1, 2 and 4 times as slow, train on scikit-learn's digits over an emulated link of 100 Mbit/s
and 20 ms: every round is padded, in the transport, to what the best way of summing would take on such links
(`paceline.machines.link`). Gradients at every step under adaptive shares, and local steps whose parameters are averaged
by the clock (``combine=Averaging(period_s=...)``), take turns in the same processes, five seeds each. Both evaluate
after every epoch, with the same epochs and learning rate. ``average_over_gradients`` is the median time to 97 % test
accuracy of gradients over that of the average: larger is better.

    python benchmarks/slow_network.py
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _smoke import smoke
from common import emulate, is_worker, leave_result, run_workers
from torch import nn

import paceline

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from digits import datasets, network

MACHINES, SAMPLE_MS, NETWORK = "1,1,2,4", 0.4, "100mbit,20ms"
BATCH, MICRO, EPOCHS, SEEDS = 64, 16, 6, 5
WANTED = 0.97
globals().update(smoke(MACHINES="1,2", SAMPLE_MS=0.02, NETWORK="1000mbit,2ms", BATCH=128, EPOCHS=1, SEEDS=2))
COMBINES: dict[str, tuple[Any, float]] = {
    "gradients": ("gradients", 0.9),
    "average": (paceline.Averaging(period_s=0.5, weights="samples"), 0.5),
}
"""With the momentum that suits it: local steps have a quarter of the batch, and noise that momentum would carry on."""


def train(combine: str, seed: int) -> dict[str, float]:
    """Seconds until the wanted test accuracy, and the final one."""
    data, test = datasets()
    torch.manual_seed(seed)
    reached, accuracy = float("inf"), 0.0
    with paceline.join("adaptive", combine=COMBINES[combine][0], seed=seed, quiet=True) as fleet:
        model = fleet.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=COMBINES[combine][1])
        steps = fleet.steps(data, global_batch=BATCH, micro_batch=MICRO, epochs=EPOCHS)
        began = time.perf_counter()
        for step in steps:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * (1 - 0.95 * steps.progress)
            for x, y in step:
                step.backward(nn.functional.cross_entropy(model(x), y))
            step.commit(optimizer, clip_norm=5.0)
            if step.ends_epoch:
                accuracy = fleet.evaluate(lambda x, y: {"correct": model(x).argmax(1) == y}, test)["correct"]
                if accuracy >= WANTED:
                    reached = min(reached, time.perf_counter() - began)
        whole = time.perf_counter() - began
    return {"reached_s": reached, "accuracy": accuracy, "whole_s": whole}


def measure() -> dict[str, list[dict[str, float]]]:
    emulate(MACHINES, SAMPLE_MS)
    os.environ["PACELINE_NETWORK"] = NETWORK
    found: dict[str, list[dict[str, float]]] = {name: [] for name in COMBINES}
    for seed in range(SEEDS):
        for name in COMBINES:
            found[name].append(train(name, seed))
    return found


def main() -> None:
    if is_worker():
        leave_result(measure())
        return
    found = run_workers(__file__, len(MACHINES.split(",")))
    figures: dict[str, float] = {}
    print(f"machines {MACHINES}, {NETWORK}: seconds to {WANTED:.0%}, accuracy after {EPOCHS} epochs, {SEEDS} seeds")
    for name, runs in found.items():
        times, ends = [run["reached_s"] for run in runs], [run["accuracy"] for run in runs]
        whole = statistics.mean(run["whole_s"] for run in runs)
        spread = statistics.stdev(ends)
        said = ", ".join(f"{seconds:.1f}" for seconds in times)
        print(f"  {name:<10} {said}   {statistics.mean(ends):.1%} ± {spread:.1%}   ({whole:.1f} s in all)")
        figures[f"{name}_s"], figures[f"{name}_accuracy"] = statistics.median(times), statistics.mean(ends)
    figures["average_over_gradients"] = figures["gradients_s"] / figures["average_s"]
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
