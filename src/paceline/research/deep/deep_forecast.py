"""Deep: P3's learned forecast, which speaks only while it beats the one that needs no training.

>>> forecast = Deep()
>>> forecast.observe(Seen.whole([1.0, 2.0]))
>>> forecast.speaking
'general'
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.pace.forecast import (
    FIRST_SPREAD,
    LEAST_SPREAD,
    Floats,
    Forecast,
    Learner,
    Mask,
    Seen,
    Smoothed,
    register,
    truncated_draws,
)
from paceline.research.auto_forecast import JUDGED_BY, RECENT, TRIAL, AutoForecast, score
from paceline.research.deep.inference import ParticleFilter
from paceline.research.deep.model import DeepModel, Past, Shape, load_model, pack, pack_model, unpack, unpack_model

logger = logging.getLogger("paceline.forecast")

BACKLOG = 32
"""Steps kept to be followed when a draw is asked for; older ones are taken in without a model."""
KEPT = 2000
"""Steps kept to learn from."""
DEPTH = Shape().memory + 2 * Shape().lag
"""Steps of past kept before a model says how many it reads."""


class Candidate:
    """A model on trial: it follows the run, and is scored beside the plain forecast on steps neither has seen."""

    def __init__(self, model: DeepModel) -> None:
        self.filter = ParticleFilter(model)
        self._scores: deque[tuple[float, float]] = deque(maxlen=RECENT)

    @property
    def tried(self) -> bool:
        return len(self._scores) >= TRIAL

    @property
    def loss(self) -> float:
        """Its score over the other forecast's on the recent steps: below 1 it wins."""
        own, plain = np.mean(self._scores, axis=0)
        return float(own / max(plain, 1e-300))

    def scored(self, own: float, plain: float) -> None:
        """Note its score of a step, and the other forecast's."""
        self._scores.append((own, plain))

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": pack_model(self.filter.model),
            "states": pack(self.filter.states.numpy()),
            "summaries": pack(self.filter.summaries.numpy()),
            "scores": [list(pair) for pair in self._scores],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], past: Past | None) -> Candidate:
        candidate = cls(unpack_model(state["model"]))
        candidate._scores.extend((float(own), float(plain)) for own, plain in state["scores"])
        candidate.filter.states = torch.from_numpy(unpack(state["states"]))
        candidate.filter.summaries = torch.from_numpy(unpack(state["summaries"]))
        if past is not None:
            candidate.filter.read_windows(past)
        return candidate


