"""Models on trial: each is scored beside the forecast that needs no model on steps neither has seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from paceline.deep.model import DeepModel
from paceline.deep.particle_filter import ParticleFilter
from paceline.deep.past import Past
from paceline.deep.serialize import pack, pack_model, unpack, unpack_model
from paceline.pace.forecast.auto import RECENT, TRIAL


class Candidate:
    """A model that follows the run, and how well it foretold the steps."""

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
    """The one whose forecasts are used; None where the other forecast's are."""
    winners = [candidate for candidate in candidates if candidate.tried and candidate.loss < 1]
    return min(winners, key=lambda candidate: candidate.loss, default=None)


def settled(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Of an older and a newer model, the better one, once the newer has been tried."""
    if len(candidates) > 1 and all(candidate.tried for candidate in candidates):
        return [min(candidates, key=lambda candidate: candidate.loss)]
    return list(candidates)
