"""Training the deep forecast: stochastic gradients of its bound on random stretches of random workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from paceline.deep.elbo import Series, StepBatch, elbo
from paceline.deep.learning.censoring import CensoredRecording
from paceline.deep.learning.recordings import Recording
from paceline.deep.model import DeepModel, Shape

Progress = Callable[[int, int], None]
"""Called with the updates done and their total."""
MOST_WORKERS, MOST_STEPS = 256, 2000
"""What training reads of a recording at most: workers drawn at random, and the last steps. Weights are shared between
workers, so more of them teach little."""
LEAST_BETA = 0.05


@dataclass(frozen=True)
class Training:
    """How to train. The defaults take about a minute of one core."""

    updates: int = 2000
    rate: float = 3e-3
    """Peak of the learning rate, which rises over a tenth of the updates and then falls to nothing."""
    decay: float = 0.01
    batch: int = 4
    steps: int = 40
    workers: int = 32
    """An update reads ``batch`` stretches of ``steps`` steps and ``workers`` workers; fewer where there are fewer.
    These stand for the whole fleet: its likelihood is scaled up from theirs (`paceline.deep.elbo`)."""
    renew: int = 100
    """Updates after which hidden times are drawn anew."""
    anneal: float = 0.3
    """Part of the updates over which the weight of the KL rises to 1."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("updates", "batch", "steps", "workers", "renew"):
            if getattr(self, name) < 1:
                raise ValueError(f"training needs {name} of at least 1, not {getattr(self, name)}")


def fit(
    recordings: Sequence[Recording],
    *,
    shape: Shape | None = None,
    training: Training | None = None,
    progress: Progress | None = None,
) -> DeepModel:
    """A model of these recordings. The same seed gives the same model; torch's own random numbers are left alone."""
    if not recordings:
        raise ValueError("nothing to learn from: give at least one recording")
    with one_thread():
        return _fit(recordings, shape, training or Training(), progress)


@contextmanager
def one_thread() -> Iterator[None]:
    """These networks are small: a second thread costs more than it brings, ten times more where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _fit(recordings: Sequence[Recording], shape: Shape | None, how: Training, progress: Progress | None) -> DeepModel:
    rng = np.random.default_rng(how.seed)
    noise = torch.Generator().manual_seed(how.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(how.seed)
        model = DeepModel(shape).float()
    hidden = [CensoredRecording(_portion(recorded, rng), model, rng) for recorded in recordings]
    _train(model, hidden, [recorded.workers for recorded in recordings], how, rng, noise, progress)
    return model.requires_grad_(False).eval()


def _train(
    model: DeepModel,
    hidden: Sequence[CensoredRecording],
    fleets: Sequence[int],
    how: Training,
    rng: np.random.Generator,
    noise: torch.Generator,
    progress: Progress | None,
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.rate, weight_decay=how.decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, how.rate, total_steps=how.updates + 1, pct_start=0.1)
    lengths = np.array([len(part.series) for part in hidden], dtype=np.float64)
    for update in range(how.updates):
        if update and update % how.renew == 0:
            for part in hidden:
                part.renew(model, noise)
        chosen = int(rng.choice(len(hidden), p=lengths / lengths.sum()))
        stretch = _stretch(hidden[chosen].series, how, model.shape.lag, rng)
        beta = min(1.0, LEAST_BETA + update / (how.anneal * how.updates))
        loss = -elbo(model, stretch, fleet=fleets[chosen], beta=beta, noise=noise)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if progress is not None:
            progress(update + 1, how.updates)


def _stretch(series: Series, how: Training, lag: int, rng: np.random.Generator) -> StepBatch:
    """Random steps of random workers; steps before the first one repeat it, as they do when a run begins."""
    total, fleet = series.logs.shape
    steps, size = min(how.steps, total - 1), min(how.workers, fleet)
    first = rng.integers(1, total - steps + 1, how.batch) - lag
    workers = np.argsort(rng.random((how.batch, fleet)), axis=1)[:, :size]
    return StepBatch.cut(series, torch.from_numpy(first), steps=steps + lag, workers=torch.from_numpy(workers), lag=lag)


def _portion(recorded: Recording, rng: np.random.Generator) -> Recording:
    seconds, late = recorded.seconds[-MOST_STEPS:], recorded.late[-MOST_STEPS:]
    chosen = np.sort(rng.permutation(recorded.workers)[:MOST_WORKERS])
    return Recording(recorded.name, seconds[:, chosen], late[:, chosen])
