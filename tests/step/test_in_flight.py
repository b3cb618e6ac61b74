"""Work in flight on a CPU: what was called has been done, so a micro-batch counts at once, or never."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lone import linear, mse, numbers
from one_process import Meeting, Threads
from paceline.gradients.gradients import Gradients
from paceline.records import Plan
from paceline.step.device import SideStream, StreamMark, tensors_in
from paceline.step.late.deadline_round import MicroBatchInFlight, WorkInFlight
from paceline.step.losses.loss_weights import Tally
from paceline.step.step_state import LoopPhase, RoundPhase, StepState, Work

CPU = torch.device("cpu")


class Flight:
    """A worker's gradients and what it has in flight, in an open step."""

    def __init__(self) -> None:
        self.model = linear()
        self.gradients = Gradients(Threads(Meeting(2), 0), [self.model])
        self.lock, self.paces = threading.Condition(threading.RLock()), deque[float]()
        training = SimpleNamespace(lock=self.lock)
        loop: Any = SimpleNamespace(device=CPU, gradients=self.gradients, training=training)
        loop.micro_batches = SimpleNamespace(paces=self.paces)
        self.in_flight = WorkInFlight(loop, SideStream(CPU))
        plan = Plan(generation=0, step=0, samples=(8, 8), deadline_s=1.0)
        self.step_state = StepState(
            plan=plan, shares=(8, 8), epoch=0, dealt=16, expected=16, last=False, compare=False, opened=10.0
        )
        self.step_state.start(10.0)
        self.gradients.begin(16)

    def gradient(self, first: int) -> Any:
        x, y = (tensor[first : first + 4] for tensor in numbers().tensors)
        return self.gradients.accumulation.backward_apart(mse(self.model, x, y), 4)

    def micro_batch(self, first: int = 0, *, began: float = 10.0) -> None:
        self.in_flight.start(
            self.step_state, Work(samples=4, micro_batches=1, seconds=1.0), self.gradient(first), began
        )

    def launch(self, mark: StreamMark, *, began: float = 10.0) -> None:
        """One that the device is not known to be done with."""
        flight = MicroBatchInFlight(self.step_state, Work(samples=4, micro_batches=1), self.gradient(0), mark, began)
        self.in_flight._waiting.append(flight)

    def sum(self) -> list[torch.Tensor]:
        return [flat.clone() for flat in self.gradients.close(self.step_state.work.samples).flats]


class Mark(StreamMark):
    """A point that a device passes when a test says so."""

    def __init__(self, *, passed: bool) -> None:
        self.is_passed = passed

    def passed(self) -> bool:
        return self.is_passed

    def wait(self) -> None:
        self.is_passed = True


@pytest.fixture
def flight() -> Any:
    flight = Flight()
    yield flight
    flight.gradients.detach()


def test_a_micro_batch_counts_as_soon_as_the_loop_is_done_with_it(flight: Flight) -> None:
    flight.micro_batch(0)
    flight.micro_batch(4)
    assert (flight.step_state.work.samples, flight.step_state.work.micro_batches) == (8, 2)
    model, (x, y) = linear(), (tensor[:8] for tensor in numbers().tensors)
    (mse(model, x, y) * 8 / 16).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    found = torch.cat([flat.flatten() for flat in flight.sum()])
    assert torch.allclose(found.sort().values, expected.sort().values, rtol=0, atol=1e-14)
    assert not flight.paces, "on a CPU the loop notes its pace itself"


@pytest.mark.parametrize("ended", ["the round closed", "a lap cut it off"])
def test_a_micro_batch_that_comes_too_late_never_counts_and_says_by_how_much(flight: Flight, ended: str) -> None:
    flight.micro_batch(0)
    flight.step_state.enter(RoundPhase.CLOSED if ended == "the round closed" else LoopPhase.CUT_OFF)
    flight.micro_batch(4)
    assert flight.step_state.work.samples == 4
    late_s = flight.in_flight.late_s
    assert late_s > 0.0
    flight.in_flight.late_s = late_s + 1.0
    flight.in_flight.reported(late_s)
    assert flight.in_flight.late_s == late_s + 1.0, "one that came later is reported next"
    flight.in_flight.reported(late_s + 1.0)
    assert flight.in_flight.late_s == 0.0, "it is reported once"


