"""Loops over steps without a process of their own: a transport that answers as a test says, one for threads, and a
worker made by hand from the parts that a fleet makes it from."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from lone import linear, numbers
from paceline.feed import Source
from paceline.feed.dealing import make_dealing
from paceline.gradients.gradients import Gradients
from paceline.gradients.header import FIELDS, PLAN_HEAD
from paceline.pace import Ask, Pacer, make
from paceline.records import History, LoopSettings, Plan, StepRecord
from paceline.step.checks.replicas import Repair
from paceline.step.combine import GradientCombine
from paceline.step.context import LoopContext, LoopPosition, MicroBatching, ReplicaAccess, RunNotes
from paceline.step.script_loops import ScriptLoop
from paceline.step.step import Step
from paceline.step.steps import StepLoop
from paceline.step.tracking import Tracked
from paceline.step.training_state import TrainingState
from paceline.transport import Alone
from paceline.transport.base import Pending, RoundTensors, Transport, made

PATIENCE_S = 60.0
"""How long anything here is waited for; only a failing test takes so long."""


class Facts:
    """A round's header, as the other workers may write it."""

    def __init__(self, vector: np.ndarray[Any, np.dtype[np.float64]], workers: int) -> None:
        self._facts = vector[: workers * len(FIELDS)].reshape(workers, len(FIELDS))
        self._vector, self._workers = vector, workers

    def write(self, rank: int, **facts: float) -> None:
        for name, value in facts.items():
            self._facts[rank, FIELDS.index(name)] = value

    def read(self, rank: int, name: str) -> float:
        return float(self._facts[rank, FIELDS.index(name)])

    def add(self, slot: int, value: float) -> None:
        """A figure of ``step.add``."""
        start = self._workers * len(FIELDS) + PLAN_HEAD + 2 * self._workers + 2 * slot
        self._vector[start : start + 2] += value, 1


class Scripted(Alone):
    """A fleet whose other workers exist by what a test says of them: their sums are zero, and their facts are written
    by ``answer(round, facts)`` when a round ends."""

    def __init__(self, size: int = 1, *, elastic: bool = False) -> None:
        super().__init__()
        self.size, self.solitary, self.workers = size, size == 1 and not elastic, tuple(range(size))
        self.elastic = elastic
        self.answer: Callable[[int, Facts], None] = lambda number, facts: None
        self.others: Callable[[str], list[Any]] = lambda label: []
        self.failures: dict[int, BaseException] = {}
        """By the number of a round: what it ends with."""
        self.re_formed: list[BaseException] = []
        self.labels: list[str] = []
        self.done: list[str] = []
        self._summed = torch.empty(0)

    @contextmanager
    def round(self, label: str, *, background: bool = False, result: RoundTensors = ()) -> Iterator[list[torch.Tensor]]:
        number = len(self.labels)
        self.labels.append(label)
        yield made(result)
        if number in self.failures:
            raise self.failures[number]
        self.answer(number, Facts(self._summed.numpy(), self.size))

    def sum(self, tensor: torch.Tensor) -> Any:
        self._summed = tensor
        return super().sum(tensor)

    def gather(self, label: str, value: Any) -> list[Any]:
        own = super().gather(label, value)
        return own + (self.others(label) or own * (self.size - 1))

    def doing(self, what: str, *, begun: int | None = None) -> None:
        self.done.append(what)

    def recover(self, over: Any, *how: Any, **more: Any) -> None:
        if not self.elastic:
            raise over
        self.re_formed.append(over)