def best(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the candidate whose forecasts are used; None where the other forecast's are."""
    winners = [candidate for candidate in candidates if candidate.tried and candidate.loss < 1]
    return min(winners, key=lambda candidate: candidate.loss, default=None)


def settled(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the better of an older and a newer model, once the newer has been tried."""
    if len(candidates) > 1 and all(candidate.tried for candidate in candidates):
        return [min(candidates, key=lambda candidate: candidate.loss)]
    return list(candidates)


class Deep(Forecast):
    """P3's deep Markov model, once there is one that earns its keep.

    It follows every step with `AutoForecast` and, when given a ``model`` (a `DeepModel`, or the path of a file written
    by ``paceline learn``) or when one is `adopt`-ed, with that too. `score` judges both on each step before they see
    it; the model speaks while its mean score over the last 50 steps is the better one, after a trial of 10, and a
    change is logged. So a model is judged only by steps that came after it was made.

    A model fits any number of workers. When a step comes with more columns than before, the new ones are new workers;
    with fewer, the last ones have left; call `rearrange` first when it was otherwise.

    ``always`` lets the model speak win or lose, to see what it would do.

    ``learns`` says whether models trained in the background on this run are wanted: `series` is kept for them. By
    default it is so when no model was given.
    """

    name = "deep"

    def __init__(
        self,
        model: DeepModel | str | Path | None = None,
        *,
        always: bool = False,
        learns: bool | None = None,
        seed: int = 0,
    ) -> None:
        self.always = always
        self.learns = model is None if learns is None else learns
        self._rng = np.random.default_rng(seed)
        self._plain, self._smoothed = AutoForecast(), Smoothed()
        self._spoke = False
        self._past: Past | None = None
        self._stale = False
        self._candidates: list[Candidate] = []
        self._backlog: deque[Seen] = deque()
        self._segments: list[list[Seen]] = []
        if model is not None:
            self.adopt(model if isinstance(model, DeepModel) else load_model(model))

    @classmethod
    def from_text(cls, forecast: str) -> Deep:
        """Return the forecast for ``forecast=`` as it is written: ``deep``, or ``deep:FILE`` with a model."""
        return cls(model=forecast.strip().partition(":")[2] or None)

    @property
    def speaking(self) -> str:
        """Name of the forecast that answers `draw` at present: ``"deep"``, ``"general"`` or ``"smoothed"``."""
        self._catch_up()
        return self._plain.speaking if self._in_use() is None else "deep"

    def learner(self) -> Learner | None:
        """Return what trains models on this run in the background, where they are wanted."""
        from paceline.research.deep.background import BackgroundLearner  # which trains this forecast

        return BackgroundLearner(forecast=self) if self.learns else None

    def adopt(self, model: DeepModel) -> None:
        """Try a model. One that speaks goes on until the new one has done better over its trial."""
        self._catch_up()
        present = self._in_use()
        newcomer = Candidate(model)
        if self._past is not None:
            newcomer.filter.catch_up(self._past)
        self._candidates = [newcomer] if present is None else [present, newcomer]

    def observe(self, seen: Seen) -> None:
        """Take note of a step. The work is left to the next `draw`, which happens while a step computes."""
        if (known := self._workers()) is not None and known != len(seen.seconds):
            self.rearrange([i if i < known else -1 for i in range(len(seen.seconds))])
        self._record(seen)
        self._backlog.append(seen)
        if len(self._backlog) > BACKLOG:
            self._skip(self._backlog.popleft())

    def rearrange(self, sources: Sequence[int], seconds: Floats | None = None) -> None:
        """Follow a change of members: the new column i was column ``sources[i]``, or is a new worker where that is -1.

        A new worker is taken to have always been at ``seconds[i]`` or, without that, for a typical one until it is
        seen.
        """
        self._catch_up()
        if self._past is None:
            return
        wrong = [source for source in sources if not -1 <= source < self._past.workers]
        if wrong or not len(sources):
            raise ValueError(f"columns are known by their place among {self._past.workers}, or -1, not {wrong}")
        self._past.rearrange(sources, None if seconds is None else np.log(seconds))
        typical = np.full(len(sources), np.exp(np.median(self._past.rows[-1])))
        self._plain.rearrange(sources, typical if seconds is None else seconds)
        if seconds is None:
            self._smoothed.load_state_dict(_rearranged(self._smoothed.state_dict(), sources))
        else:
            self._smoothed.rearrange(sources, seconds)
        for candidate in self._candidates:
            candidate.filter.read_windows(self._past)
        self._segments.append([])

    def draw(self, rows: int, rng: np.random.Generator) -> Floats:
        self._catch_up()
        in_use = self._in_use()
        if in_use is None or self._past is None:
            return self._plain.draw(rows, rng)
        return in_use.filter.draw(rows, rng)

    def series(self) -> list[tuple[Floats, Mask]]:
        """Return the steps to learn from, up to the last 2,000: seconds and who was late, per set of workers."""
        return [
            (np.stack([seen.seconds for seen in steps]), np.stack([seen.late for seen in steps]))
            for steps in self._segments
            if steps
        ]

    def state_dict(self) -> dict[str, Any]:
        self._catch_up()
        past = None
        if self._past is not None:
            past = {name: pack(getattr(self._past, name)) for name in ("rows", "hidden", "fresh")}
        return {
            "plain": self._plain.state_dict(),
            "smoothed": self._smoothed.state_dict(),
            "past": past,
            "contenders": [candidate.state_dict() for candidate in self._candidates],
            "draws": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._backlog.clear()
        self._segments.clear()
        self._smoothed.load_state_dict(state["smoothed"])
        self._plain.load_state_dict(state.get("plain", state["smoothed"]))
        self._rng.bit_generator.state = state["draws"]
        self._past = None
        if state["past"] is not None:
            rows, hidden, fresh = (unpack(state["past"][name]) for name in ("rows", "hidden", "fresh"))
            self._past = Past(rows.shape[1], len(rows))
            self._past.rows, self._past.hidden, self._past.fresh = rows, hidden, fresh
        own = [Candidate(candidate.filter.model) for candidate in self._candidates]
        # A run may go on with a model that its first part did not have.
        self._stale = self._past is not None and not state["contenders"]
        self._candidates = [Candidate.from_state(part, self._past) for part in state["contenders"]] or own

    def _in_use(self) -> Candidate | None:
        if self.always and self._candidates:
            return self._candidates[-1]
        return best(self._candidates)

    def _workers(self) -> int | None:
        if self._backlog:
            return len(self._backlog[-1].seconds)
        return None if self._past is None else self._past.workers

    def _record(self, seen: Seen) -> None:
        if not self.learns:
            return
        if not self._segments:
            self._segments.append([])
        self._segments[-1].append(seen)
        if sum(map(len, self._segments)) > KEPT:
            self._segments[0].pop(0)
            self._segments = [steps for steps in self._segments if steps]

    def _catch_up(self) -> None:
        if self._stale and self._past is not None:
            for candidate in self._candidates:
                candidate.filter.catch_up(self._past)
            self._stale = False
        while self._backlog:
            self._follow(self._backlog.popleft())

    def _follow(self, seen: Seen) -> None:
        """Score everybody on the step, then take it in."""
        past, logs = self._with_columns(seen)
        in_use = self._in_use()
        row = self._imputed(seen) if in_use is None else in_use.filter.impute(logs, seen.late, self._rng)
        self._judge(seen)
        for candidate in self._candidates:
            candidate.filter.update(row, seen.late, self._rng)
        self._plain.observe(seen)
        self._smoothed.observe(seen)
        past.push(row, seen.late)
        for candidate in self._candidates:
            candidate.filter.read_windows(past)
        self._candidates = settled(self._candidates)
        self._log_a_change()

    def _skip(self, seen: Seen) -> None:
        """Take a step in without the models, which read the past when they are needed again."""
        past, _ = self._with_columns(seen)
        past.push(self._imputed(seen), seen.late)
        self._plain.observe(seen)
        self._smoothed.observe(seen)
        self._stale = True

    def _with_columns(self, seen: Seen) -> tuple[Past, Floats]:
        """Return the past, in which every worker of the step has a column, and the step's log seconds."""
        logs, begins = np.log(seen.seconds), self._past is None
        past = self._past = self._past or Past(len(logs), DEPTH)
        if past.fresh.any():
            past.welcome(logs, seen.late)
            for candidate in self._candidates:
                candidate.filter.catch_up(past) if begins else candidate.filter.read_windows(past)
        return past, logs

    def _judge(self, seen: Seen) -> None:
        """Score every model beside the plain forecast; not where a model speaks whatever its score."""
        if self._candidates and self._plain.steps and not self.always:
            plain = score(self._plain.draw(JUDGED_BY, self._rng), seen)
            for candidate in self._candidates:
                candidate.scored(score(candidate.filter.draw(JUDGED_BY, self._rng), seen), plain)

    def _log_a_change(self) -> None:
        in_use = self._in_use()
        if (in_use is not None) == self._spoke:
            return
        self._spoke = in_use is not None
        tried = [candidate for candidate in self._candidates if candidate.tried]
        error = "".join(f"; the model's error is {each.loss:.2f} of the other's" for each in tried[-1:])
        who = self._plain.speaking if in_use is None else self.name
        logger.info("step %d: forecasts are %s's now%s", self._plain.steps, who, error)

    def _imputed(self, seen: Seen) -> Floats:
        """Return the step's log seconds, with draws of x given x > cut-off from smoothed for those cut off."""
        logs = np.log(seen.seconds)
        if not seen.late.any():
            return logs
        assert self._past is not None
        mean, spread = self._past.level(len(self._past.rows)), np.full(len(logs), FIRST_SPREAD)
        if (believed := self._smoothed.state_dict())["mean"] is not None:
            seconds = np.array(believed["mean"])
            mean, spread = np.log(seconds), np.maximum(np.sqrt(believed["variance"]) / seconds, LEAST_SPREAD)
        drawn = truncated_draws(self._rng, mean, spread, logs, 1)[0]
        return np.where(seen.late, drawn, logs)


def _rearranged(smoothed: Mapping[str, Any], sources: Sequence[int]) -> dict[str, Any]:
    """Return the smoothed forecast's state for the new columns; a new worker is a typical one."""
    if smoothed["mean"] is None:
        return dict(smoothed)
    mean, variance = np.array(smoothed["mean"]), np.array(smoothed["variance"])
    columns = np.asarray(sources, dtype=np.int64)
    new, typical = columns < 0, float(np.median(mean))
    wide = float(np.median(variance)) + float(np.var(mean))
    return {
        **smoothed,
        "mean": np.where(new, typical, mean[columns]).tolist(),
        "variance": np.where(new, wide, variance[columns]).tolist(),
    }


register(Deep.name, Deep)
