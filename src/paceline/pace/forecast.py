"""Forecasts: from what was observed, joint samples of the next step's seconds for all workers.

`Smoothed` is the one that `joint` and `auto` use. Others stand in plug-ins and are imported when their name is asked
for: ``Cutoff(forecast="deep")`` works without an import by the user, and only such a run loads torch for it.

Seconds are own compute for an equal share. A worker that a cut-off left behind is *censored*: it is only known to have
been slower than the cut-off. A forecast takes that as it is (draws or moments of "x given x > cut-off"); putting any
single number in its place, such as the cut-off itself, would make stragglers look harmless and undo the gain (P3).

From the draws follows how many whole shares a step should wait for: one that closes with the c-th arrival does c shares
in ``x_(c) + T_o`` seconds, with x_(c) the c-th smallest time and T_o the round's own cost (communication and update).
Waiting for everybody is c = n.

>>> make("smoothed").name
'smoothed'
>>> best_count(np.array([[1.0, 1.0, 1.0, 9.0]]))
3

Draws and moments beyond a bound are those of the normal distribution, for whole arrays. With ``Q(z) = P(Z > z)`` for a
standard normal Z, everything is done in ``log Q``, so a bound thirty deviations out is as good as one at the middle.
NumPy has no error function: ``log Q`` is tabulated once and read by linear interpolation (error under 1e-6).

>>> float(round(quantile(np.array([0.975]))[0], 4))
1.96
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.pace.plug_ins import Registry, complete
from paceline.records import StepRecord

Floats = NDArray[np.float64]

LOWEST, HIGHEST, STEP = -9.0, 37.0, 0.002
"""The table's range in deviations; beyond it lies less than 1e-18 on one side, and no floating point on the other."""


@lru_cache(maxsize=1)
def _table() -> tuple[Floats, Floats]:
    z = np.arange(LOWEST, HIGHEST, STEP)
    return z, np.array([math.log(0.5 * math.erfc(value / math.sqrt(2.0))) for value in z.tolist()])


def log_tail(z: ArrayLike) -> Floats:
    """Return ``log P(Z > z)``."""
    grid, tail = _table()
    z = np.asarray(z, dtype=np.float64)
    return np.asarray(np.where(z > grid[-1], _far_tail(np.maximum(z, grid[-1])), np.interp(z, grid, tail)))


def _far_tail(z: Floats) -> Floats:
    """Return the tail past the table by its first two terms, ``Q = phi(z) / z * (1 - 1 / z^2)``."""
    return np.asarray(-z * z / 2 - np.log(z * math.sqrt(2 * math.pi)) + np.log1p(-1 / (z * z)))


def quantile(p: ArrayLike) -> Floats:
    """Return ``Phi^-1(p)`` for p strictly between 0 and 1."""
    p = np.asarray(p, dtype=np.float64)
    if not np.all((p > 0) & (p < 1)):
        raise ValueError("a quantile is asked for probabilities strictly between 0 and 1")
    return -_beyond(np.log(p))


def _beyond(log_q: Floats) -> Floats:
    """Return the z with ``log P(Z > z) = log_q``."""
    grid, tail = _table()
    twice = -2 * np.minimum(log_q, tail[-1])
    far = np.sqrt(twice - np.log(2 * math.pi * twice))
    far += (_far_tail(far) + twice / 2) / far  # one step of Newton's
    return np.where(log_q < tail[-1], far, np.interp(-log_q, -tail, grid))


def truncated_draws(rng: np.random.Generator, mean: ArrayLike, sigma: ArrayLike, above: ArrayLike, rows: int) -> Floats:
    """Draw ``rows`` times x | x > above for every ``N(mean, sigma^2)``: the inverse of the tail at ``U * Q(a)``."""
    mean, sigma, above = (np.asarray(v, dtype=np.float64) for v in (mean, sigma, above))
    bound = (above - mean) / sigma
    uniform = 1.0 - rng.random((rows, *np.broadcast_shapes(bound.shape, mean.shape)))
    return np.maximum(mean + sigma * np.maximum(_beyond(log_tail(bound) + np.log(uniform)), bound), above)


