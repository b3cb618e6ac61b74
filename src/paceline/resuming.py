"""Going on from a checkpoint in a script with several loops.

A checkpoint says in which loop it was saved. A script goes on from it in one of two ways:

- ``"all"``: it makes all its loops again, from the first. Those that were over are passed over: they give no steps.
  What the script does between them (a schedule stepped once an epoch, say) is undone at the very place where the
  checkpoint was saved, because everything is restored there once more; and what ``fleet.evaluate`` and ``fleet.agree``
  gave between loops, they give again, so that decisions fall as they fell.
- ``"rest"``: it begins with the loop in which the checkpoint was saved, or the one after it: ``for epoch in
  range(first, epochs)``.

Where the data tell which one it is, nothing need be said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline import checkpoint

LOOPS = ("all", "rest")


class Resume:
    """A checkpoint that was loaded, until the script is where it was saved."""

    def __init__(self, path: Path, content: Mapping[str, Any], *, loops: str | None, made: int) -> None:
        """``made``: calls of `told_again` kinds between loops that this process has made already."""
        steps = content["steps"]
        self.path, self.content, self.saved = path, content, steps
        self.loop: int = steps.get("loop", 0)
        """In which it was saved."""
        self.over: bool = steps["dealing"] is None
        """Whether that loop was over."""
        self.passes: Mapping[str, Any] = steps.get("passes") or _of_one_loop(steps)
        """Passes over each dataset until then, and what the script had done."""
        self.lengths: Sequence[int | None] = self.passes["lengths"]
        self.loops = loops if loops is not None or self._beyond_first else "all"
        self.restored = True
        """Whether models and tracked things have its state, as far as the script was when it was loaded."""
        self._saves: int = self.passes["saves"]
        self._told = list(self.passes["told"])[made:]

    @property
    def _beyond_first(self) -> bool:
        return self.loop > 0 or self.over

    @property
    def later(self) -> bool:
        """Whether the script may still do things before it is where the checkpoint was saved."""
        return self._beyond_first and self.loops != "rest"

    def must_be_in(self, loop: int, length: int | None) -> None:
        """The script has made that loop before it loads: then it must be the one that the checkpoint was saved in."""
        if loop != self.loop:
            raise ValueError(
                f"{self.path} was saved in loop {self.loop + 1} of its script: call fleet.load before fleet.steps"
            )
        checkpoint.check_length(self.path, self.saved, length)
        self.loops = "all"

    @property
    def data(self) -> int:
        """The number of the dataset of the loop it was saved in."""
        return int(self.saved.get("data", 0))

    @property
    def same_data(self) -> bool:
        """Whether the loop to come goes over the data of the one it was saved in, if that has as many samples: when it
        is that very loop; else as it was between the loops before; and after the first one, when that was an epoch
        rather than a phase of several."""
        if not self.over:
            return True
        return self.data < self.loop if self.loop else self.saved.get("epochs", 1) == 1

    def settle(self, length: int | None) -> None:
        """The first loop after loading goes over a dataset of this length: find out which of the two ways it is."""
        if self.loops is not None:
            return
        first, last = length == self.lengths[0], length == self.lengths[-1]
        if not first:
            self.loops = "rest"  # other data than the script's first loop had
        elif not self.over and not last:
            self.loops = "all"
        else:
            self.loops = "all"
            self._refuse_if_the_script_may_skip()

    def _refuse_if_the_script_may_skip(self) -> None:
        done = self.loop + self.over
        one_long_loop = self.loop == 0 and self.saved.get("epochs", 1) > 1
        holds = _counts if one_long_loop else _holds  # one that is over mostly was all: any number may be in it
        if not (holds(self.content.get("extra"), done) or holds(self.content.get("state"), done)):
            return
        raise ValueError(
            f"{self.path} was saved {'after' if self.over else 'in'} loop {self.loop + 1} of the script, and holds the "
            f"number {done}, from which the script may count its loops: say which loops it makes now. "
            f'fleet.load(..., loops="rest"): it begins with number {done + 1} (for epoch in range({done}, epochs)); '
            'fleet.load(..., loops="all"): it makes all of them again, and those that are done are passed over'
        )

    @property
    def first(self) -> int:
        """The number of the script's first loop from now on."""
        return self.loop + self.over if self.loops == "rest" else 0

    def passes_over(self, loop: int) -> bool:
        """Whether that loop has nothing left to do."""
        return loop < self.loop

    def saved_here(self) -> bool:
        """The script comes to ``fleet.save`` after the loop it was saved in: whether it is the very call."""
        self._saves -= 1
        return self._saves == 0

    @property
    def saved_in_the_loop(self) -> bool:
        """In its steps, not between it and the next."""
        return self._saves == 0

    def told_again(self, kind: str) -> list[Any]:
        """What that call gave at this place: one value, or none when nobody knows."""
        return [self._told.pop(0)[1]] if self._told and self._told[0][0] == kind else []


def _of_one_loop(steps: Mapping[str, Any]) -> dict[str, Any]:
    """Of a checkpoint from before loops were counted."""
    passes = steps["epoch"] + (steps["dealing"] is not None)
    return {"counts": [passes], "lengths": [steps.get("dataset_length")], "told": [], "saves": 0}


def _counts(value: Any, number: int) -> bool:
    """Whether plain data has this whole number where a script keeps how far it has come.

    >>> _counts({"phase": 1, "bad": 0}, 1), _counts({"bad": 1, "best": 0.5}, 1), _counts(1, 1)
    (True, False, True)
    """
    if isinstance(value, Mapping):
        named = ((str(name).lower(), item) for name, item in value.items())
        return any(_holds(item, number) for name, item in named if any(word in name for word in _COUNTED))
    return _holds(value, number)


_COUNTED = ("epoch", "phase", "stage", "loop", "round")


def _holds(value: Any, number: int) -> bool:
    """Whether plain data has this whole number in it.

    >>> _holds({"epoch": 3, "best": 0.5}, 3), _holds([0.5, True], 1)
    (True, False)
    """
    if isinstance(value, Mapping):
        return any(_holds(item, number) for item in value.values())
    if isinstance(value, (list, tuple, set)):
        return any(_holds(item, number) for item in value)
    return type(value) is int and value == number
