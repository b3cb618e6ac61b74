"""P3's cut-off: equal shares, and a round that closes with the first c whole ones; late work is thrown away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.pace.fixed import Equal
from paceline.pace.forecast import Forecast, Learner, Smoothed, best_count, make, static_count
from paceline.pace.forecasting import DRAWS, Followed, column, steps_ahead
from paceline.pace.pacer import Ask, Pacer, Simulated, Traits, register
from paceline.records import Plan, StepRecord
from paceline.research.auto_forecast import AutoForecast
from paceline.research.forecasts import LastValue, OrderStatistics, Window

ROUND_RATE = 0.1
"""Least weight of the newest round in the running mean of T_o; more while there are few."""


@register
class Cutoff(Pacer):
    """Equal shares; the round closes with ``c = argmax_c mean_s c / (x^s_(c) + T_o)`` whole ones (P3).

    That is the greatest expected rate, ``E[c / x]``, and not ``c / E[x]``, the rate at the expected time.

    ``x`` are joint samples of the next step's seconds from ``forecast``: a name (see `paceline.pace.forecast.make`) or
    a forecast. ``T_o``, the round's own seconds, is ``overhead_s`` or, when that is None, the running mean of the
    records' ``round_s``. The step before anything was seen waits for everybody, and so does the last step of an epoch.
    ``static`` (0.9, say) waits for that fraction of the workers in every step, for comparison, and forecasts nothing.
    ``draws`` is how many joint samples a decision is made from, ``seed`` that of drawing them.

    A plan is made a step ahead. The count is decided again by the leader while the step runs, from every record there
    is (`recount`); it decides when the round closes, and nothing else.

    ``keep_batch`` deals more in later steps to make up for shares that did not count. False is P3's own rule: every
    step is dealt one global batch, the gradient is the mean over the shares that came, and no later step is larger. An
    epoch then has more steps, since every sample still counts once in it.

    A worker whose share did not count is *censored*: known only to be slower than the time it had spent when the round
    closed.
    """

    name = "cutoff"
    """Name in ``pace=``, the log and checkpoints."""
    deadlines = True
    """Its plans may close a round without everybody."""
    traits = Traits(if_cut="joint", played="arrivals", shown=False)
    """Facts of it for reports and the simulator."""

    def __init__(
        self,
        forecast: str | Forecast = "auto",
        *,
        static: float | None = None,
        overhead_s: float | None = None,
        draws: int = DRAWS,
        seed: int = 0,
        keep_batch: bool = True,
    ) -> None:
        if draws < 1:
            raise ValueError(f"a decision needs at least one draw, not {draws}")
        if overhead_s is not None and not (overhead_s >= 0 and np.isfinite(overhead_s)):
            raise ValueError(f"overhead_s is the round's own seconds, finite and at least 0, not {overhead_s}")
        if static is not None:
            static_count(static, 1)
        self.static, self.overhead_s, self.draws, self.seed = static, overhead_s, draws, seed
        self.keep_batch = keep_batch
        self._equal = Equal()
        self._followed = Followed(make(forecast))
        self._share = 0.0
        self._round_s, self._rounds = 0.0, 0
        self._generation: int | None = None
        self._step = -1

    @classmethod
    def simulated(cls, *, seed: int, forecast: Forecast | None = None) -> Sequence[Simulated]:
        """Return the simulator's rows: one per forecast, the default (auto) among them."""
        tried: list[Forecast] = [OrderStatistics(), LastValue(), Smoothed(), Window(seed=seed), AutoForecast()]
        tried += [] if forecast is None else [forecast]
        return [Simulated(one.name, cls(one, seed=seed), as_chosen=isinstance(one, AutoForecast)) for one in tried]

    @property
    def forecast(self) -> Forecast:
        """What foretells the workers' times."""
        return self._followed.forecast

    def learner(self) -> Learner | None:
        """Return what learns the forecast from the run, where the forecast wants that."""
        return self.forecast.learner()

    def check(self, workers: int) -> None:
        """Raise ValueError when the settings make no sense for this number of workers."""
        self._equal.check(workers)

    def observe(self, record: StepRecord) -> None:
        """Learn from a step: who was how fast, and who was late."""
        self._equal.observe(record)
        if self._generation in (None, record.generation):  # the first round of new members may hold their forming
            self._rounds += 1
            rate = max(ROUND_RATE, 1 / self._rounds)
            self._round_s += rate * (float(column((record.round_s,), 1)[0]) - self._round_s)
        self._generation, self._step = record.generation, record.step
        if self.static is None:
            self._follow(record)

    def _follow(self, record: StepRecord) -> None:
        """Give the forecast seconds for the equal share of the first step; who did not count is late.

        Nothing is learned of who sat out, nor of who had done nothing when a step without a cut-off lost another
        worker.
        """
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
        seconds = self._share * np.where(counted, per_sample, beyond)
        self._followed.observe(record.workers, seconds, ~counted, sizes=record.micro_size)

    def plan(self, ask: Ask) -> Plan:
        """Return equal shares, and how many complete ones the round waits for."""
        plan = self._equal.plan(ask)
        count = self.count(ask, max(plan.samples))
        return plan if count is None or ask.last else replace(plan, wait_for=count)

    def recount(self, ask: Ask, share: int) -> int | None:
        """Return how many complete shares close the open step, by every record there is; None: as planned."""
        return None if self.static is not None else self.count(ask, share)

    def count(self, ask: Ask, share: int) -> int | None:
        """Return how many workers a step of ``share`` samples each waits for; None for everybody, whatever comes.

        That is where nothing is known yet, for one alone, and with ``static``. A forecast's count may be all of them:
        the leader may find a smaller one while the step runs.
        """
        workers = len(ask.workers)
        if self.static is not None:
            count = static_count(self.static, workers)
            return count if count < workers else None
        rng = np.random.default_rng((self.seed, ask.step))
        drawn = self._followed.draws(ask.workers, self.draws, rng, ahead=steps_ahead(ask.step, self._step))
        if drawn is None or not self._share or not share or workers == 1:
            return None
        overhead_s = self._round_s if self.overhead_s is None else self.overhead_s
        return best_count(drawn * (share / self._share), overhead_s=overhead_s)

    def state_dict(self) -> dict[str, Any]:
        """Return what it has learned, as plain data."""
        return {
            "equal": self._equal.state_dict(),
            "followed": self._followed.state_dict(),
            "share": self._share,
            "round_s": self._round_s,
            "rounds": self._rounds,
            "generation": self._generation,
            "step": self._step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another pacer of this kind had learned."""
        self._equal.load_state_dict(state["equal"])
        self._followed.load_state_dict(state["followed"])
        self._share, self._round_s, self._rounds = float(state["share"]), float(state["round_s"]), int(state["rounds"])
        self._generation, self._step = state.get("generation"), int(state.get("step", -1))

    def __repr__(self) -> str:
        kept = "" if self.keep_batch else ", keep_batch=False"
        if self.static is not None:
            return f"Cutoff(static={self.static}{kept})"
        settings = f"overhead_s={self.overhead_s}, draws={self.draws}, seed={self.seed}{kept}"
        return f"Cutoff({self.forecast.name!r}, {settings})"
