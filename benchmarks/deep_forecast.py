"""Does the learned forecast earn its keep? P3's cut-off with it, over the clairvoyant cut-off.

Two scenarios of 158 workers in nodes of 40 (speeds spread by 0.1, noise 0.05, both lognormal): in *bursts* a node turns
1.8 times slower with probability 0.03 a step and recovers with 0.1; in *periodic* each node is twice as slow for 3 of
every 12 steps. A model is trained on 600 steps of one seed and plays steps of another, which it sees censored by its
own cut-offs. Beside it, with the same rule: last value, smoothed, the best static count in hindsight, and on bursts the
true generating model, which knows every node, speed and probability and follows each node's state exactly.

    python benchmarks/deep_forecast.py --train [--models DIR]    # five seeds, ten trainings: about ten minutes
    python benchmarks/deep_forecast.py                           # one seed, short trainings: within a minute
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from _smoke import pool_context, smoke

from paceline.pace import Ask
from paceline.pace.forecast import Forecast, Seen, Smoothed, best_static_count, clairvoyant_counts, log_tail
from paceline.records import StepRecord
from paceline.research.cutoff import Cutoff
from paceline.research.deep.deep_forecast import Deep
from paceline.research.deep.fit import Training, fit
from paceline.research.deep.model import load_model, save_model
from paceline.research.deep.recordings import recording
from paceline.research.forecasts import LastValue
from paceline.simulate import make, play

WORKERS, NODE, NOISE = 158, 40, 0.05
SLOWER, STARTS, ENDS = 1.8, 0.03, 0.1
"""Bursts: the factor, and the chances a step of turning slow and of recovering."""
WARM_UP = 20
TRAINING_SEEDS = 1000
"""Seed s is played by a model trained on seed 1000 + s."""
FLEETS = (158, 2175)
SCENARIOS = ("bursts", "periodic")


@dataclass(frozen=True)
class Size:
    seeds: int
    train_steps: int
    play_steps: int
    training: Training


FULL = Size(seeds=5, train_steps=600, play_steps=300, training=Training())
SMALL = Size(seeds=1, train_steps=600, play_steps=120, training=Training(updates=1000, rate=4e-3))
PROCESSES, TIMED_STEPS = 2, 24
SMOKE = Size(seeds=1, train_steps=60, play_steps=16, training=Training(updates=2))
globals().update(smoke(WORKERS=10, NODE=5, WARM_UP=4, SMALL=SMOKE, PROCESSES=1, TIMED_STEPS=6))


class TrueBursts:
    """Bursts as they are: a filter of every node's two states, exact, cut-offs included (a hidden Markov model)."""

    name = "true model"

    def __init__(self, seconds: np.ndarray) -> None:
        """``seconds`` are read for the speeds alone: each worker's mean log time while its node is healthy."""
        self._node = np.arange(seconds.shape[1]) // NODE
        logs = np.log(seconds)
        above = logs - np.median(logs, axis=0)
        slow = np.stack([np.median(above[:, self._node == node], axis=1) for node in range(self._node[-1] + 1)], axis=1)
        slow = slow > np.log(SLOWER) / 2
        self._speed = np.mean(logs - np.log(SLOWER) * slow[:, self._node], axis=0)
        self._slow = np.zeros(self._node[-1] + 1)

    def _ahead(self) -> np.ndarray:
        return self._slow * (1 - ENDS) + (1 - self._slow) * STARTS

    def observe(self, seen: Seen) -> None:
        before = self._ahead()
        healthy, slow = (self._evidence(seen, factor) for factor in (1.0, SLOWER))
        odds = np.log(before / (1 - before)) + slow - healthy
        self._slow = 1 / (1 + np.exp(-np.clip(odds, -500, 500)))

    def _evidence(self, seen: Seen, factor: float) -> np.ndarray:
        z = (np.log(seen.seconds / factor) - self._speed) / NOISE
        return np.bincount(self._node, np.where(seen.late, log_tail(z), -z * z / 2 - 0.5 * np.log(2 * np.pi)))

    def draw(self, rows: int, rng: np.random.Generator) -> np.ndarray:
        slow = (rng.random((rows, len(self._slow))) < self._ahead())[:, self._node]
        noise = NOISE * rng.standard_normal((rows, len(self._node)))
        return np.exp(self._speed + np.log(SLOWER) * slow + noise)

    def rearrange(self, sources: Sequence[int], seconds: np.ndarray) -> None:
        raise NotImplementedError("its nodes are where they are: it plays fleets whose members stay")

    def state_dict(self) -> dict[str, Any]:
        return {"slow": self._slow.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._slow = np.array(state["slow"])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def train(scenario: str, seed: int, size: Size, folder: Path) -> dict[str, float]:
    """Train and save one model; seconds on the clock and of the processor."""
    seconds = make(scenario, steps=size.train_steps, workers=WORKERS, seed=TRAINING_SEEDS + seed)
    wall, cpu = time.perf_counter(), time.process_time()
    model = fit([recording(scenario, seconds)], training=replace(size.training, seed=seed))
    spent = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    save_model(model, _file(folder, scenario, seed))
    say(f"trained {scenario}, seed {seed}: {spent['wall_s']:.0f} s, {spent['cpu_s']:.0f} s of one core")
    return spent


def throughput(seconds: np.ndarray, forecast: Forecast) -> float:
    return play.arrivals(seconds, Cutoff(forecast, overhead_s=0.0)).after(WARM_UP).throughput


def uncensored(seconds: np.ndarray, forecast: Forecast) -> float:
    """The same rule when it is told everybody's time after every step."""
    rule, (steps, size) = Cutoff(forecast, overhead_s=0.0), seconds.shape
    first = np.empty(steps, dtype=np.int64)
    for step, own in enumerate(seconds):
        first[step] = rule.plan(_ask(step, size)).wait_for or size
        rule.observe(_record(step, own))
    return play.counts("uncensored", seconds, first).after(WARM_UP).throughput


def measure(scenario: str, seed: int, size: Size, folder: Path) -> dict[str, float]:
    """Everybody's throughput over the clairvoyant's, on one seed."""
    torch.set_num_threads(1)
    seconds = make(scenario, steps=size.play_steps, workers=WORKERS, seed=seed)
    scored = np.sort(seconds[WARM_UP:], axis=1)
    clairvoyant = play.counts("clairvoyant", seconds[WARM_UP:], clairvoyant_counts(scored)).throughput
    static = play.counts("static", seconds[WARM_UP:], best_static_count(scored)).throughput
    model = load_model(_file(folder, scenario, seed))
    rates = {
        "deep": throughput(seconds, Deep(model, always=True)),
        "deep, uncensored": uncensored(seconds, Deep(model, always=True)),
        "last value": throughput(seconds, LastValue()),
        "smoothed": throughput(seconds, Smoothed()),
        "best static": static,
    }
    if scenario == "bursts":
        rates["true model"] = throughput(seconds, TrueBursts(seconds))
    say(f"played {scenario}, seed {seed}: deep {rates['deep'] / clairvoyant:.3f} of the clairvoyant")
    return {name: rate / clairvoyant for name, rate in rates.items()}


def plan_ms(workers: int, model_file: Path) -> float:
    """Median milliseconds from a step's record to the next plan, the model speaking; a third of the steps warms up."""
    seconds = make("bursts", steps=TIMED_STEPS, workers=workers, seed=0)
    rule, spent = Cutoff(Deep(load_model(model_file), always=True), overhead_s=0.0), []
    for step, own in enumerate(seconds):
        wait_for = rule.plan(_ask(step, workers)).wait_for or workers
        late = own > np.partition(own, wait_for - 1)[wait_for - 1]
        begin = time.perf_counter()
        rule.observe(_record(step, own, late))
        rule.plan(_ask(step + 1, workers))
        spent.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(spent[TIMED_STEPS // 3 :])


def _ask(step: int, workers: int) -> Ask:
    return Ask(step=step, total=play.SHARE * workers, workers=tuple(range(workers)))


def _record(step: int, own: np.ndarray, late: np.ndarray | None = None) -> StepRecord:
    late = np.zeros(len(own), dtype=bool) if late is None else late
    closed = float(own[~late].max())
    return StepRecord(
        step=step,
        epoch=0,
        generation=0,
        workers=tuple(range(len(own))),
        planned=(play.SHARE,) * len(own),
        samples=tuple(np.where(late, 0, play.SHARE).tolist()),
        seconds=tuple(np.where(late, 0.0, own).tolist()),
        unfinished_s=tuple(np.where(late, closed, 0.0).tolist()),
    )


def _file(folder: Path, scenario: str, seed: int) -> Path:
    return folder / f"{scenario}-{seed}.pt"


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")


def _table(results: dict[str, list[dict[str, float]]]) -> None:
    print(f"{'over the clairvoyant':<20}" + "".join(f"{scenario:>17}" for scenario in results))
    for name in results["bursts"][0]:
        cells = [[row[name] for row in rows if name in row] for rows in results.values()]
        print(f"{name:<20}" + "".join(f"{_spread(cell) if cell else '-':>17}" for cell in cells))


def _figures(results: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    def ratio(scenario: str, over: str) -> float:
        return statistics.mean(row["deep"] / row[over] for row in results[scenario])

    return {
        "deep_over_true_bursts": ratio("bursts", "true model"),
        "deep_over_last_bursts": ratio("bursts", "last value"),
        "deep_over_oracle_periodic": statistics.mean(row["deep"] for row in results["periodic"]),
        "deep_over_last_periodic": ratio("periodic", "last value"),
        "truncated_over_uncensored": min(ratio(scenario, "deep, uncensored") for scenario in results),
    }


def run(size: Size, folder: Path, processes: int) -> dict[str, Any]:
    jobs = [(scenario, seed, size, folder) for scenario in SCENARIOS for seed in range(size.seeds)]
    with ProcessPoolExecutor(processes, mp_context=pool_context()) as pool:
        spent = list(pool.map(train, *zip(*jobs)))
        played = list(pool.map(measure, *zip(*jobs)))
    results = {name: [row for row, job in zip(played, jobs) if job[0] == name] for name in SCENARIOS}
    _table(results)
    figures: dict[str, Any] = {name: round(value, 4) for name, value in _figures(results).items()}
    for workers in FLEETS:
        figures[f"plan_ms_{workers}"] = round(plan_ms(workers, _file(folder, "bursts", 0)), 1)
    figures["train_s"] = round(max(each["wall_s"] for each in spent), 1)
    figures["train_cpu_s"] = round(max(each["cpu_s"] for each in spent), 1)
    return {
        **figures,
        "seeds": size.seeds,
        "updates": size.training.updates,
        "setting": "full" if size == FULL else "small",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="the full setting: five seeds, ten trainings")
    parser.add_argument("--models", type=Path, help="keep the trained models in this folder")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="trainings at the same time, one core each")
    asked = parser.parse_args()
    if not asked.train:
        print("small setting: one seed and short trainings; --train gives the real figures")
    torch.set_num_threads(1)
    with TemporaryDirectory() as scratch:
        folder = asked.models or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        print(json.dumps(run(FULL if asked.train else SMALL, folder, asked.processes)))


if __name__ == "__main__":
    main()
