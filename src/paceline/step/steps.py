"""The steps of a training, one after another, as the user's loop makes them.

The user's thread runs the loop. The combine (combine.py) decides how the workers' work merges. When a step is over, the
training's state (training_state.py) passes it to the feed, the history and every worker's pacer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from paceline.errors import Dropped, DroppedInCall, MisuseError
from paceline.feed import Generators, seed_step
from paceline.gradients import Gradients
from paceline.step.checks.schedules import ScheduleWatch, held_at_their_end
from paceline.step.context import LoopContext
from paceline.step.step import Step

if TYPE_CHECKING:
    from paceline.step.combine import Combine
    from paceline.step.members import Membership


class Steps:
    """The result of ``fleet.steps``: iterate it for steps; ``len(steps)`` is their number over all epochs."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop

    def __len__(self) -> int:
        return len(self._loop)

    def __iter__(self) -> Iterator[Step]:
        return iter(self._loop)

    @property
    def index(self) -> int:
        """The next step's index."""
        return self._loop.index

    @property
    def rounds(self) -> int:
        """Shared updates so far."""
        return self._loop.rounds

    @property
    def progress(self) -> float:
        """The fraction of the whole training that is done, in [0, 1]; the same on every worker."""
        return self._loop.progress

    def renew_data(self) -> None:
        """Hand the dataset as it is now to this worker's loader processes.

        For ``persistent_workers``, or in the middle of an epoch: without persistent workers every epoch begins so.
        """
        self._loop.renew_data()


