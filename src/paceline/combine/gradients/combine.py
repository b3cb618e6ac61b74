"""``combine="gradients"`` as the loop uses it: a round of gradients in every step.

A step is opened when it is dealt: on the user's thread, or, after a round with a deadline, on the proxy's. Whether its
round waits for everybody or has a deadline is the plan's choice, and is asked for here alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from paceline import concurrency
from paceline.combine import Header
from paceline.combine.base import Combine, CombineParts
from paceline.deadline.allowed import Allowed
from paceline.deadline.rounds import Deadlines, ProxyRound
from paceline.errors import Dropped, MisuseError, NonFiniteGradients
from paceline.loop.context import LoopContext
from paceline.loop.handover import take_whole_state, whole_state
from paceline.loop.hyperparameters import unlike_settings
from paceline.loop.orders import check_order
from paceline.loop.rounds import InlineRound, ReplicaComparison, StepRound
from paceline.loop.step import Step
from paceline.loop.step_recording import has_gradient, void_record
from paceline.loop.step_state import RoundPhase, StepState
from paceline.loop.updates import unlike_updates
from paceline.pace import deadlines_needed, may_set_deadlines
from paceline.records import Plan


class GradientCombine:
    """One mean gradient every step."""

    counts_steps = True

    def __init__(self, loop: LoopContext, settings: None = None, parts: CombineParts | None = None) -> None:
        self.loop = loop
        self._step_states: dict[int, StepState] = {}
        """Steps that are open, or over and not taken over yet."""
        self._agreed_epoch = -1
        self._replicas = ReplicaComparison(loop)
        others = (loop.transport.size > 1 or loop.transport.elastic) and not loop.transport.grouped
        self._deadlines = self._make_deadlines() if others and may_set_deadlines(loop.training.pacer) else None

    def _make_deadlines(self) -> Deadlines | None:
        """For a pace that can do without: where none can be, none; where there may be some, steps that the script sees
        as without them, but that a late worker's work may not count."""
        loop = self.loop
        if deadlines_needed(loop.training.pacer):
            return Deadlines(loop, self._register)
        loop.training.deadlines = Allowed(loop)
        loop.gradients.accumulation.follows_freezing = True
        loop.copyable = loop.transport.elastic  # a script may count its steps itself
        return None if loop.dealing.length is None else Deadlines(loop, self._register)

    @property
    def rounds(self) -> int:
        return self.loop.next

    @property
    def hands_over_state(self) -> bool:
        needed = self._deadlines is not None and deadlines_needed(self.loop.training.pacer)
        return self.loop.transport.elastic or needed

    # -- a step begins -------------------------------------------------------------------------------------------------

    def begin(self) -> Step | None:
        loop = self.loop
        if loop.membership is not None:
            loop.membership.at_boundary()
            if loop.membership.still_outside:
                return None
        if self._deadlines is not None and (copied := self._deadlines.between_steps()) is not None:
            self._forget_up_to(copied, self._deadlines)
        loop.at_boundary()
        began = concurrency.perf_counter()
        loop.transport.doing(f"step {loop.next}", begun=loop.next + 1)
        step_state = self._step_states.get(loop.next) or self._open_here()
        own_print, own_rates = self._replicas.fingerprint(step_state), loop.tracking.digest()
        with loop.training.changed:
            if step_state.dealt >= loop.settings.global_batch and step_state.generation == loop.transport.generation:
                loop.full_shares = step_state.plan.samples
            missed = step_state.closed
            share = 0 if missed else step_state.shares[loop.transport.rank]
            loop.size_micro_batches(share)
            loop.dealing.take_up(share)
            if not missed:
                step_state.start(began)
                step_state.fingerprint, step_state.rates = own_print, own_rates
                step_state.updates = loop.tracking.updates.reported(step_state.index)
            loop.gradients.begin(step_state.dealt)
            if self._deadlines is not None:
                self._deadlines.begin()
        return Step(loop, self, step_state, self._round_of(step_state, missed), share=share, began=began)

    def _round_of(self, step_state: StepState, missed: bool) -> StepRound:
        """The one place where a step's round is chosen."""
        if self._deadlines is None:
            return InlineRound(self.loop, step_state, self._replicas)
        if not step_state.plan.bounded:
            return InlineRound(self.loop, step_state, self._replicas, late_s=self._deadlines.in_flight.late_s)
        if not missed:
            self._deadlines.proxy.begun(step_state)
        return ProxyRound(self.loop, step_state, self._deadlines)

    def _forget_up_to(self, index: int, deadlines: Deadlines) -> None:
        """A peer's state after that step was taken over."""
        with self.loop.training.changed:
            for old in [number for number in self._step_states if number <= index]:
                deadlines.promises.note(self._step_states.pop(old))
        deadlines.promises.decline()

    def _open_here(self) -> StepState:
        """Open a step on this thread: the first, or one after a round that waited for everybody."""
        self._check_order()  # first: the plan is for those who are there after it
        plan = self.loop.training.plan or self._hand_round_plan()
        step_state = self.loop.training.open(plan)
        self._register(step_state)
        if self._deadlines is not None:
            self._deadlines.proxy.watch(step_state)
        return step_state

    def _register(self, step_state: StepState) -> None:
        self._step_states[step_state.index] = step_state

    def _hand_round_plan(self) -> Plan:
        """The leader hands a plan round: for the first step and, since then there is something to know about the
        machines and equal shares may be very wrong for them, for the second too."""
        transport, training = self.loop.transport, self.loop.training

        def mine() -> dict[str, Any] | None:
            return training.first_plan().to_json() if transport.rank == 0 else None

        return Plan.from_json(transport.gather("the plan of the first steps", mine)[0])

    def _check_order(self) -> None:
        """A custom order must be the same on every worker, or samples would be lost and doubled in silence."""
        dealing = self.loop.dealing
        if self._agreed_epoch == dealing.epoch:
            return
        self._agreed_epoch = dealing.epoch
        check_order(self.loop.transport, dealing)

    # -- its round -----------------------------------------------------------------------------------------------------

    def exchange(self, step: Step, clip_norm: float | None, *, own: bool) -> bool:
        step_state = step.step_state
        try:
            here = step.work.run()
        except Dropped as dropped:
            self._give_up(step, dropped)
            return False
        header = step_state.header
        assert header is not None
        self._compare_rates(step_state, header)
        self._compare_updates(step_state, header)
        apply = may_apply(self, step, header) and here
        if apply:
            self.loop.gradients.mean(header, clip_norm, own=own)
        step.record = step.work.record(header, apply)
        return apply

    def _give_up(self, step: Step, dropped: Dropped) -> None:
        """The fleet went on without this worker: its step does not count, and the next begins with a peer's state."""
        step_state = step.step_state
        step_state.enter(RoundPhase.VOID)
        step.record = step_state.record = void_record(step_state)
        text = f"step {step_state.index}: {dropped}; it enters anew"
        self.loop.observe("note", {"level": "warning", "text": text})

    def _compare_rates(self, step_state: StepState, header: Header) -> None:
        """Every worker must update with the same learning rates and other settings of its optimisers."""
        tracking, said = self.loop.tracking, set(header.column("rates").tolist())
        if len(said - {0.0}) > 1:
            everybody = self.loop.transport.gather("comparing learning rates", tracking.hyperparameters)
            if said_so := unlike_settings(everybody, step=step_state.index, missing=tracking.missing()):
                raise MisuseError(said_so)

    def _compare_updates(self, step_state: StepState, header: Header) -> None:
        """Every worker must have made as many updates in the step before."""
        said = header.column("updates").tolist()
        if text := unlike_updates(said, workers=step_state.workers, step=step_state.index):
            raise MisuseError(text)

    # -- its commit ----------------------------------------------------------------------------------------------------

    def commit(self, step: Step, updated: float) -> None:
        loop, step_state, header = self.loop, step.step_state, step.step_state.header
        if step_state.round_phase is RoundPhase.VOID:
            loop.gradients.clear(overflow=False)
            self._step_states.clear()
            return
        assert header is not None
        loop.gradients.clear(overflow=header.total("overflow") > 0)
        loop.next += 1
        step.work.commit(header, step.began)
        self._step_states.pop(step_state.index, None)
        step.record, step.ends_epoch = step_state.record, step_state.ends_epoch  # a stream's end shows only now
        loop.finished, loop.progress = step_state.finishes, step_state.progress
        if self._deadlines is not None:
            self._deadlines.commit_s = concurrency.perf_counter() - updated
        step.work.compare(header)
        loop.transport.doing(f"its own code after step {step.index}")

    # -- between steps -------------------------------------------------------------------------------------------------

    def meet(self, label: str) -> AbstractContextManager[Any]:
        """A step's commit has seen to it that parameters are equal."""
        if self._deadlines is not None:
            self._deadlines.promises.decline()  # who waits for a copy must come here too, on its own way
        return nullcontext()

    def shown(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def models_were_set(self) -> None:
        self.loop.gradients.statistics_were_set()

    def warn(self, text: str) -> None:
        self.loop.warn_all(text)

    def ended(self) -> None:
        if self.loop.finished and self._deadlines is not None:
            self._deadlines.end()

    def close(self, *, orderly: bool) -> None:
        if self._deadlines is not None:
            self._deadlines.close(orderly=orderly)

    def wait_for_threads(self) -> None:
        if self._deadlines is not None:
            self._deadlines.proxy.join()

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def open_step(self) -> StepState | None:
        """The step under way, unless what it did is counted."""
        return self._step_states.get(self.loop.training.index)

    def members_changed(self, kept: Sequence[int | None]) -> None:
        if self._deadlines is not None:
            self._deadlines.members_changed()

    def whole_state(self) -> dict[str, Any]:
        proxy = self._deadlines.proxy.place if self._deadlines is not None else None
        return {**whole_state(self.loop), "agreed_epoch": self._agreed_epoch, "proxy": proxy}

    def take_over(self, state: Mapping[str, Any], *, ahead: Sequence[int]) -> None:
        with self.loop.training.changed:
            take_whole_state(self.loop, state, ahead=ahead)
            self._step_states.clear()
            if self._deadlines is not None:
                self._deadlines.restart(state["proxy"])
            self._agreed_epoch = state["agreed_epoch"]

    def state_dict(self) -> dict[str, Any]:
        with self.loop.training.changed:
            step_state = self._step_states.get(self.loop.next)
            training = (
                step_state.before
                if step_state is not None and step_state.before is not None
                else self.loop.training.state_dict()
            )
            return {**training, "gradients": self.loop.gradients.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loop = self.loop
        loop.gradients.load_state_dict(state["gradients"])
        loop.training.load_state_dict(state)
        loop.next, loop.finished, loop.progress = loop.training.index, loop.training.finished, loop.training.progress


def may_apply(combine: Combine, step: Step, header: Header, *, ranks: Sequence[int] | None = None) -> bool:
    """Whether the round gave a gradient to apply; NonFiniteGradients when it gave a bad one and the run is to stop.
    ``ranks``: of the header's workers, where they are not the whole fleet."""
    if header.total("nonfinite"):
        bad, rule = np.flatnonzero(header.column("nonfinite")), combine.loop.nonfinite
        text = nonfinite_text(step.index, header, bad.tolist(), ranks=ranks, skip=rule == "skip")
        if rule == "stop":
            raise NonFiniteGradients(text)
        combine.warn(text)
    return has_gradient(header)


def nonfinite_text(
    step: int, header: Header, workers: Sequence[int], *, ranks: Sequence[int] | None, skip: bool
) -> str:
    """Who had bad gradients in which step, and what to do about them."""
    losses = header.column("loss")[list(workers)]
    who = " and ".join(f"worker {worker if ranks is None else ranks[worker]}" for worker in workers)
    loss = "its loss was finite" if np.isfinite(losses).all() else "the loss itself was NaN or infinite"
    said = f"{who} had NaN or infinite gradients in step {step} ({loss})"
    if skip:
        return f"{said}: the update was skipped"
    leave_out = 'paceline.join(nonfinite="skip") leaves such steps out'
    return f"{said}: stopped before the update. {leave_out}; a GradScaler must be tracked with fleet.track(scaler=...)"
