"""A worker is killed: how long until the others' next committed step, and how much do they stall when it comes back?

Four workers train a model of 5 MB in steps of about 50 ms (padded, so that two cores suffice), under the launcher of
``paceline run``. One of them, the leader as often as the others in random order, gets SIGKILL at a random moment
of the step, and is started again by the launcher; later some get SIGSTOP, and SIGCONT once the others have gone on.

- *survivors_s*: from the signal until every survivor has committed a step without the dead one.
- *freeze_s*: the same for SIGSTOP; nothing tells that a worker stands still but its silence.
- *join_stall_s*: the longest gap between two commits of the others, from two steps before a killed one's re-entry to
  five after it, less a usual step; the worst of all re-entries.

Then the same job under torchft, and in plain DDP under torchrun with a checkpoint every five steps, and the same
figure for each; for torchrun, until all its new processes have committed a step, which may be one they had done
before. torchft learns of a death by silence alone and leaves out whoever is late by as long, so its figure follows
from how long it is told to wait: *torchft_over_paceline* is with two steps, the least that a live worker's slow step
does not exceed; *torchft_1s_over_paceline* with a second, about the silence that Paceline bears in a live worker.

    python benchmarks/kill.py            # 3 minutes
    python benchmarks/kill.py --quick    # 50 s: 6 kills, 2 freezes, no peers
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from _kill_herds import WORKERS, Herd, Launched, Torchft, Torchrun, missing_torchft
from _kill_stamps import Process, Watch, entry, is_whole, latest, longest_gap_s, odd_sizes, recovered_at, step_gaps_s
from _smoke import smoke, smoking
from _waiting import show, wait_for

CALM_STEPS = 10
"""Steps with everybody before each fault."""
LIMIT_S = 40.0
"""Whatever is waited for comes sooner, or the benchmark fails."""
SILENCE_MS = {"torchft": 100, "torchft_1s": 1000}
KILLS, FREEZES, PEER_KILLS = 20, 5, 3
QUICK_KILLS, QUICK_FREEZES = 6, 2
KILLS_S, QUICK_KILLS_S = 110.0, 32.0
"""On a busy computer a process takes long to start again: after so many seconds there are no further kills, and the
figures say how many there were."""
globals().update(smoke(CALM_STEPS=3, QUICK_KILLS=1, QUICK_FREEZES=1))


@dataclass
class Found:
    """Seconds, one for each fault."""

    kills: list[float] = field(default_factory=list)
    freezes: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    """The others' longest gap around each re-entry, a usual step included."""
    steps: list[float] = field(default_factory=list)
    leaders: int = 0
    """How many of those killed led the fleet."""
    left_out: int = 0
    """Commits without somebody who lived."""


class Hunt:
    """Strikes the workers of a herd one after another, and reads in their files what became of it."""

    def __init__(self, herd: Herd, folder: Path, *, kills: int, freezes: int = 0, kills_s: float = KILLS_S) -> None:
        self._herd, self._watch, self._random = herd, Watch(folder / "stamps"), random.Random(0)
        self._kills, self._freezes, self._kills_s = kills, freezes, kills_s
        self._ranks: list[int] = []
        """Who is struck next, the leader (0) as often as the others."""
        self.found = Found()

    def run(self) -> Found:
        self._await_all(since=0.0)
        began = time.monotonic()
        while len(self.found.kills) < self._kills and time.monotonic() - began < self._kills_s:
            self._kill()
        for _ in range(self._freezes):
            self._freeze()
        return self.found

    def _kill(self) -> None:
        before, target = self._draw()
        self.found.leaders += self._watch.look()[target][-1].rank == 0
        at = self._herd.kill(target)
        seconds = self._await_recovery(before, target, at)
        self.found.kills.append(seconds)
        show(f"{self._herd.name}: kill {len(self.found.kills)} of {self._kills}: {seconds:.3f} s")
        self._herd.replace(target.slot)
        self._await_all(since=at)
        if self._herd.goes_on:
            self._note_entry(before, target, at)

    def _freeze(self) -> None:
        before, target = self._draw()
        at = time.monotonic()
        os.kill(target.pid, signal.SIGSTOP)
        try:
            seconds = self._await_recovery(before, target, at)
        finally:
            os.kill(target.pid, signal.SIGCONT)
        self.found.freezes.append(seconds)
        show(f"{self._herd.name}: freeze {len(self.found.freezes)} of {self._freezes}: {seconds:.3f} s")
        self._await_all(since=at + seconds)

    def _draw(self) -> tuple[list[Process], Process]:
        """Everybody, and who is struck, at a random moment of a step."""
        commits = self._watch.look()
        before = sorted(latest(commits).values(), key=lambda process: commits[process][-1].rank)
        if not self._ranks:
            self._ranks = self._random.sample(range(WORKERS), WORKERS)
        target = before[self._ranks.pop()]
        time.sleep(self._random.uniform(0, 0.1))
        self.found.steps += step_gaps_s(self._watch.look(), target, before=time.monotonic(), steps=CALM_STEPS)
        return before, target

    def _await_recovery(self, before: list[Process], target: Process, at: float) -> float:
        """Seconds from then to the first step without the struck one that all who go on have committed."""

        def moment() -> float | None:
            commits = self._watch.look()
            if self._herd.goes_on:
                others = [process for process in before if process != target]
                return recovered_at(commits, others, since=at, workers=WORKERS - 1)
            fresh = [process for process in latest(commits).values() if process not in before]
            return recovered_at(commits, fresh, since=at, workers=WORKERS) if len(fresh) == WORKERS else None

        return wait_for(moment, f"the next step after a fault under {self._herd.name}", within_s=LIMIT_S) - at

    def _await_all(self, *, since: float) -> None:
        def whole() -> bool | None:
            return is_whole(self._watch.look(), workers=WORKERS, steps=CALM_STEPS, since=since) or None

        wait_for(whole, f"all workers to train under {self._herd.name}", within_s=LIMIT_S)

    def _note_entry(self, before: list[Process], target: Process, at: float) -> None:
        commits, others = self._watch.look(), [process for process in before if process != target]
        back = entry(commits, latest(commits)[target.slot], since=at)
        assert back is not None
        self.found.stalls.append(longest_gap_s(commits, others, steps=(back.step - 2, back.step + 5)))
        self.found.left_out += odd_sizes(commits, others, since=at, allowed=(WORKERS - 1, WORKERS))


