"""Heartbeats through a store: who is lost, who is elsewhere, and one failure that is everybody's. One process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from clocks import give_clock
from paceline.errors import CallMismatch, FleetError, WorkerLost
from paceline.roster import calls
from paceline.transport import heartbeat
from paceline.transport.call_sequences import CallSequences
from paceline.transport.heartbeat import Heartbeat


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rules, twenty times faster; nobody is silent unless a test says when."""
    for name, seconds in (("BEAT_S", 0.02), ("CHECK_S", 0.05), ("SILENT_S", 60.0), ("SILENT_AFTER_RESET_S", 60.0)):
        monkeypatch.setattr(heartbeat, name, seconds)


class Eyes:
    """Some workers' heartbeats over one store."""

    def __init__(self, size: int) -> None:
        self.store, self.launcher = dist.HashStore(), dist.HashStore()
        self.failed = [threading.Event() for _ in range(size)]
        self.sequences = [CallSequences(calls.CALLS, calls.BACKGROUND, calls.GROUP) for _ in range(size)]
        self.workers = [self._make(rank, size) for rank in range(size)]

    def _make(self, rank: int, size: int) -> Heartbeat:
        names = [f"worker {number} (cpu)" for number in range(size)]
        own, on_failure = self.sequences[rank], self.failed[rank].set
        return Heartbeat(self.store, self.launcher, rank, size, names=names, sequences=own, on_failure=on_failure)

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()


@pytest.fixture
def eyes() -> Iterator[Callable[[int], Eyes]]:
    made: list[Eyes] = []

    def make(size: int) -> Eyes:
        made.append(Eyes(size))
        return made[-1]

    yield make
    for one in made:
        one.stop()


class BeatClock:
    """Goes on by a beat whenever all of the ``living`` have beaten: a busy computer makes none of them silent."""

    sleep = staticmethod(time.sleep)

    def __init__(self, crew: Eyes, living: tuple[int, ...]) -> None:
        self._store, self._living = crew.store, living
        self._lock, self._ticks, self._counts = threading.Lock(), 0, self._beats()

    def monotonic(self) -> float:
        with self._lock:
            counts = self._beats()
            if all(count > before for count, before in zip(counts, self._counts)):
                self._ticks, self._counts = self._ticks + 1, counts
            return self._ticks * heartbeat.BEAT_S

    def _beats(self) -> list[int]:
        keys = [f"beat/{rank}" for rank in self._living]
        return [json.loads(self._store.get(key))[0] if self._store.check([key]) else 0 for key in keys]


