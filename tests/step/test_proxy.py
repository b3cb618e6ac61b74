"""Rounds that wait for nobody, among workers that are threads of one process.

A deadline here is a minute away, and a loop that is stuck in a micro-batch lets it pass at once, when the others are
where the test wants them: so no outcome depends on how busy the computer is. One test lets a true clock run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lone import linear, numbers
from one_process import PATIENCE_S, Bounded, Meeting, Threads, Worker, eventually, together
from paceline.errors import Dropped, FleetError, GenerationOver, MisuseError
from paceline.gradients.exchange import Sum
from paceline.gradients.header import Header, Layout
from paceline.pace import Ask
from paceline.records import Plan, StepRecord
from paceline.step.late import catch_up
from paceline.step.late.catch_up import Backlog, Copy, Promises, peer_to_copy
from paceline.step.late.deadline_round import DeadlineRound
from paceline.step.late.proxy import Proxy
from paceline.step.step import Step
from paceline.step.step_state import LoopPhase, RoundPhase, StepState

pytestmark = pytest.mark.slow  # seconds, all together

Hire = Callable[..., list["Late"]]


class Late(Worker):
    """A worker that may be stuck in a micro-batch."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.loop.micro_batches.paces.append(0.001)
        self.taken: list[tuple[int, int]] = []
        """The samples that its loop took in each step it was given, by the step's number."""
        self.stuck_at: dict[tuple[int, int], Callable[[], Any]] = {}
        """By step and micro-batch: until when it is stuck there."""

    @property
    def proxy(self) -> Any:
        assert self.combine._deadlines is not None
        return self.combine._deadlines.proxy

    @property
    def index(self) -> int:
        """Rounds that are over, whatever this worker's loop knows of them."""
        return self.training.index

    def work(self, step: Step, *, commit: bool = True) -> int:
        samples = 0
        for number, (x, y) in enumerate(step):
            samples += len(x)
            if (free := self.stuck_at.pop((step.index, number), None)) is not None:
                self.be_stuck(free)
            step.backward(nn.functional.mse_loss(self.model(x), y))
            step.add(seen=len(x))
        self.taken.append((step.index, samples))
        if commit:
            step.commit(self.optimizer)
        return samples

    def be_stuck(self, free: Callable[[], Any]) -> None:
        def passed() -> Any:
            if free():
                return True
            self.let_deadline_pass()
            return False

        eventually(passed, "the others go on")

    def let_deadline_pass(self) -> None:
        """Of the open step, or of its lap, once all others are done with it."""
        with self.training.lock:
            step_state = self.proxy._step_round.step_state  # type: ignore[union-attr]
            if step_state.until is not None and all(other.waits_in(step_state.index) for other in self.others):
                step_state.until = time.perf_counter()
                self.training.lock.notify_all()

    others: list[Late]

    def waits_in(self, index: int) -> bool:
        """Whether it has nothing more to do in a step: its proxy is in the round, or goes there."""
        if (round := self.proxy._step_round) is None:
            return False
        step_state = round.step_state
        return step_state.index > index or (step_state.index == index and step_state.idle)


class Generous(Bounded):
    """Deals twice what the step should count."""

    def plan(self, ask: Ask) -> Plan:
        return super().plan(replace(ask, total=2 * ask.total))


class Counting:
    """The membership of a worker that stays, among others who do; it counts rounds."""

    leaving = passed_by = still_outside = False

    def __init__(self) -> None:
        self.rounds = 0

    def intentions(self) -> dict[str, float]:
        return {}

    def at_boundary(self) -> None:
        return

    def keep_up(self) -> None:
        return

    def note_intentions(self, header: Header, **_: Any) -> None:
        return

    def round_over(self) -> None:
        self.rounds += 1


class Leaving:
    """The membership of a worker that was asked to leave."""

    leaving = True


@pytest.fixture
def hire() -> Iterator[Hire]:
    hired: list[Late] = []

    def make(**options: Any) -> list[Late]:
        meeting = Meeting(2)
        hired.extend(Late(Threads(meeting, rank), **{"pacer": Bounded(), "batch": 16, **options}) for rank in range(2))
        for worker in hired:
            worker.others = [other for other in hired if other is not worker]
        return hired

    yield make
    for worker in hired:
        worker.close()


def run(workers: list[Late], *bodies: Callable[[], Any]) -> list[Any]:
    meeting = workers[0].transport.meeting  # type: ignore[attr-defined]
    return together(meeting, *(bodies or tuple(worker.train for worker in workers)))


def records(worker: Worker) -> list[StepRecord]:
    return list(worker.history)


def positions(*all_records: StepRecord) -> list[int]:
    """Those that counted, in order."""
    ranges = [piece for record in all_records for own in record.ranges for piece in own]
    return sorted(position for start, stop in ranges for position in range(start, stop))


def told(steps: list[Step]) -> list[StepRecord]:
    """What a loop was told of its steps, without what each worker measures for itself."""
    return [replace(step.record, wall_s=0.0, round_s=0.0) for step in steps if step.record is not None]


def gradient_of(kept: list[int]) -> list[torch.Tensor]:
    """The mean gradient of the first step over these samples."""
    model, (x, y) = linear(), numbers(64).tensors
    nn.functional.mse_loss(model(x[kept]), y[kept]).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


