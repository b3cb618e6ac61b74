"""One worker by itself: the same interface, nobody to reach."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.transport.base import RoundTensors, Transport, made
from paceline.transport.pending import Over


class Alone(Transport):
    """The transport of a fleet of one."""

    name = "alone"
    backend = "none"
    solitary = True
    rank = 0
    size = 1
    generation = 0
    calls = 0
    workers: tuple[int, ...] = (0,)

    def __init__(self) -> None:
        self._slots: list[str] = []

    @contextmanager
    def round(self, label: str, *, background: bool = False, result: RoundTensors = ()) -> Iterator[list[torch.Tensor]]:
        yield made(result)

    def sum(self, tensor: torch.Tensor) -> Over:
        return Over()

    def broadcast(self, tensors: Sequence[torch.Tensor], *, inside: bool = True) -> None:
        return

    def send(self, tensor: torch.Tensor, to: int, tag: int, *, generation: int) -> None:
        raise AssertionError("a worker alone has nobody to send to")

    def receive(self, tensor: torch.Tensor, source: int, tag: int, *, generation: int) -> None:
        raise AssertionError("a worker alone has nobody to receive from")

    def gather(self, label: str, value: Any) -> list[Any]:
        return [json.loads(json.dumps(value() if callable(value) else value))]

    def slot(self, name: str) -> int:
        if name not in self._slots:
            self._slots.append(name)
        return self._slots.index(name)

    def slot_name(self, slot: int) -> str:
        return self._slots[slot]

    def tally(self, name: str, by: int = 1) -> int:
        return 1

    def was_signalled(self, name: str) -> bool:
        return True

    def close(self, *, failure: BaseException | None = None) -> None:
        return
