"""P3's deep Markov model, with weights shared between workers so that it fits a fleet of any size.

One latent state z_t is shared by the whole fleet. Workers are correlated through it and through nothing else:

    z_t     ~ N(mu(z_(t-1)), sigma(z_(t-1)))                       gated transition
    u_(t,i) ~ N(mean(z_t, h_i), spread(z_t, h_i)^2)                emission, independent given z_t
    q(z_t | z_(t-1), g_t)                                          guide, g_t an RNN over a lag window of the fleet

``u`` is a worker's log time over its own level. P3 gives every worker its own output; here the emission reads ``h_i``,
the worker's own lag window through one network for all, and the guide reads the fleet through a mean over workers.
Changing the workers' order therefore changes the order of the forecast and nothing else.

A worker's level is the median of its log times over the last ``memory`` steps, so a machine that is slow for good and
one that is fast look alike, and a worker that is slow for less than half of the time is measured against its healthy
self. Logs make slow-downs factors, whatever the unit of the times, and a forecast can never be negative. Before a
series begins, its first step is taken to have lasted for ever.

At the end: a model in plain JSON types, numbers as base64 of little-endian bytes, so that nothing is rounded; and model
files, plain tensors and a few numbers, written by ``paceline learn``. Reading one never runs code in it.
"""

from __future__ import annotations

import base64
import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional

from paceline.pace.forecast import Floats, Mask


def levels(logs: Floats, memory: int) -> Floats:
    """Return the level after every step of a series, from that step and those before it: steps x workers."""
    padded = np.concatenate([np.repeat(logs[:1], memory - 1, axis=0), logs])
    return np.asarray(np.median(sliding_window_view(padded, memory, axis=0), axis=-1))


class Past:
    """The last ``depth`` steps of a fleet as log seconds, with draws where a worker was cut off (``hidden``).

    A worker that is new is taken for a typical one until it was seen in time once, and from then on for one that has
    always been as it was then.
    """

    def __init__(self, workers: int, depth: int) -> None:
        self.rows = np.zeros((depth, workers))
        self.hidden = np.zeros((depth, workers), dtype=np.bool_)
        self.fresh = np.ones(workers, dtype=np.bool_)

    @property
    def workers(self) -> int:
        return self.rows.shape[1]

    def deepen(self, depth: int) -> None:
        """Hold at least ``depth`` steps from now on."""
        if (more := depth - len(self.rows)) > 0:
            self.rows = np.concatenate([np.repeat(self.rows[:1], more, axis=0), self.rows])
            self.hidden = np.concatenate([np.zeros((more, self.workers), dtype=np.bool_), self.hidden])

    def welcome(self, logs: Floats, late: Mask) -> None:
        """Give the new workers among these a past: constant, so that their coming is no shock to the fleet's state."""
        if not self.fresh.any():
            return
        if self.fresh.all():
            self.rows[:] = np.median(logs[~late]) if (~late).any() else np.median(logs)
        told, bound = self.fresh & ~late, self.fresh & late
        self.rows[:, told] = logs[told]
        self.rows[:, bound] = np.maximum(self.rows[:, bound], logs[bound])
        self.fresh &= ~told

    def push(self, row: Floats, late: Mask) -> None:
        self.rows = np.concatenate([self.rows[1:], row[None]])
        self.hidden = np.concatenate([self.hidden[1:], late[None]])

    def rearrange(self, sources: Sequence[int], logs: Floats | None = None) -> None:
        """Follow a change of members: the new column i was column ``sources[i]``, or is a new worker where that is -1.

        What is believed of it stands in ``logs``; without that it is a typical one, and fresh.
        """
        columns = np.asarray(sources, dtype=np.int64)
        new = columns < 0
        rows, hidden, fresh = self.rows[:, columns], self.hidden[:, columns], self.fresh[columns]
        rows[:, new] = np.median(self.rows, axis=1)[:, None] if logs is None else logs[new]
        hidden[:, new], fresh[new] = False, logs is None
        self.rows, self.hidden, self.fresh = rows, hidden, fresh

    def level(self, memory: int) -> Floats:
        """Return each worker's level over the last ``memory`` steps."""
        return np.asarray(np.median(self.rows[-memory:], axis=0))


VERSION = 1
"""Version of the model's networks and of their inputs: weights of another one mean something else."""
KIND = "paceline deep forecast"
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
        """Return h_i, a summary of each worker's own past; (..., n, lag), newest last, and 1 where it is a draw."""
        out: Tensor = self.window(torch.cat([windows.clamp(-WIDEST, WIDEST), late], dim=-1))
        return out

    def summarise(self, contexts: Tensor, u: Tensor, late: Tensor) -> Tensor:
        """Return what the step did to the fleet given what was known before it: a mean over workers, (..., summary)."""
        step = torch.stack([u.clamp(-WIDEST, WIDEST), late], dim=-1)
        out: Tensor = self.member(torch.cat([contexts, step], dim=-1)).mean(dim=-2)
        return out

    def remember(self, summaries: Tensor) -> Tensor:
        """Return g_t: the RNN over the last ``lag`` summaries, (..., lag, summary), newest last."""
        flat = summaries.reshape(-1, *summaries.shape[-2:])
        last: Tensor = self.past(flat)[1][0]
        return last.reshape(*summaries.shape[:-2], -1)

    def guide(self, before: Tensor, past: Tensor) -> Normal:
        """Return ``q(z_t | z_(t-1), g_t)``."""
        mean, spread = self.posterior((torch.tanh(self.from_state(before)) + past) / 2).chunk(2, dim=-1)
        return Normal(mean, functional.softplus(spread) + 1e-3, validate_args=False)

    def transition(self, before: Tensor) -> Normal:
        """Return ``p(z_t | z_(t-1))``: with ``g = sigmoid(MLP z)``, the mean is ``(1 - g) (W z + b) + g MLP(z)``."""
        gate, proposal = torch.sigmoid(self.gate(before)), self.proposal(before)
        mean = (1 - gate) * self.straight(before) + gate * proposal
        spread = functional.softplus(self.noise(functional.relu(proposal))) + 1e-3
        return Normal(mean, spread, validate_args=False)

    def emission(self, state: Tensor, contexts: Tensor) -> Normal:
        """Return ``p(u_(t,i) | z_t, h_i)``: (..., state) and (..., n, context) give (..., n)."""
        mixed = functional.silu(self.emit_state(state).unsqueeze(-2) + self.emit_context(contexts))
        mean, spread = self.emit(mixed).unbind(dim=-1)
        return Normal(mean, functional.softplus(spread) + LEAST_SPREAD, validate_args=False)


