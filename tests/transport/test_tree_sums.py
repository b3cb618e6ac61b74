"""Sums over a tree: in the order that the tree says, the same bits everywhere, and lost connections end them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.transport.engines import tree_sums
from paceline.transport.engines.contract import Closer
from paceline.transport.engines.gloo import GlooEngine
from paceline.transport.engines.small_sums import SmallSum, lane
from paceline.transport.engines.tree_sums import TreeSum, TreeSums
from paceline.transport.formats import FORMATS
from paceline.transport.group import Group, let_go
from paceline.transport.topology import Topology

PAIRS = Topology(sites=(((0, 2),), ((1, 3),)))
UNEQUAL = Topology(sites=(((0, 1), (2, 3)), ((4,),), ((5, 6),)))
COMPUTERS = Topology(sites=(((0,), (1,), (2,), (3,)),))


def together(topology: Topology, work: Callable[[int, TreeSums], Any]) -> list[Any]:
    """Run ``work(rank, sums)`` on threads that are joined by Gloo over loopback; nothing is freed before the end."""
    size = len(topology.order)
    store, results, held = dist.HashStore(), [None] * size, []

    def one(rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=20)
        group = dist.ProcessGroupGloo(store, rank, size, options)
        engine = GlooEngine(group, rank=rank)
        sums = TreeSums(engine, topology.branch(rank), rank)
        try:
            results[rank] = work(rank, sums)
        finally:
            held.append(sums.close())

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    for one_of_them in held:
        let_go(one_of_them)
    return results


def no_look() -> None:
    """Wait for as long as it takes."""


def randoms(size: int, length: int) -> list[torch.Tensor]:
    return [torch.randn(length, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]


def added(parts: list[torch.Tensor]) -> torch.Tensor:
    return reduce(torch.add, parts)


def summed(topology: Topology, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    def work(rank: int, sums: TreeSums) -> torch.Tensor:
        mine = parts[rank].clone()
        sums.start(mine).wait(no_look)
        return mine

    return together(topology, work)


@pytest.mark.parametrize("length", [1, 1000, 200_001])
def test_sites_add_up_first_and_then_their_sums_in_order(length: int) -> None:
    parts = randoms(4, length)
    results = summed(PAIRS, parts)
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.equal(results[0], (parts[0] + parts[2]) + (parts[1] + parts[3]))


@pytest.mark.parametrize("length", [500, 300_000])
def test_three_sites_of_unlike_sizes_add_up_in_the_order_of_the_tree(length: int) -> None:
    parts = randoms(7, length)
    results = summed(UNEQUAL, parts)
    sites = [added([parts[0], parts[1], parts[2] + parts[3]]), parts[4], parts[5] + parts[6]]
    assert all(torch.equal(result, added(sites)) for result in results)


def test_no_two_that_cross_send_to_the_same_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[int, list[int]] = {rank: [] for rank in range(4)}
    send = tree_sums.PieceMail.send

    def noted(mail: Any, data: torch.Tensor, piece: Any, others: list[int]) -> None:
        sent[mail._engine._rank] += others
        send(mail, data, piece, others)

    monkeypatch.setattr(tree_sums.PieceMail, "send", noted)
    parts = randoms(4, 40_000)
    assert all(torch.equal(result, added(parts)) for result in summed(COMPUTERS, parts))
    for turn in range(3):
        assert {sent[rank][turn] for rank in range(4)} == {0, 1, 2, 3}, "parts of pieces"
        assert {sent[rank][3 + turn] for rank in range(4)} == {0, 1, 2, 3}, "totals"


def test_sums_longer_than_the_window_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_sums, "LEAST_WINDOW", 2)
    monkeypatch.setattr(tree_sums, "WINDOW", 2)
    monkeypatch.setattr(tree_sums, "PIECE_BYTES", 64)

    def work(rank: int, sums: TreeSums) -> list[float]:
        mine = [torch.full((length,), float(rank)) for length in (100, 7, 33)]
        under_way = [sums.start(one) for one in mine]
        for one in reversed(under_way):
            one.wait(no_look)
        return [float(one.min()) for one in mine] + [float(one.max()) for one in mine]

    assert together(UNEQUAL, work) == [[21.0] * 6] * 7


def test_types_and_shapes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int, sums: TreeSums) -> list[Any]:
        mine = [
            torch.full((3,), 2.0**-30 * (rank + 1), dtype=torch.float64) + 1,
            torch.full((5,), rank, dtype=torch.bfloat16),
            torch.full((2, 3), 1 << (40 + rank)).t(),
            torch.tensor(float(rank)),
            torch.empty(0),
        ]
        for one in [sums.start(part) for part in mine]:
            one.wait(no_look)
        return [part.tolist() for part in mine]

    exact = [[4 + 10 * 2.0**-30] * 3, [6.0] * 5, [[15 << 40] * 2] * 3, 6.0, []]
    assert together(PAIRS, work) == [exact] * 4


def test_calls_aside_are_counted_by_themselves_in_whichever_order_they_come() -> None:
    def work(rank: int, sums: TreeSums) -> list[float]:
        mine, under_way = {False: torch.tensor([1.0 + rank]), True: torch.tensor([10.0 + rank])}, []
        for background in (False, True) if rank else (True, False):
            with lane(background=background):
                under_way.append(sums.start(mine[background]))
        for one in under_way:
            one.wait(no_look)
        return [float(mine[False]), float(mine[True])]

    assert together(PAIRS, work) == [[10.0, 46.0]] * 4


def test_messages_are_kept_until_the_next_round_shows_that_they_came() -> None:
    def work(rank: int, sums: TreeSums) -> list[int]:
        kept = []
        for _ in range(3):
            sums.start(torch.ones(4)).wait(no_look)
            sums.round_is_over()
            mail = sums._streams[0].mail
            kept.append(len(mail._before) + len(mail._now))
        return kept

    assert [kept[0] for kept in together(PAIRS, work)] == [2, 2, 1, 1], "one that crosses sends across and down"
    assert all(len(set(kept)) == 1 for kept in together(PAIRS, work)), "and what is older is let go"


def test_what_fits_a_short_message_needs_no_tree() -> None:
    group = Group(0, 2)
    group.connect(lambda rank, size: (GlooEngine(None), "nothing"))
    group.sum_over(Topology(sites=(((0,),), ((1,),)), tree=True))
    assert isinstance(group.start_sum(torch.zeros(1024)), SmallSum)
    with pytest.raises(RuntimeError, match="not formed"):
        group.start_sum(torch.zeros(1025))
    let_go(group.close())


def test_a_sum_that_is_given_up_no_longer_changes_its_tensor() -> None:
    tensor = torch.zeros(3)
    one = TreeSum(tensor)
    one.abandon()
    one.land(one.parts[0], torch.ones(3))
    assert tensor.tolist() == [0.0, 0.0, 0.0]


def test_who_waits_for_a_sum_looks_now_and_then_whether_it_can_still_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def over() -> None:
        raise RuntimeError("it is over")

    monkeypatch.setattr(tree_sums, "CHECK_S", 0.001)
    one = TreeSum(torch.zeros(3))
    with pytest.raises(RuntimeError, match="it is over"):
        one.wait(over)
    assert not one.done


def test_a_group_that_is_closed_ends_what_is_under_way_and_its_threads() -> None:
    held: list[Closer] = []

    def work(rank: int, sums: TreeSums) -> str:
        if rank:
            time.sleep(0.2)
            return ""
        one = sums.start(torch.ones(3))
        held.extend(sums.close())
        with pytest.raises(RuntimeError, match="the group is closed"):
            one.wait(no_look)
        with pytest.raises(RuntimeError, match="the group is closed"):
            sums.start(torch.ones(3))
        return "ended"

    assert together(Topology(sites=(((0,),), ((1,),))), work)[0] == "ended"
    let_go(held)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("topology", [PAIRS, UNEQUAL], ids=["two places", "three places"])
def test_between_places_numbers_cross_in_a_format_and_all_get_the_same_bits(name: str, topology: Topology) -> None:
    form, size = FORMATS[name], len(topology.order)
    parts = randoms(size, 100_003)

    def work(rank: int, sums: TreeSums) -> torch.Tensor:
        mine = parts[rank].clone()
        sums.start(mine, form).wait(no_look)
        return mine

    results, exact = together(topology, work), torch.stack(parts).double().sum(0)
    assert all(torch.equal(result, results[0]) for result in results)
    off = float((results[0] - exact).norm() / exact.norm())
    assert 1e-5 < off < {"bf16": 2**-8, "fp16": 2**-11, "int8": 0.02}[name]
