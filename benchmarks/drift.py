"""How soon do adaptive shares follow a machine that changes?

Four equal machines are emulated; from step 40 on one of them takes four times as long for a sample. With shares as
before, all would wait for it: 0.31 of what the fleet can still do. A step's throughput is its samples over the wall
seconds from commit to commit. ``steps_to_recover`` is the number of steps from step 40 on until throughput is above
0.9 of the new limit for good, which is until the end of the run, 16 steps later. Step 40 itself cannot be saved, and
the plan of step 41 is made before step 40 has been measured, so 2 is the least there is.

The run is repeated in the same processes, and a step's throughput is its median over the repeats: what disturbed the
host once is not the pacer's doing.

    python benchmarks/drift.py
"""

from __future__ import annotations

import json
import statistics
from itertools import pairwise

from _smoke import smoke
from common import emulate, is_worker, leave_result, limit, paceline_commits, run_workers

MACHINES, SAMPLE_MS, BATCH = "1,1,1@40:4,1", 3.0, 256
CHANGE, STEPS = 40, 56
REPEATS = 3
RECOVERED = 0.9
globals().update(smoke(MACHINES="1,1@4:4", SAMPLE_MS=0.1, BATCH=16, CHANGE=4, STEPS=12, REPEATS=1))


def throughputs() -> list[list[float]]:
    """Samples a second of each step, from step 1 on, of each repeat."""
    emulate(MACHINES, SAMPLE_MS)
    runs = [paceline_commits("adaptive", global_batch=BATCH, steps=STEPS) for _ in range(REPEATS)]
    return [[BATCH / (end - begin) for begin, end in pairwise(stamps)] for stamps in runs]


def steps_to_recover(speeds: list[float], needed: float) -> int:
    """``speeds[k]`` is the throughput of step ``CHANGE + k``."""
    below = [k for k, speed in enumerate(speeds) if speed <= needed]
    return below[-1] + 1 if below else 0


def main() -> None:
    if is_worker():
        leave_result(throughputs())
        return
    repeats = run_workers(__file__, len(MACHINES.split(",")))
    speeds = [statistics.median(step) for step in zip(*repeats)]
    before, after = limit(MACHINES, SAMPLE_MS), limit(MACHINES, SAMPLE_MS, step=CHANGE)
    print(f"machines {MACHINES}: the limit falls from {before:,.0f} to {after:,.0f} samples/s")
    for step in range(CHANGE - 4, STEPS):
        top, speed = (before if step < CHANGE else after), speeds[step - 1]
        print(f"  step {step}  {speed:>6,.0f} samples/s  {speed / top:5.1%} of the limit")
    needed = RECOVERED * after
    each = [steps_to_recover(repeat[CHANGE - 1 :], needed) for repeat in repeats]
    figures = {"steps_to_recover": steps_to_recover(speeds[CHANGE - 1 :], needed), "each_repeat": each}
    print(json.dumps({**figures, "after_over_limit": round(statistics.median(speeds[CHANGE + 4 :]) / after, 4)}))


if __name__ == "__main__":
    main()
