"""Copies of this worker's state, promised in a round to workers that are far behind, and sent between two steps."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch

from paceline.deadline.proxy import give, peer_to_copy
from paceline.loop.step_state import Turn
from paceline.transport import Transport

GIVING_S = 30.0


class Copies:
    """Who was promised one, and those on their way."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._asked: dict[int, int] = {}
        """By rank: after which step it was promised."""
        self._giving: list[threading.Thread] = []

    def note(self, turn: Turn) -> None:
        """Who asked for a copy in this turn's round, if this worker is to give it."""
        if turn.header is not None and peer_to_copy(turn.header) == self._transport.rank:
            self._asked |= dict.fromkeys(np.flatnonzero(turn.header.column("wants_state")).tolist(), turn.index)

    def give(self, pack: Callable[[], torch.Tensor]) -> None:
        """At the end of a step, the user's own code after it included: send the state to those who were promised it."""
        if self._asked:
            self._answer(pack())

    def decline(self) -> None:
        """This worker has no state that fits: those who asked go on by themselves, or ask again."""
        self._answer(torch.empty(0, dtype=torch.uint8))

    def forget(self) -> None:
        """Members changed: who waits for a copy was told, and asks again."""
        self._asked = {}

    def join(self) -> None:
        """Until those on their way have come."""
        for thread in self._giving:
            thread.join(timeout=GIVING_S)

    def _answer(self, data: torch.Tensor) -> None:
        for rank, index in self._asked.items():
            args = (self._transport, data, rank, index)
            self._giving.append(threading.Thread(target=give, args=args, name="paceline-give", daemon=True))
            self._giving[-1].start()
        self._asked = {}