# -- a round closes ----------------------------------------------------------------------------------------------------


def test_workers_that_are_in_time_do_not_wait_for_the_deadline(hire: Hire) -> None:
    prompt, other = workers = hire(length=64)
    began = time.monotonic()
    run(workers)
    assert time.monotonic() - began < PATIENCE_S, "the deadline of a single round"
    assert [record.samples for record in records(prompt)] == [(8, 8)] * 4
    assert torch.equal(prompt.parameters(), other.parameters())
    assert positions(*records(prompt)) == list(range(64))
    assert prompt.taken == other.taken == [(step, 8) for step in range(4)]


def test_entries_are_told_of_rounds_with_a_deadline_too(hire: Hire) -> None:
    workers = hire(length=64)
    for worker in workers:
        worker.loop.membership = Counting()  # type: ignore[assignment]
    run(workers)
    assert [worker.loop.membership.rounds for worker in workers] == [4, 4]  # type: ignore[union-attr]


def test_a_round_closes_at_its_deadline_with_what_is_finished_while_a_loop_is_stuck(hire: Hire) -> None:
    prompt, late = workers = hire(length=64)
    late.stuck_at = {(0, 1): lambda: late.index >= 1}
    steps: list[list[Step]] = run(workers)
    record = records(prompt)[0]
    assert record.samples == (8, 4), "its first micro-batch, and not the one it was in"
    assert record.planned == (8, 8)
    assert record.micro_batches == (2, 1)
    assert record.deadline_s == PATIENCE_S
    assert record.unfinished_s[0] == 0.0
    assert record.unfinished_s[1] > 0.0
    assert record.sums == {"seen": 12.0}, "nor a figure that was added in it"
    assert told(steps[1]) == told(steps[0]), "the late loop is told the same"
    assert steps[1][0].share == 8
    assert torch.equal(prompt.parameters(), late.parameters())
    assert positions(*records(prompt)) == list(range(64)), "what was cut off is dealt again"


def test_the_update_of_a_round_that_closed_is_the_mean_over_what_was_finished(hire: Hire) -> None:
    prompt, late = workers = hire(length=64)
    late.stuck_at = {(0, 1): lambda: late.index >= 1}

    def first(worker: Late) -> list[torch.Tensor]:
        step = next(iter(worker.steps))
        worker.work(step, commit=False)
        step.reduce()
        assert isinstance(step._step_round, DeadlineRound)
        return [parameter.grad.clone() for parameter in worker.model.parameters() if parameter.grad is not None]

    own, theirs = run(workers, lambda: first(prompt), lambda: first(late))
    expected = gradient_of(positions(*records(prompt)[:1]))
    assert len(own) == len(theirs) == len(expected) == 2
    for mine, others, right in zip(own, theirs, expected, strict=True):
        assert torch.equal(mine, others)
        assert torch.allclose(mine, right, rtol=0, atol=1e-14)


def test_the_clock_runs_by_itself_once_somebody_has_begun(hire: Hire) -> None:
    prompt, late = workers = hire(length=64, pacer=Bounded(0.03))
    closed = threading.Event()

    def slow() -> None:
        step = next(iter(late.steps))
        for _ in step:
            eventually(lambda: late.index >= 1, "the round closes without this worker")
            closed.set()
            break

    def quick() -> None:
        prompt.work(next(iter(prompt.steps)))

    run(workers, quick, slow)
    assert closed.is_set()
    assert records(prompt)[0].samples[1] == 0
    assert records(late)[0].wall_s >= 0.03


def test_a_worker_that_does_not_know_its_pace_tries_a_single_sample_first(hire: Hire) -> None:
    new, other = workers = hire(length=16, micro_batch=8)
    new.loop.micro_batches.paces.clear()
    sizes: list[int] = []
    new.model.register_forward_pre_hook(lambda model, args: sizes.append(len(args[0])))
    run(workers)
    assert sizes == [1, 7]
    assert records(other)[0].micro_batches == (2, 1)


def test_where_so_many_arrivals_close_a_round_a_share_counts_whole_or_not_at_all(hire: Hire) -> None:
    prompt, late = workers = hire(length=64, pacer=Bounded(None, wait_for=1))
    late.stuck_at = {(0, 1): lambda: late.index >= 1}
    run(workers, *(lambda worker=worker: worker.work(next(iter(worker.steps))) for worker in workers))  # type: ignore[misc]
    record = records(prompt)[0]
    assert record.samples == (8, 0), "the micro-batch that it had finished is not its share"
    assert record.wait_for == 1
    assert torch.equal(prompt.parameters(), late.parameters())


class Recounting(Bounded):
    """Plans one count, and decides another while some steps run."""

    def __init__(self, planned: int, decided: dict[int, int]) -> None:
        super().__init__(None, wait_for=planned)
        self.decided = decided
        self.asked: list[tuple[int, int]] = []
        """The step, and how many records had been observed, of each question."""
        self.observed = 0

    def observe(self, record: StepRecord) -> None:
        self.observed += 1

    def recount(self, ask: Ask, share: int) -> int | None:
        self.asked.append((ask.step, self.observed))
        return self.decided.get(ask.step)


def recounting(hire: Hire, *, planned: int, decided: dict[int, int]) -> list[Late]:
    workers = hire(length=16 * 5, pacer=Recounting(planned, decided))
    workers[1].training.pacer = Recounting(planned, decided)
    return workers


