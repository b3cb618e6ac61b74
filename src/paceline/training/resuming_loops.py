"""Resuming from a checkpoint in a script with several loops.

A checkpoint records in which loop it was saved. A script resumes from it in one of two ways:

- ``"all"``: it makes all its loops again, from the first. Those that were over are passed over: they give no steps.
  Until the very place where the checkpoint was saved, everything tracked and ``fleet.state`` are as the script made
  them (where it was saved in a later loop than the first), and what ``fleet.evaluate`` and ``fleet.any`` returned
  between loops, they return again: so the script decides as it did before. At that place everything is restored.
- ``"rest"``: it begins with the loop in which the checkpoint was saved, or the one after it: ``for epoch in
  range(first, epochs)``.

Where the checkpoint and the data show which one it is, the script need not choose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoint import content as checkpoint
from paceline.step.script_loops import CallResults

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
