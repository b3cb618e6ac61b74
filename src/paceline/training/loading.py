"""Resuming: ``fleet.load``, and what follows until the script is where the checkpoint was saved.

A checkpoint records in which loop it was saved. A script with several loops resumes from it in one of two ways
(`Resume`):

- ``"all"``: it makes all its loops again, from the first. Those that were over are passed over: they give no steps.
  Until the very place where the checkpoint was saved, everything tracked and ``fleet.state`` are as the script made
  them (where it was saved in a later loop than the first), and what ``fleet.evaluate`` and ``fleet.any`` returned
  between loops, they return again: so the script decides as it did before. At that place everything is restored.
- ``"rest"``: it begins with the loop in which the checkpoint was saved, or the one after it: ``for epoch in
  range(first, epochs)``.

Where the checkpoint and the data show which one it is, the script need not choose.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint import content as checkpoint
from paceline.checkpoint.load import Found, fetch
from paceline.checkpoint.shards import outline
from paceline.errors import MisuseError
from paceline.step.checks.schedules import unfinished
from paceline.step.micro_batch_size import keep_saved
from paceline.step.script_loops import CallResults
from paceline.transport import Alone

if TYPE_CHECKING:
    from paceline.feed import Source
    from paceline.step.steps import StepLoop
    from paceline.training.context import TrainingContext
    from paceline.training.replica import Replica
    from paceline.training.untracked import UntrackedChecks

LOOPS = ("all", "rest")


class Resume:
    """A checkpoint that was loaded, until the script is where it was saved."""

    def __init__(self, path: Path, content: Mapping[str, Any], *, loops: str | None) -> None:
        steps = content["steps"]
        self.path, self.content, self.saved = path, content, steps
        self.loop: int = steps.get("loop", 0)
        """Number of the loop that the checkpoint was saved in."""
        self.over: bool = steps["dealing"] is None
        """Whether that loop was over."""
        self.passes: Mapping[str, Any] = steps.get("passes") or _passes_of_one_loop(steps)
        """Passes over each dataset until then, and what the script had done."""
        self.lengths: Sequence[int | None] = self.passes["lengths"]
        self.call_results = CallResults(self.passes["told"])
        self.loops = loops if loops is not None or self._beyond_first else "all"
        self.before: dict[str, Any] = {}
        """State of everything tracked, and of the script's values, before it loaded."""
        self._epochs: int = steps.get("epochs", 1)
        self._saves: int = self.passes["saves"]

    @property
    def _beyond_first(self) -> bool:
        return self.loop > 0 or self.over

    @property
    def passing(self) -> bool:
        """Return whether the script makes loops again that were over."""
        return self.loops == "all" and self._beyond_first

    @property
    def replays(self) -> bool:
        """Return whether the script makes complete loops again before the one where the checkpoint was saved."""
        return self.passing and self.loop > 0

    @property
    def data(self) -> int:
        """Return the number of the dataset of the loop that the checkpoint was saved in."""
        return int(self.saved.get("data", 0))

    def must_be_in(self, loop: int, length: int | None) -> None:
        """Raise ValueError unless the loop that the script made before loading is the one that was saved."""
        if loop != self.loop:
            raise ValueError(
                f"{self.path} was saved in loop {self.loop + 1} of its script: call fleet.load before fleet.steps"
            )
        checkpoint.check_length(self.path, self.saved, length)
        self.loops = "all"

    # -- which way ---------------------------------------------------------------------------------------------------

    @property
    def same_data(self) -> bool:
        """Return whether the loop to come goes over the data of the saved loop, if that has as many samples.

        It does when it is that very loop; else as it was between the loops before; and after the first loop, when that
        was an epoch rather than a phase of several.
        """
        if self.first_loop == self.loop:
            return True
        return self.data < self.loop if self.loop else self.saved.get("epochs", 1) == 1

    def decide_loops(self, length: int | None, epochs: int) -> None:
        """Decide between the two ways, from the dataset length of the first loop after loading."""
        if self.loops is not None:
            return
        one_long_loop = self.loop == 0 and max(self._epochs, epochs) > 1
        like_loops = len(set(self.lengths)) == 1
        if length == self.lengths[0]:
            certain = not self.over and length != self.lengths[-1]
            if not certain:
                self._refuse_if_the_script_may_skip(one_long_loop)
            self.loops = "all"
        elif not self.over and not like_loops and length == self.lengths[-1]:
            self.loops = "rest"
        elif not self.over or (like_loops and not one_long_loop):
            raise ValueError(
                f"{self.path} belongs to other data: its loops had {self.lengths[-1]} samples, this one has {length}. "
                'To train on from it with other data, say fleet.load(..., loops="rest")'
            )
        elif length in self.lengths:
            self._refuse("was saved in a script whose loops go over data of unlike lengths")
        else:
            self.loops = "rest"

    def _refuse_if_the_script_may_skip(self, one_long_loop: bool) -> None:
        parts = [self.content.get(part) for part in ("extra", "state")]
        if one_long_loop:  # most scripts had one loop only, and may store any number
            skips = any(_counts(part, self.loop + 1) for part in parts)
        else:
            skips = any(_contains(part, {self.loop, self.loop + 1}) for part in parts)
        if skips:
            self._refuse("holds a number from which the script may count its loops")

    def _refuse(self, why: str) -> None:
        done = self.loop + self.over
        raise ValueError(
            f"{self.path} was saved {'after' if self.over else 'in'} loop {self.loop + 1} of the script, and {why}: "
            f'say which loops it makes now. fleet.load(..., loops="rest"): it begins with loop {done + 1} (for epoch '
            f'in range({done}, epochs)); fleet.load(..., loops="all"): it makes all of them again, and those that are '
            "done are passed over"
        )

    @property
    def first_loop(self) -> int:
        """Return the number of the script's first loop from now on."""
        if self.loops != "rest":
            return 0
        if not self.over or self._saves:
            return self.loop + self.over
        inside, behind = (
            any(_contains(self.content.get(part), {number}) for part in ("extra", "state"))
            for number in (self.loop, self.loop + 1)
        )
        if inside == behind:
            raise ValueError(
                f"{self.path} was saved in the last step of loop {self.loop + 1}, and does not tell whether the script "
                'begins with that loop or with the next: save behind the loop, or say fleet.load(..., loops="all")'
            )
        return self.loop + behind

    # -- on the way --------------------------------------------------------------------------------------------------

    def passes_over(self, loop: int) -> bool:
        """Return whether that loop has nothing left to do."""
        return loop < self.loop

    def is_saving_call(self) -> bool:
        """Return whether this call of ``fleet.save``, after the saved loop, is the one that wrote the checkpoint."""
        self._saves -= 1
        return self._saves == 0

    @property
    def saved_in_the_loop(self) -> bool:
        """Return whether the checkpoint was saved in the loop's steps, not between that loop and the next."""
        return self._saves == 0

    def must_have_met_saving_call(self) -> None:
        """Raise ValueError if the script reaches the next loop without the ``fleet.save`` that wrote the checkpoint."""
        if self._saves > 0:
            raise ValueError(
                f"{self.path} was written by a fleet.save behind loop {self.loop + 1} which the script did not come by "
                'this time, so it is not known what it had done by then: save behind every loop, or use loops="rest"'
            )


