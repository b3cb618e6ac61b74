"""The real roster and its real members over a network in memory, with real threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from memory_roster import MemoryDoor, MemoryNetwork, MemoryRosterConnection, MemoryStoreHost

from paceline.errors import FleetError
from paceline.roster import Generation, RosterClient, RosterServer, client, liveness, timeouts, wire
from paceline.roster.door import Closed
from paceline.roster.liveness import ENDED, ProcessState

TOKEN = "a token"
WITHIN_S = 30.0
HELLO = {"name": "here/0", "session": "another", "facts": {}, "process": [0, ""], "generation": 0, "returning": False}


class Member:
    """An emulated process: its client, the connections it has had, and what the roster sees when it looks at it."""

    def __init__(self, network: MemoryNetwork, address: str, slot: int) -> None:
        self.network, self.state = network, ProcessState()
        self.connections: list[MemoryRosterConnection] = []
        self.over = threading.Event()
        self.client = RosterClient(
            address,
            token=TOKEN,
            name=f"here/{slot}",
            facts={"devices": ("cpu", "cpu")},
            on_over=lambda number: self.over.set(),
            shake_hands=self._shake_hands,
        )

    def _shake_hands(self, address: tuple[str, int], **words: Any) -> MemoryRosterConnection:
        if self.state.gone:
            raise ConnectionRefusedError("a dead process connects to nobody")
        return self.network.shake_hands(address, state=lambda: self.state, opened=self.connections.append, **words)

    def kill(self) -> None:
        self.state = ENDED
        for connection in self.connections:
            connection.close()


class MemoryFleet:
    """A roster in memory and its members."""

    def __init__(self, folder: Path) -> None:
        self.network, self.store = MemoryNetwork(), MemoryStoreHost(port=77)
        self.folder = folder
        self.members: list[Member] = []
        self.pool = ThreadPoolExecutor(8)
        self.server = self.open()

    def open(self) -> RosterServer:
        door = MemoryDoor(self.network, port=5)
        state = self.folder / "state.json"
        server = RosterServer(minimum=1, maximum=8, token=TOKEN, state=state, door=door, store=self.store)
        server.start()
        return server

    def begin(self, count: int) -> list[Member]:
        self.server.expect(count)
        self.members = [Member(self.network, self.server.address, slot) for slot in range(count)]
        return self.members

    def ask(self, *members: Member, after: int) -> list[Generation]:
        def one(member: Member) -> Generation:
            return member.client.next_generation(after=after, fresh=after == 0, orderly=True)

        asked: list[Future[Generation]] = [self.pool.submit(one, member) for member in members]
        return [future.result(WITHIN_S) for future in asked]

    def close(self) -> None:
        for member in self.members:
            member.client.close()
        self.server.close()
        self.pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFleet]:
    """A fleet that beats often, and in which nobody's time runs out."""
    for where, name, seconds in (
        (client, "BEAT_S", 0.05),
        (liveness, "FLOOR_S", 60.0),
        (liveness, "CEILING_S", 60.0),
        (timeouts, "RETURN_S", 60.0),
    ):
        monkeypatch.setattr(where, name, seconds)
    one = MemoryFleet(tmp_path)
    yield one
    one.close()


