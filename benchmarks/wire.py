"""What does a narrower wire cost in accuracy, and how many bytes does it save?

Three workers, each on a computer of its own (a network namespace on a switch without limits), train on scikit-learn's
digits. Gradients cross the network in float32, bf16 and fp16, and parameters averaged every so many local steps in
float32 and int8; all with the same seeds, shares and order of samples. A gap is the mean test accuracy of float32 less
that over the wire, in points; bytes are those that a computer's network card sent for each round, over float32's.

    python benchmarks/wire.py
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import torch
from _computers import is_worker, leave_result, run_on
from _smoke import goes_without, smoke
from _wire_training import Job, ours

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from switch import Switch, missing

JOB = Job(hidden=640, batch=96, epochs=16, target=1.0, every_steps=4)
SEEDS = 3
globals().update(smoke(JOB=Job(hidden=160, batch=192, epochs=1, target=1.0, every_steps=2), SEEDS=1))
WAYS = {
    "float32": ("gradients", "float32"),
    "bf16": ("gradients", "bf16"),
    "fp16": ("gradients", "fp16"),
    "average": ("average", "float32"),
    "average_int8": ("average", "int8"),
}


def measure() -> dict[str, list[dict[str, float]]]:
    torch.set_num_threads(1)
    return {
        way: [ours(JOB, seed, combine=combine, wire=wire, pace="equal") for seed in range(SEEDS)]
        for way, (combine, wire) in WAYS.items()
    }


def main() -> None:
    if is_worker():
        leave_result(measure())
        return
    if goes_without("computers of their own", here=not missing()):
        return
    with Switch("abc") as switch:
        found = run_on(switch, __file__, "abc")
    accuracy = {way: statistics.mean(run["accuracy"] for run in runs) for way, runs in found.items()}
    sent = {way: statistics.median(run["round_bytes"] for run in runs) for way, runs in found.items()}
    for way in WAYS:
        each = ", ".join(f"{run['accuracy']:.2%} at a loss of {run['loss']:.5f}" for run in found[way])
        print(f"{way:<14} {sent[way] / 1e3:8.0f} kB a round   {accuracy[way]:.2%} ({each})")
    figures = {}
    for way, against in (("bf16", "float32"), ("fp16", "float32"), ("average_int8", "average")):
        figures[f"{way}_gap_points"] = round(100 * (accuracy[against] - accuracy[way]), 3)
        figures[f"{way}_bytes"] = round(sent[way] / sent[against], 4)
    print(json.dumps({**figures, "seeds": SEEDS}))


if __name__ == "__main__":
    main()