def _passes_of_one_loop(steps: Mapping[str, Any]) -> dict[str, Any]:
    """Return the passes of a checkpoint from before loops were counted."""
    passes = steps["epoch"] + (steps["dealing"] is not None)
    return {"counts": [passes], "lengths": [steps.get("dataset_length")], "told": [], "saves": 0}


def _counts(value: Any, number: int) -> bool:
    """Return whether plain data has this whole number where a script stores its progress.

    >>> _counts({"phase": 1, "bad": 0}, 1), _counts({"bad": 1, "best": 0.5}, 1), _counts(1, 1)
    (True, False, True)
    """
    if isinstance(value, Mapping):
        named = ((str(name).lower(), item) for name, item in value.items())
        return any(_contains(item, {number}) for name, item in named if any(word in name for word in _COUNTED))
    return _contains(value, {number})


_COUNTED = ("epoch", "phase", "stage", "loop", "round")


def _contains(value: Any, numbers: set[int]) -> bool:
    """Return whether plain data has one of these whole numbers in it.

    >>> _contains({"epoch": 3, "best": 0.5}, {3}), _contains([0.5, True], {1})
    (True, False)
    """
    if isinstance(value, Mapping):
        return any(_contains(item, numbers) for item in value.values())
    if isinstance(value, (list, tuple, set)):
        return any(_contains(item, numbers) for item in value)
    return type(value) is int and value in numbers


