"""Does the model of goodput under failures tell the truth? An elastic fleet is killed at random, and simulated.

Five emulated machines, 1, 1, 2, 1 and 2 times as slow, train under ``adaptive``, each a process. Machines fail as
`paceline.simulate.goodput.failures` draws them from a seed: each after an exponential time, by `kill -9`, and its
process is started again two seconds later. Calm seconds before and after give the rate without failures. The simulator
plays the very same failures. It is given the machines' speeds, the pauses of `usual_costs` for a state of this size,
and how long a process took to start and enter once, before the first failure. It is told nothing of the run.

*goodput* is the samples per second under failures over those of the calm seconds, *simulated* the model's goodput, and
*error* the difference of their ratio from one. Afterwards the samples and replicas are audited as in goodput.py.

With ``--protocols`` nothing is run: public protocols are simulated with our constants (docs/research.md).

    python benchmarks/goodput_model.py               # 55 s
    python benchmarks/goodput_model.py --protocols
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import numpy as np
from _flock import Failed, Flock
from _goodput_audit import examine, speeds
from _goodput_formulas import failures_every, restart_goodput, seconds_for
from _smoke import smoke

from paceline.observe import read_log
from paceline.simulate.goodput import (
    RULES,
    Change,
    ElasticRule,
    FailureCosts,
    compare_goodput,
    failures,
    play,
    usual_costs,
)

MACHINES, SAMPLE_MS = "1,1,2,1,2", 2.5
STATE_BYTES = 12_000
"""Weights and momenta of the training, about."""
MTBF_S, REPLACE_S = 15.0, 2.0
SETTLE_S, CALM_S, FAILING_S = 1.5, 5.0, 28.0
START_S, END_S = 30.0, 30.0
globals().update(
    smoke(MACHINES="1,2", SAMPLE_MS=0.5, MTBF_S=4.0, REPLACE_S=0.5, SETTLE_S=0.5, CALM_S=1.0, FAILING_S=4.0)
)
COUNT = len(MACHINES.split(","))

Window = tuple[float, float]


# -- for real ----------------------------------------------------------------------------------------------------------


class Fleet:
    """A training whose machines fail as drawn."""

    def __init__(self, flock: Flock) -> None:
        self._flock = flock
        self.last_began = 0.0
        """When the last machine's process was started, while the others trained."""

    def begin(self) -> None:
        """Start all but one, and the last when they train."""
        for number in range(COUNT - 1):
            self._flock.start(number)
        self.wait(lambda: len(self._flock.inside) == COUNT - 1)
        self.let_pass(SETTLE_S)
        self.last_began = time.time()
        self._flock.start(COUNT - 1)
        self.wait(lambda: len(self._flock.inside) == COUNT)
        self.let_pass(SETTLE_S)

    def fail(self, changes: Sequence[Change]) -> Window:
        """Play the changes in time, and return the window."""
        began = time.time()
        for change in changes:
            self.let_pass(began + change.at_s - time.time())
            if change.comes:
                self._flock.start(change.machine)
            else:
                self._flock.kill(change.machine, returns=False)
            self._flock.note(f"machine {change.machine} {'is replaced' if change.comes else 'fails'}")
        self.let_pass(began + FAILING_S - time.time())
        return began, began + FAILING_S

    def calm(self) -> Window:
        """Let everybody train, and return the window."""
        began = time.time()
        self.let_pass(CALM_S)
        return began, began + CALM_S

    def replace_missing(self) -> None:
        """Start every machine again that is away, and wait until all train."""
        for number in sorted({*range(COUNT)} - {*self._flock.living}):
            self._flock.start(number)
        self.wait(lambda: len(self._flock.inside) == COUNT)

    def let_pass(self, seconds: float) -> None:
        until = time.time() + seconds
        while time.time() < until:
            self._flock.tick()
            time.sleep(0.01)

    def wait(self, there: Callable[[], bool]) -> None:
        until = time.time() + START_S
        while not there():
            if time.time() > until:
                raise Failed("the workers do not come to train")
            self._flock.tick()
            time.sleep(0.01)