def await_that(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(round(WITHIN_S / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come about")


def read_on(connection: MemoryRosterConnection) -> None:
    while connection.wait(WITHIN_S):
        connection.read()


def test_members_enter_the_first_generation_and_see_what_the_wire_would_give(fleet: MemoryFleet) -> None:
    generations = fleet.ask(*fleet.begin(3), after=0)
    assert {(one.number, one.workers, one.store) for one in generations} == {(1, (0, 1, 2), ("memory", 77))}
    assert generations[0].facts[1]["devices"] == ["cpu", "cpu"]
    assert fleet.store.open
    assert not list(fleet.folder.glob("*.pem")), "a door without TLS needs no certificate"


def test_a_member_whose_connection_was_cut_comes_back_as_itself(fleet: MemoryFleet) -> None:
    members = fleet.begin(3)
    fleet.ask(*members, after=0)
    members[2].connections[0].cut()
    assert all(member.over.wait(WITHIN_S) for member in members[:2])
    await_that(lambda: len(members[2].connections) == 2 and not members[2].client.away)
    assert {one.workers for one in fleet.ask(*members, after=1)} == {(0, 1, 2)}
    assert members[2].client.id == 2


def test_a_killed_process_is_left_behind_at_once(fleet: MemoryFleet) -> None:
    members = fleet.begin(3)
    fleet.ask(*members, after=0)
    members[1].kill()
    assert all(member.over.wait(WITHIN_S) for member in (members[0], members[2]))
    second = fleet.ask(members[0], members[2], after=1)
    assert {one.workers for one in second} == {(0, 2)}
    assert [gone.id for gone in second[0].left] == [1]


def test_a_process_that_is_gone_while_its_connection_stays_open_is_found_by_looking(fleet: MemoryFleet) -> None:
    members = fleet.begin(2)
    fleet.ask(*members, after=0)
    silent = fleet.network.shake_hands(
        ("memory", 5), token=TOKEN, hello={**HELLO, "name": "here/9"}, state=lambda: ENDED
    )
    with pytest.raises(EOFError):  # it never beats, so it is looked at
        read_on(silent)


def test_a_new_roster_at_the_same_address_takes_over(fleet: MemoryFleet) -> None:
    members = fleet.begin(3)
    fleet.ask(*members, after=0)
    fleet.server.close()
    await_that(lambda: all(member.client.away for member in members))
    with pytest.raises(ConnectionRefusedError):
        fleet.network.shake_hands(("memory", 5), token=TOKEN, hello=HELLO)
    fleet.server = fleet.open()
    await_that(lambda: not any(member.client.away for member in members))
    later = fleet.ask(*members, after=1)
    assert {one.workers for one in later} == {(0, 1, 2)}
    assert len({one.number for one in later}) == 1


def test_a_name_that_is_in_use_is_refused_as_over_sockets(fleet: MemoryFleet) -> None:
    fleet.begin(1)
    with pytest.raises(wire.Refused) as refused:
        fleet.network.shake_hands(("memory", 5), token=TOKEN, hello=HELLO)
    assert refused.value.kind == "busy"


def test_an_address_has_one_door_at_a_time(fleet: MemoryFleet) -> None:
    with pytest.raises(OSError, match="in use"):
        MemoryDoor(fleet.network, port=5)


def connected() -> tuple[MemoryDoor, MemoryRosterConnection, Any]:
    """Both ends of a connection, the worker's let in by hand."""
    door, pool = MemoryDoor(MemoryNetwork()), ThreadPoolExecutor(1)
    came = pool.submit(partial(door.connect, {}))
    assert door.wait(WITHIN_S) == [(None, False)]
    theirs = door.accept()
    assert theirs is not None
    assert door.wait(WITHIN_S) == [(theirs, False)]
    assert theirs.read() == [{"hello": {}}]
    theirs.send({"welcome": 3, "running": True, "store": 4})
    theirs.send({"news": 1})
    ours = came.result(WITHIN_S)
    assert (ours.id, ours.running, ours.store_port) == (3, True, 4)
    return door, ours, theirs


def test_what_was_sent_before_a_close_arrives_and_what_was_sent_before_a_cut_is_lost() -> None:
    _, ours, theirs = connected()
    ours.send({"beat": 1})
    ours.close()
    assert theirs.read() == [{"beat": 1}]
    with pytest.raises(Closed) as closed:
        theirs.read()
    assert not closed.value.cut

    _, ours, theirs = connected()
    ours.send({"beat": 1})
    ours.cut()
    with pytest.raises(Closed) as closed:
        theirs.read()
    assert closed.value.cut
    with pytest.raises(BrokenPipeError):
        ours.send({"beat": 2})


def test_a_door_that_closes_breaks_connections_and_has_no_more_events() -> None:
    door, ours, _ = connected()
    door.close()
    assert ours.wait(0.0)
    assert ours.read() == [{"news": 1}], "sent before the end"
    with pytest.raises(EOFError):
        ours.read()
    assert door.wait(0.0) == []
    with pytest.raises(ConnectionRefusedError):
        door.connect({})


def test_waking_the_door_ends_the_wait_that_follows() -> None:
    door, _, _ = connected()
    door.wake()
    assert door.wait(WITHIN_S) == []


def test_a_client_whose_thread_fails_ends_its_worker_which_would_wait_for_ever(fleet: MemoryFleet) -> None:
    """Memory or threads have run out, for instance: nobody would read what the roster sends."""
    members = fleet.begin(2)
    fleet.ask(*members, after=0)

    def fails() -> None:
        raise RuntimeError("can't start new thread")

    members[1].client.on_beat = fails
    with pytest.raises(FleetError, match=r"the thread that listens to the roster failed \(can't start new thread\)"):
        fleet.ask(members[1], after=1)
    assert members[1].over.wait(WITHIN_S), "its rounds are broken off, too"
    assert members[0].over.wait(WITHIN_S), "the others go on"