def test_a_smaller_count_that_the_leader_finds_while_the_step_runs_closes_the_round(hire: Hire) -> None:
    prompt, late = workers = recounting(hire, planned=2, decided={1: 1})
    late.stuck_at = {(1, 1): lambda: late.index >= 2}
    steps = run(workers)
    assert records(prompt)[1].samples == (8, 0), "both were planned for, one was waited for"
    assert [record.wait_for for record in records(prompt)] == [2, 1, 2, 2, 2]
    assert told(steps[0]) == told(steps[1])
    assert prompt.training.pacer.asked == [(step, step) for step in range(4)], (
        "with the step before observed, and not in the last"
    )
    assert late.training.pacer.asked == [], "the leader alone decides"


def test_a_larger_count_makes_the_round_wait_for_more(hire: Hire) -> None:
    workers = recounting(hire, planned=1, decided=dict.fromkeys(range(4), 2))
    leader: Recounting = workers[0].training.pacer  # type: ignore[assignment]
    for worker in workers:
        worker.stuck_at = {(at, 0): lambda at=at: (at, at) in leader.asked for at in range(4)}  # type: ignore[misc]
    run(workers)
    assert [record.samples for record in records(workers[0])][:4] == [(8, 8)] * 4
    assert [record.wait_for for record in records(workers[1])][:4] == [2] * 4


def test_old_signals_are_forgotten_by_the_leader(hire: Hire) -> None:
    prompt, other = workers = hire(length=16 * 6)
    run(workers)
    forgotten = prompt.transport.forgotten  # type: ignore[attr-defined]
    assert {name for name in forgotten if name.startswith("begun/0/")} >= {f"begun/0/{step}" for step in range(3)}
    assert "begun/0/0" not in prompt.transport.meeting.said  # type: ignore[attr-defined]
    assert other.transport.forgotten == []  # type: ignore[attr-defined]


# -- a late loop -------------------------------------------------------------------------------------------------------


def test_a_late_loop_takes_over_the_steps_it_missed_one_by_one(hire: Hire) -> None:
    prompt, late = workers = hire(length=16 * 6)
    late.stuck_at = {(1, 0): lambda: late.index >= 4}
    steps: list[list[Step]] = run(workers)
    assert [step.index for step in steps[1]] == list(range(6)), "every step, in order"
    assert late.taken[1:4] == [(1, 4), (2, 0), (3, 0)], "no micro-batch of a step that it missed"
    assert [step.share for step in steps[1][1:4]] == [8, 0, 0]
    assert [record.samples[1] for record in records(prompt)[1:4]] == [0, 0, 0]
    assert [record.behind for record in records(prompt)[1:4]] == [(0, 0), (0, 1), (0, 2)]
    assert told(steps[1]) == told(steps[0])
    assert [step.record for step in steps[1]] == records(late)
    assert [step.progress for step in steps[1]] == [step.progress for step in steps[0]]
    assert all(step._step_state.round_phase is RoundPhase.OVER for step in steps[1])
    assert steps[1][2]._step_state.loop_phase is LoopPhase.NOT_BEGUN
    assert torch.equal(prompt.parameters(), late.parameters())
    assert positions(*records(prompt)) == list(range(16 * 6))
    assert late.proxy.backlog._kept == [], "nothing is kept of what the loop has"


def test_a_late_loop_that_saves_is_where_its_parameters_are(hire: Hire) -> None:
    _, late = workers = hire(length=16 * 6)
    late.stuck_at = {(1, 0): lambda: late.index >= 4}
    saved: list[tuple[int, int]] = []
    late.loop.save_if_due = lambda: saved.append((late.steps.index, late.steps.state_dict()["step"]))
    run(workers)
    assert saved == [(number, number) for number in range(7)]


def test_a_step_that_nobody_did_anything_in_updates_nothing(hire: Hire) -> None:
    prompt, late = workers = hire(length=64)

    def skips(worker: Late) -> Step:
        step = next(iter(worker.steps))
        for _ in step:
            step.skip()
        step.commit(worker.optimizer)
        return step

    before = prompt.parameters()
    first, second = run(workers, lambda: skips(prompt), lambda: skips(late))
    assert first.applied == second.applied is False
    assert records(prompt)[0].samples == (8, 8)
    assert torch.equal(prompt.parameters(), before)
    assert torch.equal(late.parameters(), before)


# -- the floor ---------------------------------------------------------------------------------------------------------


def test_a_thin_round_goes_on_with_those_that_are_free_until_its_floor_is_counted(hire: Hire) -> None:
    prompt, late = workers = hire(length=64, pacer=Bounded(least_count=0.7))
    late.stuck_at = {(0, 0): lambda: late.index >= 1}
    steps: list[list[Step]] = run(workers)
    record = records(prompt)[0]
    assert record.samples[0] >= 12, "of a batch of 16, and it was dealt 8 at first"
    assert record.samples[1] == 0
    assert record.planned[0] >= record.samples[0]
    assert record.planned[1] == 8
    assert record.deadline_s is not None
    assert record.deadline_s > PATIENCE_S, "moved by what was missing"
    assert told(steps[1]) == told(steps[0])
    assert torch.equal(prompt.parameters(), late.parameters())
    assert positions(*records(prompt)) == list(range(64))