def rate(run_dir: Path, window: Window) -> float:
    """Return samples a second from the first commit in a window to the last."""
    log = read_log(run_dir)
    inside = [at for at, when in enumerate(log.times) if window[0] <= when <= window[1]]
    samples = sum(log.records[at].total for at in inside[1:])
    return samples / (log.times[inside[-1]] - log.times[inside[0]])


def started_s(run_dir: Path, began: float) -> float:
    """Return the seconds from the last machine's start to the beginning of the first step it had a part in."""
    log = read_log(run_dir)
    first = next(at for at, record in enumerate(log.records) if len(record.workers) == COUNT)
    return max(0.0, log.times[first] - step_s(run_dir) - began)


def step_s(run_dir: Path) -> float:
    return float(np.median(np.diff(read_log(run_dir).times)))


def run(seed: int, folder: Path) -> dict[str, object]:
    drawn = failures(COUNT, mtbf_s=MTBF_S, replace_s=REPLACE_S, seed=seed)
    changes = list(takewhile(lambda change: change.at_s < FAILING_S, drawn))
    with Flock(
        folder,
        call="_goodput_training:train",
        pace="adaptive",
        machines=MACHINES,
        sample_ms=SAMPLE_MS,
        minimum=1,
        maximum=COUNT,
        label="fails",
    ) as flock:
        fleet = Fleet(flock)
        fleet.begin()
        before = fleet.calm()
        failing = fleet.fail(changes)
        fleet.let_pass(REPLACE_S)
        fleet.replace_missing()
        fleet.let_pass(SETTLE_S)
        after = fleet.calm()
        flock.end(within_s=END_S)
        found = examine(flock, machines=MACHINES, sample_ms=SAMPLE_MS)
    calm = [rate(flock.run_dir, window) for window in (before, after)]
    without, under = sum(calm) / 2, rate(flock.run_dir, failing)
    start_s = started_s(flock.run_dir, fleet.last_began)
    costs = costs_of(start_s, step_s=step_s(flock.run_dir))
    spent = play(ElasticRule(speeds(MACHINES, SAMPLE_MS), costs), changes, until_s=FAILING_S)
    real, simulated = under / without, spent.useful / spent.total
    kills = sum(not change.comes for change in changes)
    print(
        f"{kills} failures in {FAILING_S:g} s: goodput {real:.1%}, simulated {simulated:.1%}; without failures "
        f"{without:,.0f} samples/s of {sum(speeds(MACHINES, SAMPLE_MS)):,.0f}; a process starts in {start_s:.2f} s"
    )
    return {
        "goodput": round(real, 4),
        "simulated": round(simulated, 4),
        "error": round(abs(simulated / real - 1), 4),
        "failures": kills,
        "start_s": round(start_s, 3),
        "calm_samples_per_s": [round(each, 1) for each in calm],
        "lost": found.lost,
        "doubled": found.doubled,
        "replicas_equal": found.replicas_equal,
        "left_running": found.left_running,
        "host_short": round(found.host_short, 3),
        "seed": seed,
    }


def costs_of(start_s: float, *, step_s: float) -> FailureCosts:
    usual = usual_costs(COUNT, state_bytes=STATE_BYTES, fleet_mtbf_s=MTBF_S / COUNT, step_s=step_s)
    return replace(usual, start_s=max(0.0, start_s - usual.join_s), save_s=0.0, every_s=float("inf"))


# -- the public protocols ----------------------------------------------------------------------------------------------


