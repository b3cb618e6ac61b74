"""Workers are killed, frozen and added all the time: is anything lost, and what does it cost?

Real processes on emulated machines 1, 1, 2, 4, 1 and 2 times as slow train under each pace in turn. Every 5 to 8
seconds one is killed (-9), stopped for 2 to 5 s, or added, as dice with a seed decide; there are 3 to 6 of them. The
training ends by itself, after an epoch. Then the books are gone through: every sample of every finished epoch counted
exactly once, the replicas of all who were there at the end equal bit for bit, weights and losses those of one machine
that does the committed steps again (float64), no process left, no more open files or threads than at the beginning.

``goodput`` is samples committed over what the machines of the living could do in that time (`_goodput_audit`), the
lesser of adaptive and joint; equal shares are listed too, and are slow by nature on such machines.

    python benchmarks/goodput.py            # every pace, less than three minutes
    python benchmarks/goodput.py --quick    # adaptive and joint, 50 s
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from _flock import Failed, Flock
from _goodput_audit import Findings, examine
from _smoke import smoke, smoking

MACHINES, SAMPLE_MS = "1,1,2,4,1,2", 2.5
LEAST, MOST = 3, 6
FIXED = "fixed:4,4,2,1,4,2"
SECONDS = {"adaptive": 30.0, "joint": 30.0, "cutoff": 17.5, "equal": 17.5, FIXED: 17.5, "epoch": 17.5}
QUICK = {"adaptive": 18.0, "joint": 18.0}
FIRST_S, GAP_S, FREEZE_S, LAST_S = 3.0, (5.0, 8.0), (2.0, 5.0), 3.0
"""Seconds before the first fault, between two, of a freeze, and after the last: what it did must show."""
END_S = 30.0
globals().update(smoke(QUICK={"adaptive": 4.0}, SAMPLE_MS=0.5, FIRST_S=1.5, GAP_S=(0.5, 1.0), LAST_S=1.0))
"""An epoch and some seconds: a training that has not ended by then hangs."""


class Injector:
    """Draws what happens next: each kind as often as the others, as far as the fleet's size allows."""

    def __init__(self, seed: str) -> None:
        self._dice, self._bag = random.Random(seed), list[str]()
        self.size = self._dice.choice((LEAST + 1, LEAST + 2))
        self.next_s = FIRST_S
        self.done: Counter[str] = Counter()

    def play(self, flock: Flock, elapsed_s: float) -> None:
        """Do what is due after so many seconds."""
        if elapsed_s < self.next_s:
            return
        self.next_s = elapsed_s + self._dice.uniform(*GAP_S)
        kind = self.draw(len(flock.living))
        self.done[kind] += 1
        if kind == "join":
            flock.note(f"worker {flock.add(new=self._dice.random() < 0.5)} is started")
            return
        target = self._dice.choice(sorted(flock.inside or flock.living))
        if kind == "kill":
            flock.kill(target, returns=False)
            flock.note(f"worker {target} was killed")
        else:
            seconds = self._dice.uniform(*FREEZE_S)
            flock.freeze(target, seconds=seconds)
            flock.note(f"worker {target} stands still for {seconds:.1f} s")

    def draw(self, living: int) -> str:
        """kill, freeze or join."""
        if not self._bag:
            self._bag = ["kill", "freeze", "join"]
            self._dice.shuffle(self._bag)
        kind = self._bag.pop()
        if kind == "kill" and living <= LEAST:
            return "join"
        return "kill" if kind == "join" and living >= MOST else kind


def disturb(pace: str, seconds: float, *, machines: str, seed: int, folder: Path) -> tuple[Findings, Counter[str]]:
    """One training of so many seconds under faults, and its audit."""
    injector = Injector(f"{seed}/{pace}")
    with Flock(
        folder,
        call="_goodput_training:train",
        pace=pace,
        machines=machines,
        sample_ms=SAMPLE_MS,
        minimum=1,
        maximum=MOST,
        label=f"{name_of(pace):<8}",
    ) as flock:
        for number in range(injector.size):
            flock.start(number)
        began = time.time()
        while (elapsed := time.time() - began) < seconds:
            flock.tick()
            if elapsed < seconds - LAST_S:
                injector.play(flock, elapsed)
            time.sleep(0.02)
        flock.end(within_s=END_S)
        flock.note("ended")
        return examine(flock, machines=machines, sample_ms=SAMPLE_MS), injector.done


