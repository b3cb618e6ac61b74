"""Inference in the deep Markov model: its evidence lower bound on stretches of a series, and following a run.

For a stretch of steps, with z drawn from the guide q and h from the window before each step:

    ELBO = sum_t [ sum_i log p(u_(t,i) | z_t, h_i) - beta KL(q(z_t | z_(t-1), g_t) || p(z_t | z_(t-1))) ]

``log p`` is censored where a worker was cut off. ``beta`` rises to 1 while training (KL annealing), so that z comes to
mean something before it has to pay for it.

z is the whole fleet's: of n workers a stretch may hold m, drawn at random, whose likelihood stands for all,

    sum_i log p  ->  (n / m) sum_(i drawn) log p

For the same z this is the sum over the fleet in expectation, and the KL counts once. Without ``n / m`` the KL would
weigh n / m times too much.

A `ParticleFilter` follows a run: draws of the fleet's shared state, and from them of the next step. The state's
distribution is carried as particles. A step that was seen moves them by the guide. A worker that was cut off enters as
a draw of x given x > cut-off: first as the model expected it, so that the guide can look at the whole fleet, then once
more given a state that explains who else was late.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from paceline.pace.forecast import Floats, Mask, truncated_draws
from paceline.research.deep.model import DeepModel, Past, levels, log_likelihood


@dataclass(frozen=True)
class Series:
    """A series of steps x workers, twice: what is to be explained, and what the model is given to read."""

    logs: Tensor
    """Log seconds; where ``late``, the log of the cut-off."""
    late: Tensor
    """True where the worker was cut off and nothing more will ever be known."""
    read: Tensor
    """Log seconds with truncated draws in place of what is ``hidden``."""
    hidden: Tensor
    """True where ``read`` is a draw: all that is late, and what training hides to make the model live with it."""
    levels: Tensor
    """Each worker's level after each step, by ``read``."""

    @classmethod
    def of(cls, logs: Floats, late: Mask, *, read: Floats, hidden: Mask, memory: int) -> Series:
        explained, given, level = (torch.as_tensor(part).float() for part in (logs, read, levels(read, memory)))
        return cls(explained, torch.as_tensor(late), given, torch.as_tensor(hidden), level)

    def __len__(self) -> int:
        return len(self.logs)


@dataclass(frozen=True)
class StepBatch:
    """Batches of consecutive steps of some workers, as the networks want them: (batch, steps, workers[, lag])."""

    windows: Tensor
    hidden_windows: Tensor
    """The window before each step, and 1 where it is a draw."""
    read: Tensor
    hidden: Tensor
    explained: Tensor
    late: Tensor

    @classmethod
    def cut(cls, series: Series, first: Tensor, *, steps: int, workers: Tensor, lag: int) -> StepBatch:
        """Return ``steps`` steps from each of ``first`` (batch), for each batch's ``workers`` (batch, n)."""
        own = workers[:, None, :]
        now = (first[:, None] + torch.arange(steps))[:, :, None]
        before = (now - 1).clamp(min=0)
        past = (now[..., None] - lag + torch.arange(lag)).clamp(min=0)
        now = now.clamp(min=0)
        level = series.levels[before, own]
        return cls(
            windows=series.read[past, own[..., None]] - level[..., None],
            hidden_windows=series.hidden[past, own[..., None]].float(),
            read=series.read[now, own] - level,
            hidden=series.hidden[now, own].float(),
            explained=series.logs[now, own] - level,
            late=series.late[now, own],
        )


@dataclass(frozen=True)
class GuidedPath:
    """What the guide makes of a stretch; the first ``lag`` steps only lead in, and are in ``summaries`` alone."""

    belief: Normal
    """The emission at the guide's z: (batch, steps - lag, workers)."""
    divergence: Tensor
    """KL of the guide from the transition, (batch, steps - lag)."""
    states: Tensor
    """z as drawn from the guide, (batch, steps - lag, state)."""
    summaries: Tensor
    """(batch, steps, summary)."""


def run_guide(model: DeepModel, stretch: StepBatch, *, noise: torch.Generator | None) -> GuidedPath:
    """Run the guide along the stretch, with draws from ``noise``; None takes the guide's mean."""
    lag = model.shape.lag
    contexts = model.contexts(stretch.windows, stretch.hidden_windows)
    summaries = model.summarise(contexts, stretch.read, stretch.hidden)
    past = model.remember(summaries.unfold(1, lag, 1).transpose(-1, -2))
    size = (*past.shape[:2], model.shape.state)
    draws = torch.zeros(size) if noise is None else torch.randn(size, generator=noise)
    states, divergence = _walk(model, past, draws.float())
    return GuidedPath(model.emission(states, contexts[:, lag:]), divergence, states, summaries)


def elbo(
    model: DeepModel,
    stretch: StepBatch,
    *,
    fleet: int | None = None,
    beta: float = 1.0,
    noise: torch.Generator | None,
) -> Tensor:
    """Return the bound of a fleet of ``fleet`` workers, in natural logs per worker and step.

    ``((n / m) sum_i log p - beta KL) / n = mean_i log p - beta KL / n``; the stretch holds some of the workers (None:
    all).
    """
    lag, drawn = model.shape.lag, stretch.read.shape[-1]
    if (size := drawn if fleet is None else fleet) < drawn:
        raise ValueError(f"a stretch of {drawn} workers is no part of a fleet of {size}")
    known = run_guide(model, stretch, noise=noise)
    fit = log_likelihood(known.belief, stretch.explained[:, lag:], stretch.late[:, lag:]).mean(dim=-1)
    bound: Tensor = (fit - beta * known.divergence / size).mean()
    return bound


