"""Does a fleet of real processes end well, whatever happens to it?

Each run is drawn from its seed: two to four workers of an elastic fleet, a pace, a combine, a wire format, an order and
micro-batches, calls between the steps (evaluate, predict, save, any, autosave), one in eight with worker groups; and
the faults: kill -9 and a restart, SIGSTOP for 0.05 to 3 s, SIGTERM, newcomers, a roster that restarts from its file,
and connections to the roster, the store or a peer that the kernel cuts. Who ends with 75 is started again, as a
launcher does. For the cuts each run has a network namespace of its own, which needs root; others go without them.

A run must end within a minute: exit codes are 0, 75 or those of the fault (Gloo may abort a process when a connection
to a peer is cut), no Python error, each sample of each epoch counted exactly once, equal replicas, no process and no
temporary file left. What is wrong is said, and the run's folder stays, at a hang with the stacks of all processes.

    python benchmarks/chaos.py --runs 300 --at-once 6 --seed 0    # seeds 0 to 299; 8 minutes on 16 cores
    python benchmarks/chaos.py --only 17                          # the run of this seed
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  every optimiser loads it: once here instead of in each worker
from _chaos_program import draw_program
from _chaos_run import BOUND_S, run_one
from _chaos_verdict import Verdict
from _smoke import smoke, smoking
from _trials import Ended, Trials

import paceline.fleet  # noqa: F401

RUNS, AT_ONCE = 20, max(1, (os.cpu_count() or 1) // 2)
globals().update(smoke(RUNS=1))
STUCK_S = BOUND_S + 60.0
"""Seconds after which a run's own process is ended."""
GROUPS_NEED = ("torch.distributed.fsdp", "torch.distributed.checkpoint")
"""Modules that processes of groups load: once here instead of in each of them."""


def play(seed: int, folder: Path) -> dict[str, Any]:
    """Make the run of this seed in this process, a fork, and return its verdict."""
    return asdict(run_one(seed, folder))


def verdict_of(ended: Ended) -> Verdict:
    """Return the verdict on a run that has ended."""
    if ended.facts is not None:
        return Verdict(**ended.facts)
    last = (ended.words.splitlines() or ["no verdict"])[-1]
    return Verdict(int(ended.name), "", crashes=[f"{last}\n{ended.words}"])


def figures(verdicts: list[Verdict], *, seconds: float) -> dict[str, object]:
    """Return what the last line says."""
    faults = sum((Counter(verdict.faults) for verdict in verdicts), Counter[str]())
    return {
        "runs": len(verdicts),
        "faults": dict(sorted(faults.items())),
        "hangs": sum(verdict.hang for verdict in verdicts),
        "crashes": sum(bool(verdict.crashes) for verdict in verdicts),
        "lost": sum(verdict.lost for verdict in verdicts),
        "doubled": sum(verdict.doubled for verdict in verdicts),
        "unequal": sum(verdict.unequal for verdict in verdicts),
        "left": sum(len(verdict.left) for verdict in verdicts),
        "restarts": sum(verdict.restarts for verdict in verdicts),
        "steps": sum(verdict.steps for verdict in verdicts),
        "failed_seeds": sorted(verdict.seed for verdict in verdicts if not verdict.sound),
        "slowest_s": round(max((verdict.seconds for verdict in verdicts), default=0.0), 1),
        "seconds": round(seconds, 1),
    }


def report(verdict: Verdict, so_far: dict[str, object], *, runs: int) -> None:
    """Print one line about a run that has ended and all before it."""
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(verdict.faults.items()))
    bad = ", ".join(f"{so_far[name]} {name}" for name in ("hangs", "crashes", "lost", "doubled", "unequal", "left"))
    total = sum(so_far["faults"].values())  # type: ignore[attr-defined]
    print(
        f"[{so_far['runs']}/{runs}] seed {verdict.seed}  {verdict.program}  {verdict.seconds:.1f} s  ({faults})  "
        f"{verdict}  |  {total} faults, {bad}",
        file=sys.stderr,
        flush=True,
    )


def read_options() -> argparse.Namespace:
    """Return what was asked for on the command line."""
    smoking()
    options = argparse.ArgumentParser(description="random faults on real fleets, and whether they end well")
    options.add_argument("--runs", type=int, default=RUNS, help=f"number of runs ({RUNS})")
    options.add_argument("--at-once", type=int, default=AT_ONCE, help=f"runs at the same time ({AT_ONCE})")
    options.add_argument("--seed", type=int, default=0, help="seed of the first run; the next ones follow")
    options.add_argument("--only", type=int, metavar="SEED", help="repeat the run of this seed alone")
    options.add_argument("--out", type=Path, metavar="FOLDER", help="for files of failed runs; with --only of any")
    options.add_argument("--no-groups", action="store_true", help="pass over seeds whose workers are groups")
    return options.parse_args()


def asked_seeds(asked: argparse.Namespace) -> list[int]:
    """Return the seeds of the runs to make."""
    if asked.only is not None:
        return [asked.only]
    seeds = (seed for seed in count(asked.seed) if not (asked.no_groups and draw_program(seed).shards > 1))
    return list(islice(seeds, asked.runs))


def main() -> int:
    """Make the runs; return 1 if anything is wrong with one of them."""
    asked = read_options()
    seeds = asked_seeds(asked)
    folder = asked.out or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    keep = asked.only is not None and asked.out is not None
    if any(draw_program(seed).shards > 1 for seed in seeds):
        for module in GROUPS_NEED:
            importlib.import_module(module)
    began, waiting, verdicts, notes = time.monotonic(), [*reversed(seeds)], list[Verdict](), set[str]()
    with Trials(folder, at_once=max(1, asked.at_once), stuck_s=STUCK_S) as runs:
        try:
            while waiting or not runs.empty:
                if waiting and not runs.full:
                    seed = waiting.pop()
                    runs.begin(str(seed), partial(play, seed))
                    continue
                verdicts.append(verdict := verdict_of(ended := runs.next_ended()))
                if verdict.sound and not keep:
                    runs.forget(ended.name)
                if verdict.note and verdict.note not in notes:
                    notes.add(verdict.note)
                    print(verdict.note, file=sys.stderr, flush=True)
                report(verdict, figures(verdicts, seconds=time.monotonic() - began), runs=len(seeds))
        except KeyboardInterrupt:
            print("broken off", file=sys.stderr)
    found = figures(verdicts, seconds=time.monotonic() - began)
    sound = all(verdict.sound for verdict in verdicts)
    if not sound:
        print(f"files of the runs that failed: {folder}", file=sys.stderr)
    elif asked.out is None:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(found))
    return 0 if sound and len(verdicts) == len(seeds) else 1


if __name__ == "__main__":
    sys.exit(main())
