"""The contract of engines, the same for Gloo, for the one in memory, and for one that is made up here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from memory_engine import MemoryEngine, MemoryNetwork

from paceline.transport.engines.contract import CHECK_S, CLOSED, Check, Closer, Engine, EngineWork, Held
from paceline.transport.engines.gloo import GlooEngine, GlooWork, connect_gloo
from paceline.transport.group import let_go

Engines = list[Engine]


class ToyWork(EngineWork):
    """A work that is over when ``finish`` finds everything on the board."""

    def __init__(self, aborted: threading.Event, finish: Callable[[], bool]) -> None:
        self._aborted, self._finish, self._done = aborted, finish, False

    def wait(self, check: Check) -> None:
        looked = time.monotonic()
        while not self._done and not self._finish():
            if self._aborted.wait(0.001):
                raise RuntimeError("aborted")
            if time.monotonic() - looked > CHECK_S:
                check()
                looked = time.monotonic()
        self._done = True

    def abandon(self) -> bool:
        return self.done

    @property
    def done(self) -> bool:
        return self._done or self._aborted.is_set()


class ToyEngine(Engine):
    """Ranks put clones of their tensors on one board, and take them from there."""

    def __init__(self, board: dict[Any, torch.Tensor], rank: int, size: int) -> None:
        self._board, self._rank, self._size = board, rank, size
        self._counts: dict[Any, int] = {}
        self._aborted, self._open = threading.Event(), True

    def _exchange(self, tensor: torch.Tensor, write: Callable[[list[torch.Tensor]], Any], ranks: Any = None) -> ToyWork:
        number = self._number("round")
        self._board[number, self._rank] = tensor.clone()
        keys = [(number, rank) for rank in (range(self._size) if ranks is None else ranks)]
        return self._work(keys, write)

    def _number(self, what: Any) -> tuple[Any, int]:
        if not self._open:
            raise RuntimeError(CLOSED)
        self._counts[what] = self._counts.get(what, 0) + 1
        return what, self._counts[what]

    def _work(self, keys: list[Any], write: Callable[[list[torch.Tensor]], Any]) -> ToyWork:
        def finish() -> bool:
            there = all(key in self._board for key in keys)
            if there:
                write([self._board[key] for key in keys])
            return there

        return ToyWork(self._aborted, finish)

    def sum(self, tensor: torch.Tensor) -> ToyWork:
        return self._exchange(tensor, lambda parts: tensor.copy_(torch.stack(parts).sum(0)))

    def all_to_all(self, sent: torch.Tensor, got: torch.Tensor) -> ToyWork:
        return self._exchange(sent, lambda parts: got.copy_(torch.stack([part[self._rank] for part in parts])))

    def broadcast(self, tensor: torch.Tensor, root: int) -> ToyWork:
        return self._exchange(tensor, lambda parts: tensor.copy_(parts[0]), [root])

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> ToyWork:
        self._board[self._number((self._rank, to, tag))] = tensor.clone()
        return self._work([], lambda parts: None)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> ToyWork:
        return self._work([self._number((source, self._rank, tag))], lambda parts: tensor.copy_(parts[0]))

    def abort(self) -> None:
        self._aborted.set()

    def close(self) -> list[Closer]:
        was_open, self._open = self._open, False
        return [Held(self)] if was_open else []


def gloo(size: int) -> Engines:
    store = dist.HashStore()

    def one(rank: int) -> Engine:
        return connect_gloo(store, rank, size, towards=("127.0.0.1", 1), spare_port=0)[0]

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def memory(size: int) -> Engines:
    network = MemoryNetwork()
    return [MemoryEngine(network, "group", rank, size) for rank in range(size)]


def toy(size: int) -> Engines:
    board: dict[Any, torch.Tensor] = {}
    return [ToyEngine(board, rank, size) for rank in range(size)]


@pytest.fixture(params=[gloo, memory, toy], ids=lambda make: make.__name__)
def connected(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Engines]]:
    made: Engines = []

    def connect(size: int) -> Engines:
        made.extend(request.param(size))
        return made

    yield connect
    for engine in made:
        engine.abort()
    for engine in made:
        let_go(engine.close())


def no_look() -> None:
    """Wait for as long as it takes."""


def over() -> None:
    raise RuntimeError("it is over")


def all_wait(works: list[EngineWork]) -> None:
    with ThreadPoolExecutor(len(works)) as pool:
        list(pool.map(lambda work: work.wait(no_look), works, timeout=20))


@pytest.mark.parametrize("size", [2, 3])
def test_a_sum_is_everybodys_and_the_same_bits_everywhere(connected: Callable[[int], Engines], size: int) -> None:
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    mine = [part.clone() for part in parts]
    all_wait([engine.sum(tensor) for engine, tensor in zip(connected(size), mine, strict=True)])
    assert all(torch.equal(tensor, mine[0]) for tensor in mine)
    torch.testing.assert_close(mine[0], torch.stack(parts).sum(0))


def test_rows_are_exchanged(connected: Callable[[int], Engines]) -> None:
    sent = [torch.tensor([[10 * rank + to] for to in range(3)], dtype=torch.uint8) for rank in range(3)]
    got = [torch.zeros(3, 1, dtype=torch.uint8) for _ in range(3)]
    all_wait([engine.all_to_all(*pair) for engine, *pair in zip(connected(3), sent, got, strict=True)])
    assert [rows.view(-1).tolist() for rows in got] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]


def test_a_broadcast_comes_from_the_rank_that_is_named(connected: Callable[[int], Engines]) -> None:
    mine = [torch.full((3,), float(rank)) for rank in range(3)]
    all_wait([engine.broadcast(tensor, 1) for engine, tensor in zip(connected(3), mine, strict=True)])
    assert [tensor.tolist() for tensor in mine] == [[1.0] * 3] * 3


def test_messages_find_their_tag_and_keep_their_order(connected: Callable[[int], Engines]) -> None:
    first, second = connected(2)
    got = [torch.zeros(2) for _ in range(3)]
    coming = [second.receive(into, 0, tag) for into, tag in zip(got, (7, 8, 7), strict=True)]
    sent = [first.send(torch.full((2,), value), 1, tag) for value, tag in ((1.0, 7), (2.0, 7), (3.0, 8))]
    all_wait([*coming, *sent])
    assert [float(into[0]) for into in got] == [1.0, 3.0, 2.0]


@pytest.mark.parametrize("what", ["sum", "receive"])
def test_an_abort_wakes_who_waits(connected: Callable[[int], Engines], what: str) -> None:
    engine = connected(2)[0]
    work = engine.sum(torch.zeros(3)) if what == "sum" else engine.receive(torch.zeros(3), 1, 7)
    timer = threading.Timer(0.1, engine.abort)
    timer.start()
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        work.wait(no_look)
    assert time.monotonic() - began < 0.1 + 0.4, "before it would have looked"
    assert work.abandon()


def test_a_look_ends_a_wait(connected: Callable[[int], Engines]) -> None:
    work = connected(2)[0].sum(torch.zeros(3))
    assert not work.done
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="it is over"):
        work.wait(over)
    assert 0.3 < time.monotonic() - began < 3
    assert not work.abandon(), "the other may still come"


def test_what_is_done_can_be_waited_for_again_and_given_up(connected: Callable[[int], Engines]) -> None:
    works = [engine.sum(torch.ones(3)) for engine in connected(2)]
    all_wait(works)
    assert works[0].done
    works[0].wait(over)
    assert works[0].abandon()
    assert works[1].carrier is None


def test_an_engine_is_given_up_once_and_then_closed(connected: Callable[[int], Engines]) -> None:
    engine = connected(2)[0]
    held = engine.close()
    assert held
    assert engine.close() == []
    with pytest.raises(RuntimeError, match="closed"):
        engine.sum(torch.zeros(1))
    engine.abort()
    let_go(held)


class EndsLate:
    """Gloo's work that ends after a wait for it has timed out, and before it is asked whether it has."""

    def __init__(self, error: str = "") -> None:
        self.waits, self.error = 0, error

    def wait(self, timeout: object) -> None:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return True