def all_of(series: Series, first: int, steps: int, lag: int) -> StepBatch:
    """Return every worker of ``steps`` steps from ``first`` on, led in by the ``lag`` steps before."""
    workers = torch.arange(series.logs.shape[1])[None]
    return StepBatch.cut(series, torch.tensor([first - lag]), steps=steps + lag, workers=workers, lag=lag)


def _walk(model: DeepModel, past: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Walk z along the stretch, and return it and its KL; the first step only gives the second one its past."""
    state = model.guide(torch.zeros_like(noise[:, 0]), past[:, 0]).mean
    states, means, spreads = [state], [], []
    for step in range(1, past.shape[1]):
        guide = model.guide(state, past[:, step])
        state = guide.mean + guide.stddev * noise[:, step]
        states.append(state)
        means.append(guide.mean)
        spreads.append(guide.stddev)
    walked = torch.stack(states, dim=1)
    guided = Normal(torch.stack(means, dim=1), torch.stack(spreads, dim=1), validate_args=False)
    return walked[:, 1:], kl_divergence(guided, model.transition(walked[:, :-1])).sum(dim=-1)


PARTICLES = 32


@contextmanager
def cpu_inference() -> Iterator[None]:
    """Compute without gradients, on the CPU and in full precision, whatever defaults the script has set."""
    with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        yield


class ParticleFilter:
    """What a model believes after the steps in a `Past`.

    Call `catch_up` first; then, for each step, `impute` what was cut off, `update` the particles, push the step into
    the past, and `read_windows` of that past again.
    """

    @cpu_inference()
    def __init__(self, model: DeepModel) -> None:
        self.model = model.eval()
        self.states = torch.zeros(PARTICLES, model.shape.state, dtype=torch.float32)
        self.summaries = torch.zeros(model.shape.lag, model.shape.summary, dtype=torch.float32)
        self._contexts = torch.zeros(0, model.shape.context, dtype=torch.float32)
        self._level = np.zeros(0)

    @property
    def depth(self) -> int:
        """Steps of past that it reads."""
        return self.model.shape.memory + 2 * self.model.shape.lag

    @cpu_inference()
    def catch_up(self, past: Past) -> None:
        """Begin from a past: the guide's mean along its last ``lag`` steps."""
        past.deepen(self.depth)
        lag, memory = self.model.shape.lag, self.model.shape.memory
        series = Series.of(past.rows, past.hidden, read=past.rows, hidden=past.hidden, memory=memory)
        known = run_guide(self.model, all_of(series, len(series) - lag, lag, lag), noise=None)
        self.states = known.states[0, -1].repeat(PARTICLES, 1)
        self.summaries = known.summaries[0, -lag:]
        self.read_windows(past)

    @cpu_inference()
    def read_windows(self, past: Past) -> None:
        """Read every worker's own window."""
        lag = self.model.shape.lag
        self._level = past.level(self.model.shape.memory)
        windows = _tensor((past.rows[-lag:] - self._level).T)
        self._contexts = self.model.contexts(windows, _tensor(past.hidden[-lag:].T))

    @cpu_inference()
    def impute(self, logs: Floats, late: Mask, rng: np.random.Generator) -> Floats:
        """Return the step with truncated draws for those cut off, whose ``logs`` are their cut-off."""
        if not late.any():
            return logs
        expected = self._beyond(self._ahead(self.states, rng), logs, late, rng)
        states, _ = self._moved(expected, late, rng)
        return self._beyond(states, logs, late, rng)

    @cpu_inference()
    def update(self, row: Floats, late: Mask, rng: np.random.Generator) -> None:
        """Move the particles by the guide, given the step as imputed."""
        self.states, self.summaries = self._moved(row, late, rng)

    @cpu_inference()
    def draw(self, rows: int, rng: np.random.Generator) -> Floats:
        """Draw joint samples of the next step: a particle moved by the transition, then every worker's seconds."""
        states = self._ahead(self.states[torch.arange(rows) % PARTICLES], rng)
        belief = self.model.emission(states, self._contexts)
        u = belief.mean + belief.stddev * _noise(belief.mean.shape, rng)
        return np.asarray(np.exp(self._level + u.double().numpy()))

    def _ahead(self, states: Tensor, rng: np.random.Generator) -> Tensor:
        return _sample(self.model.transition(states), rng)

    def _moved(self, row: Floats, late: Mask, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        newest = self.model.summarise(self._contexts, _tensor(row - self._level), _tensor(late))
        summaries = torch.cat([self.summaries[1:], newest[None]])
        return _sample(self.model.guide(self.states, self.model.remember(summaries)), rng), summaries

    def _beyond(self, states: Tensor, logs: Floats, late: Mask, rng: np.random.Generator) -> Floats:
        """Return truncated draws given one of the states, taken by how well it explains the complete step."""
        belief = self.model.emission(states, self._contexts)
        fit = log_likelihood(belief, _tensor(logs - self._level), torch.as_tensor(late)).sum(dim=-1)
        weights = torch.softmax(fit.double(), dim=0).numpy()
        chosen = rng.choice(len(weights), p=weights / weights.sum())
        mean = self._level + belief.mean[chosen].double().numpy()
        spread = belief.stddev[chosen].double().numpy()
        row = logs.copy()
        row[late] = truncated_draws(rng, mean[late], spread[late], logs[late], 1)[0]
        return row


def _sample(belief: Normal, rng: np.random.Generator) -> Tensor:
    return torch.as_tensor(belief.mean + belief.stddev * _noise(belief.mean.shape, rng))


def _noise(shape: torch.Size, rng: np.random.Generator) -> Tensor:
    return torch.from_numpy(rng.standard_normal(tuple(shape), dtype=np.float32))


def _tensor(values: Floats | Mask) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float32)