logger = logging.getLogger("paceline")


class Loading:
    """Loader of checkpoints, which brings the script's loops to where they were saved."""

    def __init__(self, context: TrainingContext, replica: Replica, untracked: UntrackedChecks) -> None:
        self._context, self._replica, self._untracked = context, replica, untracked
        self._checked: StepLoop | None = None
        """The newest loop that was over when its schedules were looked at."""

    def load(self, path: str | Path, *, missing_ok: bool, loops: str | None) -> Any:
        """Run ``fleet.load``."""
        context = self._context
        over = context.steps if context.steps is not None and context.steps.begun else None
        if over is not None and not (over.finished or over.left):
            raise MisuseError("fleet.load in the middle of a loop: call it before the first step, or behind the loop")
        if loops not in (None, *LOOPS):
            raise ValueError(f'loops must be "all" or "rest", got {loops!r}')
        self.check_schedules()
        self._untracked.before_load(path)
        if context.outside:
            return self._load_outside(Path(path), loops)
        with context.meet("fleet.load()") if over is not None else nullcontext():
            context.tracking.must_agree(context.transport, "fleet.load()")
            device = context.state_device
            found = fetch(context.transport, Path(path), device=device, missing_ok=missing_ok, warn=context.warn)
        if found is None:
            return None
        self._untracked.after_fetch(path, found)
        return self._restore_all(*found, loops=loops)

    def check_schedules(self) -> None:
        """Warn of schedules that are not at their end when a loop is over; once, for a load may set them back."""
        steps = self._context.steps
        if steps is None or not steps.begun or not steps.finished or steps is self._checked:
            return
        self._checked = steps
        for name, thing in self._context.tracking.things.items():
            if isinstance(thing, LRScheduler) and (text := unfinished(name, thing)):
                self._context.warn(text)

    def _load_outside(self, path: Path, loops: str | None) -> Any:
        """Load on a worker that waits to enter.

        It gets a peer's state, and needs only what is the script's own from the file, if there is one.
        """
        try:
            found = self._fetch_alone(path)
            return None if found is None else self._restore_all(*found, loops=loops)
        except ValueError as error:
            logger.warning("%s: a peer's state comes instead", error)
            return None

    def _fetch_alone(self, path: Path) -> Found | None:
        """Return the checkpoint for this worker alone; the first of its processes reads it."""
        transport, device = self._context.transport, self._context.state_device
        warn = partial(logger.warning, "%s")
        found: Found | None = None

        def read() -> Found | None:
            nonlocal found
            found = fetch(Alone(), path, device=device, missing_ok=True, warn=warn)
            return found and Found(found.path, outline(found.content))

        outlined = transport.once("the checkpoint", read)
        return found if transport.shard == 0 else outlined

    # -- restoring ---------------------------------------------------------------------------------------------------

    def _restore_all(self, path: Path, content: dict[str, Any], *, loops: str | None) -> Any:
        context, steps = self._context, self._context.steps
        if context.passing is not None and steps is not None:
            context.inform(f"fleet.load({str(path)!r}): nothing is loaded, because its loop is passed over")
            return content["extra"]
        fresh = steps is None or not (steps.begun or steps.finished)  # else only objects are set back
        resume = Resume(path, content, loops=loops) if fresh and content["steps"] is not None else None
        if resume is not None and steps is not None:
            resume.must_be_in(steps.script_loop.number, steps.dataset_length)
        self._take_seed(path, content["seed"])
        if resume is not None:
            resume.before = self._replica.own_state()
        self._restore_replica(path, content, later=loops == "all" and resume is not None and resume.passing)
        if content["pace"]["name"] == context.pacer.name:
            context.pacer.load_state_dict(content["pace"]["state"])
        context.resume = resume
        if resume is not None and steps is not None:
            self.continue_in(steps)
        if steps is not None and steps.begun:
            steps.combine.models_were_set()
        context.recorder.event("load", {"step": (content["steps"] or {}).get("step", 0), "path": str(path)})
        return content["extra"]

    def _restore_replica(self, path: Path, content: Mapping[str, Any], *, later: bool) -> None:
        """Restore models and tracked objects.

        With ``later``, what does not fit yet may fit once the script is where the checkpoint was saved.
        """
        context = self._context
        try:
            checkpoint.must_match(path, content, context.tracking.things, context.models)
        except ValueError as misfit:
            if not later:
                raise ValueError(
                    f'{misfit}. (If the script changes its model between loops, say fleet.load(..., loops="all"))'
                ) from None
            context.inform(f"{misfit}; it is looked at again where the checkpoint was saved")
            return
        self._replica.restore(path, content, guard=True)

    def _take_seed(self, path: Path, seed: int) -> None:
        """Adopt the checkpoint's seed, on which the epoch's order and every sample's random numbers depend."""
        context = self._context
        if seed == context.seed:
            return
        if context.steps is not None:
            raise ValueError(f"{path} was made with seed {seed}: join with that seed, or load before fleet.steps")
        context.inform(f"the seed is now {seed}, as in the checkpoint: the epoch's order depends on it")
        context.seed = seed

    # -- on the way to where the checkpoint was saved ------------------------------------------------------------------

    def before_loop(self, source: Source, epochs: int) -> None:
        """Prepare for a new loop: the first one after loading shows which of the script's loops it is."""
        context, resume = self._context, self._context.resume
        if resume is None:
            return
        guessed = resume.loops is None
        resume.decide_loops(source.length, epochs)
        if context.steps is not None:
            return
        if resume.loops == "rest":
            context.passes.continue_from(resume.passes, loop=resume.first_loop)
            if source.length == resume.lengths[-1] and resume.same_data:
                context.passes.recognise(source.dataset, resume.data)
            if guessed:
                context.warn(f"after {resume.path} the script goes on with its loop {resume.first_loop + 1}")
        elif resume.replays:  # the script begins again from its own beginning
            checkpoint.restore_tracked(resume.path, resume.before["tracked"], context.tracking.things)
            context.tracking.state.replace(resume.before["state"])
            text = f"{resume.path} was saved in the script's loop {resume.loop + 1}"
            context.warn(f"{text}: those before it are passed over, they give no steps")

    def continue_in(self, steps: StepLoop) -> None:
        """Pass over a loop that was made after loading, resume in it, or end the resuming."""
        resume, loop = self._context.resume, steps.script_loop.number
        if resume is None:
            return
        if resume.passes_over(loop):
            steps.pass_over(resume.saved["step"])
            return
        if steps.script_loop.dataset == resume.data:
            keep_saved(steps.loop, resume.saved.get("sizes"))
        if loop == resume.loop:
            checkpoint.check_length(resume.path, resume.saved, steps.dataset_length)
            steps.load_state_dict(resume.saved)
            steps.gradients.statistics_were_set()
            if not steps.finished or resume.saved_in_the_loop:
                self._finish(resume)
            return
        if resume.passing:
            resume.must_have_met_saving_call()
        self._finish(resume)

    def passes_over_save(self, path: Path) -> bool:
        """Return whether ``fleet.save`` writes nothing because its loop is passed over.

        Everything is further on than the script then. In the very call that wrote the checkpoint, the script is where
        it was saved.
        """
        context, steps = self._context, self._context.steps
        if steps is None:
            return False
        context.passes.saves += steps.left
        if (resume := context.passing) is None:
            return False
        if steps.script_loop.number == resume.loop and resume.is_saving_call():
            self._finish(resume)
        else:
            context.inform(f"fleet.save({str(path)!r}): not written, because its loop is passed over")
        return True

    def _finish(self, resume: Resume) -> None:
        """End the resuming, where the checkpoint was saved: undo what the script did to tracked objects on its way."""
        context = self._context
        context.resume = None
        if resume.passing:
            # What was tracked only after loading was meant to begin anew.
            saved, things = resume.content["tracked"], context.tracking.things
            known = {name: thing for name, thing in things.items() if name in saved}
            checkpoint.must_match(resume.path, resume.content, known, context.models)
            self._replica.restore(resume.path, resume.content)
            if context.steps is not None:
                context.steps.combine.models_were_set()
        context.passes.load_state_dict(resume.passes)

    def unreached(self) -> MisuseError | None:
        """Return the error to raise where the script ends before it came to where the checkpoint was saved."""
        resume = self._context.passing
        if resume is None or not resume.replays or self._context.steps is None:
            return None
        return MisuseError(
            f"the script ended before it came to where {resume.path} was saved (loop {resume.loop + 1}), so nothing "
            'was trained: if it begins with a later loop by itself, load with fleet.load(..., loops="rest")'
        )
