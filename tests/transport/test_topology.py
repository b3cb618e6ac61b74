"""Who is near whom, from round trips; and the tree that follows: every worker in it once, each sum across once."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.transport.topology import (
    FAST_BITS_S,
    Topology,
    arranged,
    computers_of,
    near_ones,
    one_place,
    pair,
    sums_over_tree,
)


def links(computers: str, **near: float) -> dict[tuple[str, str], float]:
    """20 ms between all but these: ``ab=0.0004``."""
    return {pair(a, b): near.get(a + b, 0.02) for a, b in combinations(computers, 2)}


def facts(*where: str, device: str = "cpu") -> list[dict[str, Any]]:
    """``a@paris``: computer a, whose PACELINE_SITE is paris."""
    said = [one.partition("@") for one in where]
    return [{"computer": c + a + s, "host": c, "device": device, **({"site": s} if s else {})} for c, a, s in said]


def test_computers_that_are_near_are_one_site() -> None:
    assert near_ones(list("abcd"), links("abcd", ab=0.0003, cd=0.0008)) == [["a", "b"], ["c", "d"]]


def test_round_trips_of_a_busy_local_network_make_no_sites() -> None:
    assert near_ones(list("abc"), {("a", "b"): 0.0001, ("a", "c"): 0.0009, ("b", "c"): 0.0005}) == [["a", "b", "c"]]


def test_one_noisy_measurement_parts_nobody_where_another_way_is_near() -> None:
    assert near_ones(list("abc"), {("a", "b"): 0.0002, ("a", "c"): 0.012, ("b", "c"): 0.0003}) == [["a", "b", "c"]]


def test_a_gap_too_small_to_be_clear_makes_no_sites() -> None:
    found = near_ones(list("abc"), {("a", "b"): 0.008, ("a", "c"): 0.02, ("b", "c"): 0.021})
    assert found == [["a"], ["b"], ["c"]], "all are far, and alike"


def test_far_but_clearly_nearer_than_the_rest_is_a_site() -> None:
    assert near_ones(list("abc"), {("a", "b"): 0.004, ("a", "c"): 0.05, ("b", "c"): 0.06}) == [["a", "b"], ["c"]]


def test_the_longest_gap_decides_where_there_are_several() -> None:
    found = near_ones(list("abcd"), links("abcd", ab=0.0002, bc=0.004, ac=0.004) | {("a", "d"): 0.2})
    assert found == [["a", "b", "c"], ["d"]]


def test_a_computer_that_was_not_reached_is_by_itself() -> None:
    assert near_ones(list("abc"), {("a", "b"): 0.0002}) == [["a", "b"], ["c"]]


def test_ranks_that_are_interleaved_are_put_in_order() -> None:
    where = arranged(facts("a", "b", "a", "b"), {("a", "b"): 0.02})
    assert where.sites == (((0, 2),), ((1, 3),))
    assert where.order == (0, 2, 1, 3)
    assert where.far_s == 0.02


def test_names_take_the_place_of_measurements() -> None:
    where = arranged(facts("a@x", "b@y", "c@x"), dict.fromkeys(combinations(["a@x", "b@y", "c@x"], 2), 0.0001))
    assert where.sites == (((0,), (2,)), ((1,),))
    assert sums_over_tree(where, facts("a@x", "b@y", "c@x"), bits_s=1e10)


def test_workers_that_say_nothing_count_by_their_host() -> None:
    assert computers_of([{"host": "a"}, {"host": "b"}, {"host": "a"}]) == {"a": (0, 2), "b": (1,)}


@pytest.mark.parametrize(
    ("where", "bits_s", "device", "expected"),
    [
        ("aabb", 1e8, "cpu", True),
        ("aabb", FAST_BITS_S, "cpu", False),
        ("aabb", 1e8, "cuda:0", False),
        ("aaaa", None, "cpu", False),
    ],
)
def test_the_tree_is_for_slow_links_between_cpus(where: str, bits_s: float, device: str, expected: bool) -> None:
    said = facts(*where, device=device)
    known = {("a", "b"): 0.0002} if "b" in where else {}
    assert sums_over_tree(arranged(said, known), said, bits_s=bits_s) is expected


def test_a_site_of_several_computers_is_summed_in_three_levels() -> None:
    where = Topology(sites=(((0, 1), (2, 3)), ((4, 5),)))
    assert [where.branch(rank).parent for rank in range(6)] == [None, 0, 0, 2, None, 4]
    assert [where.branch(rank).children for rank in range(6)] == [(1, 2), (), (3,), (), (5,), ()]


def test_computers_of_one_site_cross_among_themselves() -> None:
    where = Topology(sites=(((0, 1), (2, 3)),))
    assert where.branch(0).tops == (0, 2)
    assert where.crosses(0, 2)
    assert not where.crosses(0, 1)


def test_some_of_the_workers_keep_their_places() -> None:
    where = Topology(sites=(((0, 2),), ((1, 3),)), names=("a", "b"), tree=True)
    assert where.among([1, 2, 3]).sites == (((1,),), ((0, 2),))
    assert where.among([1, 2, 3]).tree
    assert not where.among([1, 3]).tree
    assert where.among([1, 3]).names == ("b",)


nested = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=4)


@given(nested, st.randoms(use_true_random=False))
def test_a_part_of_every_worker_reaches_one_that_crosses_exactly_once(sizes: list[list[int]], chance: Any) -> None:
    ranks = list(range(sum(map(sum, sizes))))
    chance.shuffle(ranks)
    where = Topology(tuple(tuple(tuple(sorted(ranks.pop() for _ in range(n))) for n in site) for site in sizes))

    def brought(rank: int) -> list[int]:
        return [rank, *(one for child in where.branch(rank).children for one in brought(child))]

    tops = where.branch(0).tops
    assert sorted(rank for top in tops for rank in brought(top)) == sorted(where.order)
    assert all(where.branch(child).parent == rank for rank in where.order for child in where.branch(rank).children)
    assert all(where.branch(top).parent is None for top in tops)


def test_one_place_keeps_the_order_of_ranks() -> None:
    assert one_place(4).order == (0, 1, 2, 3)
