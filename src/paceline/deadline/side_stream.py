"""Work beside the user's on a device: a CUDA stream of its own, so that a round need not wait for a late kernel.

On a CPU there is nothing to it: what was called has been done.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class StreamMark:
    """A point in the user's stream."""

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
    """The stream beside the user's, once it is open. ``with stream.work():`` work goes there, from any thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    def open(self) -> None:
        """Before the first round with a deadline, on the user's thread: runs without one have no stream."""
        if self._stream is None and self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self.follow()

    def work(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def follow(self) -> None:
        """What goes here from now on comes after what the user's stream has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def rejoin(self) -> None:
        """What the user's stream is given from now on comes after what was done here."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def lend(self, tensors: Iterable[torch.Tensor]) -> None:
        """These were made here and are used by the user's stream: the same the other way round."""
        for tensor in tensors if self._stream is not None else ():
            if tensor.device.type == "cuda":
                tensor.record_stream(torch.cuda.current_stream(self._device))

    def keep(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """These belong to the user's stream and are used here: their memory is not to be given away meanwhile."""
        for tensor in tensors if self._stream is not None else ():
            if tensor is not None:
                tensor.record_stream(self._stream)
