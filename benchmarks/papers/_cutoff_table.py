"""P3's rules against simulated clusters: scenarios and widened recordings, models that learn from them, throughput."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from _smoke import smoke

from paceline.machines import read_trace
from paceline.pace import Joint
from paceline.pace.forecast import Forecast, best_static_count, clairvoyant_counts
from paceline.research.cutoff import Cutoff
from paceline.research.deep.deep_forecast import Deep
from paceline.research.deep.fit import Training, fit
from paceline.research.deep.model import load_model, save_model
from paceline.research.deep.recordings import recording
from paceline.research.forecasts import LastValue, OrderStatistics
from paceline.simulate import SCENARIOS, Outcome, deadline_play, make, play

TRAIN_STEPS, WARM_UP = 600, 20
TRAINING_SEEDS = 1000
"""Seed s is played by a model trained on seed 1000 + s."""
SHOWN = slice(60, 120)
"""Steps whose counts are told."""
globals().update(smoke(TRAIN_STEPS=40, WARM_UP=2, SHOWN=slice(2, 8)))

Row = dict[str, float]
Cluster = tuple[str, int, int]
"""A scenario or the path of a trace, workers, and the seed."""
Played = tuple[Row, dict[str, list[float]]]
"""Throughputs over naive's, and the counts of some steps."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def seconds(source: str, workers: int, steps: int, seed: int, *, learned: bool) -> np.ndarray:
    """Steps x workers of a scenario, or of a recorded trace (a path); ``learned`` are those a model learns from."""
    seed += TRAINING_SEEDS if learned else 0
    if source in SCENARIOS:
        return make(source, steps=steps, workers=workers, seed=seed)
    own = read_trace(Path(source)).seconds
    return widened(own[: len(own) // 2] if learned else own[len(own) // 2 :], workers, steps, seed)


def widened(own: np.ndarray, workers: int, steps: int, seed: int) -> np.ndarray:
    """Copies of the recorded job until there are so many workers, each from another step on and coming round."""
    rng, columns = np.random.default_rng(seed), np.arange(workers)
    begins = rng.integers(len(own), size=-(-workers // own.shape[1]))
    at = (np.arange(steps)[:, None] + begins[columns // own.shape[1]]) % len(own)
    return np.asarray(own[at, columns % own.shape[1]])


def train(source: str, fleets: Sequence[int], seed: int, updates: int, folder: str) -> None:
    """A model of clusters of these sizes, saved for each of them."""
    torch.set_num_threads(1)
    series = [seconds(source, workers, TRAIN_STEPS, seed, learned=True) for workers in fleets]
    recordings = [recording(f"{source}, {own.shape[1]} workers", own) for own in series]
    model = fit(recordings, training=Training(updates=updates, rate=4e-3, seed=seed))
    for workers in fleets:
        save_model(model, model_file(folder, source, workers, seed))
    say(f"trained on {Path(source).stem}, {' and '.join(map(str, fleets))} workers, seed {seed}")


def model_file(folder: str, source: str, workers: int, seed: int) -> Path:
    return Path(folder) / f"{Path(source).stem}-{workers}-{seed}.pt"


def outcomes(own: np.ndarray, model: Path) -> dict[str, Outcome]:
    """Every rule against the same steps, without those that warm up."""
    scored = np.sort(own[WARM_UP:], axis=1)

    def predicted(forecast: Forecast) -> Outcome:
        return play.arrivals(own, Cutoff(forecast, overhead_s=0.0)).after(WARM_UP)

    return {
        "naive": play.counts("naive", own[WARM_UP:], own.shape[1]),
        "best static": play.counts("static", own[WARM_UP:], best_static_count(scored)),
        "Elfving": predicted(OrderStatistics()),
        "last value": predicted(LastValue()),
        "deep": predicted(Deep(load_model(model), always=True)),
        "oracle": play.counts("oracle", own[WARM_UP:], clairvoyant_counts(scored)),
        "joint": deadline_play.play(own, Joint(), cut_to_fit=True).after(WARM_UP),
    }


def measure(source: str, workers: int, seed: int, steps: int, folder: str) -> Played:
    """One column of the table."""
    torch.set_num_threads(1)
    own = seconds(source, workers, steps, seed, learned=False)
    found = outcomes(own, model_file(folder, source, workers, seed))
    say(f"played {Path(source).stem}, {workers} workers, seed {seed}")
    rates = {name: outcome.throughput / found["naive"].throughput for name, outcome in found.items()}
    return rates, {name: found[name].shares[SHOWN].tolist() for name in ("oracle", "deep", "Elfving")}
