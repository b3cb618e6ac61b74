"""What the loader processes of torch's DataLoader need to serve us: the user's dataset in view, errors as they are."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, NoReturn

from torch.utils.data import get_worker_info

from paceline import concurrency
from paceline.errors import LoaderDied, describe_exit


@dataclass(frozen=True)
class LoaderFailure:
    """An exception on its way from a loader process, where torch would put its own words in place of the message."""

    error: Exception
    trace: str

    @classmethod
    def of(cls, error: Exception) -> LoaderFailure:
        trace = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # some exceptions cannot be pickled, or only cannot be unpickled: keep name and message
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return cls(error, trace)

    def reraise(self) -> NoReturn:
        self.error.add_note(f"It was raised in a loader process:\n{self.trace}")
        raise self.error


class InitWorker:
    """Runs in each new loader process: `get_worker_info` shows the user's dataset, then the user's own init runs."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        # The loader's dataset is our wrapper; code written for a plain DataLoader expects its own. Info is frozen.
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
        if self._init is not None:
            self._init(worker_id)


def as_it_is(data: Any) -> Any:
    """The DataLoader's collate function: everything is collated already."""
    return data


DYING_S = 1.0
"""From the first sign of a process's death until its exit code is known."""


def received(iterator: Any) -> Any:
    """The next of what a DataLoader's iterator gives; `LoaderDied` when a process of it is dead."""
    try:
        return next(iterator)
    except (RuntimeError, EOFError, OSError) as error:
        raise (_death(list(getattr(iterator, "_workers", ())), error) or error) from None


def _death(processes: Sequence[Any], error: Exception) -> LoaderDied | None:
    """The death of one of these processes, of which ``error`` may be a sign; None: all live."""
    try:
        until = concurrency.monotonic() + DYING_S
        while not any(process.exitcode for process in processes) and concurrency.monotonic() < until:
            wait([process.sentinel for process in processes], timeout=0.05)
    except RuntimeError as told:  # torch's handler of SIGCHLD, just now
        error = told
    dead = next((process for process in processes if process.exitcode), None)
    return LoaderDied.told_by(error) if dead is None else LoaderDied(dead.pid, describe_exit(dead.exitcode))


def shut_down(iterator: Any) -> None:
    """End the processes of a DataLoader iterator now, not when the last reference to it happens to go."""
    stop = getattr(iterator, "_shutdown_workers", None)
    if stop is not None:
        stop()
