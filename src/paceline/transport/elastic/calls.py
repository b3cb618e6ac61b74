"""How far a worker is with its calls, and what becomes of a call that ended on some workers and not on others.

Calls of one lane are made one after another, the same on every worker. When a generation breaks off, a call may have
ended here and not there, but only the last one: so counts differ by one at most, and a worker that has the result
hands it over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline import concurrency
from paceline.errors import FleetError
from paceline.roster.calls import CALLS, ROUNDS
from paceline.transport.calls import CallSequences


@dataclass
class Lane:
    """One sequence of calls of this worker."""

    entered: int = 0
    finished: int = 0
    result: list[Any] | None = None
    """What the last finished call gave, when that was facts."""
    kept: Sequence[torch.Tensor] = ()
    """The tensors that hold the last finished call's result, when that was a round."""
    pending: Sequence[torch.Tensor] = ()
    """Where the result of the round under way will stand."""
    given: bool = False
    """The call under way was finished by others, and its result handed over."""

    def enter(self) -> int:
        """Begin the next call, or the last one again if it was cut short; its number."""
        self.entered, self.given = self.finished + 1, False
        return self.entered

    def finish(self, *, facts: list[Any] | None, kept: Sequence[torch.Tensor]) -> None:
        self.finished = self.entered
        self.result, self.kept, self.pending, self.given = facts, kept, (), False

    def finish_given(self, *, facts: bool) -> None:
        """The call under way has ended by what others gave: facts, in ``result``, or a round's tensors, in ``kept``."""
        self.finished, self.pending, self.given = self.entered, (), True
        self.result, self.kept = (self.result, ()) if facts else (None, self.kept)

    def forget(self) -> None:
        """The fleet went on without this worker: what was under way is no longer its business."""
        self.kept, self.pending, self.result, self.entered = (), (), None, self.finished

    def says(self) -> dict[str, Any]:
        """For the others, when the group is re-formed."""
        return {"finished": self.entered if self.given else self.finished, "facts_kept": self.result is not None}


class Lanes:
    """This worker's sequences of calls, which ``sequences`` shows to the others."""

    def __init__(self, sequences: CallSequences) -> None:
        self._sequences = sequences
        self._lanes = {CALLS: Lane(), ROUNDS: Lane()}

    def __getitem__(self, name: str) -> Lane:
        return self._lanes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._lanes)

    def enter(self, label: str, *, lane: str) -> int:
        return self._sequences.enter(label, lane=lane, since=concurrency.monotonic(), call=self[lane].enter())

    def forget(self) -> None:
        """The fleet went on without this worker, which is no longer in any call, and in no step."""
        self._sequences.begun = 0
        for name, lane in self._lanes.items():
            lane.forget()
            self._sequences.fall_back(lane.finished, lane=name)

    def skip_to(self, call: int, *, lane: str) -> None:
        """This worker has taken over a peer's place in the training, calls included."""
        self._lanes[lane] = Lane(entered=call, finished=call)
        self._sequences.skip_to(call, lane=lane)

    @property
    def rounds(self) -> int:
        """Rounds aside that this worker has finished."""
        return self[ROUNDS].finished

    @rounds.setter
    def rounds(self, rounds: int) -> None:
        self.skip_to(rounds, lane=ROUNDS)


@dataclass(frozen=True)
class Gift:
    """The last call's result, on its way from one who has it to those who have not."""

    giver: int | None
    """None: nobody still has it as it was."""
    behind: tuple[int, ...]
    facts: bool
    """Whether it is facts; else the tensors of a round."""


def gift(said: Mapping[int, Mapping[str, Any]], *, intact: Mapping[int, bool] | None = None) -> Gift | None:
    """Who gives the last call's result to whom, by what each said of its lane; None: all are equally far.

    ``intact``: whose tensors still are as the round left them; without it, everybody's.

    >>> gift({0: {"finished": 7, "facts_kept": True}, 2: {"finished": 6, "facts_kept": False}})
    Gift(giver=0, behind=(2,), facts=True)
    """
    finished = {rank: int(theirs["finished"]) for rank, theirs in said.items()}
    last = max(finished.values())
    behind = tuple(rank for rank, count in finished.items() if count < last)
    if any(finished[rank] < last - 1 for rank in behind):
        raise FleetError(f"workers are more than one call apart ({finished}): this is a bug in Paceline")
    if not behind:
        return None
    known = [rank for rank, count in finished.items() if count == last]
    facts = bool(said[known[0]]["facts_kept"])
    givers = [rank for rank in known if facts or intact is None or intact[rank]]
    return Gift(givers[0] if givers else None, behind, facts)
