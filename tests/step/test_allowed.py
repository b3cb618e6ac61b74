"""A pace that can do without deadlines: where there are none, what the run says of it, and what it does not cost."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from lone import linear, numbers
from one_process import Bounded, Meeting, Threads, Worker, together
from paceline.errors import MisuseError
from paceline.gradients.gradients import Gradients
from paceline.pace import Ask
from paceline.records import Plan
from paceline.step.device import SideStream
from paceline.transport import Alone


class Maybe(Bounded):
    """Closes rounds at a deadline from the third step on, where they may have one."""

    name = "maybe"
    does_without = True

    def plan(self, ask: Ask) -> Plan:
        plan = super().plan(ask)
        return plan if ask.deadlines and ask.step >= 2 else Plan(plan.generation, plan.step, plan.samples)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(x, y) for x, y in numbers(16)])


def pair(**options: Any) -> list[Worker]:
    meeting = Meeting(2)
    return [
        Worker(Threads(meeting, rank), **{"pacer": Maybe(), "length": 64, "batch": 16, **options}) for rank in (0, 1)
    ]


def train(workers: list[Worker], body: Any = None) -> None:
    try:
        bodies = [worker.train if body is None else lambda worker=worker: body(worker) for worker in workers]
        together(workers[0].transport.meeting, *bodies)  # type: ignore[attr-defined]
    finally:
        for worker in workers:
            worker.close()


def bounded(worker: Worker) -> list[bool]:
    return [record.deadline_s is not None for record in worker.history]


def said(worker: Worker) -> list[str]:
    return [fields["text"] for event, fields in worker.events if event == "note"]


def test_where_deadlines_may_be_there_are_some() -> None:
    workers = pair()
    train(workers)
    assert bounded(workers[0]) == [False, False, True, True]
    assert not said(workers[0])


def test_a_stream_has_none_and_the_run_says_so_once() -> None:
    workers = pair(data=Stream())
    train(workers)
    assert not any(bounded(workers[0]))
    assert len(workers[0].history) > 1
    assert said(workers[0]) == [
        "pace maybe stays adaptive: an iterable dataset cannot give again what a deadline cut off"
    ]


def test_a_script_that_takes_the_gradient_for_itself_has_none() -> None:
    def body(worker: Worker) -> None:
        for step in worker.steps:
            for x, y in step:
                step.backward(nn.functional.mse_loss(worker.model(x), y))
            step.reduce()
            step.commit(worker.optimizer)

    workers = pair()
    train(workers, body)
    assert not any(bounded(workers[0]))
    assert said(workers[0])[0].startswith("pace maybe stays adaptive: step.reduce() gives the gradient to the script")


@pytest.mark.parametrize("at", [1, 3])
def test_a_script_that_freezes_and_unfreezes_goes_on_without(at: int) -> None:
    """Frozen before the first deadline or after it: replicas stay equal, and the frozen one rests."""
    bias: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def body(worker: Worker) -> None:
        parameter = list(worker.model.parameters())[-1]
        for step in worker.steps:
            if step.index in (at, at + 1):
                parameter.requires_grad_(step.index != at)
            for x, y in step:
                step.backward(nn.functional.mse_loss(worker.model(x), y))
            step.commit(worker.optimizer)
            bias[worker.transport.rank].append(parameter.detach().clone())

    workers = pair(length=160)
    train(workers, body)
    assert torch.equal(workers[0].parameters(), workers[1].parameters())
    assert torch.equal(bias[0][at], bias[0][at - 1]), "it was frozen"
    assert not torch.equal(bias[0][-1], bias[0][-2]), "and is trained again"
    assert any("frozen or unfrozen" in text for text in said(workers[0]))
    assert bounded(workers[0])[-4:] == [False] * 4


def test_a_parameter_unfrozen_under_a_deadline_gets_no_gradient_of_one_worker_alone() -> None:
    model = linear()
    last = list(model.parameters())[-1]
    last.requires_grad_(False)
    work = Gradients(Alone(), [model]).accumulation
    work.follow_freezing()
    work.begin(8.0, None)
    last.requires_grad_(True)
    work.check_apart()
    x, y = numbers(8).tensors
    grads = work.backward_apart(nn.functional.mse_loss(model(x), y), 8).grads
    assert work.refrozen
    assert last.grad is None
    assert all(grad is not None for grad in grads)


def test_a_pace_that_needs_deadlines_still_refuses_freezing() -> None:
    model = linear()
    work = Gradients(Alone(), [model]).accumulation
    next(model.parameters()).requires_grad_(False)
    with pytest.raises(MisuseError, match="frozen or unfrozen between steps"):
        work.check_apart()


def test_no_thread_is_started_before_the_first_deadline() -> None:
    before = set(threading.enumerate())  # another test's may still be ending

    def proxies() -> int:
        return sum(thread.name == "paceline-proxy" for thread in set(threading.enumerate()) - before)

    seen: list[tuple[int, int]] = []

    def body(worker: Worker) -> None:
        for step in worker.steps:
            seen.append((step.index, proxies()))
            worker.work(step)

    train(pair(), body)
    assert {count for index, count in seen if index < 2} == {0}
    assert max(count for index, count in seen if index >= 2) > 0


def test_a_side_stream_is_none_until_it_is_opened() -> None:
    side = SideStream(torch.device("cuda"))
    side.follow()
    side.rejoin()
    side.lend([torch.ones(1)])
    side.keep([torch.ones(1)])
    with side.work():
        assert torch.ones(1).device.type == "cpu"


def test_no_step_is_passed_over_and_nothing_need_be_tracked_in_a_fleet_of_fixed_size() -> None:
    workers = pair(tracked=False)
    assert not workers[0].combine.hands_over_state
    assert not workers[0].combine._deadlines.copyable()
    train(workers)
