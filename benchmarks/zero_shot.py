"""The forecast that needs no training on your cluster, on clusters that were left out of its making.

P3's cut-off is played with the general forecast, with auto (the default, which may choose smoothed instead) and, for
comparison, with Elfving, smoothed and last value: on the seeded scenarios, on six kinds of trouble that its family of
clusters does not have, and on recorded traces. Figures are throughput over the clairvoyant cut-off's; the first steps
(10, or a quarter of a short trace) are played but not scored. On *bursts* and *periodic* a deep model trained on 600
steps of the same cluster (another seed of the same scenario) plays too.

    python benchmarks/zero_shot.py [--traces DIR]    # within a minute; the deep models trained shortly
    python benchmarks/zero_shot.py --train           # three seeds, and deep models trained in full: some minutes
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from _smoke import pool_context, smoke

from paceline.machines.trace import read_trace
from paceline.pace.forecast import Forecast, Seen, Smoothed, clairvoyant_counts
from paceline.research.auto_forecast import AutoForecast as Auto
from paceline.research.cutoff import Cutoff
from paceline.research.forecasts import LastValue, OrderStatistics
from paceline.research.general import General
from paceline.simulate import SCENARIOS, make, play

SIZES, STEPS, WARM_UP = (16, 158), 120, 10
SEEDS, SEEDS_TRAINED = (11,), (11, 12, 13)
TRAINED, TRAINING_SEED = ("bursts", "periodic"), 1000
TRAINING_STEPS, UPDATES = 600, 700
TIMED = 30
globals().update(smoke(SIZES=(6,), STEPS=16, TRAINING_STEPS=60, UPDATES=2, TIMED=6))

Generator = np.random.Generator
RIVALS: dict[str, Callable[[], Forecast]] = {"elfving": OrderStatistics, "smoothed": Smoothed, "last": LastValue}


def healthy(rng: Generator, steps: int, workers: int) -> np.ndarray:
    return 0.1 * rng.standard_normal((1, workers)) + 0.05 * rng.standard_normal((steps, workers))


def of_nodes(rows: np.ndarray, workers: int) -> np.ndarray:
    """Columns of nodes as columns of their workers."""
    return rows[:, np.arange(workers) * rows.shape[1] // workers]


def throttled(rng: Generator, steps: int, workers: int) -> np.ndarray:
    """Each node gets hotter: 2 % slower a step, up to a random limit, and starts again at its best."""
    heat, limit, rows = rng.uniform(0, 20, 5), rng.uniform(12, 30, 5), np.empty((steps, 5))
    for step in range(steps):
        rows[step] = heat
        heat = np.where(heat >= limit, 0.0, heat + 1)
        limit = np.where(heat == 0, rng.uniform(12, 30, 5), limit)
    return np.exp(healthy(rng, steps, workers) + of_nodes(0.02 * rows, workers))


def waves(rng: Generator, steps: int, workers: int) -> np.ndarray:
    """Each node's log seconds swing by 0.35 with a period of 17.3 steps."""
    turn = 2 * np.pi * (np.arange(steps)[:, None] / 17.3 + rng.random(5))
    return np.exp(healthy(rng, steps, workers) + of_nodes(0.35 * np.sin(turn), workers))


def roving(rng: Generator, steps: int, workers: int) -> np.ndarray:
    """One worker in eight is 2.5 times slower; every tenth step, on average, it is others."""
    slow, rows = rng.random(workers) < 0.125, np.empty((steps, workers))
    for step in range(steps):
        slow = rng.permutation(slow) if rng.random() < 0.1 else slow
        rows[step] = slow
    return np.exp(healthy(rng, steps, workers) + np.log(2.5) * rows)


def contagious(rng: Generator, steps: int, workers: int) -> np.ndarray:
    """A slow-down of 1.7 spreads from a node to the next with probability 0.3 a step, and ends with 0.25."""
    slow, rows = np.zeros(8, dtype=bool), np.empty((steps, 8))
    for step in range(steps):
        luck = rng.random(8)
        slow = np.where(slow, luck >= 0.25, luck < np.where(np.roll(slow, 1), 0.3, 0.01))
        rows[step] = slow
    return np.exp(healthy(rng, steps, workers) + of_nodes(np.log(1.7) * rows, workers))


def three_levels(rng: Generator, steps: int, workers: int) -> np.ndarray:
    """Each node is at 1, 1.4 or 2.8, and changes with probability 0.08 a step."""
    level, rows = rng.integers(3, size=6), np.empty((steps, 6))
    for step in range(steps):
        level = np.where(rng.random(6) < 0.08, rng.integers(3, size=6), level)
        rows[step] = np.log([1.0, 1.4, 2.8])[level]
    return np.exp(healthy(rng, steps, workers) + of_nodes(rows, workers))


def two_rhythms(rng: Generator, steps: int, workers: int) -> np.ndarray:
    """Half of the nodes are twice as slow for 2 of 11 steps, the others for 4 of 13."""
    phase, period, slow = rng.integers(13, size=6), np.array([11, 13] * 3), np.array([2, 4] * 3)
    rows = (np.arange(steps)[:, None] + phase) % period < slow
    return np.exp(healthy(rng, steps, workers) + of_nodes(np.log(2.0) * rows, workers))


UNLIKE = {kind.__name__.replace("_", "-"): kind for kind in (throttled, waves, roving, contagious, three_levels)}
UNLIKE["two-rhythms"] = two_rhythms


