"""Training the deep forecast: stochastic gradients of its bound on random stretches of random workers.

The model must live with cut-offs, so some of what is known is hidden while it learns. Where a worker was cut off the
model reads a draw of x given x > cut-off, from its own belief and drawn anew every now and then (a stochastic form of
expectation and maximisation). A trace without cut-offs gets some: where P3's rule would have cut with hindsight, more
or less. What is hidden from the model in this way is still what it has to explain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from paceline.pace.forecast import Floats, Forecast, Mask, Seen, Smoothed, clairvoyant_counts, truncated_draws
from paceline.research.auto_forecast import score
from paceline.research.deep.deep_forecast import Deep
from paceline.research.deep.inference import Series, StepBatch, all_of, elbo, run_guide
from paceline.research.deep.model import DeepModel, Shape, save_model
from paceline.research.deep.recordings import Recording
from paceline.research.forecasts import LastValue
from paceline.research.general import General

Progress = Callable[[int, int], None]
"""Called with the updates done and their total."""
MOST_WORKERS, MOST_STEPS = 256, 2000
"""What training reads of a recording at most: workers drawn at random, and the last steps. Weights are shared between
workers, so more of them teach little."""
LEAST_BETA = 0.05
FIRST_SPREAD = 0.2
"""Spread of a worker's log time about its median before the model knows better."""
BLOCK = 50
"""Steps with one habit of cutting."""
WHOLE = 0.3
"""Part of the blocks in which everybody is waited for."""
COUNTS = (0.85, 1.02)
"""Range of a block's count over the clairvoyant one."""
HELD_OUT = 5
"""One in this many steps, at the end of every recording, is kept from training."""
DRAWS = 64
"""Draws that a forecast is scored from on held-out steps."""


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
    These stand for the whole fleet: its likelihood is scaled up from theirs (`paceline.research.deep.inference`)."""
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
    """Return a model of these recordings. The same seed gives the same model; torch's own random numbers stay alone."""
    if not recordings:
        raise ValueError("nothing to learn from: give at least one recording")
    with one_thread():
        return _fit(recordings, shape, training or Training(), progress)


def learn(
    recorded: Sequence[Recording], output: Path, *, updates: int, seed: int, progress: Progress | None = None
) -> dict[str, float]:
    """Write a model of these recordings, and return its scores and the other forecasts' on steps kept from training."""
    training = Training(updates=updates, seed=seed)
    model = fit([part.until(split(part)) for part in recorded], training=training, progress=progress)
    scores = held_out_scores(model, recorded)
    save_model(model, output, about={"held_out": scores, "learned_from": [part.name for part in recorded]})
    return scores


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: these networks are small, and a second one costs more than it brings."""
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
    """Draw random steps of random workers; steps before the first one repeat it, as they do when a run begins."""
    total, fleet = series.logs.shape
    steps, size = min(how.steps, total - 1), min(how.workers, fleet)
    first = rng.integers(1, total - steps + 1, how.batch) - lag
    workers = np.argsort(rng.random((how.batch, fleet)), axis=1)[:, :size]
    return StepBatch.cut(series, torch.from_numpy(first), steps=steps + lag, workers=torch.from_numpy(workers), lag=lag)


def _portion(recorded: Recording, rng: np.random.Generator) -> Recording:
    seconds, late = recorded.seconds[-MOST_STEPS:], recorded.late[-MOST_STEPS:]
    chosen = np.sort(rng.permutation(recorded.workers)[:MOST_WORKERS])
    return Recording(recorded.name, seconds[:, chosen], late[:, chosen])


class CensoredRecording:
    """A recording of which the model reads less than is known."""

    def __init__(self, recorded: Recording, model: DeepModel, rng: np.random.Generator) -> None:
        self._logs, self._late, self._rng = np.log(recorded.seconds), recorded.late, rng
        median = np.broadcast_to(np.median(self._logs, axis=0), self._logs.shape)
        self.series = self._hide(median, np.full_like(self._logs, FIRST_SPREAD), model.shape.memory)

    def renew(self, model: DeepModel, noise: torch.Generator) -> None:
        """Cut elsewhere, and draw what is hidden from what the model believes by now."""
        steps, lag = len(self.series), model.shape.lag
        with torch.no_grad():
            belief = run_guide(model, all_of(self.series, 1, steps - 1, lag), noise=noise).belief
        level = self.series.levels.double().numpy()
        mean, spread = level.copy(), np.full_like(level, FIRST_SPREAD)
        mean[1:] = level[:-1] + belief.mean[0].double().numpy()
        spread[1:] = belief.stddev[0].double().numpy()
        self.series = self._hide(mean, spread, model.shape.memory)

    def _hide(self, mean: Floats, spread: Floats, memory: int) -> Series:
        cut = cutoffs(self._logs, self._rng)[:, None]
        hidden: Mask = self._late | (self._logs > cut)
        read = np.minimum(self._logs, cut)
        read[hidden] = truncated_draws(self._rng, mean[hidden], spread[hidden], read[hidden], 1)[0]
        return Series.of(self._logs, self._late, read=read, hidden=hidden, memory=memory)


def cutoffs(logs: Floats, rng: np.random.Generator) -> Floats:
    """Return a log cut-off for every step, or infinity."""
    steps, workers = logs.shape
    ordered = np.sort(logs, axis=1)
    blocks = np.arange(steps) // BLOCK
    whole = rng.random(blocks[-1] + 1) < WHOLE
    habit = rng.uniform(*COUNTS, blocks[-1] + 1)
    counts = np.clip(np.round(clairvoyant_counts(np.exp(ordered)) * habit[blocks]), 1, workers).astype(np.int64)
    return np.where(whole[blocks], np.inf, ordered[np.arange(steps), counts - 1])


def split(recorded: Recording) -> int:
    """Return the first step that is kept from training."""
    return recorded.steps - recorded.steps // HELD_OUT


def held_out_scores(model: DeepModel, recordings: Sequence[Recording]) -> dict[str, float]:
    """Return the mean score of the held-out steps under deep, general, smoothed and last value.

    A score (`paceline.research.auto_forecast.score`) is the error as a part of the mean time, up to the cut-off where
    there was one; the smaller the better. Every earlier step is seen, none ahead.
    """
    rivals: dict[str, Callable[[], Forecast]] = {
        "deep": lambda: Deep(model, always=True),
        "general": General,
        "smoothed": Smoothed,
        "last value": LastValue,
    }
    with one_thread():
        return {
            name: float(np.mean([one for recorded in recordings for one in _scores(make(), recorded)]))
            for name, make in rivals.items()
        }


def _scores(forecast: Forecast, recorded: Recording) -> list[float]:
    rng, first, scores = np.random.default_rng(0), split(recorded), []
    for step, (seconds, late) in enumerate(zip(recorded.seconds, recorded.late)):
        seen = Seen(seconds, late)
        if step >= first:
            scores.append(score(forecast.draw(DRAWS, rng), seen))
        forecast.observe(seen)
    return scores