def truncated_moments(mean: ArrayLike, sigma: ArrayLike, above: ArrayLike) -> tuple[Floats, Floats]:
    """Return mean and variance of x | x > above: the limit of infinitely many truncated draws.

    With ``a = (above - mean) / sigma`` and the hazard ``h = phi(a) / Q(a)``: ``mean + sigma * h`` and
    ``sigma^2 * (1 + a h - h^2)``.
    """
    mean, sigma, above = (np.asarray(v, dtype=np.float64) for v in (mean, sigma, above))
    a = (above - mean) / sigma
    hazard = np.exp(np.minimum(-a * a / 2 - math.log(2 * math.pi) / 2 - log_tail(a), 700.0))
    shrunk = 1 + a * hazard - hazard * hazard
    # Far out the difference cancels to noise; there the tail is nearly exponential with rate a.
    variance = np.where(a > 30, 1 / np.maximum(a, 1.0) ** 2, np.clip(shrunk, 0.0, 1.0))
    return np.maximum(mean + sigma * hazard, above), sigma * sigma * variance


Mask = NDArray[np.bool_]

FIRST_SPREAD = 0.1
"""Standard deviation over mean that a worker starts with."""
LEAST_SPREAD = 0.005
RESEARCH = "paceline.research"


@dataclass(frozen=True)
class Seen:
    """One step as the fleet saw it."""

    seconds: Floats
    """Each worker's seconds for an equal share; where ``late``, the cut-off it had not met."""
    late: Mask
    """Whether the worker was cut off: its time then is above ``seconds``, and nothing more is known."""

    @classmethod
    def whole(cls, seconds: ArrayLike) -> Seen:
        """Return a step that waited for everybody."""
        return cls.until(seconds, np.inf)

    @classmethod
    def until(cls, seconds: ArrayLike, cutoff_s: float) -> Seen:
        """Return a step that closed ``cutoff_s`` after its start; who was slower is late."""
        own = np.asarray(seconds, dtype=np.float64)
        if own.ndim != 1 or not len(own):
            raise ValueError("a step is seen as one number of seconds per worker, for at least one worker")
        if not np.all(np.isfinite(own) & (own > 0)):
            worker = int(np.argmin(np.isfinite(own) & (own > 0)))
            raise ValueError(f"worker {worker}: seconds are finite and above 0, not {own[worker]}")
        if not cutoff_s > 0:
            raise ValueError(f"a cut-off comes after the step's start, not at {cutoff_s} s")
        late = own > cutoff_s
        return cls(np.where(late, cutoff_s, own), late)


class Learner(Protocol):
    """A learner that makes a forecast from a run while that goes on."""

    def after(self, record: StepRecord) -> None:
        """Take note of an observed step. Quick: it is called between steps."""

    def close(self) -> None:
        """End what is under way and leave no files."""


@runtime_checkable
class MinimalForecast(Protocol):
    """The methods that a class must have to be a forecast. ``draw`` changes nothing but the generator it is given."""

    name: str

    def observe(self, seen: Seen) -> None:
        """Learn from a step."""

    def draw(self, rows: int, rng: np.random.Generator) -> Floats:
        """Draw joint samples of the next step's seconds: one row per sample, one column per worker.

        There are ``rows`` of them, or a single one from a forecast without any uncertainty. Raises ValueError before
        anything was observed.
        """

    def rearrange(self, sources: Sequence[int], seconds: Floats) -> None:
        """Follow a change of members: the new column i was column ``sources[i]``.

        Where that is -1 the column starts anew, from ``seconds[i]``. Nothing happens before anything was observed.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned, in plain JSON types."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another forecast of this kind had learned."""


