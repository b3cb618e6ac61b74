"""NCCL, where every worker has a GPU of its own: an engine around Gloo that sums what lies on GPUs.

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
from paceline.transport.engines.contract import (
    Check,
    Closer,
    Engine,
    EngineAround,
    EngineKind,
    EngineWork,
    Facts,
    Meeting,
)
from paceline.transport.engines.gloo import Gloo
from paceline.transport.network import ENGINE_TIMEOUT, Store, dist

FREE_S = 5.0
"""Seconds that the end of a group waits for the thread that aborts its sums."""
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
"""torch's watchdog would end the process when a peer is lost: here another goes on, or names the lost one. And a group
that failed would wait for a minute, before it goes, for a dump that nobody asked for."""


class NcclGroup:
    """A process group of NCCL's: one GPU per worker."""

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
        """Free the threads that wait in a sum; returns at once, though NCCL takes half a second to free its memory."""
        if self._aborting is None:
            self._aborting = concurrency.Thread(target=self._group.abort, name="paceline-abort", daemon=True)
            self._aborting.start()

    def close(self) -> None:
        """Abort the group, and wait until NCCL has freed what it holds."""
        self.abort()
        assert self._aborting is not None
        self._aborting.join(FREE_S)


class NcclEngine(EngineAround):
    """Sums of tensors on GPUs by NCCL; all else by the engine inside."""

    def __init__(self, inner: Engine, group: NcclGroup) -> None:
        super().__init__(inner)
        self._group: NcclGroup | None = group

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def sum(self, tensor: torch.Tensor) -> EngineWork:
        if not tensor.is_cuda:
            return self.inner.sum(tensor)
        if self._group is None:
            raise RuntimeError("the group is closed")
        return self._group.sum(tensor)

    def abort(self) -> None:
        if (group := self._group) is not None:
            group.abort()
        self.inner.abort()

    def _close_own(self) -> list[Closer]:
        group, self._group = self._group, None
        if group is None:
            return []
        group.abort()
        return [group.close]


class Nccl(EngineKind):
    """NCCL around Gloo."""

    name, needs_gpus = "nccl", True

    def suits(self, facts: Facts) -> bool:
        own_gpus = {(fact["host"], fact["device"]) for fact in facts if fact["device"].startswith("cuda")}
        return len(own_gpus) == len(facts) and bool(dist.is_nccl_available())

    def connect(self, meeting: Meeting) -> tuple[NcclEngine, str]:
        gloo, how = Gloo().connect(meeting)
        store = dist.PrefixStore("gpus", meeting.store)
        try:
            group = meeting.patiently(lambda: NcclGroup(store, meeting.rank, meeting.size, meeting.device))
        except BaseException:
            gloo.abort()
            raise
        return NcclEngine(gloo, group), f"{how}, and sums on GPUs over nccl"

    def warm_up(self, device: torch.device) -> None:
        """Load NCCL and what it needs on this GPU."""
        NcclGroup(dist.HashStore(), 0, 1, device).close()


class NcclSum(EngineWork):
    """A sum under way on the GPUs."""

    def __init__(self, work: Any, stream: Any) -> None:
        self._work = work
        self._ended = cuda.Event()
        with cuda.stream(stream):  # which is nobody's: it shows the kernel's end, come what may
            work.wait()
            self._ended.record(stream)

    def wait(self, check: Check) -> None:
        """Wait until the sum stands in the tensor, for the host and for the stream that is current here."""
        pause = 0.00005
        while not self.done:
            check()
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

    @property
    def done(self) -> bool:
        """Whether the sum has ended; true also when it has failed, and its kernel waits for ever."""
        return bool(self._work.is_completed())


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set these variables while a group is made, which reads them; the script's own groups keep theirs."""
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
