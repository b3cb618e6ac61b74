"""Whole fleets inside one process under thousands of random schedules and faults: how many end as they should?

Each schedule is a fleet of two to four workers, with the real roster, transport and training loop, over a network in
memory and on a virtual clock. A seed draws the program, the order in which its threads run, and the faults: kills,
freezes, cut connections, roster restarts, joins and SIGTERM at any point. A wrong end is printed with its seed, and
``--only SEED`` plays it again with the log of what happened. ``--scripts`` plays scripts of several loops instead, and
``--wide`` larger fleets, averages with calls, and faults in every call.
``--mutant NAME`` puts a mended bug back and stops at the first schedule that shows it.

    python benchmarks/schedules.py --seeds 0:20000 --at-once 2
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "harness")]

import torch  # noqa: E402
from mutants import MUTANTS, mutant  # noqa: E402
from scheduled_fleets import draw, play  # noqa: E402
from scheduled_scripts import draw_script, play_script  # noqa: E402
from scheduled_wide import draw_wide, play_wide  # noqa: E402

KINDS: dict[str, tuple[Any, Any]] = {
    "fleets": (draw, play),
    "scripts": (draw_script, play_script),
    "wide": (draw_wide, play_wide),
}
"""How a case is drawn and played: one loop, a script of several, or more of everything."""
CHUNK = 25
"""Schedules that a process plays before it says how they went."""
NONE = {"schedules": 0, "faults": 0, "points": 0, "virtual_s": 0.0, "ended": 0, "ended_well": 0}
"""What is counted; of the workers, those that ended, and those of them that ended with 0."""


def play_all(seeds: range, name: str | None, kind: str) -> dict[str, Any]:
    """Play these schedules, in a process of its own, and return what was wrong with which."""
    drawn, played = KINDS[kind]
    torch.set_num_threads(1)
    found: dict[str, Any] = {"wrong": {}, **NONE}
    with mutant(name):
        for seed in seeds:
            verdict = played(seed)
            found["schedules"] += 1
            found["faults"] += len(drawn(seed).faults)
            found["points"] += verdict.points
            found["virtual_s"] += verdict.virtual_s
            found["ended"] += len(verdict.outcomes)
            found["ended_well"] += sum(outcome.code == 0 for outcome in verdict.outcomes.values())
            if verdict.problems:
                found["wrong"][seed] = [str(drawn(seed)), *verdict.problems]
                if name is not None:
                    break
    return found


def _play_chunk(asked: tuple[range, str | None, str]) -> dict[str, Any]:
    seeds, name, kind = asked
    worker, cores = multiprocessing.current_process()._identity, sorted(os.sched_getaffinity(0))
    if len(cores) > 1:  # one thread runs at a time: a switch between cores only costs
        os.sched_setaffinity(0, {cores[worker[0] % len(cores)]})
    return play_all(seeds, name, kind)


def chunks(seeds: range, name: str | None, kind: str) -> Iterator[tuple[range, str | None, str]]:
    """Cut the seeds into parts for several processes."""
    for start in range(seeds.start, seeds.stop, CHUNK):
        yield range(start, min(start + CHUNK, seeds.stop)), name, kind


def run(seeds: range, *, at_once: int, name: str | None, kind: str) -> dict[str, Any]:
    """Play the schedules in several processes, and print what is found as it is found."""
    began, told = time.monotonic(), 0.0
    total: dict[str, Any] = {**NONE, "wrong": {}}
    gc.collect()
    gc.freeze()  # what was imported is no garbage, and need not be looked at again and again
    with multiprocessing.get_context("fork").Pool(at_once, maxtasksperchild=20) as pool:
        for found in pool.imap_unordered(_play_chunk, chunks(seeds, name, kind)):
            for seed, problems in found.pop("wrong").items():
                total["wrong"][seed] = problems
                print("\n".join(problems), file=sys.stderr, flush=True)
            for key, value in found.items():
                total[key] += value
            if time.monotonic() - told > 10.0:
                told = time.monotonic()
                said = f"{total['schedules']} of {len(seeds)} schedules, {len(total['wrong'])} wrong"
                print(f"{time.monotonic() - began:6.0f} s: {said}", file=sys.stderr, flush=True)
            if name is not None and total["wrong"]:
                pool.terminate()
                break
    return {**total, "seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--seeds", default="0:400", help="first and last, as 0:20000")
    parser.add_argument("--at-once", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="put a mended bug back")
    parser.add_argument("--only", type=int, help="play one seed, and print what happened")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--scripts",
        dest="kind",
        action="store_const",
        const="scripts",
        default="fleets",
        help="scripts of several loops",
    )
    kinds.add_argument(
        "--wide", dest="kind", action="store_const", const="wide", help="larger fleets, faults in all calls"
    )
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args()
    if asked.only is not None:
        drawn, played = KINDS[asked.kind]
        with mutant(asked.mutant):
            verdict = played(asked.only)
        print("\n".join([str(drawn(asked.only)), *verdict.log, *verdict.problems]), file=sys.stderr)
        print(json.dumps({"schedules": 1, "wrong": [asked.only] if verdict.problems else []}))
        return int(bool(verdict.problems))
    first, last = (0, 8) if asked.smoke else (int(part) for part in asked.seeds.split(":"))
    found = run(range(first, last), at_once=asked.at_once, name=asked.mutant, kind=asked.kind)
    found["wrong"], found["virtual_s"] = sorted(found["wrong"]), round(found["virtual_s"], 1)
    print(json.dumps(found))
    return int(bool(found["wrong"]) and asked.mutant is None)


if __name__ == "__main__":
    sys.exit(main())