def test_the_mean_of_a_step_that_went_on_to_its_floor_is_exact(hire: Hire) -> None:
    prompt, late = workers = hire(length=64, pacer=Bounded(least_count=1.0))
    late.stuck_at = {(0, 1): lambda: late.index >= 1}

    def first(worker: Late) -> list[torch.Tensor]:
        step = next(iter(worker.steps))
        worker.work(step, commit=False)
        step.reduce()
        return [parameter.grad.clone() for parameter in worker.model.parameters() if parameter.grad is not None]

    own, theirs = run(workers, lambda: first(prompt), lambda: first(late))
    counted = positions(*records(prompt)[:1])
    assert len(counted) >= 16
    for mine, others, right in zip(own, theirs, gradient_of(counted), strict=True):
        assert torch.equal(mine, others)
        assert torch.allclose(mine, right, rtol=0, atol=1e-14)


def test_a_micro_batch_that_ends_while_the_floor_is_waited_for_counts(hire: Hire) -> None:
    prompt, late = workers = hire(length=64, pacer=Bounded(least_count=1.0))
    late.stuck_at = {(0, 0): lambda: late.proxy._step_round.step_state.plan.deadline_s > PATIENCE_S}
    run(workers)
    record = records(prompt)[0]
    assert record.samples[1] == 8, "the loop that comes back does its share"
    assert record.samples[0] >= 8
    assert record.unfinished_s == (0.0, 0.0)
    assert positions(*records(prompt)) == list(range(64))
    assert torch.equal(prompt.parameters(), late.parameters())


def test_near_an_epochs_end_a_thin_round_takes_back_what_a_stuck_worker_was_dealt(hire: Hire) -> None:
    prompt, late = workers = hire(length=24, pacer=Generous(least_count=1.0))
    late.stuck_at = {(0, 0): lambda: late.index >= 1}
    steps: list[list[Step]] = run(workers)
    first, second = records(prompt)
    assert first.samples == (16, 0), "twelve were dealt to it, and four more were the stuck one's"
    assert first.planned == (16, 0)
    assert first.deadline_s is not None
    assert first.deadline_s > PATIENCE_S
    assert steps[1][0]._step_state.loop_phase is LoopPhase.CUT_OFF
    assert second.samples == (4, 4)
    assert positions(first, second) == list(range(24))
    assert told(steps[1]) == told(steps[0])
    assert torch.equal(prompt.parameters(), late.parameters())


def test_a_round_closes_below_its_floor_when_all_have_left_their_micro_batches(hire: Hire) -> None:
    workers = hire(length=64, pacer=Bounded(least_count=0.7))

    def one_only(worker: Late) -> Step:
        step = next(iter(worker.steps))
        for x, y in step:
            step.backward(nn.functional.mse_loss(worker.model(x), y))
            worker.loop.membership = Leaving()  # type: ignore[assignment]
        worker.loop.membership = None
        step.commit(worker.optimizer)
        return step

    first, second = run(workers, *(lambda worker=worker: one_only(worker) for worker in workers))  # type: ignore[misc]
    assert told([first]) == told([second])
    assert records(workers[0])[0].samples == (4, 4)


def test_an_epochs_last_step_has_laps_instead_of_a_floor(hire: Hire) -> None:
    workers = hire(length=32, pacer=Bounded(least_count=0.7))
    steps: list[list[Step]] = run(workers)
    assert [step._step_state.floor for step in steps[0]] == [12, 0]


# -- laps: an epoch's last step ----------------------------------------------------------------------------------------


def test_what_a_late_worker_left_of_an_epoch_is_dealt_again_in_its_last_step(hire: Hire) -> None:
    prompt, late = workers = hire(length=16)
    late.stuck_at = {(0, 1): lambda: late.index >= 1}
    steps: list[list[Step]] = run(workers)
    (record,) = records(prompt)
    assert record.samples == (12, 4), "its first micro-batch counts, the rest another has done"
    assert record.planned == (12, 8)
    assert prompt.taken == [(0, 12)]
    assert late.taken == [(0, 8)], "one of its micro-batches was for nothing"
    assert positions(record) == list(range(16))
    assert steps[1][0]._step_state.loop_phase is LoopPhase.CUT_OFF
    assert told(steps[1]) == told(steps[0])
    assert steps[0][0].ends_epoch
    assert steps[1][0].ends_epoch
    assert torch.equal(prompt.parameters(), late.parameters())


def test_the_mean_over_all_laps_is_that_of_the_whole_batch(hire: Hire) -> None:
    prompt, late = workers = hire(length=16)
    late.stuck_at = {(0, 1): lambda: late.index >= 1}
    run(workers)
    own = linear()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.05, momentum=0.9)
    x, y = numbers(16).tensors
    nn.functional.mse_loss(own(x), y).backward()
    optimizer.step()
    expected = torch.cat([parameter.detach().flatten() for parameter in own.parameters()])
    assert torch.allclose(prompt.parameters(), expected, rtol=0, atol=1e-14)


