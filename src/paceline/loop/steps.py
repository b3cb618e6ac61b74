"""The steps of a training, one after another, as the user's loop makes them.

The user's thread runs the loop. How work merges is the combine's (combine/base.py); what a step did enters the feed,
the history and every worker's pacer once, in the training's state (training_state.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from paceline.combine import Gradients
from paceline.errors import Dropped, DroppedInCall, MisuseError
from paceline.loop.context import LoopContext
from paceline.loop.schedules import ScheduleWatch, held_at_their_end
from paceline.loop.step import Step

if TYPE_CHECKING:
    from paceline.combine.base import Combine
    from paceline.loop.membership import Membership


class Steps:
    """What ``fleet.steps`` returns: iterate it for steps; ``len(steps)`` is their number over all epochs.

    A script needs these and ``index``, ``rounds`` and ``progress``; the other members are for the library's own parts.
    """

    def __init__(self, loop: LoopContext, combine: Combine) -> None:
        self.loop, self.combine = loop, combine
        self.training, self.dealing, self.settings, self.place = loop.training, loop.dealing, loop.settings, loop.place
        loop.tracking.forget_steps()
        self.before_first: Callable[[Steps], None] = lambda steps: None
        self.after_first = self.before_first
        """Called before the first step, when the script has brought everything, and before the second."""
        self._looks = 0
        self.dataset_length: int | None = None
        self.micro_batches: int | None = None
        """What a DataLoader would count as steps, in all epochs."""
        self.schedule_watch: ScheduleWatch | None = None
        """Looks at the script's schedules, until all of them are known."""
        self.left = False
        """Whether the script has come to the end of the loop, or has left it."""

    # -- the loop --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self.dealing.length is None:
            raise TypeError("an iterable dataset does not say how many steps it makes")
        if self.most is None:
            raise TypeError(
                "with rounds by the clock a fast worker makes more steps than a slow one, so nobody knows how many: "
                "follow step.progress, or use paceline.Averaging(every_steps=...)"
            )
        self.training.promised = self.most // self.settings.epochs
        return self.most

    @property
    def most(self) -> int | None:
        """The number of steps, where it is known: no worker makes more."""
        if self.dealing.length is None or not self.combine.counts_steps:
            return None
        return -(-self.dealing.length // self.settings.global_batch) * self.settings.epochs

    @property
    def _beyond_promise(self) -> bool:
        """Whether the open step is one more than the number of steps: workers were lost in the very last one."""
        length, training = self.dealing.length, self.training
        last = training.dealing.epoch == training.end_epoch - 1
        return last and length is not None and training.epoch_step * self.settings.global_batch >= length

    def __iter__(self) -> Iterator[Step]:
        self.left = False
        loop = self.loop
        try:
            while not loop.finished:
                step = None if self._passed_by else self._begin()
                if step is None:
                    loop.finished = True
                    return
                loop.step = step
                loop.tracking.updates.begin(loop, step.index)
                with held_at_their_end(loop.tracking.things.values()) if self._beyond_promise else nullcontext():
                    yield step
                if not step.committed:
                    raise MisuseError(f"step {step.index} was not committed: call step.commit(optimizer) in every step")
            if self._looks == 1:  # there was one step
                self._look_at_the_script()
            loop.at_boundary()
        finally:
            self.left = True
            loop.tracking.updates.end(loop)
            self.combine.ended()
            loop.transport.doing("after the last step")

    @property
    def _passed_by(self) -> bool:
        return self.loop.membership is not None and self.loop.membership.passed_by

    def _begin(self) -> Step | None:
        if self.loop.closed:
            raise MisuseError("this loop has ended: a later fleet.steps took its place, or the fleet was left")
        self._look_at_schedules()
        while True:
            try:
                self._look_at_the_script()
                return self.combine.begin()
            except (Dropped, DroppedInCall) as dropped:  # no step is open: nothing of this worker's is lost
                why = dropped.why if isinstance(dropped, DroppedInCall) else str(dropped)
                self.loop.observe("note", {"level": "warning", "text": f"{why}; it enters anew"})

    def _look_at_schedules(self) -> None:
        """Between two steps: how often each is stepped shows in the first ones."""
        watch, last = self.schedule_watch, self.loop.step
        if watch is not None and last is not None:
            watch.look(ends_epoch=last.ends_epoch, progress=self.loop.progress)
            self.schedule_watch = None if watch.over else watch

    def _look_at_the_script(self) -> None:
        """Before the first step, and before the second: what the first one used shows by then."""
        if self._looks < 2:
            (self.after_first if self._looks else self.before_first)(self)
            self._looks += 1

    # -- how far it is ---------------------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether the first step has been given out."""
        return self.loop.begun

    @property
    def finished(self) -> bool:
        """Whether there are no more steps."""
        return self.loop.finished

    @property
    def index(self) -> int:
        """The next step's index."""
        return self.loop.next

    @property
    def current_index(self) -> int:
        """The index of the step that the loop is in, its commit included; before the first, the first's."""
        return self.loop.next if self.loop.step is None else self.loop.step.index

    @property
    def rounds(self) -> int:
        """Shared updates so far."""
        return self.combine.rounds

    @property
    def progress(self) -> float:
        """The part of the whole training that is done, in [0, 1]; the same on every worker."""
        return self.loop.progress

    @property
    def gradients(self) -> Gradients:
        """What is summed over the fleet, or over this worker's group."""
        return self.loop.gradients

    @property
    def membership(self) -> Membership | None:
        """Follows who is there, where workers come and go."""
        return self.loop.membership

    # -- between steps ---------------------------------------------------------------------------------------------

    def meet(self, label: str) -> AbstractContextManager[Any]:
        """Everybody comes to this call; in the context the parameters are those to show."""
        return self.combine.meet(label)

    def renew_data(self) -> None:
        """Hand the dataset as it is now to this worker's loader processes: for ``persistent_workers``, or in the middle
        of an epoch. Without persistent workers every epoch begins with it."""
        self.dealing.renew()

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state that belongs to the parameters as they are on this worker, however far the fleet has gone on."""
        return self.combine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; before the first step."""
        self.combine.load_state_dict(state)

    def pace_state(self) -> dict[str, Any]:
        """The pacer's state as of the last step that entered the training's state."""
        with self.training.changed:
            return self.training.pacer.state_dict()

    def pass_over(self, step: int) -> None:
        """This loop was over before ``step``, in a run that this one goes on from: it gives no steps."""
        self.training.finish(step)
        self.loop.first = self.loop.next = step
        self.loop.finished, self.loop.progress = True, 1.0

    def close(self, *, orderly: bool = True) -> None:
        """End the loop. ``orderly``: not because of an error, which would have said enough."""
        loop = self.loop
        if loop.closed:
            return
        self.combine.close(orderly=orderly)
        loop.closed = True
        loop.tracking.updates.end(loop)
        if orderly and loop.step is not None and not loop.step.committed:
            text = f"the loop was left in step {loop.step.index}, before its commit: its samples were not counted"
            self.combine.warn(text)
        if orderly and not loop.finished and self.training.index > loop.first:
            loop.observe("left", {"step": self.training.index})
        self.dealing.close()
        loop.gradients.detach()