def name_of(pace: str) -> str:
    return pace.partition(":")[0]


def told(pace: str, one: Findings, faults: Counter[str]) -> str:
    done = ", ".join(f"{count} {kind}" for kind, count in sorted(faults.items()))
    return (
        f"{name_of(pace):<8}  goodput {one.goodput:5.1%}  {one.steps:>4} steps, {one.epochs:>2} epochs, "
        f"{one.generations} generations ({done})  lost {one.lost}, doubled {one.doubled}, replicas "
        f"{'equal' if one.replicas_equal else 'UNLIKE'} on {one.ended}, off by {one.replay_off:.0e}"
    )


def figures(found: dict[str, Findings], faults: Counter[str], *, seed: int) -> dict[str, object]:
    each = found.values()
    wanted = [found[pace].goodput for pace in ("adaptive", "joint") if pace in found]
    return {
        "goodput": round(min(wanted), 3) if wanted else None,
        "goodput_by_pace": {name_of(pace): round(one.goodput, 3) for pace, one in found.items()},
        "lost": sum(one.lost for one in each),
        "doubled": sum(one.doubled for one in each),
        "replicas_equal": all(one.replicas_equal for one in each),
        "replay_off": float(f"{max(one.replay_off for one in each):.1e}"),
        "loss_off": float(f"{max(one.loss_off for one in each):.1e}"),
        "epochs": sum(one.epochs for one in each),
        "faults": dict(faults),
        "files_growth": max((one.files_growth for one in each if one.files_growth is not None), default=None),
        "threads_growth": max((one.threads_growth for one in each if one.threads_growth is not None), default=None),
        "left_running": sum(one.left_running for one in each),
        "host_short": round(max(one.host_short for one in each), 3),
        "restarts": sum(one.restarts for one in each),
        "seed": seed,
    }


def read_options() -> argparse.Namespace:
    options = argparse.ArgumentParser(description="kill, freeze and add workers under every pace")
    options.add_argument("--quick", action="store_true", help="adaptive and joint alone, 50 s")
    options.add_argument("--seed", type=int, default=0, help="of the faults")
    options.add_argument("--only", choices=[name_of(pace) for pace in SECONDS], help="this pace alone")
    options.add_argument("--seconds", type=float, help="so long under each pace")
    options.add_argument("--machines", default=MACHINES, help="as paceline run --emulate; with jitter, 1~0.1,2~0.1")
    options.add_argument("--keep", type=Path, metavar="FOLDER", help="leave logs and diaries there")
    asked = options.parse_args()
    asked.quick = asked.quick or smoking()
    return asked


def main() -> int:
    asked = read_options()
    seconds = {pace: asked.seconds or usual for pace, usual in (QUICK if asked.quick else SECONDS).items()}
    folder = asked.keep or Path(tempfile.mkdtemp(prefix="goodput-"))
    found: dict[str, Findings] = {}
    faults: Counter[str] = Counter()
    for pace in [pace for pace in seconds if asked.only in (None, name_of(pace))]:
        where, faulty = folder / name_of(pace), {"machines": asked.machines, "seed": asked.seed}
        try:
            found[pace], done = disturb(pace, seconds[pace], folder=where, **faulty)
        except Failed as error:
            print(f"seed {asked.seed}, {name_of(pace)}: {error}\nlogs: {folder}", file=sys.stderr)
            return 1
        faults += done
        print(told(pace, found[pace], done), flush=True)
    sound = all(one.sound for one in found.values())
    if asked.keep is None and sound:
        shutil.rmtree(folder)
    elif not sound:
        print(f"the audit has found something: logs in {folder}", file=sys.stderr)
    print(json.dumps(figures(found, faults, seed=asked.seed)))
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
