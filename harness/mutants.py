"""Mended bugs, each as it was: a bench that finds them again is one that would have found them.

`with mutant(name):` puts one back for the block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from paceline.checkpoint.held import Holding
from paceline.checkpoint.parts import StatePart
from paceline.roster.calls import BACKGROUND, CALLS
from paceline.step.late.proxy import Proxy
from paceline.step.step_state import LoopPhase, StepState
from paceline.step.training_state import TrainingState
from paceline.transport.base import made
from paceline.transport.distributed import Distributed
from paceline.transport.elastic.reform import Reform
from paceline.transport.elastic.transport import Elastic

Patch = tuple[type, str, Any]


def lost_wake_up() -> list[Patch]:
    """A lap's offer counts as taken before the loop has woken, and the next lap overwrites it."""

    def report(self: Any, step_state: StepState, *, cut_off: bool = False) -> torch.Tensor:
        table = torch.zeros(3, self._transport.size, dtype=torch.float64)
        with self._training.lock:
            self._deadlines.in_flight.count_landed()
            if cut_off and not step_state.idle:
                step_state.enter(LoopPhase.CUT_OFF)
            waits, done = step_state.loop_phase is LoopPhase.WAITING, step_state.loop_phase is LoopPhase.DONE
            table[:, self._transport.rank] = torch.tensor([step_state.work.samples, done, waits])
        return table

    def take_extra(self: Any, step_state: StepState) -> bool:
        if self.error is not None:
            raise self.error
        if step_state.over or not step_state.extra:
            return False
        counted = step_state.counted[self._transport.rank]
        self._training.dealing.begin_share(step_state.extra, done=step_state.work.samples - counted)
        step_state.extra = 0
        return True

    def offer_rest(self: Any, step_state: StepState) -> None:
        left = step_state.shares[self._transport.rank] - step_state.work.samples
        if step_state.loop_phase is LoopPhase.DONE and left > 0:
            step_state.extra = left
            step_state.enter(LoopPhase.WORKING)

    lap = TrainingState.lap

    def lapped(self: TrainingState, step_state: StepState, *args: Any) -> None:
        lap(self, step_state, *args)
        if step_state.extra:
            step_state.enter(LoopPhase.WORKING)

    idle = property(lambda self: self.loop_phase in (LoopPhase.DONE, LoopPhase.WAITING))
    return [
        (Proxy, "_report", report),
        (Proxy, "_take_extra", take_extra),
        (Proxy, "_offer_rest", offer_rest),
        (TrainingState, "lap", lapped),
        (StepState, "idle", idle),
    ]


def unsettled_group() -> list[Patch]:
    """A group can be called in as soon as it is formed, while another thread settles it."""
    form = Reform._form

    def formed(self: Reform, forming: Any) -> None:
        form(self, forming)
        self.group, self.now = forming.group, forming.generation

    def standing(self: Elastic) -> tuple[int, Any]:
        return self.reform.number, self.reform.group

    return [(Reform, "_form", formed), (Elastic, "_standing", standing)]


def waits_for_itself() -> list[Patch]:
    """The thread that is to record a round that was handed over waits, in its next call, for that record."""

    def enter(self: Elastic, label: str, *, lane: str) -> int:
        self.deliver_members_changed()
        return self.lanes.enter(label, lane=lane)

    def finish(self: Reform, lane: str, began: int, *, facts: Any, tensors: Any) -> bool:
        with self._lock:
            if self.number != began:
                return False
            self._lanes[lane].finish(facts=facts, tensors=tensors)
            return True

    return [(Elastic, "_enter", enter), (Reform, "finish", finish)]


def sums_of_the_old_size() -> list[Patch]:
    """The tensors of a round are made before it begins, for those who were there then."""

    @contextmanager
    def round(self: Elastic, label: str, *, background: bool = False, result: Any = ()) -> Iterator[list[torch.Tensor]]:
        lane = BACKGROUND if background else CALLS
        tensors = self.lanes[lane].pending = made(result)
        with Distributed.round(self, label, background=background):
            began = self.reform.number
            yield tensors
        if not self.reform.finish(lane, began, facts=None, tensors=tensors):
            raise self.reform.why_over()

    return [(Elastic, "round", round)]


def re_enters_in_mid_call() -> list[Patch]:
    """A thread in a call enters the fleet anew, when another has heard that this worker was dropped."""

    def re_form(self: Reform, number: int, *, orderly: bool) -> None:
        with self._lock:
            if self.number > number and not self.is_over:
                return
            asks_orderly = orderly
            while not self._try(boundary=orderly, orderly=asks_orderly):
                asks_orderly = False
                self._pause()
            self._in_vain = 0

    return [(Reform, "re_form", re_form)]


def waits_for_those_who_form() -> list[Patch]:
    """A worker for which a generation did not come about waits for the next one, and does not ask the roster to end the
    one that others still form."""
    attempt = Reform._try

    def try_orderly(self: Reform, *, boundary: bool, orderly: bool) -> bool:
        return attempt(self, boundary=boundary, orderly=boundary)

    return [(Reform, "_try", try_orderly)]


def trusts_old_digests() -> list[Patch]:
    """A part of a state is left out by the digest that its giver once made of it, though it may have changed since."""

    def leave_out(self: Holding, part: StatePart, held: Collection[str]) -> str:
        seen = self._seen.get(part.layout)
        return seen.digest if seen is not None and seen.digest in held else ""

    return [(Holding, "leave_out", leave_out)]


MUTANTS: dict[str, Callable[[], list[Patch]]] = {
    one.__name__: one
    for one in (
        lost_wake_up,
        unsettled_group,
        waits_for_itself,
        sums_of_the_old_size,
        re_enters_in_mid_call,
        waits_for_those_who_form,
        trusts_old_digests,
    )
}


@contextmanager
def mutant(name: str | None) -> Iterator[None]:
    """Put one of the `MUTANTS` back; none for None."""
    with ExitStack() as stack:
        for owner, attribute, old in MUTANTS[name]() if name is not None else []:
            stack.enter_context(mock.patch.object(owner, attribute, old))
        yield
