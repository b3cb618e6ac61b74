"""Small sums: right, the same bits everywhere, and lost connections come out as named errors."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.errors import WorkerLost
from paceline.transport.engines.contract import EngineWork
from paceline.transport.engines.gloo import GlooEngine
from paceline.transport.engines.small_sums import MOST_BYTES, Outbox, SmallSum, SmallSums, is_small, lane
from paceline.transport.fixed import FixedTransport
from paceline.transport.group import Group, Over, Watched, wait_for_all


def together(size: int, work: Callable[..., Any]) -> list[Any]:
    """Run ``work(rank, sums)`` on threads that are joined by Gloo over loopback; nothing is freed before the end."""
    store, results, kept = dist.HashStore(), [None] * size, []

    def one(rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=20)
        group = dist.ProcessGroupGloo(store, rank, size, options)
        engine = GlooEngine(group, rank=rank)
        sums = SmallSums(engine, rank, size)
        kept.append((group, sums))
        results[rank] = work(rank, sums)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return results


def no_look() -> None:
    """Wait for as long as it takes."""


def randoms(size: int, length: int) -> list[torch.Tensor]:
    return [torch.randn(length, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]


@pytest.mark.parametrize("length", [101, 5001])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8])
def test_everybody_has_the_sum_bit_for_bit_the_same(size: int, length: int) -> None:
    parts = randoms(size, length)

    def work(rank: int, sums: SmallSums) -> torch.Tensor:
        mine = parts[rank].clone()
        sums.sum(mine).wait(no_look)
        return mine

    results = together(size, work)
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], torch.stack(parts).sum(0))


def test_three_add_up_in_the_order_of_ranks() -> None:
    parts = randoms(3, 7)

    def work(rank: int, sums: SmallSums) -> torch.Tensor:
        mine = parts[rank].clone()
        sums.sum(mine).wait(no_look)
        return mine

    assert torch.equal(together(3, work)[1], (parts[0] + parts[1]) + parts[2])


def test_sums_of_unlike_types_go_in_one_message_and_stay_exact() -> None:
    def work(rank: int, sums: SmallSums) -> tuple[list[Any], int]:
        mine = [
            torch.full((3,), 2.0**-30 * (rank + 1), dtype=torch.float64) + 1,
            torch.full((5,), rank, dtype=torch.bfloat16),
            torch.full((2, 2), float(rank)),
            torch.full((3,), 10.0 * rank),
            torch.full((3,), 1 << (40 + rank)),
        ]
        begun = [sums.sum(part) for part in mine]
        sums.exchange(begun)
        for one in begun:
            one.wait(no_look)
        return [part.tolist() for part in mine], sums._lanes[0]._number

    exact = [[4 + 10 * 2.0**-30] * 3, [6.0] * 5, [[6.0] * 2] * 2, [60.0] * 3, [15 << 40] * 3]
    assert together(4, work) == [(exact, 1)] * 4


def test_sums_that_are_under_way_at_once_are_not_mixed_up_whatever_their_sizes() -> None:
    def work(rank: int, sums: SmallSums) -> list[list[float]]:
        mine = [torch.full((length,), float(rank + 10 * length)) for length in (1, 7, 3)]
        under_way = [sums.sum(part) for part in mine]
        for one in under_way:
            sums.exchange([one])
        for one in under_way:
            one.wait(no_look)
        return [part.tolist() for part in mine]

    expected = [[3.0 + 30 * length] * length for length in (1, 7, 3)]
    assert together(3, work) == [expected] * 3


def test_calls_aside_are_counted_by_themselves_in_whichever_order_they_come() -> None:
    def work(rank: int, sums: SmallSums) -> list[float]:
        ours, theirs = torch.tensor([1.0 + rank]), torch.tensor([10.0 + rank])
        first, second = sums.sum(ours), sums.sum(theirs)
        for background in (False, True) if rank else (True, False):
            with lane(background=background):
                sums.exchange([second if background else first])
        first.wait(no_look)
        second.wait(no_look)
        return [float(ours), float(theirs)]

    assert together(2, work) == [[3.0, 21.0]] * 2


def test_messages_are_used_again_once_nothing_is_sent_from_them_any_more() -> None:
    def work(rank: int, sums: SmallSums) -> tuple[list[float], int]:
        totals, used = [], set()
        for number in range(6):
            mine = torch.full((4,), float(number + rank))
            one = sums.sum(mine)
            one.wait(no_look)
            assert one.exchange is not None
            used.add(id(one.exchange.wires))
            kept.append(one.exchange.wires)
            sums.round_is_over()
            totals.append(float(mine[0]))
        return totals, len(used)

    kept: list[Any] = []
    assert together(2, work) == [([1.0, 3.0, 5.0, 7.0, 9.0, 11.0], 2)] * 2


def test_large_tensors_go_another_way_and_in_large_fleets_larger_ones_are_small() -> None:
    most = torch.empty(MOST_BYTES // 4)
    assert is_small(most, 2)
    assert is_small(most, 4), "a ring would send as much"
    assert not is_small(most, 8)
    assert is_small(most, 64), "a ring would take 126 turns"
    assert not is_small(torch.empty(MOST_BYTES // 4 + 1), 2)
    assert is_small(torch.empty(1, device="meta"), 2), "where devices are unlike all go one way"


def test_a_ring_carries_what_is_large() -> None:
    group = Group(1, 2)
    ring: Any = SimpleNamespace(sum=lambda _: "ring", takes=lambda _: False)
    group.connect(lambda rank, size: (ring, "a ring"))
    assert group.start_sum(torch.zeros(MOST_BYTES)) == "ring"
    assert isinstance(group.start_sum(torch.zeros(3)), SmallSum)


def test_what_waits_for_several_sums_sends_the_small_ones_in_one_message_and_waits_for_them_first() -> None:
    said: list[Any] = []

    class Large(EngineWork):
        def wait(self, check: Any) -> None:
            said.append("large")

    class Sums:
        def exchange(self, sums: Any) -> None:
            said.append([float(one.tensor) for one in sums])
            for one in sums:
                one.exchange = SimpleNamespace(finish=lambda check: said.append("small"))

    group, sums = Group(0, 2), Sums()
    watch: Any = SimpleNamespace(check=lambda: None, check_group=lambda group: None, group=group)
    works = [SmallSum(sums, torch.tensor(1.0)), Large(), SmallSum(sums, torch.tensor(2.0))]  # type: ignore[arg-type]
    wait_for_all([Watched(work, watch, group=group) for work in works])
    assert said == [[1.0, 2.0], "small", "small", "large"]


@pytest.mark.parametrize("call", ["sum", "send", "receive"])
def test_a_connection_that_is_broken_already_is_a_named_error_too(call: str) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    transport = FixedTransport.__new__(FixedTransport)
    transport._formed, transport._summed = Group(0, 2), 0
    engine: Any = SimpleNamespace(send=broken, receive=broken, sum=broken, takes=lambda _: False)
    transport.group.connect(lambda rank, size: (engine, "what is broken"))
    lost = WorkerLost("worker 1 (cpu) was killed")
    transport._heartbeat = SimpleNamespace(failure=None, diagnose=lambda error: lost)  # type: ignore[assignment]
    where: tuple[int, ...] = () if call == "sum" else (1, 7)
    options = {} if call == "sum" else {"generation": 0}
    with pytest.raises(WorkerLost, match="worker 1"):
        (getattr(transport, call)(torch.zeros(3), *where, **options) or Over()).wait()


def test_a_sum_is_kept_until_another_round_of_sums_is_over_whatever_rounds_without_sums_end_meanwhile() -> None:
    outbox: Any = Outbox()
    first, second = (SimpleNamespace(wires=SimpleNamespace(layout=())) for _ in range(2))
    outbox.keep(first)
    outbox.round_is_over()
    outbox.round_is_over()
    outbox.round_is_over()
    assert outbox._before == [first]
    assert outbox.spare(()) is None
    outbox.keep(second)
    outbox.round_is_over()
    assert outbox.spare(()) is first.wires
    assert outbox.empty() == [second]


class Broken:
    """An engine whose connections are gone: what is waited for fails."""

    def send(self, *_: Any) -> Broken:
        return self

    receive = send

    def takes(self, *_: Any) -> bool:
        return False

    def wait(self, *_: Any) -> None:
        raise RuntimeError("connection reset by peer")


def test_a_sum_that_failed_holds_no_group_once_nobody_holds_it() -> None:
    made = [Broken()]
    broken: Any = made[0]
    sums, seen = SmallSums(broken, 0, 2), weakref.ref(broken)
    one = sums.sum(torch.ones(3))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="reset by peer"):
            one.wait(no_look)
    gc.disable()
    try:
        made.clear()
        del one, sums, broken
        assert seen() is None, "its group would stay until the next search for garbage"
    finally:
        gc.enable()