class Meeting:
    """Where the threads of one process meet that stand for workers."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.brought: dict[Any, dict[int, Any]] = defaultdict(dict)
        self.said: dict[str, int] = {}
        self.slots: list[str] = []
        self.failure: BaseException | None = None

    def bring(self, key: Any, rank: int, value: Any) -> None:
        with self.changed:
            self.brought[key][rank] = value
            self.changed.notify_all()

    def everybodys(self, key: Any, count: int | None = None) -> dict[int, Any]:
        """What all workers have brought to one call."""
        there = lambda: self.failure or len(self.brought[key]) >= (count or self.size)  # noqa: E731
        with self.changed:
            assert self.changed.wait_for(there, PATIENCE_S), f"nobody comes to {key}"
            if self.failure is not None:
                raise self.failure
            return dict(self.brought[key])


class Threads(Transport):
    """The transport of one of several workers that are threads of one process."""

    name = "threads"
    backend = "none"

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.size, self.generation, self.workers = rank, meeting.size, 0, tuple(range(meeting.size))
        self.calls = 0
        self.meeting = meeting
        self.failure: BaseException | None = None
        """What this worker's next background round ends with."""
        self.forgotten: list[str] = []
        self._background = threading.local()
        self._sums: dict[bool, int] = {True: 0, False: 0}

    @contextmanager
    def round(self, label: str, *, background: bool = False, result: RoundTensors = ()) -> Iterator[list[torch.Tensor]]:
        if background and self.failure is not None:
            raise self.failure
        self._background.here = background
        try:
            yield made(result)
        finally:
            self._background.here = False

    def sum(self, tensor: torch.Tensor) -> Any:
        background = getattr(self._background, "here", False)
        self._sums[background] += 1
        key = ("sum", background, self._sums[background])
        self.meeting.bring(key, self.rank, tensor.clone())
        return _Summed(self.meeting, key, tensor)

    def all_to_all(self, sent: torch.Tensor, got: torch.Tensor) -> Any:
        background = getattr(self._background, "here", False)
        self._sums[background] += 1
        key = ("rows", background, self._sums[background])
        self.meeting.bring(key, self.rank, sent.clone())
        return _Exchanged(self.meeting, key, self.rank, got)

    def gather(self, label: str, value: Any) -> list[Any]:
        self.calls += 1
        key = ("gather", label, self.calls)
        self.meeting.bring(key, self.rank, json.dumps(value() if callable(value) else value))
        everybodys = self.meeting.everybodys(key)
        return [json.loads(everybodys[rank]) for rank in range(self.size)]

    def send(self, tensor: torch.Tensor, to: int, tag: int, *, generation: int) -> None:
        self.meeting.bring(("to", to, self.rank, tag), self.rank, tensor.clone())

    def receive(self, tensor: torch.Tensor, source: int, tag: int, *, generation: int) -> None:
        tensor.copy_(self.meeting.everybodys(("to", self.rank, source, tag), 1)[source])

    def slot(self, name: str) -> int:
        with self.meeting.changed:
            if name not in self.meeting.slots:
                self.meeting.slots.append(name)
            return self.meeting.slots.index(name)

    def slot_name(self, slot: int) -> str:
        return self.meeting.slots[slot]

    def doing(self, what: str, *, begun: int | None = None) -> None:
        return

    def signal(self, name: str) -> None:
        self.tally(name)

    def tally(self, name: str, by: int = 1) -> int:
        with self.meeting.changed:
            self.meeting.said[name] = self.meeting.said.get(name, 0) + by
            return self.meeting.said[name]

    def was_signalled(self, name: str) -> bool:
        with self.meeting.changed:
            return name in self.meeting.said

    def forget(self, name: str) -> None:
        self.forgotten.append(name)
        with self.meeting.changed:
            self.meeting.said.pop(name, None)

    def broadcast(self, tensors: Sequence[torch.Tensor], *, inside: bool = True) -> None:
        raise AssertionError("not in these tests")

    def close(self, *, failure: BaseException | None = None) -> None:
        return


class _Summed(Pending):
    def __init__(self, meeting: Meeting, key: Any, tensor: torch.Tensor) -> None:
        self._meeting, self._key, self._tensor = meeting, key, tensor

    def wait(self) -> None:
        parts = self._meeting.everybodys(self._key)
        self._tensor.copy_(torch.stack([parts[rank] for rank in sorted(parts)]).sum(0))

    def abandon(self) -> bool:
        return True


class _Exchanged(Pending):
    def __init__(self, meeting: Meeting, key: Any, rank: int, got: torch.Tensor) -> None:
        self._meeting, self._key, self._rank, self._got = meeting, key, rank, got

    def wait(self) -> None:
        rows = self._meeting.everybodys(self._key)
        self._got.copy_(torch.stack([rows[rank][self._rank] for rank in sorted(rows)]))

    def abandon(self) -> bool:
        return True


