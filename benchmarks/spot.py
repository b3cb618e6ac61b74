"""Does a training live through hours of spot machines that come and are reclaimed?

A trace of such machines (rows of milliseconds,add|remove,node) is played 300 times as fast on up to 8 real workers, on
emulated machines: a node that is reclaimed is killed (-9), another takes its place when the trace has one. Some
workers are gone before they had begun. The training goes on to the trace's end, and then the books are gone through as
in goodput.py. `paceline run -n 1:8 --spot FILE --speed-up 300` plays the same on a script of yours; here workers are
forked from a process that has torch loaded, since starting sixty of them would keep two cores busy all the time.

Without a file a trace is made up, from a seed: a pool whose machines are reclaimed a few at a time, three times an
hour, and replaced some minutes later.

    python benchmarks/spot.py                       # 4 made-up hours: 48 s, and some to begin and end
    python benchmarks/spot.py --trace FILE.csv      # a recorded one to its end: 11.4 h take 137 s
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from _flock import Failed, Flock
from _goodput_audit import Findings, examine
from _smoke import smoke

from paceline.launcher.faults import Faults
from paceline.machines.spot import Market, Row, read_spot

MACHINES, SAMPLE_MS, MOST = "1,1,2,4,1,2,1,2", 2.5, 8
SPEED_UP = 300.0
HOURS, POOL = 4.0, 12
"""Of a made-up trace, and how many machines its pool wants."""
RECLAIM_S, REPLACE_S = 1200.0, 600.0
"""Mean seconds between two reclaims, and from a reclaim to the machine that replaces it."""
START_S, END_S = 60.0, 40.0
globals().update(smoke(MACHINES="1,1,2", SAMPLE_MS=0.5, MOST=3, HOURS=0.25, POOL=3, RECLAIM_S=300.0, REPLACE_S=100.0))


def made_up(seed: int, *, hours: float = HOURS) -> tuple[Row, ...]:
    """A trace of a pool: at random times one to four machines are reclaimed together, each replaced later."""
    dice, nodes = random.Random(seed), (f"node{number}" for number in range(1, 1_000_000))
    there = {next(nodes): 0.0 for _ in range(POOL)}
    rows = [Row(0.0, True, node) for node in there]
    at = 0.0
    while (at := at + dice.expovariate(1 / RECLAIM_S)) < hours * 3600:
        standing = sorted(node for node, since in there.items() if since <= at)
        for node in dice.sample(standing, min(len(standing), dice.randint(1, 4))):
            del there[node]
            new, since = next(nodes), at + dice.expovariate(1 / REPLACE_S)
            there[new] = since
            rows += [Row(at, False, node), Row(since, True, new)]
    return tuple(sorted((row for row in rows if row.at_s <= hours * 3600), key=lambda row: row.at_s))


def play(rows: Sequence[Row], *, speed_up: float, pace: str, folder: Path) -> tuple[Findings, Flock]:
    """The whole trace on a training that ends after it, and its audit."""
    with Flock(
        folder,
        call="_goodput_training:train",
        pace=pace,
        machines=MACHINES,
        sample_ms=SAMPLE_MS,
        minimum=1,
        maximum=MOST,
        label="spot",
    ) as flock:
        faults = Faults(market=Market(rows, room=MOST, speed_up=speed_up))
        began, stood = time.time(), None
        while stood is None or time.time() - stood < (rows[-1].at_s - rows[0].at_s) / speed_up:
            faults.play(flock, step=-1, elapsed_s=time.time() - began)
            stood = time.time() if stood is None and flock.inside else stood
            if stood is None and time.time() - began > START_S:
                raise Failed("the first workers do not come to train")
            flock.tick()
            time.sleep(0.02)
        flock.note("the trace has ended")
        flock.end(within_s=END_S)
        return examine(flock, machines=MACHINES, sample_ms=SAMPLE_MS), flock


def figures(found: Findings, flock: Flock, rows: Sequence[Row], *, speed_up: float, trace: str) -> dict[str, object]:
    return {
        "finished": found.sound,
        "lost": found.lost,
        "doubled": found.doubled,
        "replicas_equal": found.replicas_equal,
        "replay_off": float(f"{found.replay_off:.1e}"),
        "loss_off": float(f"{found.loss_off:.1e}"),
        "goodput": round(found.goodput, 3),
        "trace": trace,
        "hours": round((rows[-1].at_s - rows[0].at_s) / 3600, 2),
        "speed_up": speed_up,
        "started": len(flock.lives),
        "killed": sum(life.struck for life in flock.lives),
        "generations": found.generations,
        "epochs": found.epochs,
        "files_growth": found.files_growth,
        "threads_growth": found.threads_growth,
        "left_running": found.left_running,
        "host_short": round(found.host_short, 3),
        "restarts": found.restarts,
    }


def read_options() -> tuple[argparse.Namespace, tuple[Row, ...]]:
    """What was asked for, and the trace."""
    options = argparse.ArgumentParser(description="play a trace of spot machines on a training")
    options.add_argument("--trace", type=Path, metavar="FILE.csv", help="rows of milliseconds,add|remove,node")
    options.add_argument("--speed-up", type=float, default=SPEED_UP, help="so many times as fast as recorded")
    options.add_argument("--until", type=float, metavar="HOURS", help="so much of the trace alone")
    options.add_argument("--pace", default="adaptive")
    options.add_argument("--seed", type=int, default=0, help="of a made-up trace")
    options.add_argument("--keep", type=Path, metavar="FOLDER", help="leave log and diaries there")
    asked = options.parse_args()
    until = math.inf if asked.until is None else asked.until
    try:
        whole = read_spot(asked.trace) if asked.trace else made_up(asked.seed, hours=min(until, HOURS))
        rows = tuple(row for row in whole if row.at_s <= until * 3600)
        if not rows:
            raise ValueError(f"the trace has nothing in its first {until:g} hours: give a later --until")
        Market(rows, room=MOST, speed_up=asked.speed_up)  # says what is wrong with the speed-up
    except ValueError as error:
        options.error(str(error))
    return asked, rows


def main() -> int:
    asked, rows = read_options()
    trace = asked.trace.name if asked.trace else f"made up, seed {asked.seed}"
    seconds = (rows[-1].at_s - rows[0].at_s) / asked.speed_up
    print(f"{len(rows)} events ({trace}): {seconds:.0f} s at {asked.speed_up:g} times", file=sys.stderr)
    folder = asked.keep or Path(tempfile.mkdtemp(prefix="spot-"))
    try:
        found, flock = play(rows, speed_up=asked.speed_up, pace=asked.pace, folder=folder / "training")
    except Failed as error:
        print(f"{trace}: {error}\nlogs: {folder}", file=sys.stderr)
        return 1
    if asked.keep is None and found.sound:
        shutil.rmtree(folder)
    print(
        f"{found.steps} steps in {found.generations} generations; {len(flock.lives)} workers started, "
        f"{found.ended} there at the end"
    )
    print(json.dumps(figures(found, flock, rows, speed_up=asked.speed_up, trace=trace)))
    return 0 if found.sound else 1


if __name__ == "__main__":
    sys.exit(main())
