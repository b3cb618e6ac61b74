"""How long a GPU works on a step, and how it is waited for.

The host runs ahead of a GPU, so it can neither time it nor know that it is done without asking. Two events in the
stream tell the seconds. A third is waited for, once a step, by looking again and again: a wait inside the driver could
not say that it is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paceline import concurrency

if TYPE_CHECKING:
    from paceline.loop.context import LoopContext

PAUSE_S = 0.00005
"""Between two looks."""
SAY_AFTER_S = 10.0
"""A step's kernels that take so much longer than the host may never end: the worker says that it waits for them. Again
after twice as long, and so on."""


def mark(device: torch.device, *, timed: bool = False) -> Any:
    """An event at the end of what the device was given so far; None where there is nothing to wait for."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for(event: Any, loop: LoopContext, step: int) -> None:
    """Until the device has come to ``event`` in this step; a wait that is long is told to everybody."""
    if event is None:
        return
    began, say_after = concurrency.perf_counter(), SAY_AFTER_S
    while not event.query():
        concurrency.sleep(PAUSE_S)
        if (waited := concurrency.perf_counter() - began) > say_after:
            say_after *= 2
            loop.transport.doing(f"waiting for {loop.device} in step {step}")
            text = f"worker {loop.transport.rank} has waited {waited:.0f} s for {loop.device} to end step {step}"
            loop.observe("note", {"level": "warning", "text": f"{text}: a kernel may be stuck"})


class DeviceClock:
    """Own compute of a step by a GPU's clock, from the first micro-batch to the last gradient. Idle on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began: Any = None
        self._ended: Any = None

    def begin(self) -> None:
        """The first micro-batch is there."""
        if self._began is None:
            self._began = mark(self._device, timed=True)

    def end(self) -> None:
        """The last backward was called."""
        self._ended = mark(self._device, timed=True)

    def seconds(self) -> float | None:
        """Once the device has come to the end; None where there is no such clock."""
        if self._began is None or self._ended is None:
            return None
        return float(self._began.elapsed_time(self._ended)) / 1e3
