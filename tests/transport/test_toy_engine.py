"""An engine that nobody has heard of: one file and one line of the registry, and a fleet trains over it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import BEFORE, apart, results

from paceline import concurrency
from paceline.observe import read_log
from paceline.transport.engines.contract import (
    CHECK_S,
    CLOSED,
    Check,
    Closer,
    Engine,
    EngineKind,
    EngineWork,
    Held,
    Meeting,
)

pytestmark = pytest.mark.fleet


class StoreWork(EngineWork):
    """A work that ends when all its keys are in the store."""

    done = False

    def __init__(self, engine: StoreEngine, keys: list[str], write: Callable[[list[Any]], Any]) -> None:
        self._engine, self._keys, self._write = engine, keys, write

    def wait(self, check: Check) -> None:
        looked = concurrency.monotonic()
        while not self.done and not self._engine.store.check(self._keys):
            if self._engine.aborted:
                raise RuntimeError("aborted")
            if concurrency.monotonic() - looked > CHECK_S:
                check()
                looked = concurrency.monotonic()
            concurrency.sleep(0.0005)
        if not self.done:
            self._write([self._engine.store.get(key) for key in self._keys])
            self.done = True

    def abandon(self) -> bool:
        return True  # nobody but who waits writes


class StoreEngine(Engine):
    """Workers put their tensors into the store of their group, and read the others' there."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self._rank, self._size, self._counts = store, rank, size, dict[str, int]()
        self.aborted = self._closed = False

    def _put(self, lane: str, tensor: torch.Tensor | None = None) -> str:
        """Return the key of this lane's next message, and put the message there."""
        if self._closed:
            raise RuntimeError(CLOSED)
        self._counts[lane] = self._counts.get(lane, 0) + 1
        key = f"{lane}/{self._counts[lane]}"
        if tensor is not None:
            self.store.set(key, tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return key

    def _with_all(self, tensor: torch.Tensor, write: Callable[[list[Any]], Any]) -> StoreWork:
        mine = self._put(f"all/{self._rank}", tensor)
        number = mine.rpartition("/")[2]
        return StoreWork(self, [f"all/{rank}/{number}" for rank in range(self._size)], write)

    def sum(self, tensor: torch.Tensor) -> StoreWork:
        return self._with_all(tensor, lambda got: tensor.copy_(sum(read(one, tensor) for one in got)))

    def all_to_all(self, sent: torch.Tensor, got: torch.Tensor) -> StoreWork:
        return self._with_all(sent, lambda all: got.copy_(torch.stack([read(one, sent)[self._rank] for one in all])))

    def broadcast(self, tensor: torch.Tensor, root: int) -> StoreWork:
        return self._with_all(tensor, lambda got: tensor.copy_(read(got[root], tensor)))

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> StoreWork:
        self._put(f"{self._rank}-{to}-{tag}", tensor)
        return StoreWork(self, [], lambda got: None)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> StoreWork:
        key = self._put(f"{source}-{self._rank}-{tag}")
        return StoreWork(self, [key], lambda got: tensor.copy_(read(got[0], tensor)))

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> list[Closer]:
        was_closed, self._closed = self._closed, True
        return [] if was_closed else [Held(self)]


def read(data: bytes, like: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=like.dtype).view(like.shape)


class OverStore(EngineKind):
    """The kind, as the registry lists it."""

    name = "toy"

    def connect(self, meeting: Meeting) -> tuple[StoreEngine, str]:
        return StoreEngine(meeting.store, meeting.rank, meeting.size), "the store"


TOY = f"""from __future__ import annotations
import torch
from paceline import concurrency
from paceline.transport.engines.contract import CLOSED, CHECK_S, Engine, EngineKind, EngineWork, Held
from paceline.transport.engines import register

{"".join(inspect.getsource(part) for part in (StoreWork, StoreEngine, read, OverStore))}
register(OverStore())
"""
"""The engine in a script of its own, and the one line."""

TRAIN = """
def network():  # some of its sums are too large for a single message
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 40_000), nn.Tanh(), nn.Linear(40_000, 3)).double()

with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    fleet.track(optimizer=optimizer)
    for step in fleet.steps(data, global_batch=12, micro_batch=3, epochs=2):
        for a, b in step:
            step.backward(loss_fn(model(a), b))
        step.commit(optimizer)
    weights = torch.tensor(flat(model), dtype=torch.float64)
    result = [fleet.world_size, flat(model[2])[::97], float(weights.sum()), float(weights.norm())]
"""


def test_the_toy_is_short() -> None:
    assert len(TOY.splitlines()) < 100


def test_three_workers_train_over_it_exactly_as_one_process(tmp_path: Path) -> None:
    three = results(tmp_path / "three", TRAIN, before=TOY + BEFORE, workers=3, PACELINE_BACKEND="toy")
    assert three[0] == three[1] == three[2]
    alone = results(tmp_path / "one", TRAIN, before=BEFORE, workers=1)[0]
    assert (three[0][0], alone[0]) == (3, 1)
    assert apart(three[0][1], alone[1]) < 1e-12
    assert three[0][2:] == pytest.approx(alone[2:], rel=1e-12)
    log = read_log(tmp_path / "three" / "run")
    assert log.run["backend"] == "toy"
    assert len(log.records) == 8
