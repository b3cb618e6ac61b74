"""Automatic saving, off the training thread.

Between two steps the leader copies the state (`Snapshot`), and a thread of its own writes it into a folder (file.py).
While one checkpoint is being written no other is taken: one that is due meanwhile is taken at the first step after.
Each kind of disk error is reported once, and the training continues. Every worker keeps the schedule, so that a new
leader continues with it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paceline import concurrency
from paceline.checkpoint import file as checkpoint_file
from paceline.settings import whole_number

FINISH_S = 60.0
"""Seconds that the end of a run waits for a checkpoint that is being written."""

SLOW = "slow"


class LastSave(NamedTuple):
    """Step and time of the last save, or of the beginning of the schedule."""

    step: int
    seconds: float


@dataclass(frozen=True)
class Schedule:
    """Times of saving: at multiples of ``every_steps`` steps, or ``every_s`` seconds after the last save.

    With both, whichever comes first.

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
        """Return whether to save before step ``step`` at ``now`` seconds, given the last save."""
        if step <= since.step:
            return False
        by_steps = self.every_steps is not None and step // self.every_steps > since.step // self.every_steps
        return by_steps or (self.every_s is not None and now - since.seconds >= self.every_s)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class Snapshot:
    """A copy of a training's state in host memory, with a copy of every tensor in it.

    Tensors of a GPU are copied in the order of its own work: this thread continues at once, and another thread can
    `wait` for their arrival.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._copies: dict[tuple[Any, ...], torch.Tensor] = {}
        self._devices: set[torch.device] = set()
        self.content: dict[str, Any] = self._copy(dict(content))
        self._arrived = [_mark(device) for device in self._devices]

    def wait(self) -> None:
        """Wait until every copy is complete."""
        for event in self._arrived:
            event.synchronize()

    def _copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            copy = self._tensor(value.detach())
            return torch.nn.Parameter(copy, value.requires_grad) if isinstance(value, torch.nn.Parameter) else copy
        if type(value) in (dict, OrderedDict):
            return type(value)((key, self._copy(item)) for key, item in value.items())
        if type(value) in (list, tuple, set):
            return type(value)(self._copy(item) for item in value)
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor; tied weights are copied once, as ``torch.save`` would write them."""
        if tensor.layout is not torch.strided:
            return tensor.to("cpu", copy=True)
        where = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
        key = (*where, tensor.shape, tensor.stride(), tensor.dtype)
        if key not in self._copies:
            self._copies[key] = self._from_gpu(tensor) if tensor.is_cuda else tensor.to("cpu", copy=True)
        return self._copies[key]

    def _from_gpu(self, tensor: torch.Tensor) -> torch.Tensor:
        self._devices.add(tensor.device)
        try:
            copy = torch.empty_like(tensor, device="cpu", pin_memory=True)  # from torch's own cache after the first
        except RuntimeError:  # no more memory may be pinned: this thread waits for the copy instead
            return tensor.cpu()
        return copy.copy_(tensor, non_blocking=True)


def _mark(device: torch.device) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class Autosaver:
    """Writer of checkpoints on the schedule, where this worker leads.

    Args:
        folder: folder of the checkpoints; created when it does not exist.
        schedule: when to save.
        keep: number of checkpoints to keep.
        leads: returns whether this worker leads; called each time, since that may change.
        content: context manager that gives the state between two steps, plain values and tensors.
        log_event: receives what was saved, and errors, on the training thread.
        clock: returns seconds.
        writes: whether this process of the worker writes: the first, where it has several.
        agreed: returns the first process's value of a flag, on all processes of the worker.
    """

    def __init__(
        self,
        folder: Path,
        *,
        schedule: Schedule,
        keep: int,
        leads: Callable[[], bool],
        content: Callable[[], AbstractContextManager[Mapping[str, Any]]],
        log_event: Callable[[str, Mapping[str, Any]], None],
        clock: Callable[[], float] = concurrency.monotonic,
        writes: bool = True,
        agreed: Callable[[bool], bool] = bool,
    ) -> None:
        self._folder, self._schedule, self._keep = folder, schedule, whole_number("keep", keep)
        self._leads, self._content, self._log_event, self._clock = leads, content, log_event, clock
        self._writes, self._agreed = writes, agreed
        self._since: LastSave | None = None
        self._thread: concurrency.Thread | None = None
        self._reports: concurrency.SimpleQueue[Callable[[], None]] = concurrency.SimpleQueue()
        """Reports of the writer's thread, for the training thread to deliver."""
        self._reported: set[str] = set()
        """Kinds of trouble that were reported and are not over."""
        self._tidied = False
        """Whether this worker has tidied the folder."""

    # -- the training thread ---------------------------------------------------------------------------------------

    def boundary(self, step: int, *, last: bool = False) -> None:
        """Save if it is due, between two steps.

        Args:
            step: index of the next step.
            last: whether there is no next step; the end is always saved.
        """
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
            except ValueError as error:  # better reported now than when a checkpoint is needed
                raise ValueError(f"fleet.autosave: {error}") from None

    def _save(self, step: int) -> None:
        try:
            with self._content() as content:
                taken = Snapshot(content)
        except Exception as error:  # the user's own extra, or no memory for a copy
            self._warn(f"state: {type(error).__name__}", f"the state could not be copied: {_one_line(error)}")
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
        """Wait for the checkpoint that is being written, unless the writer was too slow once."""
        if self._thread is None or SLOW in self._reported:
            return
        self._thread.join(timeout=FINISH_S)
        if self._busy:
            self._warn(SLOW, f"a checkpoint was not written within {FINISH_S:.0f} s: the one before it is whole")

    def close(self) -> None:
        """Wait for the checkpoint that is being written, for `FINISH_S` at most."""
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
        self._log_event("note", {"level": "warning", "text": f"automatic saving in {self._folder}: {text}"})

    # -- the writer's thread ---------------------------------------------------------------------------------------

    def _write(self, taken: Snapshot, step: int) -> None:
        path = checkpoint_file.path_of(self._folder, step)
        try:
            taken.wait()
            self._tidy(step)
            checkpoint_file.write(path, taken.content)
        except Exception as error:
            self._report_trouble(error, f"cannot write {path.name}, the training goes on without")
            return
        saved = {"step": step, "path": str(path), "automatic": True}
        self._reports.put(lambda: self._log_event("save", saved))
        try:
            checkpoint_file.prune(self._folder, keep=self._keep)
        except OSError as error:
            self._report_trouble(error, "cannot remove old checkpoints")
            return
        self._reports.put(self._reported.clear)

    def _tidy(self, step: int) -> None:
        """Rename, once, the checkpoints in the folder that are not of this training."""
        if self._tidied:
            return
        if aside := checkpoint_file.set_aside(self._folder, beyond=step):
            names = ", ".join(path.name for path in aside)
            text = f"checkpoints of later steps than this training's were there; they are now called {names}"
            self._reports.put(lambda: self._warn("aside", text))
        self._tidied = True

    def _report_trouble(self, error: Exception, text: str) -> None:
        kind = f"{type(error).__name__} {getattr(error, 'errno', None)}"
        self._reports.put(lambda: self._warn(kind, f"{text}: {_one_line(error)}"))


def _one_line(error: Exception) -> str:
    text = str(getattr(error, "strerror", None) or error)
    return text.splitlines()[0] if text.strip() else type(error).__name__