class Forecast(MinimalForecast, Protocol):
    """A forecast that follows the steps seen so far. What stands here a class may leave out."""

    tells_apart: ClassVar[bool] = True
    """Columns belong to workers; otherwise they are only ranks."""

    @classmethod
    def from_text(cls, forecast: str) -> Forecast:
        """Return the forecast that ``forecast=`` stands for, settings after a colon included."""
        if forecast.partition(":")[2]:
            raise ValueError(f"unknown forecast {forecast!r}. Known: {_known()}")
        return cls()

    def look_ahead(self, steps: int) -> None:
        """Draw the step that comes this many steps after the last observed one; by default always the next."""
        return

    def learner(self) -> Learner | None:
        """Return what learns from the run while it goes on; None for a forecast that learns by itself."""
        return None


def same_workers(known: Floats | None, seen: Seen) -> None:
    """Raise ValueError for a step of another fleet: these forecasts know workers by their column."""
    if known is not None and known.shape[-1] != len(seen.seconds):
        raise ValueError(
            f"{len(seen.seconds)} workers in a step after steps of {known.shape[-1]}: rearrange the forecast first"
        )


def moved(columns: Floats, sources: Sequence[int], start: Floats | float) -> Floats:
    """Return the columns in their new positions; where the source is -1, ``start``.

    >>> moved(np.array([1.0, 2.0]), [1, -1], 9.0).tolist()
    [2.0, 9.0]
    """
    positions = np.asarray(sources, dtype=np.intp)
    return np.where(positions < 0, start, columns[..., positions])


def to_list(state: Floats | None) -> list[float] | None:
    return None if state is None else [float(value) for value in state]


def to_array(values: list[float] | None) -> Floats | None:
    return None if values is None else np.array(values, dtype=np.float64)


def known(state: Floats | None) -> Floats:
    """Return the state, once there is one; ValueError before."""
    if state is None:
        raise ValueError("nothing was observed yet: a forecast needs one step")
    return state


class Smoothed(Forecast):
    """An exponentially weighted normal distribution per worker, ``x_i ~ N(m_i, s_i^2)``, workers independent.

    With ``rate`` r the weight of the newest step:

        e = x - m,    m <- m + r e,    s^2 <- (1 - r) (s^2 + r e^2)

    A worker cut off at t enters with the mean and the variance of ``x | x > t`` under its own distribution, that is as
    the average over all truncated draws: one known to be slow keeps its belief, one believed fast moves beyond t.
    """

    name = "smoothed"

    def __init__(self, *, rate: float = 0.2) -> None:
        if not 0 < rate <= 1:
            raise ValueError(f"rate is the weight of the newest step, above 0 and at most 1, not {rate}")
        self.rate = rate
        self._mean: Floats | None = None
        self._variance = np.zeros(0)

    @property
    def mean_s(self) -> Floats:
        """Expected seconds of each worker."""
        return known(self._mean).copy()

    def observe(self, seen: Seen) -> None:
        same_workers(self._mean, seen)
        if self._mean is None:
            self._mean, self._variance = seen.seconds.copy(), (FIRST_SPREAD * seen.seconds) ** 2
        expected, spread_2 = seen.seconds, np.zeros_like(seen.seconds)
        if seen.late.any():
            beyond, unknown_2 = truncated_moments(self._mean, self._sigma(), seen.seconds)
            expected = np.where(seen.late, beyond, seen.seconds)
            spread_2 = np.where(seen.late, unknown_2, 0.0)
        error = expected - self._mean
        self._mean = self._mean + self.rate * error
        self._variance = (1 - self.rate) * (self._variance + self.rate * error**2) + self.rate * spread_2

    def draw(self, rows: int, rng: np.random.Generator) -> Floats:
        mean = known(self._mean)
        drawn = mean + self._sigma() * rng.standard_normal((rows, len(mean)))
        # Times are positive; a draw below a tenth of the mean is noise of a wide belief.
        return np.maximum(drawn, 0.1 * mean)

    def rearrange(self, sources: Sequence[int], seconds: Floats) -> None:
        if self._mean is not None:
            self._mean = moved(self._mean, sources, seconds)
            self._variance = moved(self._variance, sources, (FIRST_SPREAD * seconds) ** 2)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": to_list(self._mean), "variance": self._variance.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a smoothed forecast's state, or that of auto, which follows a smoothed forecast too."""
        state = state.get("smoothed", state)
        self._mean = to_array(state["mean"])
        self._variance = np.array(state["variance"], dtype=np.float64)

    def _sigma(self) -> Floats:
        return np.maximum(np.sqrt(self._variance), LEAST_SPREAD * known(self._mean))


