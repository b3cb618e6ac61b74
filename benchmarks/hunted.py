"""Do the faults that once hung or broke a fleet still do so?

Each case is a program that was hunted: real processes, and a fault at the very point that once went wrong (a death in a
round whose result one worker has and another has not, a cut connection to the store, a freeze inside an evaluation).
`_hunted_cases.py` has them all, with their variants. A round plays every variant of every case once; one case,
``stress2``, is drawn, and ``--seconds`` plays it for that much longer. Cases that cut connections need a network
namespace, so root on Linux, and are skipped elsewhere.

A trial is a *hang* when something has not come within its time (the stacks of all processes stay in its folder), a
*crash* when a worker ends in a way that the fault does not explain, *unsound* when the ledger or the replicas are
wrong, and *missed* when the fault did not come about. ``--bugs`` puts back the mended bug of each variant, so that each
bug must go wrong at least once.

    python benchmarks/hunted.py --rounds 20 --at-once 8
    python benchmarks/hunted.py --only h1,h3
    python benchmarks/hunted.py --bugs --bound 25
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # workers are forks of this process, and compute on CPUs

import torch._dynamo  # noqa: F401  every optimiser loads it: once here instead of in each worker
from _hunted_cases import CASES, STRESS, Case, Variant
from _hunted_fleet import FOLDERS, Crash, Hang, Missed, Stage, Unsound
from _smoke import smoke, smoking
from _trials import Ended, Trials

import paceline.fleet  # noqa: F401

ROUNDS, AT_ONCE = 1, max(1, (os.cpu_count() or 1) // 2)
BOUND_S, LATE_S = 60.0, 30.0
"""Seconds that a trial may take, and how much later its own process is ended."""
MOST_VARIANTS, PLAYED = 100, tuple(case.name for case in CASES)
globals().update(smoke(MOST_VARIANTS=1, PLAYED=("s1", "h1", "h8")))
KINDS: dict[type[Exception], str] = {Hang: "hangs", Crash: "crashes", Unsound: "unsound", Missed: "missed"}
WRONG = ("hangs", "crashes", "unsound")
SOUND = "sound"


@dataclass(frozen=True)
class Trial:
    """One variant of one case, to be played once."""

    case: Case
    variant: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.case.name}-{self.variant}-{self.number}"

    @property
    def setting(self) -> Variant:
        return self.case.variants[self.variant]


@dataclass(frozen=True)
class Found:
    """How a trial ended: one of `KINDS`, or sound."""

    trial: Trial
    kind: str
    text: str
    seconds: float


def play(trial: Trial, asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Play a trial in this process, a fork without threads, and return what was found."""
    from _chaos_sockets import enter_own_network
    from nursery import Nursery

    enter_own_network()
    folder.mkdir(parents=True)
    began, kind, text = time.monotonic(), SOUND, ""
    nursery = Nursery(*FOLDERS, fork=True)
    bug = trial.setting["bug"] if asked.bugs else ""
    stage = Stage(folder, nursery, random.Random(f"{asked.seed}/{trial.name}"), asked.bound, bug=bug)
    try:
        trial.case.play(stage, trial.setting)
    except tuple(KINDS) as error:
        kind, text = KINDS[type(error)], str(error)
    return {"kind": kind, "text": text, "seconds": time.monotonic() - began}


def found_in(trial: Trial, ended: Ended) -> Found:
    """Return what was found in a trial that has ended; an error of the trial's own process is a crash."""
    if ended.facts is not None:
        return Found(trial, **ended.facts)
    last = (ended.words.splitlines() or ["it was ended"])[-1]
    return Found(trial, "crashes", f"the trial's own process: {last}\n{ended.words}", BOUND_S)


def figures(found: list[Found], *, seconds: float, skipped: Mapping[str, str], rounds: int) -> dict[str, Any]:
    """Return what the last line says."""
    names = [case.name for case in CASES if any(one.trial.case is case for one in found)]
    of_case = {name: _counts([one for one in found if one.trial.case.name == name]) for name in names}
    return {
        "rounds": rounds,
        **_counts(found),
        "cases": of_case,
        "skipped_cases": dict(skipped),
        "failed": sorted(one.trial.name for one in found if one.kind in WRONG),
        "slowest_s": round(max((one.seconds for one in found), default=0.0), 1),
        "seconds": round(seconds, 1),
    }


def _counts(found: list[Found]) -> dict[str, int]:
    kinds = Counter(one.kind for one in found)
    return {"trials": len(found), **{kind: kinds[kind] for kind in KINDS.values()}}


def shown(found: list[Found]) -> dict[str, Any]:
    """Return in how many trials with each bug something went wrong, of how many: of each case, and the bugs of none."""
    played, wrong = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for one in found:
        key = one.trial.setting["bug"], one.trial.case.name
        played[key] += 1
        wrong[key] += one.kind in WRONG
    hidden = {bug for bug, _ in played} - {bug for (bug, _), count in wrong.items() if count}
    return {
        "shown": {f"{bug} in {case}": [wrong[bug, case], played[bug, case]] for bug, case in played},
        "hidden": sorted(hidden),
    }


