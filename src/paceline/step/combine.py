"""Combines: how the workers' work merges, by one protocol (`Combine`); and that of gradients, a round in every step.

A combine gives out steps, exchanges what was done in one, and commits it. `StepLoop`, `Step`, `Membership` and
training/ call these methods, and nothing else of a combine; training/combines.py lists the combines, and averaging/
has the others.

`GradientCombine` opens a step when it is dealt: on the user's thread, or, after a round with a deadline, on the
proxy's. The plan decides whether its round waits for everybody or has a deadline; `GradientCombine._make_round` alone
looks at that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from paceline import concurrency
from paceline.errors import Dropped, MisuseError, NonFiniteGradients
from paceline.gradients import Header
from paceline.machines.failures import Failures
from paceline.pace import deadlines_needed, may_set_deadlines
from paceline.records import Plan
from paceline.step.ahead import why_not_ahead
from paceline.step.checks.sameness import ReplicaComparison, check_order
from paceline.step.checks.updates import unlike_settings, unlike_updates
from paceline.step.context import LoopContext
from paceline.step.late.deadline_round import Allowed, DeadlineRound, Deadlines
from paceline.step.losses.loss_weights import check_weights
from paceline.step.members import newcomer_state, take_newcomer_state
from paceline.step.round import StepRound, SynchronousRound
from paceline.step.step import Step
from paceline.step.step_state import RoundPhase, StepState, has_gradient, void_record
from paceline.transport.formats import Format

if TYPE_CHECKING:
    from paceline.step.step_state import StepState


@dataclass(frozen=True)
class CombineParts:
    """The parts that a combine may need, beside those that the parts of the loop share."""

    models: Sequence[torch.nn.Module]
    failures: Failures | None = None
    """The failures to emulate."""
    lengths: Sequence[int] = ()
    """The samples of an epoch that each worker claims when the epoch opens; empty: they are dealt step by step."""
    first_round: int = 0
    """The number of rounds in the run's loops before this one."""
    wire_format: Format | None = None
    """The format in which parameters travel; None sends them unchanged."""


class Combine(Protocol):
    """The way in which work merges in one loop; ``loop`` has what the parts of the loop share."""

    loop: LoopContext

    @property
    def rounds(self) -> int:
        """Shared updates so far."""

    @property
    def counts_steps(self) -> bool:
        """Whether the dataset's length and the global batch give the number of steps that every worker makes."""

    @property
    def hands_over_state(self) -> bool:
        """Whether a worker's state may have to be taken over by another one."""

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin(self) -> Step | None:
        """Begin the next step and return it.

        Returns None when the fleet is in a later loop of the script: this newcomer's script must reach that first.
        """

    def exchange(self, step: Step, clip_norm: float | None, *, own: bool) -> bool:
        """Run the step's round; return whether there is a gradient to apply, which then is in ``p.grad``.

        ``own``: code of the user's own comes before the update.
        """

    def commit(self, step: Step, update_began: float) -> None:
        """End the step on this worker; ``update_began`` is a time (perf_counter)."""

    def complete(self) -> None:
        """Complete the last step, which was committed before its device had computed it; mostly there is none.

        Raises NonFiniteGradients, as its own commit would have, when it had nothing to apply and the run is to stop.
        """

    # -- between steps -------------------------------------------------------------------------------------------------

    def meet(self, label: str) -> AbstractContextManager[Any]:
        """Return a context for a call of all workers: in it the models hold the parameters to evaluate and to save."""

    def shown(self) -> AbstractContextManager[Any]:
        """Return a context in which the models hold the parameters to evaluate and to save."""

    def models_were_set(self) -> None:
        """Go on from other weights than the last round left: a checkpoint was loaded behind this loop."""

    def warn(self, text: str) -> None:
        """Log a warning that all workers that step together have; one of them logs it."""

    def ended(self) -> None:
        """Note that the loop has given out its last step, or was left."""

    def close(self, *, orderly: bool) -> None:
        """End the loop; ``orderly`` is False after an error."""

    def wait_for_threads(self) -> None:
        """Wait, once the transport is closed, for the threads of this loop: the process must not end under them."""

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def open_step(self) -> StepState | None:
        """The step under way, in which members may change; None once its result is counted."""

    def count_round(self) -> None:
        """Count the open step's round where it is over already: members change before its commit."""

    def members_changed(self, old_ranks: Sequence[int | None]) -> None:
        """Follow a change of members: ``old_ranks`` has the old rank, or None, of each new rank."""

    def newcomer_state(self) -> dict[str, Any]:
        """Return everything that a newcomer needs to be where this worker is at a step boundary."""

    def take_over(self, state: Mapping[str, Any], *, ahead: Sequence[int]) -> None:
        """Take over a peer's `newcomer_state`, and go on where the peer is."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that belongs to this worker's present parameters, however far the fleet has gone on."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on, before the first step, where ``state_dict`` was called."""


