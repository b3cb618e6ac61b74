"""How near do unequal shares come to the sum of the machines' speeds, and how far is plain torch DDP from it?

Machines are emulated: 1, 1, 2 and 4 times slower than a reference. The limit is known: ``sum_i 1 / (factor_i * s)``
with s seconds a sample on the reference. Plain DDP, pace "epoch" and pace "adaptive" run one after another in the
same processes; speeds are samples over wall seconds between commits, everything included, after warm-up (4 steps; for
"epoch" its first epoch, in which shares are equal by its rule).

Then two machines, 1:2 and 1:3: the part of the time that adaptive shares save against plain DDP. With speeds v the
rule of P1 gives ``1 - min(v) / mean(v)``: one third and one half.

    python benchmarks/sum_of_speeds.py
"""

from __future__ import annotations

import json
import sys

from _smoke import smoke
from common import ddp_commits, emulate, is_worker, leave_result, limit, paceline_commits, run_workers, speed

BATCH = 256
WARM_UP = 4
FOUR, FOUR_MS = "1,1,2,4", 2.2
PAIRS, PAIR_MS = ("1,2", "1,3"), 1.25
globals().update(smoke(BATCH=16, WARM_UP=1, FOUR="1,2", FOUR_MS=0.1, PAIR_MS=0.1))
RULE = {"saved_1_2": 1 / 3, "saved_1_3": 1 / 2}


def four_machines() -> dict[str, float]:
    """Samples a second of each way to train."""
    emulate(FOUR, FOUR_MS)
    ddp = ddp_commits(global_batch=BATCH, steps=WARM_UP + 4)
    adaptive = paceline_commits("adaptive", global_batch=BATCH, steps=WARM_UP + 26)
    epoch = paceline_commits("epoch", global_batch=BATCH, steps=6, epochs=4)
    return {
        "ddp": speed(ddp, global_batch=BATCH, skip=WARM_UP),
        "adaptive": speed(adaptive, global_batch=BATCH, skip=WARM_UP),
        "epoch": speed(epoch, global_batch=BATCH, skip=6),
    }


def two_machines() -> dict[str, float]:
    """Part of the time saved against plain DDP, by machines."""
    saved = {}
    for machines in PAIRS:
        emulate(machines, PAIR_MS)
        ddp = ddp_commits(global_batch=BATCH, steps=WARM_UP + 4)
        adaptive = paceline_commits("adaptive", global_batch=BATCH, steps=WARM_UP + 16)
        slow, fast = (speed(stamps, global_batch=BATCH, skip=WARM_UP) for stamps in (ddp, adaptive))
        saved["saved_" + machines.replace(",", "_")] = 1 - slow / fast
    return saved


def main() -> None:
    if is_worker():
        leave_result(two_machines() if "two" in sys.argv else four_machines())
        return
    speeds = run_workers(__file__, len(FOUR.split(",")))
    top = limit(FOUR, FOUR_MS)
    print(f"machines {FOUR}, {FOUR_MS} ms a sample, {BATCH} samples a step:")
    for name, value in {**speeds, "limit": top}.items():
        print(f"  {name:<9} {value:>7,.0f} samples/s  {value / top:6.1%} of the limit")
    saved = run_workers(__file__, 2, "two")
    for name, value in saved.items():
        print(f"  {name} {value:.3f} of the time (by the rule {RULE[name]:.3f})")
    figures = {
        "adaptive_over_limit": speeds["adaptive"] / top,
        "adaptive_over_ddp": speeds["adaptive"] / speeds["ddp"],
        "epoch_over_limit": speeds["epoch"] / top,
        **saved,
    }
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
