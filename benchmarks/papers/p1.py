"""P1, static and self-adaptive allocation (Chao, Liao and Gao, 2021): machines of unlike speed, a small CNN.

First two and four machines at 1:2, 1:3 and 1,1,2,4 (times slower; emulated, in real processes) learn Fashion-MNIST with
equal shares, shares set by hand (``fixed``) and self-adaptive ones (``adaptive``). A time a step is the median between
commits after the first steps. The rule predicts ``T_adaptive / T_equal = min(v) / mean(v)`` with speeds v. Then an
elastic fleet on machines 1 and 4: a fast worker joins and the slow one leaves (it is replaced), and an old machine, 4
times slower, is added. In the JSON:

    saved_1_2, saved_1_3, saved_1_1_2_4   part of the time a step that adaptive saves against equal shares
    static_saved                          the same of shares set by hand
    saved_of_work     the same two of the slowest worker's own seconds, the round and the rest left out
    loss_gap          largest difference of a step's loss between any two ways: they are one curve over steps
    steps_to_follow   steps from a change of members until all shares are within a tenth of what speeds ask for, in
                      three steps in a row
    worth             samples/s that the old machine adds: as the report says, as measured (after less before), by its
                      speed alone; and the least speed, as a part of the others', that would still be worth it

    python benchmarks/papers/p1.py            3 seeds: 24 processes at once, most of them asleep, 3 minutes on 16 cores
    python benchmarks/papers/p1.py --quick    1 seed: about 90 s on two cores
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from _chart import Chart, folder_of_plots, write
from _data import load, small_cnn
from _smoke import forked, smoke
from common import emulate, is_worker, leave_result, run_workers
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.observe import RunLog, read_log, verdict
from paceline.roster import RosterServer

QUICK = "--quick" in sys.argv
MICRO, SAMPLE_MS, WARM_UP = 16, 2.5, 5
FLEETS = {"1,2": 64, "1,3": 64, "1,1,2,4": 128}
"""Machines, and the global batch."""
STEPS, SEEDS = (30, 1) if QUICK else (120, 3)
ELASTIC, ELASTIC_BATCH, AFTER = "1,4", 96, 30 if QUICK else 60
"""Machines of the elastic fleet (the list begins again for those that join), and steps after the last one joined."""
EVENTS, MOST_STEPS = "join@5,leave:1@60,join@80", 2000
CLOSE, IN_A_ROW = 0.1, 3
"""Shares this close to what speeds ask for, in so many steps in a row, have followed."""
SMOKES = bool(smoke(found=True))
globals().update(smoke(SAMPLE_MS=0.1, WARM_UP=1, FLEETS={"1,2": 16}, STEPS=4, SEEDS=1, ELASTIC_BATCH=16, AFTER=2))
ELASTIC_WORKER = "elastic"

Curve = dict[str, list[float]]


def rule(machines: str) -> float:
    """Part of the time saved, ``1 - min(v) / mean(v)``."""
    speeds = [1 / float(factor) for factor in machines.split(",")]
    return 1 - min(speeds) / fmean(speeds)


def by_hand(machines: str) -> str:
    factors = [float(factor) for factor in machines.split(",")]
    return "fixed:" + ",".join(f"{max(factors) / factor:g}" for factor in factors)


# -- in the workers ----------------------------------------------------------------------------------------------------


def train(fleet: paceline.Fleet, batch: int, steps: int, *, epochs: int = 1, seed: int = 0) -> Any:
    """Yields every committed step."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = fleet.model(small_cnn())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    fleet.track(optimizer=optimizer)
    images = load(quiet=True)
    data = TensorDataset(images.train_x[: batch * steps], images.train_y[: batch * steps])
    for step in fleet.steps(data, global_batch=batch, micro_batch=MICRO, epochs=epochs):
        for x, y in step:
            step.backward(nn.functional.cross_entropy(model(x), y))
        step.commit(optimizer)
        yield step


def measure(machines: str, seed: int) -> dict[str, Curve]:
    """By way to share: seconds between commits, and the loss of every step."""
    emulate(machines, SAMPLE_MS)
    found = {}
    for name, pace in {"equal": "equal", "static": by_hand(machines), "adaptive": "adaptive"}.items():
        told: Curve = {"step_s": [], "work_s": [], "loss": [], "short": []}
        with paceline.join(pace, quiet=True, seed=seed) as fleet:
            began = None
            for step in train(fleet, FLEETS[machines], STEPS, seed=seed):
                now = time.perf_counter()
                told["step_s"] += [now - began] if began is not None else []
                told["work_s"].append(max(step.record.seconds))
                told["loss"].append(step.loss)
                told["short"].append(sum(step.record.shortfall_s) / max(1e-9, sum(step.record.seconds)))
                began = now
        found[name] = told
    return found