@pytest.mark.slow
def test_a_worker_that_beats_is_waited_for_however_long_it_takes(
    eyes: Callable[[int], Eyes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "SILENT_S", 0.5)
    crew = eyes(2)
    clock = BeatClock(crew, living=(0, 1))
    give_clock(monkeypatch, heartbeat, clock)
    crew.workers[0].enter("a round")
    wait_until(lambda: crew.failed[0].is_set() or clock.monotonic() > 2 * heartbeat.SILENT_S)
    assert crew.workers[0].failure is None


@pytest.mark.slow
def test_a_worker_that_stops_beating_is_lost_and_named_with_what_it_did(
    eyes: Callable[[int], Eyes], monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = eyes(3)
    give_clock(monkeypatch, heartbeat, BeatClock(crew, living=(0, 2)))
    crew.sequences[1].note("step 7")
    wait_for_beat(crew, 1, "step 7")
    crew.workers[1].stop()
    for rank in (0, 2):
        crew.workers[rank].enter("a round")
    monkeypatch.setattr(heartbeat, "SILENT_S", 0.5)
    for rank in (0, 2):
        assert crew.failed[rank].wait(30)
        failure = crew.workers[rank].failure
        assert isinstance(failure, WorkerLost)
        assert str(failure).startswith("worker 1 (cpu) went silent")
        assert "step 7" in str(failure)


def wait_for_beat(crew: Eyes, rank: int, doing: str) -> None:
    key = f"beat/{rank}"
    wait_until(lambda: crew.store.check([key]) and json.loads(crew.store.get(key))[1] == doing)


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never happened")


def test_two_that_wait_in_unlike_calls_are_told_so_both_with_the_same_words(eyes: Callable[[int], Eyes]) -> None:
    crew = eyes(3)
    crew.workers[1].enter("the round of step 3")
    crew.workers[2].enter("the round of step 3")
    crew.workers[0].enter("fleet.save()")  # only now is anything wrong
    texts = set()
    for rank in range(3):
        assert crew.failed[rank].wait(30)
        assert isinstance(crew.workers[rank].failure, CallMismatch)
        texts.add(str(crew.workers[rank].failure))
    assert len(texts) == 1
    text = texts.pop()
    assert "worker 0 (cpu) called fleet.save()" in text or "worker 0 (cpu)" in text
    assert "fleet.save()" in text
    assert "the round of step 3" in text
    assert "every worker must make the same calls in the same order" in text


def test_a_worker_one_call_behind_is_not_elsewhere(eyes: Callable[[int], Eyes]) -> None:
    crew = eyes(2)
    crew.workers[0].enter("fleet.any()")
    crew.workers[0].leave()
    crew.workers[0].enter("the round of step 3")
    crew.workers[1].enter("fleet.any()")
    assert not crew.failed[0].wait(0.4)
    assert not crew.failed[1].is_set()


def test_what_the_launcher_saw_die_is_known_at_once(eyes: Callable[[int], Eyes]) -> None:
    crew = eyes(2)
    crew.launcher.set("died/1", "was killed by signal 9 (SIGKILL)")
    crew.workers[0].enter("a round")
    assert crew.failed[0].wait(30)
    assert str(crew.workers[0].failure) == "worker 1 (cpu) was killed by signal 9 (SIGKILL)"


def test_the_first_failure_published_stands_for_all(eyes: Callable[[int], Eyes]) -> None:
    crew = eyes(3)
    crew.workers[1].enter("a round")
    first = crew.workers[2].publish("lost", "worker 2 (cpu) ended with KeyError: 'x'")
    second = crew.workers[0].publish("mismatch", "something later")
    assert str(first) == str(second) == "worker 2 (cpu) ended with KeyError: 'x'"
    assert isinstance(second, WorkerLost)
    assert crew.failed[1].wait(30)
    assert str(crew.workers[1].failure) == str(first)


def test_everybody_who_heard_of_a_failure_says_so(eyes: Callable[[int], Eyes]) -> None:
    crew = eyes(2)
    crew.workers[1].enter("a round")
    crew.workers[0].publish("fleet", "it is over")
    assert crew.failed[1].wait(30)
    crew.workers[0].await_acknowledgements(30.0)
    assert crew.store.check(["knows/1"])


def test_a_broken_connection_is_traced_to_the_silent_worker(
    eyes: Callable[[int], Eyes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "SILENT_AFTER_RESET_S", 0.2)
    crew = eyes(3)
    wait_for_beat(crew, 1, "starting")
    crew.workers[1].stop()
    found = crew.workers[0].diagnose(RuntimeError("[gloo/transport] Connection reset by peer"))
    assert isinstance(found, WorkerLost)
    assert "worker 1 (cpu) went silent" in str(found)


@pytest.mark.slow
def test_a_broken_connection_with_all_alive_says_just_that(
    eyes: Callable[[int], Eyes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "SILENT_S", 0.2)
    monkeypatch.setattr(heartbeat, "SILENT_AFTER_RESET_S", 0.1)
    crew = eyes(2)
    give_clock(monkeypatch, heartbeat, BeatClock(crew, living=(0, 1)))
    found = crew.workers[0].diagnose(RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed"))
    assert type(found) is FleetError
    assert str(found).endswith("yet all of them are alive: Connection closed")


@pytest.mark.slow
def test_waiting_workers_are_named_in_a_warning_with_what_they_do(
    eyes: Callable[[int], Eyes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calls, "REMIND_S", (0.1, 0.3, 60.0))
    crew = eyes(2)
    crew.sequences[1].note("a long compile")
    wait_for_beat(crew, 1, "a long compile")
    with caplog.at_level("WARNING", logger="paceline"):
        crew.workers[0].enter("the round of step 0")
        wait_until(lambda: len(caplog.records) >= 2)
        time.sleep(0.2)  # ten more beats, and nothing more to say
    said = [record.getMessage() for record in caplog.records]
    assert said == ["the round of step 0: waiting for worker 1 (cpu) (a long compile)"] * 2


class Cut:
    """A store whose computer does not answer once ``cut`` is set, and then never."""

    def __init__(self) -> None:
        self._store, self.cut, self.healed = dist.HashStore(), threading.Event(), threading.Event()
        self.asked, self.answered = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        if self.cut.is_set():
            self.asked.set()
            self.healed.wait(20)
            self.answered.set()
        return getattr(self._store, name)


@pytest.mark.parametrize("waits", [True, False])
def test_a_worker_that_is_cut_off_from_the_store_says_so_and_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, waits: bool
) -> None:
    monkeypatch.setattr(heartbeat, "QUIET_S", 0.2)
    monkeypatch.setattr(heartbeat, "SILENT_S", 0.6)
    store, own, failed = Cut(), CallSequences(calls.CALLS, calls.BACKGROUND, calls.GROUP), threading.Event()
    names = ["worker 0 (a, cpu)", "worker 1 (b, cpu)"]
    beat = Heartbeat(store, dist.HashStore(), 1, 2, names=names, sequences=own, on_failure=failed.set)
    if waits:
        beat.enter("the round of step 3")
    store.cut.set()
    assert failed.wait(5 if waits else 1) is waits, "who works by itself needs no store"
    if waits:
        assert "worker 0 (a, cpu)'s computer, where the fleet meets, has not answered for" in caplog.text
        assert isinstance(beat.failure, WorkerLost)
        assert "the network is cut" in str(beat.failure)
    store.healed.set()
    beat.stop()


def test_a_broken_connection_is_named_though_another_thread_waits_for_a_store_that_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat, "SILENT_S", 0.6)
    monkeypatch.setattr(heartbeat, "CHECK_S", 0.2)
    store, own, failed = Cut(), CallSequences(calls.CALLS, calls.BACKGROUND, calls.GROUP), threading.Event()
    beat = Heartbeat(store, dist.HashStore(), 1, 2, names=["a", "b"], sequences=own, on_failure=failed.set)
    beat.enter("the round of step 3")
    store.cut.set()
    wait_until(store.asked.is_set)  # by the thread that beats, which holds the connection's lock
    found = beat.diagnose(RuntimeError("[gloo/transport] Connection reset by peer"))
    assert "where the fleet meets, has not answered" in str(found)
    assert found is beat.failure
    assert not store.answered.is_set(), "its request has not ended"
    assert failed.is_set()
    store.healed.set()
    beat.stop()


def test_whoever_learns_of_a_failure_first_frees_all_that_wait_and_nobody_waits_after_it(
    eyes: Callable[[int], Eyes],
) -> None:
    crew = eyes(1)
    own, failed = crew.workers[0], crew.failed[0]
    own.enter("the round of step 3")
    published = own.publish("lost", "worker 1 was killed")  # by another thread, whose connection broke first
    assert failed.is_set()
    own.leave()
    with pytest.raises(WorkerLost) as raised:
        own.enter("the round of step 4")
    assert raised.value is published
    assert not own.waits()
