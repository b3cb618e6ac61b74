"""Small sums by way of the leader: right, the same bits everywhere, and lost connections come out as named errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.errors import WorkerLost
from paceline.transport.fixed import FixedTransport
from paceline.transport.group import Group
from paceline.transport.small_sums import MOST_BYTES, Outbox, StarSum, is_small


def together(size: int, work: Callable[..., Any]) -> list[Any]:
    """Run ``work(rank, group, keep)`` on threads that are joined by Gloo over loopback; nothing is freed before the
    end."""
    store, results, kept = dist.HashStore(), [None] * size, []

    def one(rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=20)
        group = dist.ProcessGroupGloo(store, rank, size, options)
        kept.append(group)

        def keep(star: StarSum) -> StarSum:
            kept.append(star)
            return star

        results[rank] = work(rank, group, keep)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return results


@pytest.mark.parametrize("size", [2, 3, 5])
def test_everybody_has_the_sum_in_the_order_of_ranks_bit_for_bit(size: int) -> None:
    parts = [
        torch.randn(101, dtype=torch.float32, generator=torch.Generator().manual_seed(rank)) for rank in range(size)
    ]

    def work(rank: int, group: Any, keep: Callable[[StarSum], StarSum]) -> torch.Tensor:
        mine = parts[rank].clone()
        keep(StarSum(group, mine, rank=rank, size=size, number=1)).wait()
        return mine

    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    assert all(torch.equal(result, expected) for result in together(size, work))


def test_sums_that_are_under_way_at_once_are_not_mixed_up_whatever_their_sizes() -> None:
    def work(rank: int, group: Any, keep: Callable[[StarSum], StarSum]) -> list[list[float]]:
        mine = [torch.full((length,), float(rank + 10 * length)) for length in (1, 7, 3)]
        under_way = [keep(StarSum(group, part, rank=rank, size=3, number=n)) for n, part in enumerate(mine)]
        for one in under_way:
            one.wait()
        return [part.tolist() for part in mine]

    expected = [[3.0 + 30 * length] * length for length in (1, 7, 3)]
    assert together(3, work) == [expected] * 3


def test_large_tensors_and_those_of_a_device_go_another_way() -> None:
    row = torch.empty(MOST_BYTES // 4, dtype=torch.float32)
    assert is_small(row, 2)
    assert not is_small(row, 3), "the leader would receive more"
    assert not is_small(torch.empty(1, device="meta"), 2)


@pytest.mark.parametrize("alike", [True, False])
def test_where_devices_are_unlike_everybody_goes_the_way_that_all_can(alike: bool) -> None:
    went: list[str] = []

    def went_by(way: str) -> Callable[..., Any]:
        return lambda *_: went.append(way)

    group = Group(1, 2)
    group.alike, group._gloo = alike, SimpleNamespace(send=went_by("star"), allreduce=went_by("ring"))
    group.start_sum(torch.zeros(3))
    assert went == ["star" if alike else "ring"], (
        "a GPU's tensor cannot go by the star, and the others must not wait there"
    )


@pytest.mark.parametrize("call", ["sum", "send", "receive"])
def test_a_connection_that_is_broken_already_is_a_named_error_too(call: str) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    transport = FixedTransport.__new__(FixedTransport)
    transport._formed, transport._noticed, transport._summed = Group(0, 2), threading.Event(), 0
    transport.group.alike = True
    transport.group._gloo = SimpleNamespace(send=broken, recv=broken, allreduce=broken)
    lost = WorkerLost("worker 1 (cpu) was killed")
    transport._heartbeat = SimpleNamespace(failure=None, diagnose=lambda error: lost)  # type: ignore[assignment]
    args = () if call == "sum" else (1, 7)
    with pytest.raises(WorkerLost, match="worker 1"):
        getattr(transport, call)(torch.zeros(3), *args)


def test_a_sum_is_kept_until_another_round_of_sums_is_over_whatever_rounds_without_sums_end_meanwhile() -> None:
    outbox: Any = Outbox()
    outbox.keep("a sum")
    outbox.round_is_over()
    outbox.round_is_over()
    outbox.round_is_over()
    assert outbox._before == ["a sum"]
    outbox.keep("the next")
    outbox.round_is_over()
    assert outbox.empty() == ["the next"]
