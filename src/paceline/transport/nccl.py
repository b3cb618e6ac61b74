"""NCCL, where every worker has a GPU of its own: it sums what lies there, and everything else goes over Gloo.

A group of NCCL's cannot be mended and can only be aborted, which frees the threads that wait in a sum; where workers
come and go, the next generation forms its own. What is waited for is the end of the sum's kernel itself, by the host,
so that a tensor is never read or written while an aborted kernel still runs on it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from paceline import concurrency
from paceline.transport.engines.base import EngineWork, Look
from paceline.transport.network import ENGINE_TIMEOUT, Store, dist

CLOSE_S = 5.0
ABANDON_S = 0.05
"""How long the kernel of an aborted sum may take to end."""
cuda: Any = torch.cuda
OURS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
}
"""torch's watchdog would end the process when a peer is lost: here another goes on, or says who was lost. And a group
that failed would wait for a minute, before it goes, for a dump that nobody asked for."""


class NcclGroup:
    """A group of GPUs, one a worker."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = ENGINE_TIMEOUT
        with cuda.device(device):
            with _environment(OURS):
                self._group = dist.ProcessGroupNCCL(store, rank, size, options)
            self._group.eager_connect_single_device(device)
            self._stream = cuda.Stream(device)
        self._aborting: concurrency.Thread | None = None

    def sum(self, tensor: torch.Tensor) -> NcclSum:
        if self._aborting is not None:
            raise RuntimeError("the group was aborted")
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        return NcclSum(self._group.allreduce([tensor], options), self._stream)

    def abort(self) -> None:
        """Free the threads that wait in it; returns at once, though giving back what NCCL holds takes half a second."""
        if self._aborting is None:
            self._aborting = concurrency.Thread(target=self._group.abort, name="paceline-abort", daemon=True)
            self._aborting.start()

    def close(self) -> None:
        self.abort()
        assert self._aborting is not None
        self._aborting.join(CLOSE_S)


def warm_up(device: torch.device) -> None:
    """Load NCCL and what it needs on this GPU, so that nobody waits for it when this worker enters."""
    NcclGroup(dist.HashStore(), 0, 1, device).close()


class NcclSum(EngineWork):
    """A sum under way on the GPUs."""

    def __init__(self, work: Any, stream: Any) -> None:
        self._work = work
        self._ended = cuda.Event()
        with cuda.stream(stream):  # which is nobody's: it shows the kernel's end, come what may
            work.wait()
            self._ended.record(stream)

    def wait(self, look: Look) -> None:
        """Until the sum stands in the tensor, for the host and for the stream that is current here."""
        pause = 0.00005
        while not self._work.is_completed():  # also when it has failed, and its kernel waits for ever
            look()
            concurrency.sleep(pause)
            pause = min(pause * 1.5, 0.001)
        self._work.wait()

    def abandon(self) -> bool:
        """Wait a moment for the kernel to be over, with its sum or without."""
        until = concurrency.monotonic() + ABANDON_S
        while not self._ended.query():
            if concurrency.monotonic() > until:
                return False
            concurrency.sleep(0.0005)
        return True


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """These variables while a group is made, which reads them; the script's own groups keep theirs."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