def rates(ordered: Floats, *, overhead_s: float = 0.0) -> Floats:
    """Return shares per second when closing with the c-th arrival, ``c / (x_(c) + T_o)``; rows are sorted times."""
    return np.arange(1, ordered.shape[-1] + 1) / (ordered + overhead_s)


def best_count(samples: Floats, *, overhead_s: float = 0.0) -> int:
    """Return ``argmax_c mean_s c / (x^s_(c) + T_o)`` over joint samples, one per row; the larger count among equals.

    ``E[c / x]``, the expectation of the rate that P3 maximises (the mean outside is reconstructed), and not
    ``c / E[x]``: a forecast of one row, as Elfving's, makes them the same, and docs/research.md says where they differ.
    """
    gain = rates(np.sort(samples, axis=1), overhead_s=overhead_s).mean(axis=0)
    return best_count_of(gain)


def clairvoyant_counts(ordered: Floats, *, overhead_s: float = 0.0) -> NDArray[np.int64]:
    """Return the best count of each step by its true times; rows are sorted times."""
    gain = rates(ordered, overhead_s=overhead_s)
    return np.asarray(ordered.shape[1] - np.argmax(gain[:, ::-1], axis=1), dtype=np.int64)


def static_count(fraction: float, workers: int) -> int:
    """Return the nearest whole number of workers to a fraction of them, at least one."""
    if not 0 < fraction <= 1:
        raise ValueError(f"a static cut-off waits for a fraction of the workers, above 0 and at most 1, not {fraction}")
    return max(1, round(fraction * workers))


def best_static_count(ordered: Floats, *, overhead_s: float = 0.0) -> int:
    """Return the one count that would have done most over all steps, ``argmax_c sum c / sum (x_(c) + T_o)``."""
    return best_count_of(np.arange(1, ordered.shape[1] + 1) * len(ordered) / (ordered + overhead_s).sum(axis=0))


def best_count_of(throughput: Floats) -> int:
    """Return the count with the highest throughput; the larger one among equals."""
    return len(throughput) - int(np.argmax(throughput[::-1]))


_FORECASTS: Registry[type[Forecast]] = Registry()
Kind = TypeVar("Kind", bound=Callable[..., MinimalForecast])


def register(name: str, kind: Kind) -> Kind:
    """Let the name stand for ``kind()``, or for ``kind.from_text("name:settings")`` where the class has that method."""
    complete(kind, Forecast)
    known: Any = kind
    _FORECASTS.add(name, known)
    return kind


def make(forecast: str | MinimalForecast) -> Forecast:
    """Return a forecast from its name or from itself."""
    if isinstance(forecast, MinimalForecast) and not isinstance(forecast, type):
        complete(type(forecast), Forecast)
        own: Any = forecast
        return own  # type: ignore[no-any-return]
    if not isinstance(forecast, str):
        known = _known()
        raise ValueError(f"forecast must be a name or a forecast such as Smoothed(), not {forecast!r}. Known: {known}")
    kind = _FORECASTS.get(forecast.strip().partition(":")[0])
    if kind is None:
        raise ValueError(f"unknown forecast {forecast!r}. Known: {_known()}")
    return kind.from_text(forecast)


def _known() -> str:
    return ", ".join(_FORECASTS.usages())


_FORECASTS.plug_in("auto", f"{RESEARCH}.auto_forecast")
_FORECASTS.plug_in("general", f"{RESEARCH}.general")
_FORECASTS.plug_in("last", f"{RESEARCH}.forecasts")
register("smoothed", Smoothed)
_FORECASTS.plug_in("elfving", f"{RESEARCH}.forecasts")
_FORECASTS.plug_in("window", f"{RESEARCH}.forecasts")
_FORECASTS.plug_in(
    "deep", f"{RESEARCH}.deep.deep_forecast", usage="deep, deep:FILE (a model written by `paceline learn`)"
)