def test_who_closes_the_step_counts_what_the_device_has_done_and_stops_there(flight: Flight) -> None:
    for passed in (True, True, False, True):
        flight.launch(Mark(passed=passed))
    flight.in_flight.count_landed()
    assert flight.step_state.work.samples == 8, "in the order of the loop"
    assert len(flight.in_flight._waiting) == 2


def test_a_micro_batch_of_a_step_that_is_over_never_counts_in_the_next(flight: Flight) -> None:
    """The loop may be a step behind the proxy, which has opened the next one."""
    flight.launch(Mark(passed=True))
    late, flight.step_state = flight.step_state, replace(flight.step_state, work=Work(), round_phase=RoundPhase.OPEN)
    late.enter(RoundPhase.CLOSED)
    flight.in_flight.count_landed()
    assert (late.work.samples, flight.step_state.work.samples) == (0, 0)
    assert flight.in_flight.late_s > 0.0


def test_the_loop_waits_for_all_but_the_last(flight: Flight) -> None:
    marks = [Mark(passed=False) for _ in range(3)]
    for mark in marks:
        flight.launch(mark)
    flight.in_flight.land(leave=1)
    assert [mark.is_passed for mark in marks] == [True, True, False]
    assert flight.step_state.work.samples == 8
    flight.in_flight.land()
    assert flight.step_state.work.samples == 12


def test_a_micro_batch_that_the_proxy_has_counted_meanwhile_counts_once(flight: Flight) -> None:
    class Counted(Mark):
        def wait(self) -> None:
            self.is_passed = True
            with flight.lock:
                flight.in_flight.count_landed()

    flight.launch(Counted(passed=False))
    flight.in_flight.land()
    assert flight.step_state.work.samples == 4


def test_a_worker_is_busy_since_it_took_the_micro_batch_that_is_under_way(flight: Flight) -> None:
    flight.launch(Mark(passed=True), began=11.0)
    flight.launch(Mark(passed=False), began=12.0)
    flight.in_flight.count_landed()
    assert flight.step_state.busy_since == 12.0
    flight.step_state.busy_since = 13.0  # the loop is in the next one by now
    flight.in_flight.land()
    assert flight.step_state.busy_since == 13.0


def test_another_step_begins_with_nothing_in_flight(flight: Flight) -> None:
    flight.launch(Mark(passed=True))
    flight.in_flight.clear()
    flight.in_flight.land()
    assert flight.step_state.work.samples == 0


def test_on_a_cpu_there_is_no_stream_to_wait_for() -> None:
    mark, side = StreamMark(CPU), SideStream(CPU)
    mark.wait()
    assert mark.passed()
    with side.work():
        side.follow()
        side.rejoin()
        side.lend([torch.ones(1)])
        side.keep([torch.ones(1), None])


def test_the_side_stream_keeps_the_memory_of_everything_that_it_may_read(
    flight: Flight, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, weights and figures lie on the device too: freed by the loop, their memory would be written again."""
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(SideStream, "keep", lambda self, *what: kept.extend(tensors_in(what)))
    weight, loss, hits, read, factor = (torch.tensor(float(number)) for number in range(5))
    tally = Tally(read=[(read, 4)], factors=[factor])
    done = Work(samples=4, micro_batches=1, weight=weight, loss_sum=loss, added={"hits": hits}, tally=tally)
    gradient = flight.gradient(0)
    flight.in_flight.start(flight.step_state, done, gradient, 10.0)
    own = [weight, loss, hits, read, factor, *(grad for grad in gradient.grads if grad is not None)]
    assert {id(tensor) for tensor in own} <= {id(tensor) for tensor in kept}
    assert {id(tensor) for tensor in gradient.statistics} <= {id(tensor) for tensor in kept}
    figure = torch.tensor(2.0)
    flight.in_flight.add_figures(flight.step_state, {"hits": figure})
    assert kept[-1] is figure
    assert float(flight.step_state.work.added["hits"]) == 4.0