def test_a_worker_that_comes_back_takes_over_what_another_leaves_in_a_later_lap(hire: Hire) -> None:
    prompt, late = workers = hire(length=16)
    late.stuck_at = {(0, 0): lambda: late.proxy._step_round.step_state.loop_phase is LoopPhase.CUT_OFF}
    prompt.stuck_at = {(0, 2): lambda: prompt.index >= 1}
    run(workers)
    (record,) = records(prompt)
    assert record.samples == (8, 8)
    assert record.planned == (16, 16)
    assert (prompt.taken, late.taken) == ([(0, 12)], [(0, 12)]), "each was cut off in one micro-batch"
    assert positions(record) == list(range(16))
    assert torch.equal(prompt.parameters(), late.parameters())


def test_a_step_of_which_a_lap_has_counted_is_not_begun_anew(hire: Hire) -> None:
    prompt, late = workers = hire(length=16)
    late.stuck_at = {(0, 0): lambda: late.proxy._step_round.step_state.loop_phase is LoopPhase.CUT_OFF}

    def leave_and_come_back() -> None:
        step = next(iter(prompt.steps))
        for number, (x, y) in enumerate(step):
            if number == 2:  # the first micro-batch of the lap
                break
            step.backward(nn.functional.mse_loss(prompt.model(x), y))
        prompt.combine.begin()

    with pytest.raises(MisuseError, match=r"a part of it has counted already: leave the loop behind step\.commit"):
        run(workers, leave_and_come_back, late.train)


