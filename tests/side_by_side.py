"""Workers on threads of one process, each with a whole fleet of its own: a transport that really adds their tensors."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.errors import FleetError
from paceline.transport.base import RoundTensors, made
from paceline.transport.fixed import Alone
from paceline.transport.group import Over

PATIENCE_S = 30.0


class Meeting:
    """Where workers bring what they have, and get what all have brought."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[str] = []
        self._brought: dict[tuple[str, int], dict[int, tuple[str, Any]]] = {}
        self._changed = threading.Condition()
        self._groups: dict[tuple[int, ...], Meeting] = {}
        self._failed = False

    def bring(self, kind: str, number: int, rank: int, label: str, value: Any) -> list[Any]:
        with self._changed:
            brought = self._brought.setdefault((kind, number), {})
            brought[rank] = label, value
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(brought) == self.size or self._failed, PATIENCE_S)
        if len(brought) < self.size:
            raise FleetError(f"worker {rank} waits in {label}, and others do not come")
        if len({label for label, _ in brought.values()}) > 1:
            raise FleetError(f"unlike calls: {sorted(label for label, _ in brought.values())}")
        return [brought[one][1] for one in range(self.size)]

    def fail(self) -> None:
        """Nobody is to wait any longer."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()
            groups = list(self._groups.values())
        for group in groups:
            group.fail()

    def group(self, members: tuple[int, ...]) -> Meeting:
        with self._changed:
            return self._groups.setdefault(members, Meeting(len(members)))


class SideBySide(Alone):
    """One worker's transport to the others of a meeting. Sums are added in the order of ranks: all get one result."""

    name = "side by side"
    solitary = False

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, meeting.size
        self.workers = tuple(range(meeting.size))
        self.label = ""
        self.labels: list[str] = []
        """Of the rounds so far."""
        self.before_round: Callable[[str], None] = lambda label: None
        self._numbers: dict[str, int] = {}

    def _bring(self, kind: str, label: str, value: Any) -> list[Any]:
        number = self._numbers[kind] = self._numbers.get(kind, 0) + 1
        return self._meeting.bring(kind, number, self.rank, label, value)

    @contextmanager
    def round(self, label: str, *, background: bool = False, result: RoundTensors = ()) -> Iterator[list[torch.Tensor]]:
        self.before_round(label)
        self.label = label
        self.labels.append(label)
        yield made(result)

    @torch.no_grad()
    def sum(self, tensor: torch.Tensor) -> Over:
        first, *others = self._bring("sum", self.label, tensor.clone())
        total = first.clone()
        for other in others:
            total += other
        tensor.copy_(total)
        return Over()

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[torch.Tensor], *, inside: bool = True) -> None:
        for mine, theirs in zip(
            tensors, self._bring("broadcast", "", [one.clone() for one in tensors])[0], strict=True
        ):
            mine.copy_(theirs)

    def gather(self, label: str, value: Any) -> list[Any]:
        texts = self._bring("gather", label, json.dumps(value() if callable(value) else value))
        return [json.loads(text) for text in texts]

    def slot(self, name: str) -> int:
        if name not in self._meeting.slots:
            self._meeting.slots.append(name)
        return self._meeting.slots.index(name)

    def slot_name(self, slot: int) -> str:
        return self._meeting.slots[slot]

    def subgroup(self, members: Sequence[int]) -> SideBySide:
        return SideBySide(self._meeting.group(tuple(members)), tuple(members).index(self.rank))


def together(
    patch: pytest.MonkeyPatch,
    folder: Path,
    script: Callable[[paceline.Fleet, SideBySide], Any],
    *,
    size: int = 2,
    **joined: Any,
) -> list[Any]:
    """What ``script`` gives on each of so many workers; the first error, if there is one."""
    meeting, own = Meeting(size), threading.local()
    patch.setattr("paceline.training.join._make_transport", lambda *args: own.transport)

    def work(rank: int) -> Any:
        own.transport = SideBySide(meeting, rank)
        try:
            with paceline.join("equal", quiet=True, device="cpu", run_dir=folder / "run", **joined) as fleet:
                return script(fleet, own.transport)
        except BaseException:
            meeting.fail()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(work, rank) for rank in range(size)]]
