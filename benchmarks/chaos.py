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
import ctypes
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from itertools import count, islice
from pathlib import Path

import torch._dynamo  # noqa: F401  every optimiser loads it: once here instead of in each worker
from _chaos_program import draw_program
from _chaos_run import BOUND_S, run_one
from _chaos_verdict import Verdict
from _smoke import smoke, smoking

import paceline.fleet  # noqa: F401

RUNS, AT_ONCE = 20, max(1, (os.cpu_count() or 1) // 2)
globals().update(smoke(RUNS=1))
STUCK_S = BOUND_S + 60.0
"""Seconds after which a run's own process is ended."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
VERDICT = "verdict.json"
GROUPS_NEED = ("torch.distributed.fsdp", "torch.distributed.checkpoint")
"""Modules that processes of groups load: once here instead of in each of them."""


class Runs:
    """Runs in processes of their own, a number of them at a time. Use as a context manager: nothing survives it."""

    def __init__(self, folder: Path, *, at_once: int, keep: bool) -> None:
        """``keep``: files of sound runs stay too."""
        self._folder, self._at_once, self._keep = folder, at_once, keep
        self._under_way: dict[int, tuple[int, float]] = {}
        """Seed and beginning of each run, by its process."""
        if sys.platform == "linux":  # whoever is orphaned becomes a child of this process, which waits for it
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._under_way:
            os.kill(process, signal.SIGKILL)
        until = time.monotonic() + 10.0
        with suppress(ChildProcessError):
            while self._under_way or time.monotonic() < until:
                process, _status = os.waitpid(-1, os.WNOHANG)
                self._under_way.pop(process, None)
                if not process:
                    time.sleep(0.02)

    @property
    def full(self) -> bool:
        """Whether no further run may begin now."""
        return len(self._under_way) >= self._at_once

    @property
    def empty(self) -> bool:
        """Whether no run is under way."""
        return not self._under_way

    def begin(self, seed: int) -> None:
        """Start the run of this seed."""
        sys.stdout.flush()
        sys.stderr.flush()
        if process := os.fork():
            self._under_way[process] = (seed, time.monotonic())
            return
        try:
            _live_as_run(seed, self._folder / str(seed))
        finally:
            os._exit(1)

    def next_ended(self) -> Verdict:
        """Wait for a run to end, and return its verdict."""
        while True:
            with suppress(ChildProcessError):
                process, _ = os.waitpid(-1, os.WNOHANG)
                if process in self._under_way:
                    return self._verdict_on(self._under_way.pop(process)[0])
            for process, (_, began) in self._under_way.items():
                if time.monotonic() - began > STUCK_S:
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.02)

    def _verdict_on(self, seed: int) -> Verdict:
        folder = self._folder / str(seed)
        try:
            facts = json.loads((folder / VERDICT).read_text())
        except (OSError, ValueError):
            said = (folder.with_suffix(".err")).read_text(errors="replace").strip()
            return Verdict(seed, "", crashes=[f"{said.splitlines()[-1] if said else 'no verdict'}\n{said}"])
        verdict = Verdict(**facts)
        if verdict.sound and not self._keep:
            shutil.rmtree(folder, ignore_errors=True)
            folder.with_suffix(".err").unlink()
        return verdict


def _live_as_run(seed: int, folder: Path) -> None:
    """Make one run in this process, a fork, and leave its verdict in a file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that has started this one ends it
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    for number in (1, 2):
        os.dup2(os.open(folder.with_suffix(".err"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
    try:
        verdict = run_one(seed, folder)
        (folder / VERDICT).write_text(json.dumps(asdict(verdict)))
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()


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
    with Runs(folder, at_once=max(1, asked.at_once), keep=keep) as runs:
        try:
            while waiting or not runs.empty:
                if waiting and not runs.full:
                    runs.begin(waiting.pop())
                    continue
                verdicts.append(verdict := runs.next_ended())
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