def test_the_clock_runs_where_members_changed_for_a_signal_to_the_old_ones_is_lost() -> None:
    lock = threading.Condition(threading.RLock())
    transport: Any = SimpleNamespace(rank=1, calls=0, was_signalled=lambda name: False)
    loop: Any = SimpleNamespace(transport=transport, training=SimpleNamespace(lock=lock), gradients=None)
    proxy, state = Proxy(loop, SimpleNamespace(copyable=None)), step_state(3)  # type: ignore[arg-type]
    state.plan = replace(state.plan, deadline_s=60.0)
    waiting = threading.Thread(target=proxy._await_begin, args=(state,), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive(), "nobody has begun the step"
    assert state.until is None
    state.hurried = True
    waiting.join(PATIENCE_S)
    assert state.until is not None


def done_in_last_step(worker: Late) -> StepState:
    """The only step of an epoch, whose loop has done half of its share and waits for more."""
    state = worker.training.open(Plan(generation=0, step=0, samples=(8, 8), deadline_s=PATIENCE_S))
    state.start(time.perf_counter())
    state.work.samples = 4
    state.enter(LoopPhase.DONE)
    assert state.last
    assert state.idle
    return state


def test_a_lap_that_the_loop_has_not_woken_to_take_is_withdrawn_by_the_next_and_offered_again(
    hire: Hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, _ = hire(length=16)
    state, proxy, taken = done_in_last_step(prompt), prompt.proxy, list[tuple[int, int]]()
    monkeypatch.setattr(prompt.training.dealing, "begin_share", lambda share, *, done: taken.append((share, done)))
    prompt.training.lap(state, (4, 4), (4, 4))
    assert (state.extra, state.loop_phase) == (4, LoopPhase.DONE), "offered, and the loop does not know it yet"
    assert not state.idle
    assert proxy._report(state)[:, 0].tolist() == [4.0, 0.0, 0.0]
    assert state.extra == 4, "at a floor an offer stays"
    assert proxy._report(state, cut_off=True)[:, 0].tolist() == [4.0, 1.0, 0.0], "it would take more"
    assert (state.extra, state.loop_phase) == (0, LoopPhase.DONE)
    assert state.idle
    assert not proxy._take_extra(state), "what was withdrawn cannot be taken"
    prompt.training.lap(state, (0, 0), (2, 6))
    assert proxy.wait_for_more(state, gone=False, until=state.until)
    assert taken == [(2, 0)]
    assert (state.extra, state.loop_phase) == (0, LoopPhase.WORKING)
    proxy._report(state, cut_off=True)
    assert state.loop_phase is LoopPhase.CUT_OFF, "a loop that works is cut off by the next lap"


def test_a_loop_that_has_left_its_micro_batches_is_offered_nothing(hire: Hire) -> None:
    prompt, _ = hire(length=16)
    state = done_in_last_step(prompt)
    prompt.training.lap(state, (4, 4), (4, 4))
    state.round_phase = RoundPhase.OVER
    assert not prompt.proxy.wait_for_more(state, gone=True)
    assert (state.extra, state.loop_phase) == (0, LoopPhase.WAITING)


def test_an_epochs_order_that_workers_disagree_in_is_raised_in_both_loops(hire: Hire) -> None:
    prompt, other = workers = hire(length=16, epochs=2, order=lambda epoch: list(range(16)))
    other.loop.dealing.order_digest = lambda: f"{'a' if other.loop.dealing.epoch else 'b':>12}".replace(" ", "0")  # type: ignore[method-assign]
    prompt.loop.dealing.order_digest = lambda: "00000000000b"  # type: ignore[method-assign]

    def train(worker: Late) -> None:
        with pytest.raises(ValueError, match=r"workers disagree in order\(1\): workers \[1\] have another order"):
            worker.train()

    run(workers, lambda: train(prompt), lambda: train(other))


# -- far behind: a copy of a peer's state ------------------------------------------------------------------------------


def test_a_worker_that_is_far_behind_takes_over_a_peers_state(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up, "MOST_BYTES", 1)
    prompt, late = workers = hire(length=16 * 6)
    late.stuck_at = {(1, 0): lambda: (copy := late.proxy.backlog.copied) is not None and copy.here and late.index >= 4}
    steps: list[list[Step]] = run(workers)
    seen = [step.index for step in steps[1]]
    assert seen[:2] == [0, 1]
    assert 2 not in seen, "the copy is of the state after it"
    assert seen[2:] == list(range(seen[2], 6))
    assert not steps[1][1].applied, "the copy holds its update"
    assert late.notes == [f"worker 1 was {seen[2] - 2} steps behind and took over a peer's state"]
    assert prompt.notes == []
    assert torch.equal(prompt.parameters(), late.parameters())
    assert positions(*records(late)) == list(range(16 * 6))


def step_state(index: int, *, wants: tuple[int, int] = (0, 0), behind: tuple[int, int] = (0, 0)) -> Any:
    """A step that is over."""
    header = Header(Layout(2, 0, 0))
    for rank in range(2):
        header.write(rank, wants_state=wants[rank], behind=behind[rank])
    total = Sum([torch.zeros(1, dtype=torch.float64)], [], torch.empty(0), [])
    return StepState(
        plan=Plan(generation=0, step=index, samples=(4, 4)), shares=(4, 4), epoch=0, dealt=8, expected=8, last=False,
        compare=False, opened=0.0, header=header, total=total,
    )  # fmt: skip


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up, "MOST_BYTES", 16)


def backlog_of(rank: int = 1, *, copyable: bool = True) -> tuple[Backlog, Meeting, threading.Condition]:
    meeting, lock = Meeting(2), threading.Condition(threading.RLock())
    return Backlog(Threads(meeting, rank), lock, lambda: copyable), meeting, lock


@pytest.mark.usefixtures("bounded")
def test_a_copy_is_asked_for_beyond_the_bound_and_not_before() -> None:
    backlog, _, _ = backlog_of()
    for index, wanted in enumerate([False, False, True]):
        backlog.keep(step_state(index))
        assert backlog.make_room(), "nobody has to wait"
        assert backlog.wants_copy == wanted, "two sums are 16 bytes"


@pytest.mark.usefixtures("bounded")
def test_a_step_that_the_loop_has_taken_over_makes_room() -> None:
    backlog, _, _ = backlog_of()
    steps = [step_state(index) for index in range(3)]
    for one in steps:
        backlog.keep(one)
    backlog.forget(steps[0])
    backlog.forget(steps[0])
    assert backlog.make_room()
    assert not backlog.wants_copy


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("end", ["taken over", "stopping", "members changed"])
def test_where_a_copy_would_not_hold_everything_the_others_wait_for_the_loop(hire: Hire, end: str) -> None:
    prompt, _ = hire(length=64)
    proxy, asked, through = prompt.proxy, threading.Event(), threading.Event()
    proxy.backlog = Backlog(prompt.transport, prompt.training.lock, lambda: False)
    steps = [step_state(index) for index in range(3)]
    for one in steps:
        proxy.backlog.keep(one)
    overs = [GenerationOver("worker 7 died", generation=4)] if end == "members changed" else []
    re_formed: list[GenerationOver] = []

    def heard(name: str) -> bool:
        if overs:
            raise overs.pop()
        asked.set()
        return False

    def close() -> None:
        with pytest.raises(FleetError, match="far enough"):
            proxy._close(DeadlineRound(prompt.loop, steps[0], prompt.combine._deadlines))

    def enter() -> None:
        through.set()
        raise FleetError("far enough")

    proxy._await_count, proxy._enter = lambda step: None, enter
    prompt.transport.was_signalled = heard  # type: ignore[method-assign]
    prompt.transport.recover = lambda over, **_: re_formed.append(over)  # type: ignore[method-assign]
    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    assert asked.wait(PATIENCE_S)
    with prompt.training.lock:
        assert not through.is_set()
        assert not proxy.backlog.wants_copy
    if end == "stopping":
        proxy.stop()
    else:
        proxy.backlog.forget(steps[1])
    assert through.wait(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert [over.generation for over in re_formed] == [4] * (end == "members changed"), "the others did not wait"


@pytest.mark.usefixtures("bounded")
def test_a_copy_replaces_the_steps_up_to_it_and_no_others() -> None:
    backlog, meeting, lock = backlog_of()
    giver = Threads(meeting, 0)
    first, second, third = step_state(4), step_state(5, wants=(0, 1)), step_state(6)
    backlog.keep(first)
    backlog.wants_copy = True
    backlog.keep(second)
    backlog.keep(third)
    copy = backlog.copied
    assert copy is not None
    assert (copy.index, backlog.wants_copy) == (5, False)
    promises = Promises(giver)
    promises.note(second)
    promises.give(lambda: pytest.fail("the loop is not there yet"), after=4)
    promises.give(lambda: torch.arange(7, dtype=torch.uint8), after=5)
    promises.join()
    eventually(lambda: copy.here, "the copy comes")
    with lock:
        assert copy.data.tolist() == list(range(7))
        assert (first.total, second.total) == (None, None)
        assert third.total is not None
        assert backlog._kept == [third]


def test_a_copy_that_is_declined_leaves_the_steps_to_the_loop() -> None:
    backlog, meeting, lock = backlog_of()
    promises, one = Promises(Threads(meeting, 0)), step_state(5, wants=(0, 1))
    backlog.wants_copy = True
    backlog.keep(one)
    assert backlog.copied is not None
    promises.note(one)
    promises.decline()
    eventually(lambda: backlog.copied is None, "the copy is declined")
    with lock:
        assert backlog._kept == [one]
        assert one.total is not None


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("second", ["declined", "forgotten"])
def test_a_copy_that_is_here_is_taken_over_though_a_later_one_does_not_come(second: str) -> None:
    backlog, meeting, _ = backlog_of()
    promises, first = Promises(Threads(meeting, 0)), step_state(5, wants=(0, 1))
    backlog.wants_copy = True
    backlog.keep(first)
    promises.note(first)
    promises.give(lambda: torch.ones(3, dtype=torch.uint8), after=5)
    here = backlog.copied
    assert here is not None
    eventually(lambda: here.here, "the copy comes")
    assert first.total is None, "the copy alone has what it gave"
    for index in (6, 7, 8):
        backlog.keep(step_state(index))
    assert backlog.make_room()
    assert backlog.wants_copy
    asked = step_state(9, wants=(0, 1))
    backlog.keep(asked)
    assert backlog.copied is not here
    if second == "declined":
        promises.note(asked)
        promises.decline()
    else:
        backlog.forget_copy()
    eventually(lambda: backlog.copied is here, "the loop has the state that it needs")


def test_a_copy_that_was_forgotten_does_nothing_when_it_comes() -> None:
    backlog, meeting, lock = backlog_of()
    promises, one = Promises(Threads(meeting, 0)), step_state(5, wants=(0, 1))
    backlog.wants_copy = True
    backlog.keep(one)
    copy = backlog.copied
    backlog.forget_copy()
    promises.note(one)
    promises.give(lambda: torch.ones(3, dtype=torch.uint8), after=5)
    assert copy is not None
    eventually(lambda: copy.data.numel() == 3 and bool(copy.data.all()), "the copy comes")
    with lock:
        assert backlog.copied is None
        assert one.total is not None


def test_a_copy_ends_where_members_change_and_keeps_any_other_error() -> None:
    came: list[Copy] = []
    meeting = Meeting(2)
    for failure in (GenerationOver("members changed"), FleetError("worker 0 died")):
        meeting.failure = failure
        Copy(Threads(meeting, 1), 0, 3, came.append)
        eventually(lambda: came, "the copy ends")
        copy = came.pop()
        assert copy.declined == isinstance(failure, GenerationOver)
        assert copy.error is (None if copy.declined else failure)


@pytest.mark.parametrize(
    ("wants", "behind", "giver"),
    [((0, 1), (0, 2), 0), ((1, 0), (3, 0), 1), ((0, 1), (1, 2), None), ((1, 1), (2, 2), None), ((0, 0), (0, 0), 0)],
)
def test_the_first_worker_that_was_in_time_gives_its_state(
    wants: tuple[int, int], behind: tuple[int, int], giver: int | None
) -> None:
    assert peer_to_copy(step_state(0, wants=wants, behind=behind).header) == giver


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_worker_that_waits_in_a_call_declines_what_it_promised_before_and_meanwhile(when: str) -> None:
    backlog, meeting, _ = backlog_of()
    promises, one = Promises(Threads(meeting, 0)), step_state(5, wants=(0, 1))
    backlog.wants_copy = True
    backlog.keep(one)
    if when == "before":
        promises.note(one)
    with promises.declined(), promises.declined():
        if when == "meanwhile":
            promises.note(one)
        eventually(lambda: backlog.copied is None, "the copy is declined, so that its worker comes to the call")
    promises.give(lambda: pytest.fail("it was answered"), after=5)
    promises.note(step_state(6, wants=(0, 1)))
    assert list(promises._asked.values()) == [(6, 0)], "after the call copies are promised again"


def test_a_loop_that_has_caught_up_by_itself_no_longer_wants_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up, "MOST_BYTES", 0)
    backlog, _, _ = backlog_of()
    one = step_state(5)
    backlog.keep(one)
    assert backlog.make_room()
    assert backlog.wants_copy
    backlog.forget(one)
    assert backlog.make_room()
    assert not backlog.wants_copy


def test_a_promise_is_void_when_members_change() -> None:
    promises = Promises(Threads(Meeting(2), 0))
    promises.note(step_state(5, wants=(0, 1)))
    promises.members_changed()
    promises.give(lambda: pytest.fail("nobody waits for it"), after=5)


def test_a_worker_whose_peer_dies_while_its_copy_travels_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)

    class Dying(Threads):
        def send(self, *_: Any, **__: Any) -> None:
            raise errors.pop()

    errors = [FleetError("worker 1 was killed"), GenerationOver("generation 3 is over")]
    promises = Promises(Dying(Meeting(2), 0))
    for index in range(2):
        promises.note(step_state(index, wants=(0, 1)))
        promises.give(lambda: torch.ones(3, dtype=torch.uint8), after=index)
        promises.join()
    assert (failed, errors) == ([], [])
    assert len(promises._giving) == 1, "threads that have ended are forgotten"