def matrices(traces: Path | None, seeds: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """Names and seconds of all that is played: the name's first part is the scenario."""
    for workers in SIZES:
        for seed in seeds:
            for name in SCENARIOS:
                yield f"{name}, {workers}, {seed}", make(name, steps=STEPS, workers=workers, seed=seed)
            for name, kind in UNLIKE.items():
                yield f"{name}, {workers}, {seed}", kind(np.random.default_rng((5, seed)), STEPS, workers)
    for file in sorted(traces.glob("*.csv")) if traces else ():
        try:
            yield f"trace {file.stem}", read_trace(file).seconds
        except ValueError as error:
            print(f"skipped {file.name}, which is not a trace of step times ({error})")


def throughput(seconds: np.ndarray, forecast: Forecast) -> float:
    warm_up = min(WARM_UP, len(seconds) // 4)
    return play.arrivals(seconds, Cutoff(forecast, overhead_s=0.0)).after(warm_up).throughput


def measure(name: str, seconds: np.ndarray) -> dict[str, Any]:
    """Everybody's throughput over the clairvoyant's."""
    warm_up = min(WARM_UP, len(seconds) // 4)
    known = play.counts("clairvoyant", seconds, clairvoyant_counts(np.sort(seconds, axis=1))).after(warm_up).throughput
    rates = {rival: throughput(seconds, kind()) / known for rival, kind in RIVALS.items()}
    ours = {"general": throughput(seconds, General()) / known, "auto": throughput(seconds, Auto()) / known}
    row = {"name": name, **ours, **rates}
    print(f"played {name}: general {row['general']:.3f}, best of the others {max(rates.values()):.3f}", file=sys.stderr)
    return row


def measure_deep(name: str, seconds: np.ndarray, updates: int | None) -> tuple[str, float]:
    """The cut-off's throughput with a deep model that was trained on the same cluster, over the clairvoyant's."""
    import torch

    from paceline.research.deep.deep_forecast import Deep
    from paceline.research.deep.fit import Training, fit
    from paceline.research.deep.recordings import recording

    torch.set_num_threads(1)
    scenario, workers, seed = name.split(", ")
    steps = make(scenario, steps=TRAINING_STEPS, workers=int(workers), seed=TRAINING_SEED + int(seed))
    training = Training() if updates is None else Training(updates=updates, rate=4e-3)
    model = fit([recording(scenario, steps)], training=training)
    warm_up = min(WARM_UP, len(seconds) // 4)
    known = play.counts("clairvoyant", seconds, clairvoyant_counts(np.sort(seconds, axis=1))).after(warm_up).throughput
    rate = throughput(seconds, Deep(model, always=True)) / known
    print(f"played {name}: deep {rate:.3f}", file=sys.stderr)
    return name, rate


def draw_ms(workers: int) -> float:
    """Median milliseconds from a step seen to the draws of the next, a quarter of the workers cut off."""
    seconds, forecast, rng, spent = (
        make("bursts", steps=TIMED, workers=workers),
        General(),
        np.random.default_rng(0),
        [],
    )
    for own in seconds:
        begin = time.perf_counter()
        forecast.observe(Seen.until(own, float(np.quantile(own, 0.75))))
        forecast.draw(32, rng)
        spent.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(spent[TIMED // 3 :])


def table(rows: list[dict[str, Any]]) -> None:
    columns = ("general", "auto", *RIVALS, "deep")
    print(f"{'over the clairvoyant':<34}" + "".join(f"{column:>10}" for column in columns))
    for row in rows:
        cells = [f"{row[column]:>10.3f}" if column in row else f"{'-':>10}" for column in columns]
        print(f"{row['name']:<34}" + "".join(cells) + ("  below " + ", ".join(below(row)) if below(row) else ""))


def below(row: dict[str, Any]) -> list[str]:
    """Whom the general forecast does not reach there: 0.97 of the deep one's, all of the others'."""
    return [rival for rival in (*RIVALS, "deep") if rival in row and row["general"] < wanted(rival) * row[rival]]


def wanted(rival: str) -> float:
    return 0.97 if rival == "deep" else 1.0


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def ratios(rival: str) -> dict[str, float]:
        return {row["name"]: row["general"] / row[rival] for row in rows if rival in row}

    told: dict[str, Any] = {}
    for rival in (*RIVALS, "deep"):
        each = ratios(rival)
        key = "trained" if rival == "deep" else rival
        told[f"worst_over_{key}"] = round(min(each.values()), 4)
        told[f"worst_over_{key}_at"] = min(each, key=each.__getitem__)
        told[f"mean_over_{key}"] = round(statistics.mean(each.values()), 4)
    told["worst_auto_over_general"] = round(min(row["auto"] / row["general"] for row in rows), 4)
    told["not_reached"] = {row["name"]: below(row) for row in rows if below(row)}
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder of recorded traces (*.csv)")
    parser.add_argument("--train", action="store_true", help="three seeds, and deep models trained in full")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    matrix = dict(matrices(asked.traces, SEEDS_TRAINED if asked.train else SEEDS))
    largest = f", {SIZES[-1]}, "
    deep = [name for name in matrix if name.startswith(TRAINED) and largest in name]
    with ProcessPoolExecutor(asked.processes, mp_context=pool_context()) as pool:
        slow = [pool.submit(measure_deep, name, matrix[name], None if asked.train else UPDATES) for name in deep]
        rows = list(pool.map(measure, *zip(*matrix.items(), strict=True)))
        trained = dict(each.result() for each in slow)
    for row in rows:
        row |= {"deep": trained[row["name"]]} if row["name"] in trained else {}
    table(rows)
    timed = {f"draw_ms_{workers}": round(draw_ms(workers), 1) for workers in (158, 2175)}
    sys.stdout.flush()
    print(json.dumps({**figures(rows), **timed, "matrices": len(rows)}))


if __name__ == "__main__":
    main()