def log_likelihood(belief: Normal, u: Tensor, late: Tensor) -> Tensor:
    """Return ``log N(u)`` where the time was seen, else ``log(1 - Phi((u - mean) / sigma))``: P3's censored likelihood.

    The latter is for times only known to be above u.
    """
    spread = belief.stddev
    away = (u - belief.mean) / spread
    seen = -away.square() / 2 - spread.log() - math.log(2 * math.pi) / 2
    return torch.where(late, torch.special.log_ndtr(-away), seen)


def _network(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def pack(array: NDArray[Any]) -> dict[str, Any]:
    """Return the array as plain types."""
    plain = np.ascontiguousarray(array)
    if plain.dtype.byteorder == ">":
        plain = plain.astype(plain.dtype.newbyteorder("<"))
    return {"dtype": plain.dtype.str, "shape": list(plain.shape), "bytes": base64.b64encode(plain.tobytes()).decode()}


def unpack(plain: Mapping[str, Any]) -> NDArray[Any]:
    array = np.frombuffer(base64.b64decode(plain["bytes"]), dtype=np.dtype(plain["dtype"]))
    return array.reshape(plain["shape"]).copy()


def pack_model(model: DeepModel) -> dict[str, Any]:
    """Return sizes and weights as plain types."""
    weights = {name: pack(tensor.numpy()) for name, tensor in model.state_dict().items()}
    return {"version": VERSION, "shape": model.shape.as_dict(), "weights": weights}


def unpack_model(plain: Mapping[str, Any]) -> DeepModel:
    weights = {name: torch.from_numpy(unpack(packed)) for name, packed in plain["weights"].items()}
    return build(plain["version"], plain["shape"], weights)


def build(version: Any, shape: Any, weights: Mapping[str, Any]) -> DeepModel:
    """Return a model from its parts, each of which is checked; ValueError names the one that is not ours."""
    if version != VERSION:
        raise ValueError(f"a deep forecast of version {version!r}, where this Paceline reads version {VERSION}")
    try:
        sizes = Shape(**shape)
    except TypeError:
        raise ValueError(f"the sizes of a deep forecast are not {shape!r}") from None
    with torch.device("meta"):
        model = DeepModel(sizes)
    _check_weights(model, weights)
    model.load_state_dict(dict(weights), assign=True)
    return model.requires_grad_(False).eval()


def _check_weights(model: DeepModel, weights: Mapping[str, Any]) -> None:
    wanted = model.state_dict()
    if set(weights) != set(wanted):
        odd = min(set(weights) ^ set(wanted))
        raise ValueError(f"the weights of a deep forecast do not match its networks: {odd!r}")
    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor) or tensor.shape != wanted[name].shape or tensor.dtype != torch.float32:
            raise ValueError(f"the weights {name!r} of a deep forecast do not have the size that was announced")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"the weights {name!r} of a deep forecast are not all finite")


def save_model(model: DeepModel, path: str | Path, *, about: dict[str, Any] | None = None) -> None:
    """Write the model, whole or not at all. ``about`` is a note of plain values: where it came from, how it scored."""
    target = Path(path)
    content = {
        "kind": KIND,
        "version": VERSION,
        "shape": model.shape.as_dict(),
        "weights": {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()},
        "about": dict(about or {}),
    }
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        torch.save(content, part)
        part.replace(target)
    except (OSError, RuntimeError) as error:
        part.unlink(missing_ok=True)
        raise ValueError(f"cannot write the model to {target}: {error}") from error


def load_model(path: str | Path) -> DeepModel:
    """Return the model in a file; ValueError for one that is missing, damaged, not ours or of another version."""
    file, content = Path(path), _read(Path(path))
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise ValueError(f"{file} is not a forecast that `paceline learn` wrote")
    weights = content.get("weights")
    if not isinstance(weights, dict) or not isinstance(content.get("shape"), dict):
        raise ValueError(f"{file} is damaged: it has no weights or no sizes; learn it again")
    try:
        return build(content.get("version"), content["shape"], weights)
    except ValueError as error:
        raise ValueError(f"{file} cannot be used: {error}; learn it again with this version") from None


def _read(file: Path) -> Any:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the model {file}: {error.strerror or error}") from None
    try:
        # weights_only refuses everything but tensors and plain values, so nothing in the file is ever executed.
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception:  # bytes that are no model may trip the reader in any way
        raise ValueError(f"{file} is not a forecast that `paceline learn` wrote, or it is damaged") from None
