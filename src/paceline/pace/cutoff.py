"""P3's cut-off: equal shares, and a round that closes with the first c whole ones; late work is thrown away.

A step that closes with the c-th arrival does c shares in ``x_(c) + T_o`` seconds, with x_(c) the c-th smallest time and
T_o the round's own cost (communication and update). Waiting for everybody is c = n.

>>> best_count(np.array([[1.0, 1.0, 1.0, 9.0]]))
3
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.pace.base import Ask
from paceline.pace.equal import Equal
from paceline.pace.forecast import Forecast, make
from paceline.pace.forecast.base import Floats
from paceline.pace.reading import Followed, column
from paceline.records import Plan, StepRecord

DRAWS = 32
"""Joint samples a decision is made from."""
ROUND_RATE = 0.1
"""Least weight of the newest round in the running mean of T_o; more while there are few."""


def rates(ordered: Floats, *, overhead_s: float = 0.0) -> Floats:
    """Shares a second when closing with the c-th arrival, ``c / (x_(c) + T_o)``; rows are sorted times."""
    return np.arange(1, ordered.shape[-1] + 1) / (ordered + overhead_s)


def best_count(samples: Floats, *, overhead_s: float = 0.0) -> int:
    """``argmax_c mean_s c / (x^s_(c) + T_o)`` over joint samples, a row each; the larger count among equals."""
    gain = rates(np.sort(samples, axis=1), overhead_s=overhead_s).mean(axis=0)
    return best_count_of(gain)


def clairvoyant_counts(ordered: Floats, *, overhead_s: float = 0.0) -> NDArray[np.int64]:
    """The count for each step of somebody who knows its times beforehand; rows are sorted times."""
    gain = rates(ordered, overhead_s=overhead_s)
    return np.asarray(ordered.shape[1] - np.argmax(gain[:, ::-1], axis=1), dtype=np.int64)


def static_count(fraction: float, workers: int) -> int:
    """The nearest whole number of workers to a fraction of them, at least one."""
    if not 0 < fraction <= 1:
        raise ValueError(f"a static cut-off waits for a fraction of the workers, above 0 and at most 1, not {fraction}")
    return max(1, round(fraction * workers))


def best_static_count(ordered: Floats, *, overhead_s: float = 0.0) -> int:
    """The one count that would have done most over all steps, ``argmax_c sum c / sum (x_(c) + T_o)``: hindsight."""
    return best_count_of(np.arange(1, ordered.shape[1] + 1) * len(ordered) / (ordered + overhead_s).sum(axis=0))


def best_count_of(throughput: Floats) -> int:
    """The count with the highest throughput; the larger one among equals."""
    return len(throughput) - int(np.argmax(throughput[::-1]))


class Cutoff:
    """Equal shares; the round closes with ``c = argmax_c mean_s c / (x^s_(c) + T_o)`` whole ones (P3).

    ``x`` are joint samples of the next step's seconds from ``forecast``: a name (see `paceline.pace.forecast.make`) or
    a forecast. ``T_o``, the round's own seconds, is ``overhead_s`` or, when that is None, the running mean of the
    records' ``round_s``. The step before anything was seen waits for everybody, and so does the last step of an epoch.
    ``static`` (0.9, say) waits for that fraction of the workers in every step, for comparison, and forecasts nothing.
    ``draws`` is how many joint samples a decision is made from, ``seed`` that of drawing them.

    A worker whose share did not count is *censored*: known only to be slower than the time it had spent when the round
    closed.
    """

    name = "cutoff"
    """As in ``pace=``, the log and checkpoints."""
    deadlines = True
    """Its plans may close a round without everybody."""

    def __init__(
        self,
        forecast: str | Forecast = "smoothed",
        *,
        static: float | None = None,
        overhead_s: float | None = None,
        draws: int = DRAWS,
        seed: int = 0,
    ) -> None:
        if draws < 1:
            raise ValueError(f"a decision needs at least one draw, not {draws}")
        if overhead_s is not None and not (overhead_s >= 0 and np.isfinite(overhead_s)):
            raise ValueError(f"overhead_s is the round's own seconds, finite and at least 0, not {overhead_s}")
        if static is not None:
            static_count(static, 1)
        self.static, self.overhead_s, self.draws, self.seed = static, overhead_s, draws, seed
        self._equal = Equal()
        self._followed = Followed(make(forecast))
        self._share = 0.0
        self._round_s, self._rounds = 0.0, 0
        self._generation: int | None = None

    @property
    def forecast(self) -> Forecast:
        """What foretells the workers' times."""
        return self._followed.forecast

    def check(self, workers: int) -> None:
        """Raise ValueError when the settings make no sense for so many workers."""
        self._equal.check(workers)

    def observe(self, record: StepRecord) -> None:
        """Learn from a step: who was how fast, and who was late."""
        self._equal.observe(record)
        if self._generation in (None, record.generation):  # the first round of new members may hold their forming
            self._rounds += 1
            rate = max(ROUND_RATE, 1 / self._rounds)
            self._round_s += rate * (float(column((record.round_s,), 1)[0]) - self._round_s)
        self._generation = record.generation
        if self.static is None:
            self._follow(record)

    def _follow(self, record: StepRecord) -> None:
        """Seconds for the equal share of the first step; who did not count is late, who sat out says nothing, nor does
        who had done nothing when a step without a cut-off lost another worker."""
        count = len(record.workers)
        planned, samples, seconds, unfinished = (
            column(values, count) for values in (record.planned, record.samples, record.seconds, record.unfinished_s)
        )
        counted = (samples > 0) & (seconds > 0)
        closed = float(np.max(seconds, where=counted, initial=0.0))
        cut = (planned > 0) & (record.wait_for is not None or record.deadline_s is not None)
        per_sample = np.divide(seconds, samples, out=np.zeros(count), where=counted)
        beyond = np.divide(np.maximum(seconds + unfinished, closed), planned, out=np.zeros(count), where=cut)
        self._share = self._share or float(planned.mean())
        self._followed.observe(record.workers, self._share * np.where(counted, per_sample, beyond), ~counted)

    def plan(self, ask: Ask) -> Plan:
        """Equal shares, and how many whole ones the round waits for."""
        plan = self._equal.plan(ask)
        count = self.count(ask, max(plan.samples))
        return plan if count is None or ask.last else replace(plan, wait_for=count)

    def count(self, ask: Ask, share: int) -> int | None:
        """How many workers a step of ``share`` samples each waits for; None for everybody."""
        workers = len(ask.workers)
        if self.static is not None:
            count = static_count(self.static, workers)
        else:
            rng = np.random.default_rng((self.seed, ask.step))
            drawn = self._followed.draws(ask.workers, self.draws, rng)
            if drawn is None or not self._share or not share:
                return None
            overhead_s = self._round_s if self.overhead_s is None else self.overhead_s
            count = best_count(drawn * (share / self._share), overhead_s=overhead_s)
        return count if count < workers else None

    def state_dict(self) -> dict[str, Any]:
        """What it has learned, as plain data."""
        return {
            "equal": self._equal.state_dict(),
            "followed": self._followed.state_dict(),
            "share": self._share,
            "round_s": self._round_s,
            "rounds": self._rounds,
            "generation": self._generation,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Know what another pacer of this kind knew."""
        self._equal.load_state_dict(state["equal"])
        self._followed.load_state_dict(state["followed"])
        self._share, self._round_s, self._rounds = float(state["share"]), float(state["round_s"]), int(state["rounds"])
        self._generation = state.get("generation")

    def __repr__(self) -> str:
        if self.static is not None:
            return f"Cutoff(static={self.static})"
        return f"Cutoff({self.forecast.name!r}, overhead_s={self.overhead_s}, draws={self.draws}, seed={self.seed})"
