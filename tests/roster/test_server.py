"""The roster and its members over real sockets, in one process."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clocks import give_clock
from paceline.errors import CallMismatch, FleetError
from paceline.roster import Generation, RosterClient, RosterServer, RunOver, client, liveness, server, timeouts, wire
from paceline.roster.wire import Certificate, RosterConnection, shake_hands
from ports import own_port

TOKEN = "a token"
FACTS = {"host": "here", "device": "cpu", "pid": 1}


class Watch:
    """A member, and whether it has heard that its generation was over."""

    def __init__(self, address: str, slot: int, *, token: str = TOKEN) -> None:
        self.over = threading.Event()
        name = f"here/{slot}"
        self.client = RosterClient(address, token=token, name=name, facts=FACTS, on_over=lambda number: self.over.set())


class House:
    """A roster and its members; whatever is made here is closed in the end."""

    def __init__(self, **settings: Any) -> None:
        self.happened: list[tuple[str, dict[str, Any]]] = []
        self.news = threading.Condition()
        self.settings = {"minimum": 1, "maximum": 8, "token": TOKEN, **settings}
        self.watches: list[Watch] = []
        self.pool = ThreadPoolExecutor(16)
        self.server = self.open()

    def open(self) -> RosterServer:
        one = RosterServer(on_event=self._note, **self.settings)
        one.start()
        return one

    def _note(self, kind: str, data: dict[str, Any]) -> None:
        with self.news:
            self.happened.append((kind, data))
            self.news.notify_all()

    def await_event(self, kind: str, within_s: float = 10.0) -> dict[str, Any]:
        with self.news:
            assert self.news.wait_for(lambda: any(one == kind for one, _ in self.happened), within_s), kind
            return next(data for one, data in reversed(self.happened) if one == kind)

    def come(self, slot: int, **more: Any) -> Watch:
        self.watches.append(Watch(self.server.address, slot, **more))
        return self.watches[-1]

    def ask(self, *watches: Watch, after: int, fresh: bool = False, orderly: bool = True) -> list[Future[Generation]]:
        def one(watch: Watch) -> Generation:
            return watch.client.next_generation(after=after, fresh=fresh, orderly=orderly)

        return [self.pool.submit(one, watch) for watch in watches]

    def begin(self, count: int) -> list[Watch]:
        watches = [self.come(slot) for slot in range(count)]
        self.server.expect(0)
        asked = self.ask(*watches, after=0, fresh=True)
        assert {one.result(10).number for one in asked} == {1}
        return watches

    def close(self) -> None:
        for watch in self.watches:
            watch.client.close()
        self.server.close()
        self.pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., House]]:
    """The same rules, a few times faster; but nobody's time runs out unless a test says when."""
    for where, name, seconds in (
        (client, "BEAT_S", 0.05),
        (client, "BUSY_S", 0.3),
        (liveness, "BEAT_S", 0.05),
        (liveness, "FLOOR_S", 60.0),
        (liveness, "CEILING_S", 60.0),
        (timeouts, "RETURN_S", 60.0),
        (server, "PROVE_S", 60.0),
    ):
        monkeypatch.setattr(where, name, seconds)
    made: list[House] = []

    def make(**settings: Any) -> House:
        made.append(House(**settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def puppet(house: House, slot: int, session: str = "a puppet") -> RosterConnection:
    """A worker moved by hand, on a computer of which nothing is known."""
    hello = {"name": f"here/{slot}", "session": session, "facts": FACTS, "process": [0, ""]}
    more = {"generation": 0, "was": None, "returning": False}
    return shake_hands(wire.parse_address(house.server.address), token=TOKEN, hello={**hello, **more})


def say(connection: RosterConnection, **message: Any) -> None:
    connection.send(message)


def stranger_at(house: House) -> RosterConnection:
    """One that has come as far as TLS goes."""
    connection = RosterConnection(socket.create_connection(wire.parse_address(house.server.address), timeout=30))
    connection.secure()
    return connection


def drain(stranger: socket.socket) -> None:
    with suppress(ConnectionError):
        while stranger.recv(65536):
            pass


def await_message(connection: RosterConnection, key: str) -> dict[str, Any]:
    connection.socket.settimeout(10)
    while True:
        for message in connection.read():
            if key in message:
                return message


def test_a_closed_connection_ends_the_generation_on_the_others_at_once(house: Callable[..., House]) -> None:
    here = house()
    watches = here.begin(4)
    watches[3].client.close()
    assert all(watch.over.wait(30) for watch in watches[:3])  # long before any silence or absence counts
    second = here.ask(*watches[:3], after=1, orderly=False)
    assert {one.result(10).workers for one in second} == {(0, 1, 2)}


def test_what_the_launcher_saw_stands_in_the_next_generation(house: Callable[..., House]) -> None:
    here = house()
    watches = here.begin(2)
    here.server.died("here/1", "was killed by signal 9 (SIGKILL)")
    assert watches[0].over.wait(30)
    [second] = here.ask(watches[0], after=1, orderly=False)
    assert [(gone.id, gone.text) for gone in second.result(10).left] == [(1, "was killed by signal 9 (SIGKILL)")]


@pytest.mark.slow
def test_a_silent_worker_is_dropped_and_told_so_when_it_wakes(
    house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = house(expect=2)
    first = here.come(0)
    frozen = puppet(here, 1)
    asked = here.ask(first, after=0, fresh=True)
    say(frozen, ready=[0, True, True])
    assert asked[0].result(10).workers == (0, 1)
    await_message(frozen, "generation")
    monkeypatch.setattr(liveness, "FLOOR_S", 0.6)
    assert first.over.wait(30)  # not a word from the other one
    [second] = here.ask(first, after=1, orderly=False)
    [gone] = second.result(10).left
    assert gone.id == 1
    assert gone.text.endswith("(frozen, or its network is cut)")
    say(frozen, beat=1, generation=1, doing="step 7", begun=7, spots={})
    assert await_message(frozen, "dropped") == {"dropped": 1}
    frozen.close()


def test_a_newcomer_is_announced_and_enters_at_the_boundary(house: Callable[..., House]) -> None:
    here = house()
    watches = here.begin(2)
    newcomer = here.come(5)
    assert newcomer.client.running
    entering = here.ask(newcomer, after=0, fresh=True)
    until = time.monotonic() + 30
    while not all(watch.client.news for watch in watches):
        assert time.monotonic() < until
        time.sleep(0.005)
    here.ask(*watches, after=1)
    second = entering[0].result(10)
    assert (second.workers, second.fresh, second.orderly) == ((0, 1, 5), (5,), True)
    assert not newcomer.client.news


def test_a_run_that_has_ended_says_so_to_those_who_wait_and_those_who_come(house: Callable[..., House]) -> None:
    here = house()
    watches = here.begin(2)
    waiting = here.ask(here.come(2), after=0, fresh=True)
    for watch in watches:
        watch.client.leave("finished")
    with pytest.raises(RunOver, match="the run has ended"):
        waiting[0].result(10)
    here.await_event("finished")
    assert here.server.snapshot()["finished"]
    with pytest.raises(RunOver, match="the run has ended"):
        here.come(3)
    assert not any(watch.over.is_set() for watch in watches)


def test_an_error_that_ends_one_worker_is_quoted_to_the_others(house: Callable[..., House]) -> None:
    here = house()
    watches = here.begin(2)
    watches[1].client.leave("ValueError: no such file")
    assert watches[0].over.wait(30)
    [second] = here.ask(watches[0], after=1, orderly=False)
    assert [(gone.id, gone.text) for gone in second.result(10).left] == [(1, "ValueError: no such file")]


def test_a_worker_that_was_asked_to_leave_disturbs_nobody_and_is_quoted(house: Callable[..., House]) -> None:
    here = house()
    watches = here.begin(2)
    watches[1].client.leave("left (SIGTERM)")
    [second] = here.ask(watches[0], after=1)
    assert [(gone.id, gone.text) for gone in second.result(10).left] == [(1, "left (SIGTERM)")]
    assert not watches[0].over.is_set()


def test_a_wrong_token_is_refused_and_noted(house: Callable[..., House]) -> None:
    here = house()
    with pytest.raises(FleetError, match="does not know this run's token"):
        here.come(0, token="another token")
    assert here.await_event("refused")["kind"] == "token"
    assert here.come(0).client.id == 0


def test_a_stranger_who_trusts_any_roster_is_refused_all_the_same(house: Callable[..., House]) -> None:
    here = house()
    stranger = stranger_at(here)
    theirs, mine = stranger.answer()["challenge"], wire.challenge()
    say(stranger, challenge=mine, proof=wire.proof("guessed", "worker", theirs, mine, stranger.fingerprint))
    with pytest.raises(wire.Refused, match="does not know this run's token"):
        stranger.answer()
    with pytest.raises(EOFError):  # and not a word more
        stranger.read()
    stranger.close()
    assert here.await_event("refused")["kind"] == "token"


def test_a_worker_does_not_trust_a_roster_without_the_token() -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        raw, _ = server.accept()
        with Certificate().context.wrap_socket(raw, server_side=True) as connection:
            connection.sendall(wire.encode({"paceline": wire.VERSION, "challenge": "c"}))
            connection.recv(4096)
            connection.sendall(wire.encode({"proof": "made up"}))

    threading.Thread(target=pretend, daemon=True).start()
    with server, pytest.raises(FleetError, match="it is not this run's roster"):
        Watch(f"127.0.0.1:{server.getsockname()[1]}", 0)


@pytest.mark.parametrize(
    "garbage",
    [b"\x00\xff" * 200, b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"challenge": 1}\n', b"{" * 900 + b"\n", b"x" * 100_000],
)
def test_garbage_before_the_proof_disturbs_nobody(
    house: Callable[..., House], garbage: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PROVE_S", 0.4)
    here = house()
    address = wire.parse_address(here.server.address)
    within, after = stranger_at(here), stranger_at(here)
    sent = (
        (socket.create_connection(address, timeout=30), garbage),
        (after.socket, garbage),
        (within.socket, within._channel.seal(garbage)),
    )
    for stranger, data in sent:
        with suppress(ConnectionError):
            stranger.sendall(data)
        drain(stranger)
        stranger.close()
    here.begin(1)


@pytest.mark.parametrize(
    "message",
    [
        b'{"hello": 3}\n',
        b'{"hello": {"name": "", "session": "s", "facts": {}, "process": [0, ""], "generation": 0}}\n',
        b'{"hello": {"name": "n", "session": "s", "facts": [], "process": [0, ""], "generation": 0}}\n',
        b'{"hello": {"name": "n", "session": "s", "facts": {}, "process": [0, ""], "generation": 1, "was": {}}}\n',
        b'{"x": "' + b"x" * 70_000 + b'"}\n',
    ],
)
def test_nonsense_from_one_who_knows_the_token_disturbs_nobody(house: Callable[..., House], message: bytes) -> None:
    here = house()
    watches = here.begin(2)
    connection = stranger_at(here)
    theirs = str(connection.answer()["challenge"])
    say(connection, challenge="mine", proof=wire.proof(TOKEN, "worker", theirs, "mine", connection.fingerprint))
    connection.answer()
    connection.socket.sendall(connection._channel.seal(message))
    assert here.await_event("refused")["kind"] == "garbled"
    connection.close()
    assert not any(watch.over.is_set() for watch in watches)


@pytest.mark.parametrize("nonsense", [{"ready": 1}, {"ready": ["a", 1, 1]}, {"beat": 1}, {"beat": 1, "spots": []}])
def test_nonsense_from_a_worker_costs_it_its_connection_alone(
    house: Callable[..., House], nonsense: dict[str, Any]
) -> None:
    here = house()
    watches = here.begin(1)
    connection = puppet(here, 1)
    say(connection, **nonsense)
    assert here.await_event("refused")["kind"] == "garbled"
    connection.close()
    assert not watches[0].over.is_set()


def test_one_who_says_nothing_is_shown_the_door(house: Callable[..., House], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PROVE_S", 0.4)
    here = house()
    address = wire.parse_address(here.server.address)
    with socket.create_connection(address, timeout=30) as loris, suppress(ConnectionError):
        for _ in range(3):
            loris.sendall(b"\x16")
            time.sleep(0.05)
        drain(loris)


def test_a_crowd_of_strangers_does_not_keep_a_worker_out(house: Callable[..., House]) -> None:
    here = house()
    address = wire.parse_address(here.server.address)
    crowd = [socket.create_connection(address) for _ in range(server.UNPROVEN + 20)]
    here.begin(1)
    for stranger in crowd:
        stranger.close()


def test_a_name_in_use_is_refused_in_words(house: Callable[..., House]) -> None:
    here = house()
    here.begin(1)
    with pytest.raises(FleetError, match="another process is there as 'here/0'"):
        here.come(0)


def test_a_full_fleet_is_refused_in_words(house: Callable[..., House]) -> None:
    here = house(maximum=1)
    here.begin(1)
    with pytest.raises(FleetError, match="the fleet is full: 1 of at most 1"):
        here.come(1)


@pytest.mark.slow
def test_the_fleet_outlives_its_roster_and_goes_on_with_the_next(house: Callable[..., House], tmp_path: Path) -> None:
    here = house(state=tmp_path / "roster.json", port=own_port())
    watches = here.begin(3)
    here.server.close()
    assert not any(watch.over.wait(0.2) for watch in watches)
    here.server = here.open()
    until = time.monotonic() + 30
    while not all(watch.client.news for watch in watches):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert not any(watch.over.is_set() for watch in watches)
    second = [one.result(10) for one in here.ask(*watches, after=1)]
    assert {(one.number, one.workers, one.fresh) for one in second} == {(2, (0, 1, 2), ())}


@pytest.mark.slow
def test_a_member_that_died_while_the_roster_was_away_is_lost_after_a_while(
    house: Callable[..., House], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "RETURN_S", 1.0)
    here = house(state=tmp_path / "roster.json", port=own_port())
    watches = here.begin(2)
    here.server.close()
    watches[1].client.close()
    here.server = here.open()
    assert watches[0].over.wait(30)
    [second] = here.ask(watches[0], after=1, orderly=False)
    assert [(gone.id, gone.text) for gone in second.result(10).left] == [
        (1, "did not come back after the roster's restart")
    ]


def test_a_request_made_while_the_roster_is_away_is_answered_by_the_next(
    house: Callable[..., House], tmp_path: Path
) -> None:
    here = house(state=tmp_path / "roster.json", port=own_port())
    watches = here.begin(2)
    here.server.close()
    asked = here.ask(*watches, after=1)
    here.server = here.open()
    assert {one.result(30).number for one in asked} == {2}


def test_a_run_that_ends_while_the_roster_is_away_is_not_begun_anew_by_the_next(
    house: Callable[..., House], tmp_path: Path
) -> None:
    here = house(state=tmp_path / "roster.json", port=own_port())
    watches = here.begin(2)
    here.server.close()
    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(watch.client.leave, "finished") for watch in watches]
        time.sleep(0.2)
        assert not any(end.done() for end in ends)  # they look for the roster, to tell it
        here.server = here.open()
        for end in ends:
            end.result(30)
    assert here.server.snapshot()["finished"]
    with pytest.raises(RunOver, match="the run has ended"):
        here.come(2)


def test_a_worker_that_finishes_gives_up_a_roster_that_stays_away(
    house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "END_S", 0.3)
    here = house()
    [watch] = here.begin(1)
    here.server.close()
    watch.client.leave("finished")
    assert watch.client.failure is None


def test_a_roster_that_loses_everybody_at_once_is_not_asked_without_pause(house: Callable[..., House]) -> None:
    here, made = house(), []

    def broken_off(*args: Any, **options: Any) -> RosterConnection:
        made.append(shake_hands(*args, **options))
        if len(made) > 1:
            made[-1].break_off()
        return made[-1]

    one = RosterClient(
        here.server.address, token=TOKEN, name="here/0", facts=FACTS, on_over=lambda _: None, shake_hands=broken_off
    )
    made[0].break_off()
    time.sleep(0.5)  # ten beats
    assert 1 < len(made) < 20
    one.close()


def test_a_torn_state_file_is_explained(tmp_path: Path) -> None:
    state = tmp_path / "roster.json"
    state.write_text('{"version": 1, "numb')
    with pytest.raises(ValueError, match="move it away to begin anew"):
        RosterServer(minimum=1, maximum=2, token=TOKEN, state=state)


@pytest.mark.parametrize(("minimum", "maximum", "token"), [(0, 3, "t"), (8, 2, "t"), (1, 2, "")])
def test_bad_settings_are_explained(minimum: int, maximum: int, token: str) -> None:
    with pytest.raises(ValueError, match=r"1 <= minimum <= maximum|needs a token"):
        RosterServer(minimum=minimum, maximum=maximum, token=token)


def test_calls_that_can_never_meet_end_the_run_for_everybody(house: Callable[..., House]) -> None:
    here = house()
    watches = here.begin(2)
    watches[0].client.report(doing="step 3", begun=3, spots={"calls": (9, "the round of step 3", True)})
    watches[1].client.report(doing="saving", begun=3, spots={"calls": (9, "fleet.save()", True)})
    for watch in watches:
        assert watch.over.wait(10)
        assert isinstance(watch.client.failure, CallMismatch)
        assert "worker 0 (cpu) called the round of step 3, but worker 1 (cpu) called fleet.save()" in str(
            watch.client.failure
        )
        with pytest.raises(CallMismatch):
            watch.client.next_generation(after=1, fresh=False, orderly=False)


def test_whoever_waits_is_told_for_whom(
    house: Callable[..., House], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("paceline.roster.calls.REMIND_S", (0.1, 50.0))
    here = house()
    watches = here.begin(2)
    with caplog.at_level(logging.WARNING, logger="paceline"):
        watches[0].client.report(doing="step 41", begun=41, spots={"calls": (9, "the round of step 41", True)})
        watches[1].client.report(doing="its own code after step 40", begun=40, spots={"calls": (8, "before", False)})
        until = time.monotonic() + 30
        while "waiting for worker 1 (its own code after step 40)" not in caplog.text:
            assert time.monotonic() < until
            time.sleep(0.01)


def _stay(address: str, told: Any) -> None:
    watch = Watch(address, 1)
    watch.client.next_generation(after=0, fresh=True, orderly=True)
    told.put(os.getpid())
    watch.over.wait(30)
    told.put(watch.client.dropped)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="looks at processes through /proc")
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_real_process_that_is_stopped_or_killed_is_noticed(
    house: Callable[..., House], how: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = house(expect=2)
    context = multiprocessing.get_context("fork")
    told: Any = context.SimpleQueue()
    child = context.Process(target=_stay, args=(here.server.address, told))
    child.start()
    first = here.come(0)
    assert here.ask(first, after=0, fresh=True)[0].result(10).workers == (0, 1)
    pid = told.get()
    try:
        os.kill(pid, how)
        if how == signal.SIGSTOP:
            monkeypatch.setattr(liveness, "FLOOR_S", 0.6)
        assert first.over.wait(30)
        [second] = here.ask(first, after=1, orderly=False)
        text = second.result(10).left[0].text
        assert ("was silent for" in text) == (how == signal.SIGSTOP)
        if how == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
            assert told.get()
    finally:
        child.kill()
        child.join(10)


@pytest.mark.parametrize(("ahead_s", "counts"), [(300.0, True), (-420.0, True), (0.3, False)])
def test_the_fleets_clock_is_the_rosters(
    house: Callable[..., House], monkeypatch: pytest.MonkeyPatch, ahead_s: float, counts: bool
) -> None:
    away = SimpleNamespace(time=lambda: time.time() + ahead_s, monotonic=time.monotonic, sleep=time.sleep)
    give_clock(monkeypatch, server, away)
    member = house().come(0).client
    assert abs(member.clock() - time.time() - (ahead_s if counts else 0.0)) < 5.0
    if not counts:
        assert abs(member.clock() - time.time()) < 0.1, "so little is the network's doing"
