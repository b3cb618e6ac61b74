"""A framework that owns the loop, with Paceline and with its own DDP, on unlike machines; and with Paceline alone.

Machines are emulated: 1, 1, 2 and 4 times slower than a reference, so that equal shares reach 36 % of the sum of the
speeds. The framework's DDP and its training with Paceline (pace "adaptive") run one after another in the same
processes; speeds are samples over wall seconds between updates, everything included, after warm-up:
*lightning_over_ddp*, *accelerate_over_ddp*.

Alone, one process without launcher or emulation trains in turn with the framework as it is and with Paceline, in
blocks of steps with one micro-batch each: *lightning_alone_over_plain* is the ratio of a step's seconds, of each the
tenth quantile, because what else the computer does makes steps longer and never shorter.

    python benchmarks/frameworks.py

Lightning is in ``_frameworks_lightning``, Accelerate in ``_frameworks_accelerate``, each with a function
``commits(way, *, global_batch, micro_batch, steps)``: the clock after each update, where ``way`` is "ddp", "paceline"
or "plain"; ``python benchmarks/frameworks.py accelerate`` measures one of them. Transformers' Trainer is measured in
its own way, for *trainer_over_ddp* and *trainer_alone_over_plain*: ``_frameworks_trainer``.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from itertools import pairwise
from typing import Any

import numpy as np
from _smoke import goes_without, smoke
from common import emulate, is_worker, leave_result, limit, run_workers, speed

FRAMEWORKS = {"lightning": "lightning", "accelerate": "accelerate"}
"""By the name of their figures: the package that they need."""
BATCH, MICRO, WARM_UP, STEPS = 256, 16, 4, 26
MACHINES, SAMPLE_MS = "1,1,2,4", 2.2
BLOCKS, BLOCK = 24, 20
globals().update(smoke(BATCH=16, MICRO=4, WARM_UP=1, STEPS=3, MACHINES="1,2", SAMPLE_MS=0.1, BLOCKS=2, BLOCK=3))


def framework(name: str) -> Any:
    return importlib.import_module(f"_frameworks_{name}")


def on_machines(name: str) -> dict[str, float]:
    """Samples a second of both ways to train."""
    emulate(MACHINES, SAMPLE_MS)
    commits = framework(name).commits
    ddp = commits("ddp", global_batch=BATCH, micro_batch=MICRO, steps=WARM_UP + 4)
    ours = commits("paceline", global_batch=BATCH, micro_batch=MICRO, steps=WARM_UP + STEPS)
    return {way: speed(found, global_batch=BATCH, skip=WARM_UP) for way, found in (("ddp", ddp), ("paceline", ours))}


def alone(name: str) -> dict[str, float]:
    """A step's time with Paceline over one without."""
    times: dict[str, list[float]] = {"plain": [], "paceline": []}
    commits = framework(name).commits
    for block in range(BLOCKS):
        for way in sorted(times, reverse=bool(block % 2)):
            stamps = commits(way, global_batch=BATCH, micro_batch=BATCH, steps=BLOCK)
            times[way] += [after - before for before, after in pairwise(stamps[1:])]
    quick = {way: float(np.quantile(found, 0.1)) for way, found in times.items()}
    return {"ratio": quick["paceline"] / quick["plain"]}


def main() -> None:
    names = [name for name in FRAMEWORKS if name in sys.argv] or list(FRAMEWORKS)
    if is_worker():
        if "alone" in sys.argv:
            launched = {variable: os.environ.pop(variable) for variable in ("RANK", "WORLD_SIZE")}
            found = alone(names[0])
            os.environ.update(launched)
        else:
            found = on_machines(names[0])
        leave_result(found)
        return
    figures: dict[str, float] = {}
    for name in names:
        if goes_without(FRAMEWORKS[name], here=importlib.util.find_spec(FRAMEWORKS[name]) is not None):
            return
        speeds = run_workers(__file__, len(MACHINES.split(",")), name)
        top = limit(MACHINES, SAMPLE_MS)
        print(f"{name} on machines {MACHINES}, {SAMPLE_MS} ms a sample, {BATCH} samples a step:")
        for way, value in {**speeds, "limit": top}.items():
            print(f"  {way:<9} {value:>7,.0f} samples/s  {value / top:6.1%} of the limit")
        ratio = run_workers(__file__, 1, name, "alone")["ratio"]
        print(f"  alone: {ratio:.3f} of the time without Paceline")
        figures |= {f"{name}_over_ddp": speeds["paceline"] / speeds["ddp"], f"{name}_alone_over_plain": ratio}
    if len(names) == len(FRAMEWORKS) and importlib.util.find_spec("transformers") is not None:
        from _frameworks_trainer import trainer_figures

        figures |= trainer_figures()
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