class GradientCombine:
    """One mean gradient every step."""

    counts_steps = True

    def __init__(self, loop: LoopContext, settings: None = None, parts: CombineParts | None = None) -> None:
        self.loop = loop
        self._rounds: dict[int, StepRound] = {}
        """The rounds that are open, or over and not taken over yet, by step."""
        self._agreed_epoch = -1
        self._replicas = ReplicaComparison(loop)
        others = (loop.transport.size > 1 or loop.transport.elastic) and not loop.transport.grouped
        self._ahead: Step | None = None
        """The last step, where it was committed before the device had computed it, until its record is complete."""
        self._deadlines = self._make_deadlines() if others and may_set_deadlines(loop.training.pacer) else None

    def _make_deadlines(self) -> Deadlines | None:
        """Return what rounds with a deadline need, or None where no round can have one.

        Where the pace can do without deadlines, `Allowed` is asked before every plan whether it may have one. The
        script sees the same steps as without deadlines; only a late worker's work may not count.
        """
        loop = self.loop
        if deadlines_needed(loop.training.pacer):
            return Deadlines(loop, self._make_round)
        loop.training.ask_for_deadlines(Allowed(loop))
        loop.gradients.accumulation.follow_freezing()
        if loop.dealing.length is None:
            return None
        # No copies in a fixed fleet: a script may count its steps itself.
        return Deadlines(loop, self._make_round, copies=loop.transport.elastic)

    @property
    def rounds(self) -> int:
        return self.loop.position.next

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
            if loop.position.finished:  # it is the state after the loop's last step
                return None
        loop.save_if_due()
        began = concurrency.perf_counter()
        loop.transport.doing(f"step {loop.position.next}", begun=loop.position.next + 1)
        step_round = self._rounds.get(loop.position.next) or self._open_here()
        step_state = step_round.step_state
        own_print, own_digest = self._replicas.fingerprint(step_state), loop.tracking.digest()
        with loop.training.lock:
            if step_state.dealt >= loop.settings.global_batch and step_state.generation == loop.transport.generation:
                loop.position.full_shares = step_state.plan.samples
            # The proxy ran this round while the loop was late: the step takes its result over, and has no
            # micro-batches.
            catches_up = step_state.closed
            if not catches_up and step_state.began is not None and step_state.ranges:
                raise MisuseError(
                    f"step {step_state.index} was left before its commit, and a part of it has counted already: leave "
                    "the loop behind step.commit"
                )
            share = 0 if catches_up else step_state.shares[loop.transport.rank]
            loop.size_micro_batches(share, deadline=step_state.plan.bounded)
            loop.dealing.begin_share(share)
            if not catches_up:
                step_state.start(began)
                step_state.fingerprint, step_state.settings_digest = own_print, own_digest
                step_state.updates = loop.tracking.updates.reported(step_state.index)
            loop.gradients.begin(step_state.dealt)
            step_round.begin()
            if self._deadlines is not None:
                self._deadlines.begin()
        if self._deadlines is not None and step_state.plan.bounded and not catches_up:
            self._deadlines.proxy.begun(step_state)
        return Step(loop, self, step_state, step_round, share=share, began=began)

    def _make_round(self, step_state: StepState) -> DeadlineRound | None:
        """Make the round of a step that was dealt, and return it where it has a deadline: then the proxy runs it.

        Only this function chooses the kind of a step's round.
        """
        deadlines, index = self._deadlines, step_state.index
        if deadlines is None or not step_state.plan.bounded:
            in_flight = None if deadlines is None else deadlines.in_flight
            self._rounds[index] = SynchronousRound(self.loop, step_state, self._replicas, in_flight=in_flight)
            return None
        self._rounds[index] = step_round = DeadlineRound(self.loop, step_state, deadlines)
        return step_round

    def _forget_up_to(self, index: int, deadlines: Deadlines) -> None:
        """Forget the rounds up to step ``index``: a peer's state after that step was taken over."""
        with self.loop.training.lock:
            for old in [number for number in self._rounds if number <= index]:
                del self._rounds[old]
        deadlines.promises.decline()

    def _open_here(self) -> StepRound:
        """Open a step on this thread: the first, or one after a round that waited for everybody."""
        self._check_order()  # first: the plan is for those who are there after it
        plan = self.loop.training.plan or self._plan_from_leader()
        step_state = self.loop.training.open(plan)
        by_deadline = self._make_round(step_state)
        if self._deadlines is not None:
            self._deadlines.proxy.watch(by_deadline)
        return self._rounds[step_state.index]

    def _plan_from_leader(self) -> Plan:
        """Return the leader's plan, which all workers receive in a call of its own.

        The first step needs it, and so does the second: after the first the machines' speeds are known, and equal
        shares may be very wrong for them.
        """
        transport, training = self.loop.transport, self.loop.training

        def mine() -> dict[str, Any] | None:
            return training.first_plan().to_json() if transport.rank == 0 else None

        return Plan.from_json(transport.gather("the plan of the first steps", mine)[0])

    def _check_order(self) -> None:
        """Check, once per epoch, that a custom order is the same on every worker: else samples are lost or doubled."""
        dealing = self.loop.dealing
        if self._agreed_epoch == dealing.epoch:
            return
        self._agreed_epoch = dealing.epoch
        check_order(self.loop.transport, dealing)

    # -- its round -----------------------------------------------------------------------------------------------------

    def exchange(self, step: Step, clip_norm: float | None, *, own: bool) -> bool:
        self.complete()
        step_state = step._step_state
        if isinstance(step._step_round, SynchronousRound) and self._goes_ahead(step, own=own):
            step._ahead, self._ahead = step._step_round.run_ahead(clip_norm), step
            step._ahead.complete = self.complete
            step._record = step._step_round.make_record(True)
            return True
        try:
            has_result = step._step_round.run()
        except Dropped as dropped:
            self._give_up(step, dropped)
            return False
        header = step_state.header
        assert header is not None
        apply = may_apply(self, step, header) and has_result
        if apply:  # before any further call, in which a worker that missed the round's end may be handed the mean
            self.loop.gradients.mean(header, clip_norm, own=own)
        step._record = step._step_round.make_record(apply)  # from here on the round counts, whoever is lost in a call
        self._compare_settings(step_state, header)
        self._compare_updates(step_state, header)
        step._step_round.refuse_unlike(header)
        return apply

    def _goes_ahead(self, step: Step, *, own: bool) -> bool:
        """Return whether the update is issued before the device has computed the gradient."""
        why = why_not_ahead(self.loop, step._step_state, own=own, partial=step._parts.partial)
        if why:
            self.loop.notes.log_once(why)
        return why is None

    def complete(self) -> None:
        step = self._ahead
        if step is None or step._ahead is None or step._ahead.record is None:  # None: its commit has not come that far
            return
        self._ahead = None
        header = step._ahead.finish()
        step._record, step._ahead = step._ahead.record, None
        step._applied = has_gradient(header)
        self.loop.gradients.mean_gradient.agree_on_unit(header)
        check_weights(self.loop, step.index, header)
        may_apply(self, step, header)

    def _give_up(self, step: Step, dropped: Dropped) -> None:
        """Void the step: the fleet went on without this worker, and its next step begins with a peer's state."""
        step_state = step._step_state
        step_state.enter(RoundPhase.VOID)
        step._record = step_state.record = void_record(step_state)
        text = f"step {step_state.index}: {dropped}; it enters anew"
        self.loop.notes.warn(text)

    def _compare_settings(self, step_state: StepState, header: Header) -> None:
        """Raise MisuseError unless all workers update with the same learning rates and other optimiser settings."""
        tracking, digests = self.loop.tracking, set(header.column("settings_digest").tolist())
        if len(digests - {0.0}) > 1:
            everybody = self.loop.transport.gather("comparing learning rates", tracking.hyperparameters)
            if text := unlike_settings(everybody, step=step_state.index, missing=tracking.missing()):
                raise MisuseError(text)

    def _compare_updates(self, step_state: StepState, header: Header) -> None:
        """Raise MisuseError unless all workers made equally many updates in the step before."""
        reported = header.column("updates").tolist()
        if text := unlike_updates(reported, workers=step_state.workers, step=step_state.index):
            raise MisuseError(text)

    # -- its commit ----------------------------------------------------------------------------------------------------

    def commit(self, step: Step, update_began: float) -> None:
        loop, step_state, header = self.loop, step._step_state, step._step_state.header
        if step_state.round_phase is RoundPhase.VOID:
            loop.gradients.clear(overflow=False)
            self._rounds.clear()
            return
        assert header is not None
        loop.gradients.clear(overflow=header.total("overflow") > 0)
        loop.position.next += 1
        step._step_round.commit(step._began)
        self._rounds.pop(step_state.index, None)
        step._record, step.ends_epoch = step_state.record, step_state.ends_epoch  # a stream's end shows only now
        if step._ahead is not None:
            step._ahead.record = step_state.record
        loop.position.finished, loop.position.progress = step_state.finishes, step_state.progress
        if self._deadlines is not None:
            self._deadlines.commit_s = concurrency.perf_counter() - update_began
        step._step_round.repair_replicas(header)
        loop.transport.doing(f"its own code after step {step.index}")

    # -- between steps -------------------------------------------------------------------------------------------------

    def meet(self, label: str) -> AbstractContextManager[Any]:
        """Return a context for the call: a step's commit has left equal parameters on all workers.

        Meanwhile no copy of a state is given: a worker that waits for one would never reach the call.
        """
        self.complete()
        return nullcontext() if self._deadlines is None else self._deadlines.promises.declined()

    def shown(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def models_were_set(self) -> None:
        self.loop.gradients.statistics_were_set()

    def warn(self, text: str) -> None:
        self.loop.notes.warn_all(text)

    def ended(self) -> None:
        if self.loop.position.finished and self._deadlines is not None:
            self._deadlines.end()

    def close(self, *, orderly: bool) -> None:
        with nullcontext() if orderly else suppress(Exception):  # the script's own error is told
            self.complete()
        if self._deadlines is not None:
            self._deadlines.close(orderly=orderly)

    def wait_for_threads(self) -> None:
        if self._deadlines is not None:
            self._deadlines.proxy.join()

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def open_step(self) -> StepState | None:
        """The step under way, unless its result is counted already."""
        step_round = self._rounds.get(self.loop.training.index)
        return None if step_round is None else step_round.step_state

    def count_round(self) -> None:
        if (step_round := self._rounds.get(self.loop.position.next)) is not None:
            step_round.count()

    def members_changed(self, old_ranks: Sequence[int | None]) -> None:
        if self._deadlines is not None:
            self._deadlines.members_changed()

    def newcomer_state(self) -> dict[str, Any]:
        proxy = self._deadlines.proxy.position if self._deadlines is not None else None
        return {**newcomer_state(self.loop), "agreed_epoch": self._agreed_epoch, "proxy": proxy}

    def take_over(self, state: Mapping[str, Any], *, ahead: Sequence[int]) -> None:
        with self.loop.training.lock:
            take_newcomer_state(self.loop, state, ahead=ahead)
            self._rounds.clear()
            if self._deadlines is not None:
                self._deadlines.restart(state["proxy"])
            self._agreed_epoch = state["agreed_epoch"]

    def state_dict(self) -> dict[str, Any]:
        self.complete()
        with self.loop.training.lock:
            step_round = self._rounds.get(self.loop.position.next)
            before = None if step_round is None else step_round.step_state.before
            training = self.loop.training.state_dict() if before is None else before
            return {**training, "gradients": self.loop.gradients.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loop = self.loop
        loop.gradients.load_state_dict(state["gradients"])
        loop.training.load_state_dict(state)
        loop.position.move_to(loop.training.index, finished=loop.training.finished, progress=loop.training.progress)


def may_apply(combine: Combine, step: Step, header: Header, *, ranks: Sequence[int] | None = None) -> bool:
    """Return whether the round gave a gradient to apply.

    Raises NonFiniteGradients when it gave a bad one and the run is to stop. ``ranks``: the ranks of the header's
    workers, where they are not the whole fleet.
    """
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
    """Return the message about workers with bad gradients: which, in which step, and what to do about them."""
    losses = header.column("loss")[list(workers)]
    who = " and ".join(f"worker {worker if ranks is None else ranks[worker]}" for worker in workers)
    loss = "its loss was finite" if np.isfinite(losses).all() else "the loss itself was NaN or infinite"
    found = f"{who} had NaN or infinite gradients in step {step} ({loss})"
    if skip:
        return f"{found}: the update was skipped"
    leave_out = 'paceline.join(nonfinite="skip") leaves such steps out'
    return f"{found}: stopped before the update. {leave_out}; a GradScaler must be tracked with fleet.track(scaler=...)"