class StepLoop:
    """The steps of one loop, as the library's own parts see them; a script holds `Steps`."""

    def __init__(self, loop: LoopContext, combine: Combine) -> None:
        self.loop, self.combine = loop, combine
        self.training, self.dealing, self.settings = loop.training, loop.dealing, loop.settings
        self.script_loop = loop.script_loop
        loop.tracking.forget_steps()
        loop.gradients.loop_ends()
        self.before_first: Callable[[StepLoop], None] = lambda steps: None
        """Called before the first step, when the script has made everything."""
        self.after_first = self.before_first
        """Called before the second step, or at the loop's end where there is one step."""
        self._calls_due = ["before_first", "after_first"]
        self.dataset_length: int | None = None
        self.micro_batches: int | None = None
        """The number of micro-batches in all epochs: what a DataLoader would count as steps."""
        self.schedule_watch: ScheduleWatch | None = None
        """Checks the script's schedules, until all of them are known."""
        self._own_numbers: Generators | None = None
        """The script's own random numbers as this loop began, while it goes on."""
        self.left = False
        """Whether the script has come to the end of the loop, or has left it."""

    def leave_updates_to_script(self) -> None:
        """Leave updates and schedules to a framework's loop, before the first step.

        No step has a deadline, because such a loop must know before its backward which micro-batch is the last. Its
        schedules count in their own way, so they are not compared with the number of steps.
        """
        self.loop.script.own_updates = True
        self.micro_batches = self.schedule_watch = self.loop.epoch_length = None

    # -- the loop --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self.dealing.length is None:
            raise TypeError("an iterable dataset does not say how many steps it makes")
        if not self.training.pacer.keep_batch:
            raise TypeError(
                "with keep_batch=False an epoch has more steps the more shares are cut off, so nobody knows how many: "
                "follow step.progress"
            )
        if self.most is None:
            raise TypeError(
                "with rounds by the clock a fast worker makes more steps than a slow one, so nobody knows how many: "
                "follow step.progress, or use paceline.Averaging(every_steps=...)"
            )
        self.training.promised = self.most // self.settings.epochs
        return self.most

    @property
    def most(self) -> int | None:
        """The number of steps, which no worker exceeds; None where it is not known."""
        if self.dealing.length is None or not self.combine.counts_steps or not self.training.pacer.keep_batch:
            return None
        return -(-self.dealing.length // self.settings.global_batch) * self.settings.epochs

    @property
    def _beyond_promise(self) -> bool:
        """Whether the open step comes after the last one that ``len`` counts, because workers were lost in that."""
        length, training = self.dealing.length, self.training
        last = training.dealing.epoch == training.end_epoch - 1
        return last and length is not None and training.epoch_step * self.settings.global_batch >= length

    def __iter__(self) -> Iterator[Step]:
        self.left = False
        loop = self.loop
        loop.gradients.loop_begins()
        self._own_numbers = Generators(loop.device)
        try:
            while not loop.position.finished:
                step = None if self._passed_by else self._begin()
                if step is None and self.finished:  # a peer's state after the last step was taken over
                    break
                if step is None:
                    loop.position.finished = True
                    return
                loop.position.step = step
                loop.tracking.updates.begin(loop, step.index, loop.gradients.everything)
                seed_step(loop.seed, step.index, loop.device)
                with held_at_their_end(loop.tracking.things.values()) if self._beyond_promise else nullcontext():
                    yield step
                if not step.committed:
                    raise MisuseError(f"step {step.index} was not committed: call step.commit(optimizer) in every step")
            if self.begun:  # perhaps one step alone
                self._call_before_step()
            loop.save_if_due()
            self.combine.complete()
        finally:
            self._restore_numbers()
            self.left = True
            if not loop.position.closed:  # else this iterator was let go of late, and the fleet is elsewhere
                loop.tracking.updates.end(loop)
                if loop.position.step is None or loop.position.step.committed:
                    loop.gradients.loop_ends()
                self.combine.ended()
                loop.transport.doing("after the last step")

    def _restore_numbers(self) -> None:
        """Let the script's own random numbers go on, once: an iterator that lingers must not do so in a later loop."""
        before, self._own_numbers = self._own_numbers, None
        if before is None:
            return
        if self.loop.position.step is not None:
            self.loop.position.step._leave()
        before.restore()

    @property
    def _passed_by(self) -> bool:
        return self.loop.membership is not None and self.loop.membership.passed_by

    def _begin(self) -> Step | None:
        if self.loop.position.closed:
            raise MisuseError("this loop has ended: a later fleet.steps took its place, or the fleet was left")
        self._check_schedules()
        while True:
            try:
                self._call_before_step()
                return self.combine.begin()
            except (Dropped, DroppedInCall) as dropped:  # no step is open: no work of this worker is lost
                why = dropped.why if isinstance(dropped, DroppedInCall) else str(dropped)
                self.loop.notes.warn(f"{why}; it enters anew")

    def _check_schedules(self) -> None:
        """Check the script's schedules between two steps: the first steps show how often each is stepped."""
        watch, last = self.schedule_watch, self.loop.position.step
        if watch is not None and last is not None:
            watch.check(ends_epoch=last.ends_epoch, progress=self.loop.position.progress)
            self.schedule_watch = None if watch.over else watch

    def _call_before_step(self) -> None:
        """Call ``before_first`` or ``after_first``, once each: a worker that enters anew may come here more often."""
        if self._calls_due and self.begun == (self._calls_due[0] == "after_first"):
            getattr(self, self._calls_due[0])(self)
            del self._calls_due[0]

    def first_was_checked(self) -> None:
        """Leave out ``after_first``, in which all would wait for this newcomer: a peer of the same script passed it."""
        self._calls_due = [due for due in self._calls_due if due != "after_first"]

    # -- how far it is ---------------------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether the first step has been given out."""
        return self.loop.position.begun

    @property
    def finished(self) -> bool:
        """Whether there are no more steps."""
        return self.loop.position.finished

    @property
    def index(self) -> int:
        """The next step's index."""
        return self.loop.position.next

    @property
    def current_index(self) -> int:
        """The index of the step that the loop is in, its commit included; before the first step, the first one's."""
        return self.loop.position.next if self.loop.position.step is None else self.loop.position.step.index

    @property
    def rounds(self) -> int:
        """Shared updates so far."""
        return self.combine.rounds

    @property
    def progress(self) -> float:
        """The fraction of the whole training that is done, in [0, 1]; the same on every worker."""
        return self.loop.position.progress

    @property
    def gradients(self) -> Gradients:
        """The gradients that are summed over the fleet, or over this worker's group."""
        return self.loop.gradients

    @property
    def membership(self) -> Membership | None:
        """This loop's part in an elastic fleet; None where the workers stay the same."""
        return self.loop.membership

    # -- between steps ---------------------------------------------------------------------------------------------

    def meet(self, label: str) -> AbstractContextManager[Any]:
        """Wait for all workers in this call; in the context the models hold the parameters to evaluate and to save."""
        return self.combine.meet(label)

    def renew_data(self) -> None:
        """Hand the dataset as it is now to this worker's loader processes."""
        self.dealing.renew()

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that belongs to this worker's present parameters, however far the fleet has gone on."""
        return self.combine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on, before the first step, where ``state_dict`` was called."""
        self.combine.load_state_dict(state)

    def pace_state(self) -> dict[str, Any]:
        """Return the pacer's state after the last step that was counted."""
        with self.training.lock:
            return self.training.pacer.state_dict()

    def pass_over(self, step: int) -> None:
        """Give out no steps: in the run that this one goes on from, this loop was over before ``step``."""
        self.training.finish(step)
        self.loop.position.first = self.loop.position.next = step
        self.loop.position.finished, self.loop.position.progress = True, 1.0

    def close(self, *, orderly: bool = True) -> None:
        """End the loop; ``orderly`` is False after an error, and then no warning is logged."""
        loop = self.loop
        if loop.position.closed:
            return
        self._restore_numbers()
        self.combine.close(orderly=orderly)
        loop.position.closed = True
        loop.tracking.updates.end(loop)
        if orderly and loop.position.step is not None and not loop.position.step.committed:
            text = (
                f"the loop was left in step {loop.position.step.index}, before its commit: its samples were not counted"
            )
            self.combine.warn(text)
        if orderly and not loop.position.finished and self.training.index > loop.position.first:
            loop.notes.log_event("left", {"step": self.training.index})
        self.dealing.close()
        loop.gradients.detach()
