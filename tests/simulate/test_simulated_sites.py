"""Rounds over several sites: bytes over every link, and the seconds they take."""

from itertools import combinations, permutations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.machines.link import Link, parse_link
from paceline.simulate.sites import (
    HEADER_FIXED,
    HEADER_NUMBERS,
    LITTLE,
    SMALL,
    RoundCost,
    SiteNetwork,
    Sites,
    header_bytes,
    sending_s,
)
from paceline.transport.formats import part_of
from quick import examples

FAST, SLOW = parse_link("10gbit,0.1ms"), parse_link("100mbit,20ms")
TWO = Sites({"a": FAST, "b": FAST}, {frozenset("ab"): SLOW})
MODEL = 10_000_000


def four_and_four(*, interleaved: bool = False) -> tuple[str, ...]:
    return ("a", "b") * 4 if interleaved else ("a",) * 4 + ("b",) * 4


def test_one_ring_over_two_sites_moves_the_model_nearly_twice_over_the_link_and_two_levels_once() -> None:
    ring = TWO.sum(four_and_four(), MODEL, "ring")
    assert ring.link_bytes == {("a", "b"): 1.75 * MODEL, ("b", "a"): 1.75 * MODEL}
    two = TWO.sum(four_and_four(), MODEL, "two levels")
    assert two.link_bytes == {("a", "b"): MODEL, ("b", "a"): MODEL}
    assert ring.seconds / two.seconds > 1.5


def test_a_ring_whose_ranks_alternate_crosses_the_link_at_every_hop_and_two_levels_do_not_care() -> None:
    ring = TWO.sum(four_and_four(interleaved=True), MODEL, "ring")
    assert ring.link_bytes["a", "b"] == 4 * 1.75 * MODEL
    two = TWO.sum(four_and_four(interleaved=True), MODEL, "two levels")
    assert two == TWO.sum(four_and_four(), MODEL, "two levels")
    assert ring.seconds / two.seconds > 5


def test_shorter_wires_send_halves_and_quarters_over_the_link_and_all_of_it_within_a_site() -> None:
    def sent(wire: str) -> RoundCost:
        return TWO.sum(four_and_four(), MODEL, "two levels", wire=part_of(wire))

    for wire, part in (("bf16", 0.5), ("int8", (1 + 4 / 256) / 4)):  # a scale of four bytes for each block
        assert sent(wire).link_bytes["a", "b"] == part * MODEL
        assert sent(wire).cable_bytes == (3 + part) * MODEL  # the one that crosses hears three others


def test_in_place_of_one_ring_a_shorter_wire_is_spoken_by_everybody_to_everybody() -> None:
    flat = TWO.sum(four_and_four(), MODEL, "ring", wire=0.5)
    assert flat.link_bytes["a", "b"] == 2 * 4 * 4 * MODEL / 8 / 2
    assert flat.cable_bytes == 2 * 7 / 8 * MODEL / 2
    assert flat.latency_s == pytest.approx(2 * 0.02)


def test_five_sites_share_the_sum_out_and_the_one_that_crosses_hears_all_of_its_own() -> None:
    names = "abcde"
    five = Sites(dict.fromkeys(names, FAST), {frozenset(ends): SLOW for ends in combinations(names, 2)})
    crossed = five.sum([name for name in names for _ in range(20)], MODEL, "two levels")
    assert crossed.link_bytes == {ends: pytest.approx(2 / 5 * MODEL) for ends in permutations(names, 2)}
    assert crossed.cable_bytes == pytest.approx((19 + 8 / 5) * MODEL)


def test_a_run_takes_two_levels_between_sites_and_on_slow_cables() -> None:
    assert TWO.found(four_and_four()) == "two levels"
    assert TWO.found("aaaa") == "ring"
    assert Sites({"a": SLOW}).found("aaaa") == "two levels"
    slow = Sites({"a": Link(1e8, 0.02)}).sum("aaaa", MODEL, "two levels")
    assert (slow.cable_bytes, slow.latency_s) == (1.5 * MODEL, pytest.approx(0.04))


def test_in_one_site_a_ring_of_two_takes_two_delays_and_the_bytes_and_levels_are_the_same() -> None:
    one = Sites({"a": Link(1e9, 0.0)})
    assert one.sum("aa", MODEL).seconds == pytest.approx(8 * MODEL / 1e9)
    assert one.sum("aaaa", MODEL, "two levels").seconds == pytest.approx(one.sum("aaaa", MODEL, "ring").seconds)
    far = Sites({"a": Link(1e12, 0.02)})
    assert far.sum("aa", MODEL).latency_s == pytest.approx(2 * 0.02)
    assert far.sum("aaaa", MODEL).latency_s == pytest.approx(6 * 0.02)


