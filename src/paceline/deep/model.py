"""P3's deep Markov model, with weights shared between workers so that it fits a fleet of any size.

One latent state z_t is shared by the whole fleet. Workers are correlated through it and through nothing else:

    z_t     ~ N(mu(z_(t-1)), sigma(z_(t-1)))                       gated transition
    u_(t,i) ~ N(mean(z_t, h_i), spread(z_t, h_i)^2)                emission, independent given z_t
    q(z_t | z_(t-1), g_t)                                          guide, g_t an RNN over a lag window of the fleet

``u`` is a worker's log time over its own level (`paceline.deep.past`). P3 gives every worker its own output; here the
emission reads ``h_i``, the worker's own lag window through one network for all, and the guide reads the fleet through
a mean over workers. Changing the workers' order therefore changes the order of the forecast and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional

LEAST_SPREAD = 0.005
"""Least spread of a worker's log time that is believed."""
WIDEST = 3.0
"""Inputs are cut to this many natural logs from the level: a factor of 20."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    lag: int = 20
    """Steps of the window, for the workers' own past and for the guide."""
    memory: int = 64
    """Steps whose median is a worker's level."""
    state: int = 8
    """Dimensions of z."""
    context: int = 32
    hidden: int = 64
    summary: int = 32

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (isinstance(value, int) and 1 <= value <= 4096):
                raise ValueError(f"a deep model's {name} is a whole number from 1 to 4096, not {value!r}")
        if self.memory < self.lag:
            raise ValueError(f"a memory of {self.memory} steps is shorter than the lag window of {self.lag}")


class DeepModel(nn.Module):
    """The networks. ``...`` stands for any batch dimensions, n for the workers."""

    def __init__(self, shape: Shape | None = None) -> None:
        super().__init__()
        self.shape = shape = shape or Shape()
        context, hidden, state, summary = shape.context, shape.hidden, shape.state, shape.summary
        self.window = nn.Sequential(
            nn.Linear(2 * shape.lag, hidden), nn.SiLU(), nn.Linear(hidden, context), nn.LayerNorm(context)
        )
        self.member = nn.Sequential(nn.Linear(context + 2, summary), nn.SiLU(), nn.Linear(summary, summary))
        self.past = nn.GRU(summary, summary, batch_first=True)
        self.from_state = nn.Linear(state, summary)
        self.posterior = nn.Linear(summary, 2 * state)
        self.gate = _network(state, hidden, state)
        self.proposal = _network(state, hidden, state)
        self.straight = nn.Linear(state, state)
        self.noise = nn.Linear(state, state)
        self.emit_state = nn.Linear(state, hidden, bias=False)
        self.emit_context = nn.Linear(context, hidden)
        self.emit = nn.Linear(hidden, 2)
        nn.init.eye_(self.straight.weight)
        nn.init.zeros_(self.straight.bias)

    def contexts(self, windows: Tensor, late: Tensor) -> Tensor:
        """h_i: what a worker's own past says of it; (..., n, lag), newest last, and 1 where it is a draw."""
        out: Tensor = self.window(torch.cat([windows.clamp(-WIDEST, WIDEST), late], dim=-1))
        return out

    def summarise(self, contexts: Tensor, u: Tensor, late: Tensor) -> Tensor:
        """What the step did to the fleet, given what was known before it: a mean over workers, (..., summary)."""
        step = torch.stack([u.clamp(-WIDEST, WIDEST), late], dim=-1)
        out: Tensor = self.member(torch.cat([contexts, step], dim=-1)).mean(dim=-2)
        return out

    def remember(self, summaries: Tensor) -> Tensor:
        """g_t: the RNN over the last ``lag`` summaries, (..., lag, summary), newest last."""
        flat = summaries.reshape(-1, *summaries.shape[-2:])
        last: Tensor = self.past(flat)[1][0]
        return last.reshape(*summaries.shape[:-2], -1)

    def guide(self, before: Tensor, past: Tensor) -> Normal:
        """``q(z_t | z_(t-1), g_t)``."""
        mean, spread = self.posterior((torch.tanh(self.from_state(before)) + past) / 2).chunk(2, dim=-1)
        return Normal(mean, functional.softplus(spread) + 1e-3, validate_args=False)

    def transition(self, before: Tensor) -> Normal:
        """``p(z_t | z_(t-1))``: with ``g = sigmoid(MLP z)``, the mean is ``(1 - g) (W z + b) + g MLP(z)``."""
        gate, proposal = torch.sigmoid(self.gate(before)), self.proposal(before)
        mean = (1 - gate) * self.straight(before) + gate * proposal
        spread = functional.softplus(self.noise(functional.relu(proposal))) + 1e-3
        return Normal(mean, spread, validate_args=False)

    def emission(self, state: Tensor, contexts: Tensor) -> Normal:
        """``p(u_(t,i) | z_t, h_i)``: (..., state) and (..., n, context) give (..., n)."""
        mixed = functional.silu(self.emit_state(state).unsqueeze(-2) + self.emit_context(contexts))
        mean, spread = self.emit(mixed).unbind(dim=-1)
        return Normal(mean, functional.softplus(spread) + LEAST_SPREAD, validate_args=False)


def log_likelihood(belief: Normal, u: Tensor, late: Tensor) -> Tensor:
    """``log N(u)`` where the time was seen and ``log(1 - Phi((u - mean) / sigma))`` where it is only known to be above
    u (P3's censored likelihood)."""
    spread = belief.stddev
    away = (u - belief.mean) / spread
    seen = -away.square() / 2 - spread.log() - math.log(2 * math.pi) / 2
    return torch.where(late, torch.special.log_ndtr(-away), seen)


def _network(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
