"""P0, dynamic partitioning (Vineeth S, 2021): two workers, a constant delay a step on one of them, at two levels.

P0's public logs are of two GPUs, CIFAR-10 and a sleep of 0.1 or 0.2 s a step on one rank; the fast worker's share
settled at 0.626 and 0.753. With ``t = c_i + m b_i`` seconds the fixed point of its rule gives the fast worker
``1/2 + c / (2 m B)`` of the batch, so the delays here are ``c = (2 p - 1) m B`` for those two shares p. A small
convolutional network learns Fashion-MNIST in real processes; the machines' times are emulated (``1,1+40ms``).

Equal shares, P0's rule (``epoch``), ``adaptive``, and the best shares there are, set by hand from the formula
(``fixed``), run one after another in the same processes. A time a step is the median between commits over the last
third of the epochs, evaluation left out. In the JSON, means over levels and seeds:

    epoch_over_best    time a step under epoch / under the best shares (1: P0's rule finds them; above 1: slower)
    epoch_over_equal   time a step under epoch / under equal shares (below 1: time is saved)
    levels             by share; ``work_...`` are the same ratios of the slowest worker's own seconds, the rest left out
    shares             what P0's logs settled at, and the fast worker's part of the samples here, under epoch

    python benchmarks/papers/p0.py            3 seeds, 12 epochs: 12 processes at once, about 2 minutes on 16 cores
    python benchmarks/papers/p0.py --quick    1 seed, 8 epochs: about a minute on two cores
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from _chart import Chart, folder_of_plots, write
from _data import Images, load, small_cnn
from _smoke import smoke
from common import emulate, is_worker, leave_result, run_workers
from torch import nn
from torch.utils.data import TensorDataset

import paceline

QUICK = "--quick" in sys.argv
BATCH, MICRO, SAMPLE_MS = 64, 16, 2.5
LOGGED = (0.626, 0.753)
"""The fast worker's shares that P0's public logs settled at."""
EPOCHS, STEPS, TESTED, SEEDS = (8, 12, 1000, 1) if QUICK else (12, 20, 4000, 3)
globals().update(smoke(BATCH=16, SAMPLE_MS=0.2, EPOCHS=2, STEPS=2, TESTED=50, SEEDS=1, LOGGED=LOGGED[:1]))
PACES = ("equal", "epoch", "adaptive", "best")
LATE = max(1, EPOCHS // 3)
"""Epochs at the end over which times and shares are taken."""

Curve = dict[str, list[float]]


@dataclass(frozen=True)
class Level:
    """Delays that put the fixed point at ``share``."""

    share: float

    @property
    def delay_ms(self) -> float:
        return round((2 * self.share - 1) * SAMPLE_MS * BATCH, 1)

    @property
    def machines(self) -> str:
        return f"1,1+{self.delay_ms:g}ms"

    @property
    def best(self) -> str:
        """The pace that deals the fixed point's shares, ``b_i = (tau - c_i) / m``."""
        fast = round(BATCH / 2 + self.delay_ms / SAMPLE_MS / 2)
        return f"fixed:{fast},{BATCH - fast}"

    @property
    def best_ms(self) -> float:
        """``tau = (B + sum c_i / m) / sum(1 / m)``."""
        return (BATCH * SAMPLE_MS + self.delay_ms) / 2


# -- in the workers ----------------------------------------------------------------------------------------------------


def train(pace: str, images: Images, seed: int) -> Curve:
    """By epoch: seconds of training so far, test accuracy, seconds of the epoch and the fast worker's share; and the
    seconds of the steps of the last epochs."""
    told: Curve = {
        name: [] for name in ("time_s", "accuracy", "epoch_s", "share", "step_s", "work_s", "short_s", "own_s")
    }
    with paceline.join(pace, quiet=True, seed=seed) as fleet:
        torch.manual_seed(seed)
        model = fleet.model(small_cnn())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
        data = TensorDataset(images.train_x[: BATCH * STEPS], images.train_y[: BATCH * STEPS])
        passed, epoch_s, done, fast = 0.0, 0.0, 0, 0
        began = time.perf_counter()
        for step in fleet.steps(data, global_batch=BATCH, micro_batch=MICRO, epochs=EPOCHS):
            for x, y in step:
                step.backward(nn.functional.cross_entropy(model(x), y))
            step.commit(optimizer)
            took, record = time.perf_counter() - began, step.record
            assert record is not None
            passed, epoch_s, done, fast = passed + took, epoch_s + took, done + record.total, fast + record.samples[0]
            if step.epoch >= EPOCHS - LATE:
                told["step_s"].append(took)
                told["work_s"].append(max(record.seconds))
                told["short_s"].append(sum(record.shortfall_s))
                told["own_s"].append(sum(record.seconds))
            if step.ends_epoch:
                found = {"time_s": passed, "accuracy": accuracy(model, images), "epoch_s": epoch_s}
                for name, value in {**found, "share": fast / done}.items():
                    told[name].append(value)
                epoch_s, done, fast = 0.0, 0, 0
            began = time.perf_counter()
    return told


@torch.no_grad()
def accuracy(model: nn.Module, images: Images) -> float:
    """On every worker alike, so that all begin the next step together."""
    right = sum(
        int((model(x).argmax(1) == y).sum()) for x, y in zip(images.test_x.split(500), images.test_y.split(500))
    )
    return right / len(images.test_y)