def report(one: Found, found: list[Found], *, of: str) -> None:
    """Print one line about a trial that has ended and all before it, and more about one that went wrong."""
    counts = _counts(found)
    total = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS.values())
    name = f"{one.trial.case.name} {one.trial.variant}"
    print(f"[{len(found)}/{of}] {name}  {one.seconds:.1f} s  {one.kind}  |  {total}", file=sys.stderr, flush=True)
    if one.kind != SOUND:
        first = one.text.splitlines()[:1] if one.kind == "missed" else one.text.splitlines()
        print("\n".join(f"    {line}" for line in first), file=sys.stderr, flush=True)


def read_options() -> argparse.Namespace:
    """Return what was asked for on the command line."""
    smoking()
    options = argparse.ArgumentParser(description="faults that once hung or broke a fleet, at the same points")
    options.add_argument("--rounds", type=int, default=ROUNDS, help=f"how often each variant is played ({ROUNDS})")
    options.add_argument("--at-once", type=int, default=AT_ONCE, help=f"trials at the same time ({AT_ONCE})")
    options.add_argument("--only", metavar="CASES", help=f"of {','.join(case.name for case in CASES)}")
    options.add_argument("--seconds", type=float, default=0.0, help=f"of {STRESS}, drawn again and again, after that")
    options.add_argument("--seed", type=int, default=0, help="of what is drawn")
    options.add_argument("--bound", type=float, default=BOUND_S, help=f"seconds that a trial may take ({BOUND_S:g})")
    options.add_argument("--bugs", action="store_true", help="put the mended bug of each variant back")
    options.add_argument("--out", type=Path, metavar="FOLDER", help="for files of trials that went wrong")
    asked = options.parse_args()
    asked.only = tuple(asked.only.split(",")) if asked.only else PLAYED
    if unknown := {*asked.only} - {case.name for case in CASES}:
        options.error(f"no case {', '.join(sorted(unknown))}; cases are {', '.join(case.name for case in CASES)}")
    return asked


def no_network() -> str:
    """Return why a process cannot have a network of its own here, or nothing: tried in a fork."""
    from _chaos_sockets import enter_own_network

    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.write(writing, enter_own_network().encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        why = answer.read()
    os.waitpid(child, 0)
    return why


def variants_of(case: Case, asked: argparse.Namespace) -> list[str]:
    """Return the variants to play: with bugs those that have one."""
    return [name for name, setting in case.variants.items() if setting["bug"] or not asked.bugs][:MOST_VARIANTS]


def trials_of(asked: argparse.Namespace, cases: list[Case]) -> Iterator[Trial]:
    """Yield the trials of all rounds, and then of the stress case for as long as was asked."""
    for number in range(asked.rounds):
        for case in cases:
            yield from (Trial(case, variant, number) for variant in variants_of(case, asked))
    until, number = time.monotonic() + asked.seconds, asked.rounds
    for case in [case for case in cases if case.name == STRESS]:
        while time.monotonic() < until:
            yield from (Trial(case, variant, number) for variant in case.variants)
            number += 1


def main() -> int:
    """Play the trials; return 1 if anything is wrong with one of them."""
    asked = read_options()
    folder = asked.out or Path(tempfile.mkdtemp(prefix="hunted-"))
    folder.mkdir(parents=True, exist_ok=True)
    why = no_network()
    cases = [case for case in CASES if case.name in asked.only]
    skipped = {case.name: why for case in cases if case.cuts and why}
    cases = [case for case in cases if case.name not in skipped]
    for name in skipped:
        print(f"{name} is skipped: {why}", file=sys.stderr, flush=True)
    in_rounds = asked.rounds * sum(len(variants_of(case, asked)) for case in cases)
    began, found, complete = time.monotonic(), list[Found](), False
    under_way: dict[str, Trial] = {}
    with Trials(folder, at_once=max(1, asked.at_once), stuck_s=asked.bound + LATE_S) as trials:
        try:
            waiting = trials_of(asked, cases)
            while True:
                trial = None if trials.full else next(waiting, None)
                if trial is not None:
                    under_way[trial.name] = trial
                    trials.begin(trial.name, partial(play, trial, asked))
                    continue
                if trials.empty:
                    break
                ended = trials.next_ended()
                found.append(one := found_in(under_way.pop(ended.name), ended))
                report(one, found, of=f"{in_rounds}{'+' if asked.seconds else ''}")
                if one.kind not in WRONG:
                    trials.forget(ended.name)
            complete = True
        except KeyboardInterrupt:
            print("broken off", file=sys.stderr)
    result = figures(found, seconds=time.monotonic() - began, skipped=skipped, rounds=asked.rounds)
    if asked.bugs:
        result |= shown(found)
    if result["failed"]:
        print(f"files of the trials that went wrong: {folder}", file=sys.stderr)
    elif asked.out is None:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result))
    return 0 if complete and not result["hidden" if asked.bugs else "failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
