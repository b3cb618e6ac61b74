"""How a GPU is timed and waited for, and the stream beside the user's.

The host runs ahead of a GPU, so it can neither time it nor see that it is done without asking. Two events in the stream
measure a step's seconds (`DeviceClock`). Once per step the host waits for a third (`mark`, `wait_for_event`): it polls,
so that a long wait can be logged, which a wait inside the driver could not.

Rounds with a deadline run beside the user's loop: their kernels go to a stream of their own (`SideStream`), and a
`StreamMark` shows when a micro-batch on the user's stream is done. On a CPU all of this does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

import torch

from paceline import concurrency

if TYPE_CHECKING:
    from paceline.step.context import LoopContext

PAUSE_S = 0.00005
"""Seconds between two polls."""
WARN_AFTER_S = 10.0
"""Seconds of waiting for a step's kernels after which the worker logs a warning, for they may never end.

It logs again after twice as long, and so on.
"""


def mark(device: torch.device, *, timed: bool = False) -> Any:
    """Return an event behind all that the device was given so far; None where there is nothing to wait for."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for_event(event: Any, loop: LoopContext, step: int) -> None:
    """Wait until the device has reached ``event`` in this step; log a warning when that takes long."""
    if event is None:
        return
    began, warn_after = concurrency.perf_counter(), WARN_AFTER_S
    while not event.query():
        concurrency.sleep(PAUSE_S)
        if (waited := concurrency.perf_counter() - began) > warn_after:
            warn_after *= 2
            loop.transport.doing(f"waiting for {loop.device} in step {step}")
            text = f"worker {loop.transport.rank} has waited {waited:.0f} s for {loop.device} to end step {step}"
            loop.notes.warn(f"{text}: a kernel may be stuck")


class DeviceClock:
    """A step's computing time by the GPU's clock, from the first micro-batch to the last gradient."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began: Any = None
        self._ended: Any = None

    def begin(self) -> None:
        """Start the clock at the first micro-batch; later calls do nothing."""
        if self._began is None:
            self._began = mark(self._device, timed=True)

    def end(self) -> None:
        """Stop the clock after the last backward."""
        self._ended = mark(self._device, timed=True)

    def seconds(self) -> float | None:
        """Return the seconds, once the device has reached the end; None where there is no such clock."""
        if self._began is None or self._ended is None:
            return None
        return float(self._began.elapsed_time(self._ended)) / 1e3


class StreamMark:
    """A point in the user's stream, which the device may have passed."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def passed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class SideStream:
    """The stream beside the user's, once it is open; any thread may use it: ``with stream.work():``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    def open(self) -> None:
        """Make the stream, on the user's thread, before the first round with a deadline."""
        if self._stream is None and self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self.follow()

    def work(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def follow(self) -> None:
        """Have this stream's later work wait for what the user's stream has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def rejoin(self) -> None:
        """Have the user's stream's later work wait for what this stream has been given so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def lend(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep the memory of tensors that were made on this stream while the user's stream uses them."""
        for tensor in tensors if self._stream is not None else ():
            if tensor.device.type == "cuda":
                tensor.record_stream(torch.cuda.current_stream(self._device))

    def keep(self, *what: Any) -> None:
        """Keep the memory of all tensors in these objects, which belong to the user's stream, while this one uses them.

        Whatever this stream may read has to pass here: else the user's stream may write into the memory first.
        """
        for tensor in tensors_in(what) if self._stream is not None else ():
            if tensor.device.type == "cuda":
                tensor.record_stream(self._stream)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for part in value:
            yield from tensors_in(part)
    elif is_dataclass(value):
        yield from tensors_in(vars(value))
