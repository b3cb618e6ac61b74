"""What a slow network costs: wires, averages and topologies over real connections.

Each worker is a real process on a computer of its own, a network namespace on a switch in user space whose cables carry
100 Mbit/s and take 20 ms each way (`harness/switch.py`). Three of them train a model of 4 MB on scikit-learn's digits:
gradients in float32 and bf16, parameters averaged by the clock in float32 and int8, and torch DDP with its bfloat16
hook, in turns and in the same processes. Ratios are of samples a second, without the time of evaluations, and larger is
better for what stands first; the time to 90 % test accuracy and the bytes of a round stand beside them.
Two computers of several workers each, against DDP's rounds: `_network_sites`. What ``paceline plan`` foretells of
three fleets, against what they do: `_network_plan`.

    python benchmarks/network.py    # 7 minutes
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from functools import partial
from pathlib import Path

import torch
from _computers import is_worker, leave_result, run_on
from _network_plan import FLEETS, foretell
from _network_plan import figures as plans
from _network_sites import figures as two_sites
from _smoke import goes_without, smoke, smoking
from _wire_training import Job, ddp, model_bytes, ours

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from switch import Switch, missing

LINK = {"bits_s": 100e6, "delay_s": 0.02}
JOB = Job(hidden=960, batch=96, epochs=4, target=0.9, period_s=1.0)
SEEDS, COMPUTERS = 2, "abc"
globals().update(
    smoke(
        LINK={"bits_s": 1e9, "delay_s": 0.001},
        JOB=Job(hidden=160, batch=500, epochs=1, target=0.1, period_s=0.05),
        SEEDS=1,
        COMPUTERS="ab",
    )
)
WAYS = {
    "float32": partial(ours, combine="gradients", wire="float32"),
    "bf16": partial(ours, combine="gradients", wire="bf16"),
    "average": partial(ours, combine="average", wire="float32"),
    "average_int8": partial(ours, combine="average", wire="int8"),
    "ddp": partial(ddp, hook=False),
    "ddp_bf16": partial(ddp, hook=True),
}


def measure() -> dict[str, list[dict[str, float]]]:
    """Every way once for each seed, in turns."""
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for seed in range(SEEDS):
        for way, train in WAYS.items():
            found[way].append(train(JOB, seed))
    return found


def one_site() -> dict[str, float]:
    """The wires, on computers that are all as far from one another."""
    with Switch(COMPUTERS) as switch:
        switch.every(**LINK)
        found = run_on(switch, __file__, COMPUTERS)
    middle = {way: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for way, runs in found.items()}
    print(
        f"{len(COMPUTERS)} computers, {LINK['bits_s'] / 1e6:g} Mbit/s and {1000 * LINK['delay_s']:g} ms, a model of "
        f"{model_bytes(JOB.hidden) / 1e6:.1f} MB; medians of {SEEDS}"
    )
    for way, said in middle.items():
        sent = f"to {JOB.target:.0%}  {said['round_bytes'] / 1e6:5.2f} MB sent a round"
        print(f"  {way:<14} {said['samples_per_s']:7.1f} samples/s  {said['reached_s']:6.1f} s {sent}")
    speed = {way: said["samples_per_s"] for way, said in middle.items()}
    return {
        "wire_over_float32": speed["bf16"] / speed["float32"],
        "average_int8_over_average": speed["average_int8"] / speed["average"],
        "bf16_over_ddp_bf16_hook": speed["bf16"] / speed["ddp_bf16"],
        "float32_over_ddp": speed["float32"] / speed["ddp"],
        **{f"{way}_target_s": said["reached_s"] for way, said in middle.items()},
    }


def main() -> None:
    if is_worker():
        fleet = FLEETS.get(sys.argv[-1])
        leave_result(foretell(fleet) if fleet else measure())
        if not smoking():  # a process that used a hook of DDP's is sometimes aborted when it ends in good order
            os._exit(0)
        return
    if goes_without("computers of their own", here=not missing()):
        return
    wires = {name: round(value, 3) if math.isfinite(value) else None for name, value in one_site().items()}
    print(json.dumps({**wires, **two_sites(), **plans()}))


if __name__ == "__main__":
    main()