def test_what_was_measured_over_a_link_of_100_megabits_and_20_milliseconds() -> None:
    """10 MB between two computers took 1,014 ms; 4 MB between three, at 10 ms, 511 ms."""
    apart = Sites({"a": FAST, "b": FAST, "c": FAST}, {frozenset(ends): SLOW for ends in ("ab", "bc", "ac")})
    assert apart.sum("ab", 10e6).seconds == pytest.approx(1.014, rel=0.05)
    nearer = Sites(apart.cables, {ends: Link(1e8, 0.01) for ends in apart.links})
    assert nearer.sum("abc", 512 * 2048 * 4).seconds == pytest.approx(0.511, rel=0.1)


def test_where_no_link_joins_two_sites_bytes_go_over_those_between_and_a_site_without_any_is_refused() -> None:
    chain = Sites({"a": FAST, "b": FAST, "c": FAST, "d": FAST}, {frozenset("ab"): SLOW, frozenset("bc"): SLOW})
    assert chain.route("a", "c") == (("a", "b"), ("b", "c"))
    assert chain.delay_s("a", "c") == pytest.approx(0.04)
    crossed = chain.sum("abc", MODEL).link_bytes
    assert crossed["c", "b"] == crossed["b", "a"] == pytest.approx(4 / 3 * MODEL)
    with pytest.raises(ValueError, match="no link leads from a to d"):
        chain.route("a", "d")


def test_an_average_exchanges_its_facts_before_the_sum_and_gradients_beside_it() -> None:
    network = SiteNetwork(TWO, four_and_four(), MODEL)
    assert network.average_s > network.gradients_s
    alone = SiteNetwork(TWO, ("a",), MODEL)
    assert alone.average_s == alone.gradients_s == alone.sent_bytes == 0


def test_the_header_is_as_large_as_that_of_a_real_round() -> None:
    from paceline.gradients.header import Layout

    assert header_bytes(7) == 8 * sum(Layout(7, parameters=0, counters=0).sizes)
    assert (HEADER_NUMBERS, HEADER_FIXED) == (36, 136)


@settings(max_examples=examples(100))
@example(counts=[20], data=432.0, bits=1e6, delay_s=0.0)
@example(counts=[1, 2, 3], data=5000.0, bits=1e8, delay_s=0.02)
@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    data=st.floats(1, 1e9),
    bits=st.floats(1e6, 1e11),
    delay_s=st.floats(0, 0.3),
)
def test_more_bytes_never_take_less_and_a_wider_link_never_more(
    counts: list[int], data: float, bits: float, delay_s: float
) -> None:
    names = "abcd"[: len(counts)]
    order = [name for name, many in zip(names, counts) for _ in range(many)]
    ends = [frozenset((one, other)) for one in names for other in names if one < other]

    def cost(data: float, bits: float, topology: str) -> RoundCost:
        sites = Sites(dict.fromkeys(names, FAST), {end: Link(bits, delay_s) for end in ends})
        return sites.sum(order, data, topology)  # type: ignore[arg-type]

    for topology in ("ring", "two levels"):
        once, twice = cost(data, bits, topology), cost(2 * data, bits, topology)
        assert 0 <= once.transfer_s <= cost(data, bits / 2, topology).transfer_s * (1 + 1e-9)
        if not _goes_another_way(counts, data, topology):
            assert once.transfer_s <= twice.transfer_s * (1 + 1e-9)
        elif topology == "two levels":  # parts take less time to send, and a second trip
            assert twice.latency_s > once.latency_s


def _goes_another_way(counts: list[int], data: float, topology: str) -> bool:
    """Return whether a sum of twice the data is sent in another way."""
    if topology == "ring":
        return data <= SMALL < 2 * data
    many = len(counts) if len(counts) > 1 else counts[0]  # between sites, one worker of each exchanges
    return many > 2 and (many - 1) * data <= LITTLE < (many - 1) * 2 * data


def test_without_a_delay_sending_takes_what_the_bandwidth_says_and_with_one_longer() -> None:
    assert sending_s(Link(1e8, 0.0), 1e7) == 0.8
    assert sending_s(Link(1e8, 0.02), 1e7) == pytest.approx(0.968, abs=1e-3)
    assert sending_s(Link(1e8, 0.02), 0) == 0