NODES, NODE_STEPS, NODE_STEP_S = 8, 3000, 8.0
"""Eight nodes of eight GPUs. A step without failures is taken to last 8.0 s: the fastest published run had 8.1."""
BETWEEN_S, EVERY_STEPS, SEEDS = (2700.0, 4500.0), 100, 20
LARGE_BYTES = 12 * 1.5e9
"""State of 1.5 billion parameters with Adam in float32; the published runs trained 109 billion in shards."""
LEARNERS, RESTART_GOODPUT = 8, 0.27
PUBLISHED = {
    "3,000 steps, minutes": {"TorchPass": 405, "restart": 818, "torchft": 930},
    "goodput": {"Decoupled DiLoCo": 0.88, "data parallel": RESTART_GOODPUT},
}


def protocols() -> dict[str, object]:
    """Simulate the public protocols; every figure but the published ones rests on our constants."""
    return {"published": PUBLISHED, "minutes": fixed_work(), "goodput": at_restart_goodput()}


def fixed_work() -> dict[str, dict[str, float]]:
    """Return the minutes of 3,000 steps by rule and seconds until a node is replaced, the mean over seeds."""
    known = {"step_s": NODE_STEP_S, "every_s": EVERY_STEPS * NODE_STEP_S}
    costs = usual_costs(NODES, state_bytes=LARGE_BYTES, fleet_mtbf_s=sum(BETWEEN_S) / 2, **known)
    work, found = NODES * NODE_STEPS * NODE_STEP_S, dict[str, dict[str, float]]()
    for replace_s in (0.0, 600.0):
        for kind in RULES:
            took_s = [
                seconds_for(work, kind([1.0] * NODES, costs), drawn, limit_s=1e7)
                for seed in range(SEEDS)
                for drawn in [failures_every(NODES, between_s=BETWEEN_S, replace_s=replace_s, seed=seed)]
            ]
            row = found.setdefault(f"replaced after {replace_s:g} s", {})
            row[kind.name] = round(float(np.mean(took_s)) / 60, 1)
    return found


def at_restart_goodput() -> dict[str, object]:
    """Return Paceline's goodput at the rate of failures at which a restart on spare machines is left with 27 %."""
    rates = np.geomspace(10.0, 1e5, 4000)
    costs = [usual_costs(LEARNERS, state_bytes=LARGE_BYTES, fleet_mtbf_s=mean, step_s=1.0) for mean in rates]
    left = [
        restart_goodput(fleet_mtbf_s=mean, every_s=one.every_s, write_s=one.write_s, restart_s=one.start_s + one.load_s)
        for mean, one in zip(rates, costs, strict=True)
    ]
    at = int(np.argmin(np.abs(np.array(left) - RESTART_GOODPUT)))
    timing = {"mtbf_s": LEARNERS * float(rates[at]), "replace_s": 0.0}
    rows = compare_goodput([1.0] * LEARNERS, costs[at], **timing)  # type: ignore[arg-type]
    short = replace(costs[at], join_s=2 * costs[at].step_s)
    with_short = compare_goodput([1.0] * LEARNERS, short, **timing)  # type: ignore[arg-type]
    return {
        "fleet_fails_every_s": round(float(rates[at]), 1),
        **{one.rule: round(one.goodput, 3) for one in rows},
        "join_s": round(costs[at].join_s, 1),
        "Paceline, newcomers that pause the others for two steps": round(with_short[0].goodput, 3),
    }


def main() -> int:
    options = argparse.ArgumentParser(description="a fleet under random failures, for real and simulated")
    options.add_argument("--seed", type=int, default=0, help="of the failures")
    options.add_argument("--protocols", action="store_true", help="simulate the public protocols, and run nothing")
    options.add_argument("--keep", type=Path, metavar="FOLDER", help="leave log and diaries there")
    asked = options.parse_args()
    if asked.protocols:
        print(json.dumps(protocols()))
        return 0
    folder = asked.keep or Path(tempfile.mkdtemp(prefix="goodput-model-"))
    try:
        found = run(asked.seed, folder / "training")
    except Failed as error:
        print(f"seed {asked.seed}: {error}\nlogs: {folder}", file=sys.stderr)
        return 1
    if asked.keep is None:
        shutil.rmtree(folder)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