def work(share: float, seed: int) -> dict[str, Curve]:
    torch.set_num_threads(1)
    level, images = Level(share), load(quiet=True).part(BATCH * STEPS, TESTED)
    emulate(level.machines, SAMPLE_MS)
    return {name: train(level.best if name == "best" else name, images, seed) for name in PACES}


# -- what came out -----------------------------------------------------------------------------------------------------

Runs = dict[float, list[dict[str, Curve]]]
"""By level: for each seed, the curves by pace."""


def step_ms(run: Curve) -> float:
    return 1000 * median(run["step_s"])


def work_ms(run: Curve) -> float:
    """What the slowest worker computes in a step, without the round and whatever else the host does."""
    return 1000 * median(run["work_s"])


def settled(run: Curve) -> float:
    return fmean(run["share"][-LATE:])


def ratios(runs: list[dict[str, Curve]], over: str) -> list[float]:
    return [step_ms(run["epoch"]) / step_ms(run[over]) for run in runs]


def spread(values: list[float]) -> str:
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def tell(runs: Runs) -> dict[str, Any]:
    levels = {}
    for share, each in runs.items():
        level = Level(share)
        print(f"\n{level.machines}, {SAMPLE_MS} ms a sample, {BATCH} samples a step; at best {level.best_ms:.1f} ms")
        for name in PACES:
            steps, ours = [step_ms(run[name]) for run in each], [settled(run[name]) for run in each]
            final = fmean(run[name]["accuracy"][-1] for run in each)
            last = fmean(run[name]["epoch_s"][-1] for run in each)
            works = fmean(work_ms(run[name]) for run in each)
            print(f"  {name:<9} {fmean(steps):6.1f} ms a step ({works:.1f} work), {last:5.2f} s an epoch", end="")
            print(f", share {spread(ours)} (P0's log {share}), accuracy {final:.3f}")
        levels[str(share)] = {
            "delay_ms": level.delay_ms,
            "share": fmean(settled(run["epoch"]) for run in each),
            "epoch_over_best": fmean(ratios(each, "best")),
            "epoch_over_equal": fmean(ratios(each, "equal")),
            "work_epoch_over_best": fmean(work_ms(run["epoch"]) / work_ms(run["best"]) for run in each),
            "work_epoch_over_equal": fmean(work_ms(run["epoch"]) / work_ms(run["equal"]) for run in each),
            "round_ms": fmean(step_ms(run["epoch"]) - work_ms(run["epoch"]) for run in each),
            "by_formula_over_equal": level.best_ms / (level.delay_ms + BATCH * SAMPLE_MS / 2),
            "adaptive_over_equal": fmean(step_ms(run["adaptive"]) / step_ms(run["equal"]) for run in each),
            "whole_epoch_over_equal": fmean(run["epoch"]["time_s"][-1] / run["equal"]["time_s"][-1] for run in each),
            "accuracy_gap": fmean(run["epoch"]["accuracy"][-1] - run["equal"]["accuracy"][-1] for run in each),
        }
    every = [run for each in runs.values() for run in each]
    late = [run[name] for run in every for name in PACES]
    return {
        "epoch_over_best": fmean(ratios(every, "best")),
        "epoch_over_equal": fmean(ratios(every, "equal")),
        "shares": {name: [float(name), level["share"]] for name, level in levels.items()},
        "levels": levels,
        "spread_over_best": stdev(ratios(every, "best")) if len(every) > 1 else None,
        "host_shortfall": sum(sum(run["short_s"]) for run in late) / sum(sum(run["own_s"]) for run in late),
        "seeds": SEEDS,
    }


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return round(value, 4) if isinstance(value, float) else value


def draw(folder: Path, runs: Runs) -> None:
    """The first seed's curves."""
    epochs = list(range(EPOCHS))
    shares: dict[str, Any] = {}
    for share, each in runs.items():
        shares |= {f"epoch, delay {Level(share).delay_ms:g} ms": (epochs, each[0]["epoch"]["share"])}
        shares |= {f"P0's logs: {share}": ([0, EPOCHS - 1], [share, share])}
    share, each = list(runs.items())[-1]
    machines, names = Level(share).machines, PACES[:3]
    write(
        folder / "p0.svg",
        [
            Chart("The fast worker's share", "epoch", "part of the samples", shares),
            Chart(f"Time of an epoch, {machines}", "epoch", "s", {n: (epochs, each[0][n]["epoch_s"]) for n in names}),
            Chart(
                f"Accuracy over time, {machines}",
                "s of training",
                "test accuracy",
                {name: (each[0][name]["time_s"], each[0][name]["accuracy"]) for name in names},
            ),
        ],
    )


def main() -> None:
    if is_worker():
        leave_result(work(float(sys.argv[1]), int(sys.argv[2])))
        return
    folder = folder_of_plots(whole=not QUICK and not smoke(found=True))
    print(f"{load().name}: {BATCH * STEPS} images an epoch, {EPOCHS} epochs, {SEEDS} seeds")
    jobs = [(share, seed) for share in LOGGED for seed in range(SEEDS)]
    more = ["--quick"] if QUICK else []
    with ThreadPoolExecutor(1 if smoke(found=True) else len(jobs)) as pool:
        found = list(pool.map(lambda job: run_workers(__file__, 2, *map(str, job), *more), jobs))
    runs: Runs = {share: [run for job, run in zip(jobs, found, strict=True) if job[0] == share] for share in LOGGED}
    figures = tell(runs)
    if folder is not None:
        draw(folder, runs)
    print(json.dumps(rounded(figures)))


if __name__ == "__main__":
    main()
