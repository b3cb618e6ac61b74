"""The way NCCL is waited for, aborted and set up, on stand-ins; the real thing is in tests/fleet/test_gpu.py."""

from __future__ import annotations

import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.errors import GenerationOver
from paceline.transport.engines import nccl
from paceline.transport.engines.nccl import OURS, NcclEngine, NcclGroup, NcclSum
from paceline.transport.engines.small_sums import SmallSums
from paceline.transport.group import Group, Watched, let_go


class Kernel:
    """A sum on a GPU: its work as torch shows it, and the event at its end."""

    def __init__(self, *, after: int = 0, error: str = "", runs_on: bool = False) -> None:
        self.after, self.error, self.runs_on, self.waits = after, error, runs_on, 0

    def is_completed(self) -> bool:
        self.after -= 1
        return self.after < 0

    def wait(self) -> None:
        self.waits += 1
        if self.waits > 1 and self.error:  # the first wait only orders streams
            raise RuntimeError(self.error)

    def record(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return not self.runs_on


def under_way(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> NcclSum:
    monkeypatch.setattr(nccl, "cuda", SimpleNamespace(Event=lambda: kernel, stream=lambda stream: nullcontext()))
    return NcclSum(kernel, None)


def test_a_sum_is_waited_for_by_the_host_and_whether_it_can_still_come_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []
    under_way(Kernel(after=3), monkeypatch).wait(lambda: looks.append(1))
    assert len(looks) == 3


def test_who_waits_in_a_sum_that_can_never_come_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    def over() -> None:
        raise GenerationOver("generation 3 is over", generation=3)

    watch: Any = SimpleNamespace(check=over, check_group=lambda group: None, failed=lambda error, group: error)
    with pytest.raises(GenerationOver):
        Watched(under_way(Kernel(after=1_000_000), monkeypatch), watch, group=Group(0, 2)).wait()


def test_an_engines_error_comes_out_as_the_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    watch: Any = SimpleNamespace(
        check=lambda: None,
        check_group=lambda group: None,
        failed=lambda error, group: GenerationOver(str(error), generation=3),
    )
    with pytest.raises(GenerationOver, match="remote process exited"):
        Watched(under_way(Kernel(error="remote process exited"), monkeypatch), watch, group=Group(0, 2)).wait()


@pytest.mark.parametrize("runs_on", [False, True])
def test_a_kernel_that_was_aborted_is_done_with_its_tensor_or_known_not_to_be(
    monkeypatch: pytest.MonkeyPatch, runs_on: bool
) -> None:
    work = under_way(Kernel(error="aborted", runs_on=runs_on), monkeypatch)
    watch: Any = SimpleNamespace()
    assert Watched(work, watch, group=Group(0, 2)).abandon() is not runs_on


def test_a_wait_for_the_kernels_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert under_way(Kernel(runs_on=True), monkeypatch).abandon() is False


def test_a_group_reads_our_settings_the_script_keeps_its_own_and_an_aborted_group_sums_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, str | None] = {}
    aborted: list[int] = []

    def make(*args: Any) -> Any:
        seen.update({name: os.environ.get(name) for name in OURS})
        return SimpleNamespace(eager_connect_single_device=lambda device: None, abort=lambda: aborted.append(1))

    make.Options = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT", raising=False)
    monkeypatch.setattr(nccl, "dist", SimpleNamespace(ProcessGroupNCCL=make))
    monkeypatch.setattr(nccl, "cuda", SimpleNamespace(device=lambda device: nullcontext(), Stream=lambda device: None))
    group = NcclGroup(None, 0, 2, torch.device("cuda:0"))
    assert seen == OURS
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" not in os.environ
    group.close()
    group.close()
    assert aborted == [1]
    with pytest.raises(RuntimeError, match="aborted"):
        group.sum(torch.zeros(1))


def test_it_sums_what_lies_on_gpus_and_leaves_the_rest_to_the_engine_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    inner: Any = SimpleNamespace(
        sum=lambda tensor: done.append("inner sum"),
        takes=lambda tensor: False,
        abort=lambda: done.append("inner abort"),
        close=lambda: [lambda: done.append("inner close")],
    )
    group: Any = SimpleNamespace(
        sum=lambda tensor: done.append("sum"), abort=lambda: done.append("abort"), close=lambda: done.append("close")
    )
    on_gpu: Any = SimpleNamespace(is_cuda=True, numel=lambda: 1, element_size=lambda: 4)
    engine = SmallSums(NcclEngine(inner, group), 0, 2)
    engine.sum(on_gpu)  # small as it is
    engine.sum(torch.zeros(1 << 20))
    engine.abort()
    assert done == ["sum", "inner sum", "abort", "inner abort"]
    held = engine.close()
    engine.abort()
    assert done[4:] == ["abort", "inner abort"], "once more, when it is closed"
    let_go(held)
    assert done[6:] == ["close", "inner close"]
    with pytest.raises(RuntimeError, match="closed"):
        engine.sum(on_gpu)
