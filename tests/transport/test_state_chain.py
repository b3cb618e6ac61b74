"""A state that several newcomers need leaves its giver once: they pass it on to one another, piece by piece."""

from __future__ import annotations

import queue
import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.transport.elastic import handover
from paceline.transport.elastic.handover import HandOver, chain_of


class Post:
    """Carries tensors between ranks; a rank that is ``dead`` takes nothing, and gives nothing."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int, int], queue.SimpleQueue[torch.Tensor]] = defaultdict(queue.SimpleQueue)
        self.sent: Counter[int] = Counter()
        self.in_flight: list[tuple[int, int]] = []
        """Who sent which piece, in that order."""
        self._lock = threading.Lock()

    def worker(self, rank: int, state: torch.Tensor | None = None) -> HandOver:
        def send(tensor: torch.Tensor, to: int, tag: int) -> Any:
            with self._lock:
                self.sent[rank] += tensor.numel() * tensor.element_size()
                self.in_flight.append((rank, tag))
            self.boxes[rank, to, tag].put(tensor.clone())
            return SimpleNamespace(wait=lambda look: None)

        def receive(tensor: torch.Tensor, source: int, tag: int) -> None:
            tensor.copy_(self.boxes[source, rank, tag].get(timeout=10))

        group = SimpleNamespace(rank=rank, send=send, look=lambda: None)
        listener = SimpleNamespace(give_state=lambda: state)
        transport: Any = SimpleNamespace(lanes={}, group=group, receive=receive, listener=listener)
        return HandOver(transport)


@pytest.mark.parametrize("newcomers", [1, 2, 8])
def test_everybody_gets_the_whole_state_and_nobody_sends_it_twice(
    newcomers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "PIECE", 1000)
    state = torch.randint(0, 256, (12_345,), dtype=torch.uint8)
    post, chain = Post(), [*range(2, 2 + newcomers)]
    with ThreadPoolExecutor(8) as pool:
        taking = [pool.submit(post.worker(rank).receive_state, 0, chain) for rank in reversed(chain)]
        post.worker(0, state).send_state(chain)
        assert all(torch.equal(one.result(10), state) for one in taking)
    assert set(post.sent) == {0, *chain[:-1]}, "neither the other member nor the last newcomer"
    assert set(post.sent.values()) == {state.numel() + 8}


def test_a_piece_is_passed_on_before_the_next_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "PIECE", 4)
    post = Post()
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(post.worker(2).receive_state, 0, [2, 3])
        post.boxes[0, 2, handover.STATE_TAG].put(torch.tensor([8]))
        post.boxes[0, 2, handover.STATE_TAG + 1].put(torch.arange(4, dtype=torch.uint8))
        first = post.boxes[2, 3, handover.STATE_TAG + 1].get(timeout=10)
        assert first.tolist() == [0, 1, 2, 3]
        assert not taking.done()
        post.boxes[0, 2, handover.STATE_TAG + 2].put(torch.arange(4, dtype=torch.uint8))
        assert taking.result(10).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_one_whose_giver_is_lost_does_not_keep_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Post().worker(2)

    def lost(tensor: torch.Tensor, source: int, tag: int) -> None:
        if tag > handover.STATE_TAG:
            raise RuntimeError("generation 3 is over")
        tensor.fill_(8)

    monkeypatch.setattr(worker._transport, "receive", lost)
    before = {thread for thread in threading.enumerate() if thread.name == "paceline-send-state"}
    with pytest.raises(RuntimeError, match="generation 3 is over"):
        worker.receive_state(0, [2, 3])
    for thread in set(threading.enumerate()) - before:
        if thread.name == "paceline-send-state":
            thread.join(10)
            assert not thread.is_alive()


def test_a_state_enters_each_computer_once() -> None:
    hosts = ["a", "a", "b", "c", "b", "a", "c"]
    assert chain_of([2, 3, 4, 5, 6], hosts, giver=0) == [5, 2, 4, 3, 6]