def elastic() -> None:
    """Until the last worker that joins has been there for so many steps; everybody sees the same records."""
    with paceline.join("adaptive", quiet=True) as fleet:
        there = 0
        for step in train(fleet, ELASTIC_BATCH, 200, epochs=MOST_STEPS // 200):
            there = there + 1 if 3 in step.record.workers or SMOKES else 0
            if there >= AFTER:
                break


# -- the elastic fleet -------------------------------------------------------------------------------------------------


def run_elastic(folder: Path) -> RunLog:
    """The log of a run in which a fast worker replaces a slow one, and an old machine is added."""
    if SMOKES:
        return _forked_elastic(folder)
    fleet = ["-n", "1:4", "--emulate", ELASTIC, "--sample-ms", f"{SAMPLE_MS:g}", "--failures", EVENTS]
    start = [sys.executable, "-m", "paceline.cli", "run", "-q", *fleet, "--output-dir", str(folder)]
    subprocess.run([*start, __file__, ELASTIC_WORKER] + (["--quick"] if QUICK else []), check=True)
    return read_log(next(folder.glob("*/events.jsonl")))


def _forked_elastic(folder: Path) -> RunLog:
    """Three workers from the beginning, without a launcher: in a smoke run nobody comes or goes."""
    server = RosterServer(minimum=2, maximum=2, token="p1", expect=2)
    shared = {
        "PACELINE_TOKEN": "p1",
        "PACELINE_EMULATE": ELASTIC,
        "PACELINE_SAMPLE_MS": "0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    shared |= {"PACELINE_ROSTER": server.address, "PACELINE_RUN_DIR": str(folder / "run")}
    with closing(server):
        forked(elastic, 2, begin=server.start, **shared)
    return read_log(folder / "run")


def stretches(log: RunLog) -> list[tuple[int, int]]:
    """The first and one past the last record of each membership."""
    edges = [k for k, record in enumerate(log.records) if not k or record.workers != log.records[k - 1].workers]
    return list(zip(edges, [*edges[1:], len(log.records)], strict=True))


def factor(worker: int) -> float:
    machines = ELASTIC.split(",")
    return float(machines[worker % len(machines)])


def steps_to_follow(log: RunLog, first: int, last: int) -> int | None:
    """Steps after the change until all shares are close to what speeds ask for, and stay so for a few steps."""
    close = [_furthest(log.records[k]) <= CLOSE for k in range(first, last)]
    return next((k for k in range(len(close) - IN_A_ROW + 1) if all(close[k : k + IN_A_ROW])), None)


def _furthest(record: Any) -> float:
    speeds = [1 / factor(worker) for worker in record.workers]
    asked = [sum(record.samples) * speed / sum(speeds) for speed in speeds]
    return max(abs(done - wanted) / wanted for done, wanted in zip(record.samples, asked, strict=True))


def speed(log: RunLog, first: int, last: int) -> float:
    """Samples a second, by the median step of the second half."""
    late = log.records[first + (last - first) // 2 : last]
    return median(record.total / record.wall_s for record in late)


def tell_elastic(log: RunLog) -> dict[str, Any]:
    spans = [(span, log.records[span[0]].workers) for span in stretches(log)]
    for (first, last), workers in spans:
        factors = ",".join(f"{factor(worker):g}" for worker in workers)
        followed = steps_to_follow(log, first, last)
        print(
            f"  steps {first:>4} to {last - 1:>4}: machines {factors:<7} {speed(log, first, last):6.0f} samples/s",
            end="",
        )
        print(", shares have not followed" if followed is None else f", shares followed after {followed} steps")
    found = {workers: span for span, workers in spans}
    replaced, added = _span(found, joined=2), _span(found, joined=3)
    before, after = _span(found, exact={0, 2}), _span(found, exact={0, 2, 3})
    follow = {"replaced": replaced and steps_to_follow(log, *replaced), "added": added and steps_to_follow(log, *added)}
    judged = {worker.worker: worker for worker in verdict(log).figures.workers}
    old = judged.get(3)
    measured = speed(log, *after) - speed(log, *before) if before and after else None
    worth = {
        "report": old and old.adds,
        "measured": measured,
        "by_speeds": 1000 / SAMPLE_MS / factor(3),
        "measured_over_before": measured and before and measured / speed(log, *before),
        "least_speed": before and after and least_worth(log, before, after),
    }
    return {"steps_to_follow": follow, "worth": worth}


def _span(found: dict[Any, tuple[int, int]], *, joined: int | None = None, exact: set[int] | None = None) -> Any:
    """The first steps with a worker, or those with exactly these."""
    fits = [span for workers, span in found.items() if joined in workers or set(workers) == exact]
    return min(fits) if fits else None


def least_worth(log: RunLog, before: tuple[int, int], after: tuple[int, int]) -> float:
    """P1's condition as derived here: a newcomer's speed over the sum of the others' must exceed the growth of the rest
    of the step (the round, the update) over the time of the work."""
    rest, work = [], []
    for first, last in (before, after):
        late = log.records[first + (last - first) // 2 : last]
        rest.append(median(record.wall_s - max(record.seconds) for record in late))
        work.append(median(max(record.seconds) for record in late))
    return max(0.0, rest[1] - rest[0]) / work[0]


# -- what came out -----------------------------------------------------------------------------------------------------

Runs = dict[str, list[dict[str, Curve]]]
"""By machines: for each seed, the curves by way to share."""


def step_ms(run: Curve) -> float:
    return 1000 * median(run["step_s"][WARM_UP:-1])


def work_ms(run: Curve) -> float:
    """What the slowest worker computes in a step, without the round and whatever else the host does."""
    return 1000 * median(run["work_s"][WARM_UP:-1])


def saved(runs: Sequence[dict[str, Curve]], way: str, ms: Callable[[Curve], float] = step_ms) -> list[float]:
    return [1 - ms(run[way]) / ms(run["equal"]) for run in runs]


def loss_gap(runs: Runs) -> float:
    gaps = [
        abs(a - b)
        for each in runs.values()
        for run in each
        for one, other in (("equal", "static"), ("equal", "adaptive"), ("static", "adaptive"))
        for a, b in zip(run[one]["loss"], run[other]["loss"], strict=True)
    ]
    return max(gaps)


def tell(runs: Runs) -> dict[str, Any]:
    figures: dict[str, Any] = {"static_saved": {}, "saved_of_work": {}, "spread": {}, "rule": {}}
    for machines, each in runs.items():
        name = machines.replace(",", "_")
        print(
            f"\nmachines {machines}, {FLEETS[machines]} samples a step, {STEPS} steps; by the rule {rule(machines):.3f}"
        )
        for way in ("equal", "static", "adaptive"):
            took, whole = fmean(step_ms(run[way]) for run in each), fmean(sum(run[way]["step_s"]) for run in each)
            gain, final = fmean(saved(each, way)), fmean(fmean(run[way]["loss"][-5:]) for run in each)
            works = fmean(work_ms(run[way]) for run in each)
            print(f"  {way:<9} {took:6.1f} ms a step ({works:.1f} work), {whole:5.1f} s in all", end="")
            print(f", saved {gain:6.3f}, last loss {final:.4f}")
        gains = saved(each, "adaptive")
        figures[f"saved_{name}"] = fmean(gains)
        figures["static_saved"][name], figures["rule"][name] = fmean(saved(each, "static")), rule(machines)
        figures["saved_of_work"][name] = {way: fmean(saved(each, way, work_ms)) for way in ("static", "adaptive")}
        figures["spread"][name] = stdev(gains) if len(gains) > 1 else None
    short = [value for each in runs.values() for run in each for way in run.values() for value in way["short"]]
    return {**figures, "loss_gap": loss_gap(runs), "host_shortfall": fmean(short), "seeds": SEEDS}


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def draw(folder: Path, runs: Runs, log: RunLog) -> None:
    """The first seed's losses of the last fleet, and the shares of the elastic one."""
    machines, each = list(runs.items())[-1]
    run, over_steps, over_time = each[0], {}, {}
    for way, told in run.items():
        smoothed = [fmean(told["loss"][max(0, k - 4) : k + 1]) for k in range(len(told["loss"]))]
        clock = [sum(told["step_s"][:k]) for k in range(len(smoothed))]
        over_steps[way], over_time[way] = (list(range(len(smoothed))), smoothed), (clock, smoothed)
    workers = sorted({worker for record in log.records for worker in record.workers})
    shares: dict[str, Any] = {}
    for worker in workers:
        rows = [
            (r.step, r.samples[r.workers.index(worker)] / max(1, r.total)) for r in log.records if worker in r.workers
        ]
        shares[f"worker {worker}, {factor(worker):g}x slower"] = tuple(zip(*rows, strict=True))
    write(
        folder / "p1.svg",
        [
            Chart(f"Loss over steps, machines {machines}", "step", "loss (mean of 5)", over_steps),
            Chart(f"Loss over time, machines {machines}", "s", "loss (mean of 5)", over_time),
            Chart("Shares as workers come and go", "step", "part of the samples", shares),
        ],
    )


def main() -> None:
    if ELASTIC_WORKER in sys.argv[1:]:
        elastic()
        return
    if is_worker():
        leave_result(measure(sys.argv[1], int(sys.argv[2])))
        return
    folder = folder_of_plots(whole=not QUICK and not SMOKES)
    print(f"{load().name}, {SEEDS} seeds")
    jobs = [(machines, seed) for machines in FLEETS for seed in range(SEEDS)]
    more = ["--quick"] if QUICK else []

    def run(job: tuple[str, int]) -> dict[str, Curve]:
        found: dict[str, Curve] = run_workers(__file__, len(job[0].split(",")), *map(str, job), *more)
        return found

    with ThreadPoolExecutor(1 if SMOKES or QUICK else len(jobs)) as pool:
        found = list(pool.map(run, jobs))
    runs: Runs = {name: [run for job, run in zip(jobs, found, strict=True) if job[0] == name] for name in FLEETS}
    figures = tell(runs)
    print(f"\nan elastic fleet: machines {ELASTIC}, a fast one replaces the slow one, an old one is added")
    with tempfile.TemporaryDirectory() as scratch:
        log = run_elastic(Path(scratch))
        figures |= tell_elastic(log)
    if folder is not None:
        draw(folder, runs, log)
    print(json.dumps(rounded(figures)))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
