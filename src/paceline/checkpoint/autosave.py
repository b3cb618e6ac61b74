"""Saving by itself, off the training thread.

Between two steps the leader copies the state (snapshot.py), and a thread of its own writes it (file.py) into a folder
(folder.py). While one is being written no other is taken: what was due meanwhile comes at the first step after.
Trouble with the disk is told once for each kind of it, and the training goes on. Every worker keeps the schedule, so
that a new leader goes on with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline import concurrency
from paceline.checkpoint import file as checkpoint_file
from paceline.checkpoint import folder as checkpoint_folder
from paceline.checkpoint.snapshot import Snapshot
from paceline.settings import whole_number

FINISH_S = 60.0
"""How long the end of a run waits for a checkpoint that is being written, in seconds."""

SLOW = "slow"


class LastSave(NamedTuple):
    """When something was saved last, or the schedule began."""

    step: int
    seconds: float


@dataclass(frozen=True)
class Schedule:
    """Save at every multiple of ``every_steps`` steps, or ``every_s`` seconds after the last time, whichever is first.

    >>> Schedule(every_steps=10).due(20, 1.0, since=LastSave(12, 0.0))
    True
    >>> Schedule(every_s=60).due(20, 59.0, since=LastSave(12, 0.0))
    False
    """

    every_steps: int | None = None
    every_s: float | None = None

    def __post_init__(self) -> None:
        if self.every_steps is None and self.every_s is None:
            raise ValueError("fleet.autosave needs to know how often: give every_steps=, every_s= (seconds), or both")
        if self.every_steps is not None:
            whole_number("every_steps", self.every_steps)
        if self.every_s is not None and not (_is_number(self.every_s) and self.every_s > 0):
            raise ValueError(f"every_s must be a number of seconds above 0, got {self.every_s!r}")

    def due(self, step: int, now: float, *, since: LastSave) -> bool:
        """Whether to save before step ``step`` at ``now`` seconds, since it was done last."""
        if step <= since.step:
            return False
        by_steps = self.every_steps is not None and step // self.every_steps > since.step // self.every_steps
        return by_steps or (self.every_s is not None and now - since.seconds >= self.every_s)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class Autosaver:
    """Saves when it is due and this worker leads.

    Args:
        folder: for the checkpoints; made when it is not there.
        keep: how many of them to keep.
        leads: whether this worker writes; asked each time, since that may change.
        writes: whether this process of it does: the first, where it has several.
        agreed: the first process's answer, on all of them.
        content: the state between two steps, plain values and tensors, as it is to be saved while the context lasts.
        observe: hears of what was saved and of trouble, on the training thread.
        clock: seconds.
    """

    def __init__(
        self,
        folder: Path,
        *,
        schedule: Schedule,
        keep: int,
        leads: Callable[[], bool],
        content: Callable[[], AbstractContextManager[Mapping[str, Any]]],
        observe: Callable[[str, Mapping[str, Any]], None],
        clock: Callable[[], float] = concurrency.monotonic,
        writes: bool = True,
        agreed: Callable[[bool], bool] = bool,
    ) -> None:
        self._folder, self._schedule, self._keep = folder, schedule, whole_number("keep", keep)
        self._leads, self._content, self._observe, self._clock = leads, content, observe, clock
        self._writes, self._agreed = writes, agreed
        self._since: LastSave | None = None
        self._thread: concurrency.Thread | None = None
        self._reports: concurrency.SimpleQueue[Callable[[], None]] = concurrency.SimpleQueue()
        """What the writer's thread reports, for the training thread to deliver."""
        self._reported: set[str] = set()
        """Kinds of trouble that were reported and are not over."""
        self._tidied = False
        """Whether this worker has tidied the folder."""

    # -- the training thread ---------------------------------------------------------------------------------------

    def boundary(self, step: int, *, last: bool = False) -> None:
        """Between two steps: ``step`` is the next. ``last``: there is none, and the end is saved in any case."""
        self._deliver_reports()
        now = self._clock()
        if self._since is None:
            self._begin(LastSave(step, now))
        assert self._since is not None
        leads, due = self._leads(), self._schedule.due(step, now, since=self._since)
        due = due or (last and step > self._since.step)
        if not (self._agreed(due) if leads else due):
            return
        if leads:
            if last:
                self._finish()
            if self._agreed(self._busy):
                return  # it stays due
            self._save(step)
        self._since = LastSave(step, now)

    def _begin(self, mark: LastSave) -> None:
        self._since = mark
        if self._leads():
            try:
                with self._content():
                    pass
            except ValueError as error:  # what can never be saved is better heard of now than when it is needed
                raise ValueError(f"fleet.autosave: {error}") from None

    def _save(self, step: int) -> None:
        try:
            with self._content() as content:
                taken = Snapshot(content)
        except Exception as error:  # the user's own extra, or no memory for a copy
            self._warn(f"state: {type(error).__name__}", f"the state could not be copied: {_words(error)}")
            return
        if not self._writes:
            return
        args = (taken, step)
        self._thread = concurrency.Thread(target=self._write, args=args, name="paceline-autosave", daemon=True)
        self._thread.start()

    @property
    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _finish(self) -> None:
        """Wait for what is being written; a writer that was too slow once is not waited for again."""
        if self._thread is None or SLOW in self._reported:
            return
        self._thread.join(timeout=FINISH_S)
        if self._busy:
            self._warn(SLOW, f"a checkpoint was not written within {FINISH_S:.0f} s: the one before it is whole")

    def close(self) -> None:
        """Wait for what is being written, for `FINISH_S` at most."""
        self._finish()
        self._deliver_reports()

    def _deliver_reports(self) -> None:
        while True:
            try:
                self._reports.get_nowait()()
            except concurrency.Empty:
                return

    def _warn(self, kind: str, text: str) -> None:
        if kind in self._reported:
            return
        self._reported.add(kind)
        self._observe("note", {"level": "warning", "text": f"automatic saving in {self._folder}: {text}"})

    # -- the writer's thread ---------------------------------------------------------------------------------------

    def _write(self, taken: Snapshot, step: int) -> None:
        path = checkpoint_folder.path_of(self._folder, step)
        try:
            taken.wait()
            self._tidy(step)
            checkpoint_file.write(path, taken.content)
        except Exception as error:
            self._report_trouble(error, f"cannot write {path.name}, the training goes on without")
            return
        saved = {"step": step, "path": str(path), "automatic": True}
        self._reports.put(lambda: self._observe("save", saved))
        try:
            checkpoint_folder.prune(self._folder, keep=self._keep)
        except OSError as error:
            self._report_trouble(error, "cannot remove old checkpoints")
            return
        self._reports.put(self._reported.clear)

    def _tidy(self, step: int) -> None:
        """Once: put what is not of this training out of its way."""
        if self._tidied:
            return
        if aside := checkpoint_folder.set_aside(self._folder, beyond=step):
            names = ", ".join(path.name for path in aside)
            text = f"checkpoints of later steps than this training's were there; they are now called {names}"
            self._reports.put(lambda: self._warn("aside", text))
        self._tidied = True

    def _report_trouble(self, error: Exception, text: str) -> None:
        kind = f"{type(error).__name__} {getattr(error, 'errno', None)}"
        self._reports.put(lambda: self._warn(kind, f"{text}: {_words(error)}"))


def _words(error: Exception) -> str:
    said = getattr(error, "strerror", None) or str(error)
    return str(said).splitlines()[0] if str(said).strip() else type(error).__name__
