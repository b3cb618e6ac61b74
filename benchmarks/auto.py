"""Does the default pace lose anything: against adaptive where machines are calm, against joint where they stall?

The four equal workers and the stalls of stalls.py: one micro-batch in a hundred takes 50 times as long, inside the
user's own forward, or none does. Adaptive and auto take turns on calm machines, joint and auto on stalling ones, in the
same processes, and meet the same stalls. Speeds are counted samples over wall seconds, everything included, after the
steps in which auto has to see before it judges. Each figure is the ratio of the totals of all rounds, and ``least`` the
smallest of a single round, with what a shared core does to it.

    python benchmarks/auto.py
"""

from __future__ import annotations

import json
import statistics

import stalls
from _smoke import smoke
from common import is_worker, leave_result, run_workers

ROUNDS, CALM_STEPS, STALL_STEPS, SKIP = 4, 64, 84, 26
"""A deadline is judged over up to 20 steps after three of every worker: those before are the same for all."""
globals().update(smoke(ROUNDS=1, CALM_STEPS=8, STALL_STEPS=8, SKIP=2))
WAYS = {"calm": ("adaptive", False, CALM_STEPS), "stalls": ("joint", True, STALL_STEPS)}
"""What auto is measured against, whether there are stalls, and for how many steps."""


def measure() -> dict[str, list[tuple[float, float]]]:
    """For each way, the other pace's samples a second and auto's, a pair a round."""
    stalls.SKIP = SKIP
    pairs: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for seed in range(ROUNDS):
        for way, (other, trouble, steps) in WAYS.items():
            names = (other, "auto") if seed % 2 else ("auto", other)
            found = {name: stalls.train(name, seed, stalls=trouble, steps=steps) for name in names}
            pairs[way].append((found[other], found["auto"]))
    return pairs


def main() -> None:
    if is_worker():
        leave_result(measure())
        return
    pairs = run_workers(__file__, stalls.WORKERS)
    figures: dict[str, float] = {}
    for way, (other, _, _) in WAYS.items():
        theirs, ours = (statistics.harmonic_mean(column) for column in zip(*pairs[way], strict=True))
        least = min(auto / against for against, auto in pairs[way])
        print(f"{way:<7} {other} {theirs:,.0f}, auto {ours:,.0f} samples/s: {ours / theirs:.3f}, least {least:.3f}")
        figures |= {f"{way}_auto_over_{other}": ours / theirs, f"{way}_least": least}
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
