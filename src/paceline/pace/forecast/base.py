"""What a forecast is: from what was observed, joint samples of the next step's seconds for all workers.

Seconds are own compute for an equal share. A worker that a cut-off left behind is *censored*: it is only known to have
been slower than the cut-off. A forecast takes that as it is (draws or moments of "x given x > cut-off"); putting any
single number in its place, such as the cut-off itself, would make stragglers look harmless and undo the gain (P3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Seen:
    """One step as the fleet saw it."""

    seconds: Floats
    """Each worker's seconds for an equal share; where ``late``, the cut-off it had not met."""
    late: Mask
    """True where the worker was cut off: its time is above ``seconds``, and nothing more is known."""

    @classmethod
    def whole(cls, seconds: ArrayLike) -> Seen:
        """A step that waited for everybody."""
        return cls.until(seconds, np.inf)

    @classmethod
    def until(cls, seconds: ArrayLike, cutoff_s: float) -> Seen:
        """A step that closed ``cutoff_s`` after its start: who was slower is known only to have been slower."""
        own = np.asarray(seconds, dtype=np.float64)
        if own.ndim != 1 or not len(own):
            raise ValueError("a step is seen as one number of seconds a worker, for at least one worker")
        if not np.all(np.isfinite(own) & (own > 0)):
            worker = int(np.argmin(np.isfinite(own) & (own > 0)))
            raise ValueError(f"worker {worker}: seconds are finite and above 0, not {own[worker]}")
        if not cutoff_s > 0:
            raise ValueError(f"a cut-off comes after the step's start, not at {cutoff_s} s")
        late = own > cutoff_s
        return cls(np.where(late, cutoff_s, own), late)


@runtime_checkable
class Forecast(Protocol):
    """Follows the steps seen so far. ``draw`` changes nothing but the generator it is given."""

    name: str

    def observe(self, seen: Seen) -> None: ...

    def draw(self, rows: int, rng: np.random.Generator) -> Floats:
        """Joint samples of the next step's seconds, a row each, a column a worker: ``rows`` of them, or a single one
        from a forecast that is sure of itself. Raises ValueError before anything was observed."""

    def rearrange(self, sources: Sequence[int], seconds: Floats) -> None:
        """The members changed: the new column i was column ``sources[i]``; where that is -1 it starts anew, from
        ``seconds[i]``. Nothing happens before anything was observed."""

    def state_dict(self) -> dict[str, Any]:
        """What was learned, in plain JSON types."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def same_workers(known: Floats | None, seen: Seen) -> None:
    """Refuse a step of another fleet: these forecasts know workers by their column."""
    if known is not None and known.shape[-1] != len(seen.seconds):
        raise ValueError(
            f"{len(seen.seconds)} workers in a step after steps of {known.shape[-1]}: rearrange the forecast first"
        )


def moved(columns: Floats, sources: Sequence[int], start: Floats | float) -> Floats:
    """Columns in their new places; where the source is -1, ``start``.

    >>> moved(np.array([1.0, 2.0]), [1, -1], 9.0).tolist()
    [2.0, 9.0]
    """
    places = np.asarray(sources, dtype=np.intp)
    return np.where(places < 0, start, columns[..., places])


def to_list(state: Floats | None) -> list[float] | None:
    return None if state is None else [float(value) for value in state]


def to_array(values: list[float] | None) -> Floats | None:
    return None if values is None else np.array(values, dtype=np.float64)


def known(state: Floats | None) -> Floats:
    """The state, once there is one."""
    if state is None:
        raise ValueError("nothing was observed yet: a forecast needs one step")
    return state
