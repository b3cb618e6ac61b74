"""Spot traces: what they say, and how they are played with little room."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.machines.spot import Market, Row, SpotChange, read_spot

TRACE = "0,add,a\n0,add,b\n60000,add,c\n\n120000,remove,a\n120000,remove,c\n180000,add,d\n"


def rows(text: str) -> tuple[Row, ...]:
    return tuple(Row(float(t), sign == "+", node) for sign, node, t in (entry.split() for entry in text.split(",")))


def test_a_trace_is_read_in_seconds(tmp_path: Path) -> None:
    (tmp_path / "spot.csv").write_text(TRACE)
    read = read_spot(tmp_path / "spot.csv")
    assert read[0] == Row(0.0, True, "a")
    assert read[3:5] == (Row(120.0, False, "a"), Row(120.0, False, "c"))
    assert len(read) == 6


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "adds no node"),
        ("time,event,node\n", "line 1: a row is milliseconds"),
        ("0,add\n", "line 1: a row is milliseconds"),
        ("0,add,\n", "line 1: a row is milliseconds"),
        ("x,add,a\n", "line 1: the time is a number of milliseconds from 0, not 'x'"),
        ("-5,add,a\n", "not '-5'"),
        ("nan,add,a\n", "not 'nan'"),
        ("0,add,a\n0,add,a\n", "line 2: a is there already"),
        ("0,remove,a\n", "line 1: a is not there"),
        ("5,add,a\n4,add,b\n", "line 2: it is earlier than the row before"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "spot.csv").write_text(text)
    with pytest.raises(ValueError, match=part):
        read_spot(tmp_path / "spot.csv")


def test_a_missing_or_binary_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "spot.csv").write_bytes(b"\xff\xfe\x00")
    for name in ("none.csv", "spot.csv"):
        with pytest.raises(ValueError, match=f"cannot read the spot trace .*{name}"):
            read_spot(tmp_path / name)


def test_time_runs_faster_by_the_speed_up() -> None:
    market = Market(rows("+ a 0,+ b 300,- a 600"), room=4, speed_up=300)
    assert market.changes(0.0, inside=set()) == [SpotChange("add", "a")]
    assert market.changes(0.99, inside={"a"}) == []
    assert market.changes(1.0, inside={"a"}) == [SpotChange("add", "b")]
    assert market.changes(5.0, inside={"a", "b"}) == [SpotChange("remove", "a")]
    assert not market.coming


@pytest.mark.parametrize("speed_up", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_up_is_a_number_above_0(speed_up: float) -> None:
    with pytest.raises(ValueError, match="the speed-up is"):
        Market(rows("+ a 0"), room=1, speed_up=speed_up)


def test_a_node_without_room_waits_until_another_has_gone_and_may_go_while_it_waits() -> None:
    market = Market(rows("+ a 0,+ b 0,+ c 1,+ d 1,- c 2,- a 3"), room=2)
    assert market.changes(1.0, inside=set())[2:] == [SpotChange("wait", "c"), SpotChange("wait", "d")]
    assert market.changes(2.0, inside={"a", "b"}) == []
    assert market.coming
    assert market.changes(3.0, inside={"a", "b"}) == [SpotChange("remove", "a"), SpotChange("add", "d")]


def test_the_last_with_the_state_is_spared_until_another_has_it() -> None:
    market = Market(rows("+ a 0,- a 1,+ b 2"), room=2)
    market.changes(0.0, inside=set())
    assert market.changes(1.0, inside={"a"}) == [SpotChange("spare", "a")]
    assert market.changes(2.0, inside={"a"}) == [SpotChange("add", "b")]
    assert market.changes(3.0, inside={"a"}) == []  # b starts, but does not hold the state yet
    assert market.changes(4.0, inside={"a", "b"}) == [SpotChange("remove", "a")]
    assert market.changes(5.0, inside={"b"}) == []


def test_a_spared_node_that_comes_again_simply_stays() -> None:
    market = Market(rows("+ a 0,- a 1,+ a 2,+ b 3"), room=2)
    assert [change.what for change in market.changes(2.0, inside={"a"})] == ["add", "spare"]
    assert market.changes(3.0, inside={"a"}) == [SpotChange("add", "b")]
    assert market.changes(4.0, inside={"a", "b"}) == []


def test_two_that_should_go_at_once_do_not_both_go_when_they_are_the_last() -> None:
    market = Market(rows("+ a 0,+ b 0,- a 1,- b 1"), room=2)
    market.changes(0.0, inside=set())
    assert market.changes(1.0, inside={"a", "b"}) == [SpotChange("remove", "a"), SpotChange("spare", "b")]


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), max_size=40),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_the_room_is_kept_and_somebody_with_the_state_always_lives(
    moves: list[tuple[int, int]], room: int, random: Random
) -> None:
    there: set[int] = set()
    trace, clock = [], 0.0
    for node, gap in moves:
        clock += gap
        trace.append(Row(clock, node not in there, str(node)))
        there ^= {node}
    market, playing, inside = Market(trace, room=room), set[str](), set[str]()
    for now in range(int(clock) + 2):
        held = bool(inside)
        for change in market.changes(float(now), inside=frozenset(inside)):
            if change.what == "add":
                assert change.node not in playing
                playing.add(change.node)
            elif change.what == "remove":
                playing.remove(change.node)
                inside.discard(change.node)
            assert len(playing) <= room
        assert bool(inside) == held
        inside |= {node for node in playing if random.random() < 0.5}
    assert not market.coming or len(playing) == room