def test_a_sum_that_ends_just_after_a_wait_for_it_timed_out_has_ended_well() -> None:
    work = EndsLate()
    GlooWork(work).wait(lambda: None)
    assert work.waits == 2


def test_a_sum_that_fails_just_after_a_wait_for_it_timed_out_raises_its_own_error() -> None:
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        GlooWork(EndsLate("Connection closed by peer")).wait(lambda: None)


DOORS = {("10.0.0.2", 1001): 1, ("10.0.0.2", 1002): 2, ("10.0.0.2", 1003): 3, ("10.0.0.4", 1001): 4}


@pytest.mark.parametrize(
    ("silent", "named"),
    [
        ({("10.0.0.2", 1001): 4.0, ("10.0.0.2", 1002): 7.0}, [([1], "10.0.0.2", 4.0), ([2], "10.0.0.2", 7.0)]),
        ({("10.0.0.2", 1002): 7.0, ("10.0.0.2", 50_000): 9.0}, [([1, 3], "10.0.0.2", 9.0), ([2], "10.0.0.2", 7.0)]),
        ({("10.0.0.2", 50_000): 5.0, ("10.0.0.2", 50_001): 6.0}, [([1, 2, 3], "10.0.0.2", 6.0)]),
        ({("10.0.0.4", 1001): 3.0, ("10.0.0.4", 50_000): 4.0}, [([4], "10.0.0.4", 3.0)]),
        ({("10.0.0.9", 1): 3.0}, []),
    ],
)
def test_silent_workers_of_one_address_are_told_apart_by_their_ports(
    silent: dict[tuple[str, int], float], named: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.transport.engines.gloo.unanswered", lambda sockets: silent)
    assert GlooEngine(None, rank=0, doors=DOORS).unanswered() == named
