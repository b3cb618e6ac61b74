"""Models that try to speak: each is scored beside the smoothed forecast on steps neither has seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from paceline.deep.filter import Filter
from paceline.deep.model import DeepModel
from paceline.deep.series import Past
from paceline.deep.state import pack, pack_model, unpack, unpack_model

TRIAL = 10
"""Steps a model is watched before it may speak."""
RECENT = 50
"""Steps it is judged by from then on."""


class Contender:
    """A model following the run, and how it did."""

    def __init__(self, model: DeepModel) -> None:
        self.filter = Filter(model)
        self._scores: deque[tuple[float, float]] = deque(maxlen=RECENT)

    @property
    def tried(self) -> bool:
        return len(self._scores) >= TRIAL

    @property
    def loss(self) -> float:
        """Its score over the smoothed forecast's on the recent steps: below 1 it wins."""
        own, plain = np.mean(self._scores, axis=0)
        return float(own / max(plain, 1e-300))

    def scored(self, own: float, plain: float) -> None:
        """Note its score of a step, and the smoothed forecast's."""
        self._scores.append((own, plain))

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": pack_model(self.filter.model),
            "states": pack(self.filter.states.numpy()),
            "summaries": pack(self.filter.summaries.numpy()),
            "scores": [list(pair) for pair in self._scores],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], past: Past | None) -> Contender:
        contender = cls(unpack_model(state["model"]))
        contender._scores.extend((float(own), float(plain)) for own, plain in state["scores"])
        contender.filter.states = torch.from_numpy(unpack(state["states"]))
        contender.filter.summaries = torch.from_numpy(unpack(state["summaries"]))
        if past is not None:
            contender.filter.look(past)
        return contender


def best(contenders: Sequence[Contender]) -> Contender | None:
    """The one that speaks; None where the smoothed forecast does."""
    winners = [contender for contender in contenders if contender.tried and contender.loss < 1]
    return min(winners, key=lambda contender: contender.loss, default=None)


def settled(contenders: Sequence[Contender]) -> list[Contender]:
    """Of an older and a newer model, the better one, once the newer has been tried."""
    if len(contenders) > 1 and all(contender.tried for contender in contenders):
        return [min(contenders, key=lambda contender: contender.loss)]
    return list(contenders)
