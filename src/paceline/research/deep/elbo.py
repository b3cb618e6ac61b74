"""The evidence lower bound of the deep Markov model on stretches of a series.

For a stretch of steps, with z drawn from the guide q and h from the window before each step:

    ELBO = sum_t [ sum_i log p(u_(t,i) | z_t, h_i) - beta KL(q(z_t | z_(t-1), g_t) || p(z_t | z_(t-1))) ]

``log p`` is censored where a worker was cut off. ``beta`` rises to 1 while training (KL annealing), so that z comes to
mean something before it has to pay for it.

z is the whole fleet's: of n workers a stretch may hold m, drawn at random, whose likelihood stands for all,

    sum_i log p  ->  (n / m) sum_(i drawn) log p

For the same z this is the sum over the fleet in expectation, and the KL counts once. Without ``n / m`` the KL would
weigh n / m times too much.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from paceline.pace.forecast import Floats, Mask
from paceline.research.deep.model import DeepModel, levels, log_likelihood


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
