"""Following a run with a deep model: draws of the fleet's shared state, and from them of the next step.

The state's distribution is carried as particles. A step that was seen moves them by the guide. A worker that was cut
off enters as a draw of x given x > cut-off: first as the model expected it, so that the guide can look at the whole
fleet, then once more given a state that explains who else was late.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Normal

from paceline.pace.forecast import Floats, Mask, truncated_draws
from paceline.research.deep.elbo import Series, all_of, run_guide
from paceline.research.deep.model import DeepModel, Past, log_likelihood

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
