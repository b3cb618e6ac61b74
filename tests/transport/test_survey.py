"""Measuring round trips and bandwidths: what is known is not measured again, and all come to the same topology."""

from __future__ import annotations

import socket
import threading
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from paceline.transport import survey
from paceline.transport.engines.gloo import connect_gloo
from paceline.transport.group import Group, let_go
from paceline.transport.link_speed import bandwidth, listening_at, round_trips
from paceline.transport.survey import Survey, place_facts
from paceline.transport.topology import Topology


class Patient:
    """A watch over workers that never fail."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def check(self) -> None:
        return

    def check_group(self, group: Group) -> None:
        return

    def failed(self, error: BaseException) -> Exception:
        return RuntimeError(str(error))

    def unlike_calls(self, labels: dict[int, str]) -> Exception:
        return RuntimeError(str(labels))


def formed(name: str, store: Any, where: list[str], surveys: list[Survey], **more: Any) -> list[Topology]:
    """A group over loopback whose workers say that they are on these computers."""
    facts = [{"computer": one, "host": "here", "device": "cpu", **more} for one in where]
    found: list[Any] = [None] * len(where)

    def one(rank: int) -> None:
        group = Group(rank, len(where), store=dist.PrefixStore(name, store))
        watch, at = Patient(group), ("127.0.0.1", 1)
        topology = surveys[rank].arrange(group, facts, host="127.0.0.1", watch=watch)
        make = partial(connect_gloo, dist.PrefixStore("gloo", group.store), towards=at, spare_port=0)
        group.connect(make, topology=topology)
        group.sum_over(surveys[rank].weigh(group, topology, facts, watch=watch))
        found[rank] = group

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(where))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    topologies = [group.topology for group in found]
    for group in found:
        let_go(group.close())
    return topologies


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Which round trips were measured, by whom in any order; each takes 20 ms as far as anybody knows."""
    calls: list[list[str]] = []

    def pretend(doors: dict[str, Any]) -> dict[str, float]:
        calls.append(sorted(doors))
        assert len(round_trips(doors)) == len(doors), "all can be reached"
        return dict.fromkeys(doors, 0.02)

    monkeypatch.setattr(survey, "round_trips", pretend)
    return calls


def test_heads_measure_and_all_come_to_the_same(measured: list[list[str]]) -> None:
    store, surveys = dist.HashStore(), [Survey() for _ in range(4)]
    found = formed("first", store, ["a", "b", "a", "b"], surveys)
    assert all(one == found[0] for one in found)
    assert (found[0].sites, found[0].tree) == ((((0, 2),), ((1, 3),)), True)
    assert found[0].far_s == 0.02
    assert found[0].bits_s is not None
    assert sorted(measured) == [["a"], ["b"]]


def test_after_a_death_nothing_is_measured_again_and_a_newcomer_learns_what_is_known(
    measured: list[list[str]],
) -> None:
    store, surveys = dist.HashStore(), [Survey() for _ in range(4)]
    first = formed("first", store, ["a", "b", "a", "b"], surveys)
    measured.clear()
    later = formed("later", store, ["a", "b", "b"], [surveys[2], surveys[3], Survey()])
    assert not [call for call in measured if call]
    assert all(one == later[0] for one in later)
    assert later[0].bits_s == first[0].bits_s
    formed("last", store, ["a", "b", "c"], [surveys[2], Survey(), Survey()])
    assert sorted(call for call in measured if call) == [["a", "b"], ["c"], ["c"]], "only what is new"


def test_on_one_computer_nothing_is_said_or_measured(measured: list[list[str]]) -> None:
    store = dist.HashStore()
    found = formed("one", store, ["a", "a"], [Survey(), Survey()])
    assert found[0].sites == (((0, 1),),)
    assert not measured
    assert not store.check(["one/places/all"])


def test_one_worker_can_turn_it_off_for_all(measured: list[list[str]]) -> None:
    found = formed("off", dist.HashStore(), ["a", "b"], [Survey(), Survey()], sites="off")
    assert found[0].sites == (((0, 1),),)
    assert not measured


def test_a_round_trip_is_measured_and_a_closed_door_is_left_out() -> None:
    with closing(socket.socket()) as closed, listening_at("127.0.0.1") as at:
        closed.bind(("127.0.0.1", 0))
        found = round_trips({"open": at, "closed": ("127.0.0.1", closed.getsockname()[1])})
    assert list(found) == ["open"]
    assert 0 < found["open"] < 1


def test_a_worker_says_its_site_and_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = place_facts()
    assert list(plain) == ["computer"]
    monkeypatch.setenv("PACELINE_SITE", "paris")
    monkeypatch.setenv("PACELINE_SITES", "OFF")
    assert place_facts() == {"computer": f"{plain['computer']}@paris", "site": "paris", "sites": "off"}


def test_a_slow_link_is_measured_by_growing_sizes_and_a_trip_that_was_long_by_chance_counts_half_at_most() -> None:
    asked: list[int] = []

    def timed(size: int) -> float:
        asked.append(size)
        return 0.01 + size / 1e6

    assert bandwidth(timed, trip_s=0.01, most_bytes=1 << 24, lasting_s=2.0) == pytest.approx(8e6)
    assert asked == [1 << 18, 1 << 21], "eight times as many at most"
    assert bandwidth(lambda size: 0.02, trip_s=0.5) == 8 * (1 << 18) / 0.01
    tries = iter([0.5, 0.2, 0.3])
    assert bandwidth(lambda size: next(tries), trip_s=0.0, tries=3) == 8 * (1 << 18) / 0.2