def hunt_paceline(folder: Path, *, quick: bool) -> Found:
    kills, freezes, seconds = (QUICK_KILLS, QUICK_FREEZES, QUICK_KILLS_S) if quick else (KILLS, FREEZES, KILLS_S)
    return Launched().run(folder, lambda herd: Hunt(herd, folder, kills=kills, freezes=freezes, kills_s=seconds).run())


def hunt_torchft(folder: Path, *, silence_ms: int) -> Found:
    with closing(Torchft(folder, silence_ms=silence_ms)) as herd:
        return Hunt(herd, folder, kills=PEER_KILLS).run()


def hunt_torchrun(folder: Path) -> Found:
    with closing(Torchrun(folder)) as herd:
        return Hunt(herd, folder, kills=PEER_KILLS).run()


def own_figures(found: Found) -> dict[str, float | int]:
    step = float(np.median(found.steps))
    return {
        "survivors_s_median": float(np.median(found.kills)),
        "survivors_s_p95": float(np.quantile(found.kills, 0.95)),
        "survivors_s_max": max(found.kills),
        "freeze_s_median": float(np.median(found.freezes)),
        "join_stall_s": max(found.stalls) - step,
        "join_stall_s_median": float(np.median(found.stalls)) - step,
        "step_s": step,
        "kills": len(found.kills),
        "leaders_killed": found.leaders,
        "freezes": len(found.freezes),
        "left_out": found.left_out,
    }


def peer_figures(folder: Path, *, ours: float) -> dict[str, float | int]:
    """Those of torchrun and, where it is installed, torchft."""
    found = {"torchrun": hunt_torchrun(folder / "torchrun")}
    if missing := missing_torchft():
        print(f"{missing}; it is left out")
    else:
        found |= {name: hunt_torchft(folder / name, silence_ms=wait) for name, wait in SILENCE_MS.items()}
    medians = {name: float(np.median(theirs.kills)) for name, theirs in found.items()}
    return {
        **{f"{name}_over_paceline": median / ours for name, median in medians.items()},
        **{f"{name}_s_median": median for name, median in medians.items()},
        **{f"{name}_step_s": float(np.median(theirs.steps)) for name, theirs in found.items()},
        "peer_kills": PEER_KILLS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer faults, and no peers")
    quick = parser.parse_args().quick or smoking()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the peers' processes end as well
    with tempfile.TemporaryDirectory() as name:
        found = hunt_paceline(Path(name) / "paceline", quick=quick)
        figures: dict[str, float | int | None] = {**own_figures(found)}
        figures |= {"torchft_over_paceline": None, "torchrun_over_paceline": None}
        if not quick:
            figures |= peer_figures(Path(name), ours=float(np.median(found.kills)))
    print(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}))


if __name__ == "__main__":
    main()