# -- the end -----------------------------------------------------------------------------------------------------------


def leave(worker: Late, *, after: int, ready: Callable[[], Any] = lambda: True) -> int:
    """Leave the loop in the middle of the step after so many; returns the rounds that its proxy went into."""
    for step in worker.steps:
        if step.index == after:
            break
        worker.work(step)
    eventually(ready, "the other is where it should be")
    worker.steps.close()
    eventually(lambda: not worker.proxy._thread.is_alive(), "the thread ends")
    return int(worker.proxy._entered)


def test_workers_that_leave_their_loops_end_their_threads_after_the_same_round(hire: Hire) -> None:
    prompt, other = workers = hire(length=64)
    assert run(workers, lambda: leave(prompt, after=1), lambda: leave(other, after=1)) == [1, 1]
    assert prompt.index == other.index == 1
    assert prompt.notes == ["the loop was left in step 1, before its commit: its samples were not counted"]


def test_a_worker_whose_proxy_waits_in_a_round_is_not_left_alone_there(hire: Hire) -> None:
    prompt, other = workers = hire(length=64)

    def hurry() -> bool:
        """The deadline passes on one worker alone."""
        with prompt.training.lock:
            prompt.proxy._step_round.step_state.until = time.perf_counter()
            prompt.training.lock.notify_all()
        return bool(prompt.proxy._entered == 2)

    entered = run(
        workers,
        lambda: leave(prompt, after=1, ready=hurry),
        lambda: leave(other, after=1, ready=lambda: prompt.proxy._entered == 2),
    )
    assert entered == [2, 2]
    assert prompt.index == other.index == 2
    assert records(prompt)[1].samples == records(other)[1].samples == (0, 0)