class Bounded(Pacer):
    """Deals equally, and closes every round at one deadline, or with so many arrivals."""

    name = "bounded"
    deadlines = True

    def __init__(
        self, deadline_s: float | None = PATIENCE_S, *, wait_for: int | None = None, least_count: float = 0.0
    ) -> None:
        self.deadline_s, self.wait_for, self.least_count = deadline_s, wait_for, least_count

    def check(self, workers: int) -> None:
        return

    def observe(self, record: StepRecord) -> None:
        return

    def plan(self, ask: Ask) -> Plan:
        size = len(ask.workers)
        samples = tuple(ask.total // size + (rank < ask.total % size) for rank in range(size))
        return Plan(
            generation=ask.generation,
            step=ask.step,
            samples=samples,
            deadline_s=self.deadline_s,
            wait_for=self.wait_for,
            least_count=self.least_count,
        )

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        return


class Worker:
    """A loop made by hand: what a fleet makes for ``fleet.steps``, without the fleet."""

    def __init__(
        self,
        transport: Transport,
        *,
        data: Any = None,
        length: int = 40,
        batch: int = 8,
        micro_batch: int = 4,
        epochs: int = 1,
        pacer: Any = None,
        nonfinite: str = "stop",
        order: Callable[[int], list[int]] | None = None,
        lr: float = 0.05,
        tracked: bool = True,
    ) -> None:
        cpu = torch.device("cpu")
        self.transport, self.events = transport, []  # type: ignore[var-annotated]
        self.model: nn.Module = linear()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.tracking = Tracked(self.model.parameters)
        if tracked:
            self.tracking.add({"optimizer": self.optimizer})
        self.history = History()
        source = Source(numbers(length) if data is None else data, device=cpu, seed=0, rank=transport.rank)
        settings = LoopSettings(
            global_batch=batch, micro_batch=micro_batch, auto=False, epochs=epochs, shuffle=False, drop_last=False
        )
        dealing = make_dealing(
            source,
            settings,
            order=order,
            seed=0,
            rank=transport.rank,
            size=transport.size,
            ahead=[0] * transport.size,
        )
        self.training = TrainingState(
            transport=transport,
            pacer=make("equal") if pacer is None else pacer,
            dealing=dealing,
            settings=settings,
            unit=1,
            avoid_singles=False,
            history=self.history,
            first_index=0,
            log_event=self.log_event,
        )
        self.repairs: list[Repair] = []
        """What the next repairs find."""
        self.repaired = 0
        self.loop = LoopContext(
            transport=transport,
            training=self.training,
            gradients=Gradients(transport, [self.model]),
            dealing=dealing,
            settings=settings,
            script_loop=ScriptLoop(0, 0, 0),
            device=cpu,
            machine=None,
            seed=0,
            nonfinite=nonfinite,
            tracking=self.tracking,
            notes=RunNotes(self.log_event),
            replica=ReplicaAccess(
                repair=self._repair,
                snapshot=lambda: {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()},
                restore=self._restore,
            ),
            micro_batches=MicroBatching(dealing),
            position=LoopPosition(),
        )
        self.combine = GradientCombine(self.loop)
        self.steps = StepLoop(self.loop, self.combine)

    def log_event(self, event: str, fields: Any) -> None:
        self.events.append((event, dict(fields)))

    def _repair(self) -> Repair:
        self.repaired += 1
        return self.repairs.pop(0)

    def _restore(self, state: Any) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    @property
    def notes(self) -> list[str]:
        """Warnings that the script was given."""
        return [fields["text"] for event, fields in self.events if event == "note"]

    def work(self, step: Step, *, commit: bool = True) -> int:
        """One step as a script has it; returns the samples that it took."""
        taken = 0
        for x, y in step:
            taken += len(x)
            step.backward(nn.functional.mse_loss(self.model(x), y))
        if commit:
            step.commit(self.optimizer)
        return taken

    def train(self) -> list[Step]:
        """The whole loop."""
        done = []
        for step in self.steps:
            self.work(step)
            done.append(step)
        return done

    def parameters(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def close(self) -> None:
        self.steps.close(orderly=False)
        self.tracking.close()


def eventually(condition: Callable[[], Any], what: str) -> None:
    """Wait until it holds."""
    given_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < given_up, f"waited in vain: {what}"
        time.sleep(0.002)


def together(meeting: Meeting, *bodies: Callable[[], Any]) -> list[Any]:
    """Each body on a thread of its own; their results. The first error ends all of them, and is raised here."""
    results: list[Any] = [None] * len(bodies)
    errors: list[BaseException] = []

    def run(number: int, body: Callable[[], Any]) -> None:
        try:
            results[number] = body()
        except BaseException as error:
            with meeting.changed:
                errors.append(error)
                meeting.failure = meeting.failure or error
                meeting.changed.notify_all()

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(bodies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a worker hangs"
    return results
