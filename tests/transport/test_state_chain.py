"""A state that several newcomers need leaves its giver once: they pass it on to one another, piece by piece."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.errors import GenerationOver
from paceline.transport.elastic import handover
from paceline.transport.elastic.handover import HandOver, chain_of


class Post:
    """Carries tensors between ranks; a rank that is ``lost`` sends nothing more."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int, int], queue.SimpleQueue[torch.Tensor]] = defaultdict(queue.SimpleQueue)
        self.sent: Counter[int] = Counter()
        self.lost: set[int] = set()
        self._lock = threading.Lock()

    def worker(self, rank: int, state: Sequence[torch.Tensor] | None = None) -> HandOver:
        def send(tensor: torch.Tensor, to: int, tag: int) -> Any:
            with self._lock:
                self.sent[rank] += tensor.numel() * tensor.element_size()
            self.boxes[rank, to, tag].put(tensor.clone())
            return SimpleNamespace(wait=lambda: None)

        def receive(tensor: torch.Tensor, source: int, tag: int) -> Any:
            def wait() -> None:
                box = self.boxes[source, rank, tag]
                while box.empty() and source not in self.lost:
                    time.sleep(0.001)
                if box.empty():
                    raise GenerationOver("generation 3 is over", generation=3)
                tensor.copy_(box.get())

            return SimpleNamespace(wait=wait)

        transport: Any = SimpleNamespace(
            lanes={},
            group=SimpleNamespace(rank=rank),
            start_send=send,
            start_receive=receive,
            receive=lambda *message: receive(*message).wait(),
            listener=SimpleNamespace(give_state=lambda held: state),
        )
        return HandOver(transport)

    def send(self, source: int, to: int, *messages: Sequence[int]) -> None:
        """Post the first messages of a state: how many parts it has, their sizes, and pieces of bytes."""
        for number, message in enumerate(messages):
            content = torch.tensor(message, dtype=torch.int64 if number < 2 else torch.uint8)
            self.boxes[source, to, handover.STATE_TAGS + number].put(content)


def random_state(*sizes: int) -> list[torch.Tensor]:
    return [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]


@pytest.mark.parametrize("newcomers", [1, 2, 8])
def test_everybody_gets_the_whole_state_and_nobody_sends_it_twice(
    newcomers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "PIECE", 1000)
    state = random_state(12_345, 0, 1000, 7)
    post, chain = Post(), [*range(2, 2 + newcomers)]
    with ThreadPoolExecutor(8) as pool:
        taking = [pool.submit(post.worker(rank).receive_state, 0, chain) for rank in reversed(chain)]
        post.worker(0, state).send_state(chain, ())
        for one in taking:
            assert all(map(torch.equal, one.result(10), state))
            assert len(one.result()) == len(state)
    assert set(post.sent) == {0, *chain[:-1]}, "neither the other member nor the last newcomer"
    assert set(post.sent.values()) == {sum(part.numel() for part in state) + 8 + 8 * len(state)}


def test_a_state_that_is_large_and_one_that_is_nothing_arrive() -> None:
    state = random_state(handover.PIECE + 3)
    for parts in (state, []):
        post = Post()
        with ThreadPoolExecutor(1) as pool:
            taking = pool.submit(post.worker(2).receive_state, 0, [2])
            post.worker(0, parts).send_state([2], ())
            got = taking.result(10)
        assert len(got) == len(parts)
        assert all(map(torch.equal, got, parts))
        for part in got:
            part.zero_()  # it is memory like any other


def test_a_piece_is_passed_on_before_the_last_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "PIECE", 4)
    monkeypatch.setattr(handover, "AT_ONCE", 2)
    post = Post()
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(post.worker(2).receive_state, 0, [2, 3])
        post.send(0, 2, [1], [8], range(4))
        first = post.boxes[2, 3, handover.STATE_TAGS + 2].get(timeout=10)
        assert first.tolist() == [0, 1, 2, 3]
        assert not taking.done()
        post.boxes[0, 2, handover.STATE_TAGS + 3].put(torch.arange(4, dtype=torch.uint8))
        assert taking.result(10)[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_one_whose_giver_is_lost_in_the_middle_learns_of_it() -> None:
    post = Post()
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(post.worker(2).receive_state, 0, [2, 3])
        post.send(0, 2, [2], [4, 4], range(4))
        post.lost.add(0)
        with pytest.raises(GenerationOver):
            taking.result(10)


def test_the_giver_goes_on_only_when_all_of_its_state_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "PIECE", 10)
    waited: list[int] = []
    state, post = random_state(95), Post()
    giver = post.worker(0, state)

    def send(tensor: torch.Tensor, to: int, tag: int) -> Any:
        return SimpleNamespace(wait=lambda: waited.append(tag - handover.STATE_TAGS))

    monkeypatch.setattr(giver._transport, "start_send", send)
    giver.send_state([2], ())
    assert waited == list(range(12)), "its training may change the state now"


def test_a_state_enters_each_computer_once() -> None:
    hosts = ["a", "a", "b", "c", "b", "a", "c"]
    assert chain_of([2, 3, 4, 5, 6], hosts, giver=0) == [5, 2, 4, 3, 6]