def test_a_loop_that_comes_to_its_end_ends_its_thread(hire: Hire) -> None:
    workers = hire(length=32)
    run(workers)
    for worker in workers:
        eventually(lambda worker=worker: not worker.proxy._thread.is_alive(), "the thread ends")


def test_a_loop_whose_end_is_interrupted_ends_its_thread(hire: Hire) -> None:
    """Ctrl-C while the workers agree after which round their threads end: the script may go on without the loop."""
    prompt, other = workers = hire(length=64)

    def interrupted(label: str, value: Any) -> list[Any]:
        raise KeyboardInterrupt

    def body(worker: Late) -> None:
        steps = iter(worker.steps)
        for _ in range(3):
            worker.work(next(steps))
        assert not worker.proxy._step_round.step_state.over, "its thread has opened the next"
        worker.transport.gather = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            worker.proxy.stop_together()
        eventually(lambda: not worker.proxy._thread.is_alive(), "the thread ends")
        steps.close()  # type: ignore[attr-defined]

    run(workers, lambda: body(prompt), lambda: body(other))


# -- errors ------------------------------------------------------------------------------------------------------------


def fail_in_step_1(workers: list[Late], failure: BaseException, train: Callable[[Late], Any]) -> list[Any]:
    """The round of step 1 fails on every worker."""

    def body(worker: Late) -> Any:
        real = worker.proxy._enter

        def enter() -> None:
            real()
            if worker.proxy._entered == 2:
                worker.transport.failure = failure  # type: ignore[attr-defined]

        worker.proxy._enter = enter
        return train(worker)

    return run(workers, *(lambda worker=worker: body(worker) for worker in workers))  # type: ignore[misc]


def test_an_error_on_the_proxys_thread_is_raised_in_the_loop(hire: Hire) -> None:
    def train(worker: Late) -> int:
        with pytest.raises(FleetError, match="worker 7 died"):
            worker.train()
        return worker.steps.index

    workers = hire(length=64)
    assert fail_in_step_1(workers, FleetError("worker 7 died"), train) == [1, 1]
    assert all(worker.steps.left for worker in workers)


def test_an_error_while_the_loop_is_stuck_waits_for_it(hire: Hire) -> None:
    workers = hire(length=64)
    late = workers[1]
    late.stuck_at = {(1, 0): lambda: late.proxy.error is not None}

    def train(worker: Late) -> None:
        with pytest.raises(FleetError, match="worker 7 died"):
            worker.train()

    fail_in_step_1(workers, FleetError("worker 7 died"), train)
    assert late.taken == [(0, 8), (1, 4)]


def test_a_worker_that_the_fleet_went_on_without_gives_its_step_up(hire: Hire) -> None:
    def train(worker: Late) -> Step:
        steps = iter(worker.steps)
        worker.work(next(steps))
        step = next(steps)
        before = worker.parameters()
        worker.work(step)
        assert torch.equal(worker.parameters(), before)
        return step

    workers = hire(length=64)
    for step in fail_in_step_1(workers, Dropped("the fleet went on", generation=4), train):
        assert step._step_state.round_phase is RoundPhase.VOID
        assert (step.applied, step.committed, step.record.samples) == (False, True, (0, 0))
    for worker in workers:
        assert worker.notes == ["step 1: the fleet went on; it enters anew"]
        assert worker.proxy.error.generation == 4
        assert len(worker.history) == 1


def test_data_without_a_length_cannot_have_deadlines() -> None:
    from torch.utils.data import IterableDataset

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    with pytest.raises(ValueError, match=r"rounds with a deadline .* need a dataset with a length"):
        Worker(Threads(Meeting(2), 0), data=Stream(), pacer=Bounded())
