"""The loop over the steps, made by hand around one transport: alone, or with others whose part in a round a test
says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from lone import linear, numbers, plain
from one_process import Facts, Scripted, Worker
from paceline.errors import Dropped, FleetError, GenerationOver, MisuseError, NonFiniteGradients
from paceline.step.checks.replicas import Repair
from paceline.step.checks.sameness import COMPARE_EARLY, COMPARE_EVERY, parameters_of
from paceline.step.step_state import RoundPhase
from paceline.transport import Alone

pytestmark = pytest.mark.slow  # seconds, all together

Hire = Callable[..., Worker]


@pytest.fixture
def hire() -> Iterator[Hire]:
    hired: list[Worker] = []

    def make(transport: Any = None, **options: Any) -> Worker:
        hired.append(Worker(Alone() if transport is None else transport, **options))
        return hired[-1]

    yield make
    for worker in hired:
        worker.close()


class Squares(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        x = torch.ones(3, dtype=torch.float64)
        yield from ((x * number, x[:1]) for number in range(20))


# -- a loop from its first step to its last ----------------------------------------------------------------------------


def test_a_worker_alone_trains_as_plain_torch_does(hire: Hire) -> None:
    worker = hire(epochs=2)
    steps = worker.train()
    assert torch.allclose(worker.parameters(), plain(linear(), numbers(), batch=8, epochs=2), rtol=0, atol=1e-13)
    assert [step.index for step in steps] == list(range(10)) == [record.step for record in worker.history]
    assert [step.ends_epoch for step in steps] == [number in (4, 9) for number in range(10)]
    assert (worker.steps.index, worker.steps.rounds, worker.steps.progress) == (10, 10, 1.0)
    assert worker.steps.finished
    assert worker.steps.left


def test_the_steps_say_how_far_they_are(hire: Hire) -> None:
    worker = hire()
    steps = worker.steps
    assert (steps.begun, steps.index, steps.current_index, steps.progress) == (False, 0, 0, 0.0)
    for step in steps:
        assert steps.begun
        assert not steps.left
        assert (steps.index, steps.current_index) == (step.index, step.index)
        worker.work(step)
        assert (steps.index, steps.current_index) == (step.index + 1, step.index), "until the next begins"
        assert steps.progress == step.progress == (step.index + 1) / 5


@pytest.mark.parametrize(("length", "number"), [(40, 5), (24, 3), (8, 1), (3, 1)])
def test_the_script_is_looked_at_before_its_first_step_and_after_it(hire: Hire, length: int, number: int) -> None:
    worker = hire(length=length)
    looks: list[tuple[str, int]] = []
    worker.steps.before_first = lambda steps: looks.append(("before", steps.index))
    worker.steps.after_first = lambda steps: looks.append(("after", steps.index))
    assert len(worker.train()) == number
    assert looks == [("before", 0), ("after", 1)]


def test_a_worker_that_enters_anew_at_its_first_step_is_looked_at_once_before_it(hire: Hire) -> None:
    worker = hire()
    looks: list[str] = []
    worker.steps.before_first = lambda steps: looks.append("before")
    worker.steps.after_first = lambda steps: looks.append("after")
    begin, dropped = worker.steps.combine.begin, [Dropped("it fell silent")]

    def begin_late() -> Any:
        if dropped:
            raise dropped.pop()
        return begin()

    worker.steps.combine.begin = begin_late  # type: ignore[method-assign]
    for step in worker.steps:
        assert looks == (["before"] if step.index == 0 else ["before", "after"])
        worker.work(step)
    assert looks == ["before", "after"]


def test_the_state_is_whole_before_every_step_and_after_the_last(hire: Hire) -> None:
    worker = hire()
    at: list[int] = []
    worker.loop.save_if_due = lambda: at.append(worker.steps.index)
    worker.train()
    assert at == [0, 1, 2, 3, 4, 5]


# -- the number of steps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "batch", "epochs", "expected"), [(40, 8, 1, 5), (41, 8, 3, 18), (3, 8, 2, 2)])
def test_the_number_of_steps_is_that_of_all_epochs(
    hire: Hire, length: int, batch: int, epochs: int, expected: int
) -> None:
    worker = hire(length=length, batch=batch, epochs=epochs)
    assert len(worker.steps) == expected == len(worker.train())
    assert worker.training.promised == expected // epochs


def test_a_stream_does_not_say_how_many_steps_it_makes(hire: Hire) -> None:
    worker = hire(data=Squares())
    with pytest.raises(TypeError, match="iterable dataset does not say"):
        len(worker.steps)
    samples = [step.record.samples[0] for step in worker.train() if step.record is not None]
    assert sum(samples) == 20


def test_rounds_by_the_clock_make_nobody_knows_how_many_steps(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = hire()
    monkeypatch.setattr(worker.combine, "counts_steps", False)
    assert worker.steps.most is None
    with pytest.raises(TypeError, match=r"step\.progress"):
        len(worker.steps)


def test_an_epoch_of_another_length_than_was_promised_is_told_of(hire: Hire) -> None:
    worker = hire(length=40, epochs=2, order=lambda epoch: list(range(24 if epoch else 40)))
    assert len(worker.steps) == 10
    assert len(worker.train()) == 8
    assert any("epoch 1 has 3 steps, and len(steps) was asked when an epoch had 5" in text for text in worker.notes)


def test_work_lost_in_the_very_last_step_makes_one_more_and_schedules_stay_at_their_end(hire: Hire) -> None:
    transport = Scripted()
    worker = hire(transport)
    transport.answer = lambda number, facts: facts.write(0, samples=5.0) if number == 4 else None
    schedule = torch.optim.lr_scheduler.OneCycleLR(worker.optimizer, 0.1, total_steps=len(worker.steps))
    worker.tracking.add({"schedule": schedule})
    dealt = []
    for step in worker.steps:
        worker.work(step)
        schedule.step()
        dealt.append((step.share, step.ends_epoch))
    assert dealt == [(8, False)] * 5 + [(3, True)]
    assert schedule.last_epoch == 5
    assert type(schedule) is torch.optim.lr_scheduler.OneCycleLR
    assert worker.steps.progress == 1.0


def test_no_schedule_is_held_before_the_promised_number_of_steps(hire: Hire) -> None:
    worker = hire()
    schedule = torch.optim.lr_scheduler.OneCycleLR(worker.optimizer, 0.1, total_steps=3)
    worker.tracking.add({"schedule": schedule})

    def train() -> None:
        for step in worker.steps:
            worker.work(step)
            schedule.step()

    with pytest.raises(ValueError, match="Tried to step"):
        train()


def test_a_loop_that_was_over_in_an_earlier_run_gives_no_steps(hire: Hire) -> None:
    worker = hire()
    worker.steps.pass_over(12)
    assert worker.train() == []
    assert (worker.steps.index, worker.steps.rounds, worker.steps.progress) == (12, 12, 1.0)
    assert worker.steps.finished
    assert not worker.steps.begun
    worker.steps.close()
    assert worker.events == [], "nothing of it was left"


# -- a loop that is left -----------------------------------------------------------------------------------------------


def test_a_step_that_was_not_committed_is_an_error_and_the_loop_is_left(hire: Hire) -> None:
    worker = hire()
    steps = iter(worker.steps)
    worker.work(next(steps), commit=False)
    with pytest.raises(MisuseError, match=r"step 0 was not committed: call step\.commit"):
        next(steps)
    assert worker.steps.left
    assert not worker.steps.finished


def test_a_loop_left_between_steps_is_told_of_once(hire: Hire) -> None:
    worker = hire()
    for step in worker.steps:
        worker.work(step)
        if step.index == 1:
            break
    worker.steps.close()
    worker.steps.close()
    assert [event for event in worker.events if event[0] == "left"] == [("left", {"step": 2})]
    assert worker.notes == []


def test_a_loop_left_in_mid_step_says_that_its_samples_were_not_counted(hire: Hire) -> None:
    worker = hire()
    for step in worker.steps:
        worker.work(step, commit=step.index < 2)
        if step.index == 2:
            break
    worker.steps.close()
    assert worker.notes == ["the loop was left in step 2, before its commit: its samples were not counted"]
    assert ("left", {"step": 2}) in worker.events


def test_a_loop_ended_by_an_error_says_nothing_more(hire: Hire) -> None:
    worker = hire()
    for step in worker.steps:
        worker.work(step, commit=step.index < 2)
        if step.index == 2:
            break
    worker.events.clear()
    worker.steps.close(orderly=False)
    assert worker.events == []


def test_a_loop_that_was_closed_gives_no_step_and_its_last_one_cannot_go_on(hire: Hire) -> None:
    worker = hire()
    steps = iter(worker.steps)
    step = next(steps)
    worker.work(step, commit=False)
    worker.steps.close()
    with pytest.raises(MisuseError, match="step 0 is over: its loop was left"):
        step.commit(worker.optimizer)
    with pytest.raises(MisuseError, match="this loop has ended"):
        next(iter(worker.steps))
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in worker.model.parameters())


def test_a_closed_loop_has_given_the_parameters_back(hire: Hire) -> None:
    worker = hire()
    worker.train()
    worker.steps.close()
    x, y = numbers(4).tensors
    nn.functional.mse_loss(worker.model(x), y).backward()
    own = linear()
    own.load_state_dict(worker.model.state_dict())
    nn.functional.mse_loss(own(x), y).backward()
    for mine, theirs in zip(worker.model.parameters(), own.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


def test_a_loop_that_was_left_and_entered_again_begins_its_step_anew(hire: Hire) -> None:
    worker = hire()
    for step in worker.steps:
        worker.work(step, commit=step.index < 2)
        if step.index == 2:
            break
    assert [step.index for step in worker.train()] == [2, 3, 4]
    assert torch.allclose(worker.parameters(), plain(linear(), numbers(), batch=8), rtol=0, atol=1e-13)


def test_what_the_others_read_of_this_worker_follows_its_loop(hire: Hire) -> None:
    transport = Scripted()
    hire(transport, length=16).train()
    after = [f"its own code after step {step}" for step in (0, 1)]
    assert transport.done == ["step 0", after[0], "step 1", after[1], "after the last step"]


# -- rounds that fail --------------------------------------------------------------------------------------------------


def test_a_worker_that_the_fleet_went_on_without_gives_its_step_up_and_begins_anew(hire: Hire) -> None:
    transport = Scripted()
    worker = hire(transport)
    transport.failures = {2: Dropped("the fleet went on without this worker", generation=1)}
    steps, before = [], torch.empty(0)
    for step in worker.steps:
        before = worker.parameters()
        worker.work(step)
        steps.append(step)
        if len(steps) == 3:
            assert torch.equal(worker.parameters(), before), "nothing of it counts"
        assert len(steps) < 10, "it begins anew, and not for ever"
    assert [step.index for step in steps] == [0, 1, 2, 2, 3, 4]
    void = steps[2]
    assert void._step_state.round_phase is RoundPhase.VOID
    assert void.committed
    assert not void.applied
    assert void.record is not None
    assert (void.record.step, void.record.planned, void.record.samples) == (2, (8,), (0,))
    assert not void.record.applied
    assert worker.notes == ["step 2: the fleet went on without this worker; it enters anew"]
    assert [record.step for record in worker.history] == [0, 1, 2, 3, 4], "the void step is in no history"
    assert [step._step_state.round_phase for step in steps if step is not void] == [RoundPhase.OVER] * 5
    assert torch.allclose(worker.parameters(), plain(linear(), numbers(), batch=8), rtol=0, atol=1e-13)


def test_a_round_that_members_were_lost_in_is_run_again_and_counts_once(hire: Hire) -> None:
    transport = Scripted(elastic=True)
    worker = hire(transport)
    over = GenerationOver("members changed")
    transport.failures = {1: over}
    worker.train()
    assert transport.re_formed == [over]
    assert transport.labels.count("the round of step 1") == 2
    assert [record.samples for record in worker.history] == [(8,)] * 5
    assert torch.allclose(worker.parameters(), plain(linear(), numbers(), batch=8), rtol=0, atol=1e-13)


def test_a_figure_that_cannot_be_named_for_now_is_named_in_the_round_that_follows(
    hire: Hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = Scripted(elastic=True)
    worker = hire(transport, length=8)
    away = [GenerationOver("the store is away")]

    def slot(name: str) -> int:
        if away:
            raise away.pop()
        return Alone.slot(transport, name)

    monkeypatch.setattr(transport, "slot", slot)
    step = next(iter(worker.steps))
    step.add(seen=1)
    worker.work(step)
    assert len(transport.re_formed) == 1
    assert step.sums == {"seen": 1.0}


def test_any_other_failure_of_a_round_ends_the_loop(hire: Hire) -> None:
    transport = Scripted()
    worker = hire(transport)
    transport.failures = {1: FleetError("worker 1 died")}
    with pytest.raises(FleetError, match="worker 1 died"):
        worker.train()
    assert worker.steps.left
    assert worker.steps.index == 1


# -- gradients that are not finite -------------------------------------------------------------------------------------


def test_bad_gradients_of_another_worker_stop_the_run_before_the_update(hire: Hire) -> None:
    transport = Scripted(2)
    worker = hire(transport)
    transport.answer = lambda number, facts: facts.write(1, nonfinite=1.0, loss=float("nan"), weight=4.0)
    before = worker.parameters()
    with pytest.raises(NonFiniteGradients, match=r"^worker 1 had NaN or infinite gradients in step 0 .*stopped"):
        worker.train()
    assert torch.equal(worker.parameters(), before)


def test_bad_gradients_are_skipped_where_the_script_says_so(hire: Hire) -> None:
    transport = Scripted(2)
    worker = hire(transport, nonfinite="skip")
    transport.answer = lambda number, facts: facts.write(1, nonfinite=number == 1)
    applied = []
    for step in worker.steps:
        before = worker.parameters()
        worker.work(step)
        applied.append(step.applied)
        assert torch.equal(worker.parameters(), before) == (step.index == 1)
        assert step.record is not None
        assert step.record.applied == step.applied
    assert applied == [number != 1 for number in range(len(applied))]
    assert len(worker.notes) == 1
    assert worker.notes[0].startswith("worker 1 had NaN or infinite gradients in step 1 (its loss was finite)")


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_a_workers_own_bad_gradients_are_seen_by_the_worker(hire: Hire, nonfinite: str) -> None:
    worker = hire(Scripted(2), nonfinite=nonfinite)
    step = next(iter(worker.steps))
    for x, _ in step:
        step.backward(worker.model(x).mean() * float("nan"))
    if nonfinite == "skip":
        step.commit(worker.optimizer)
        assert not step.applied
    else:
        with pytest.raises(NonFiniteGradients, match=r"worker 0 had .*the loss itself was NaN"):
            step.commit(worker.optimizer)


# -- what the others say in the round ----------------------------------------------------------------------------------


def test_figures_are_summed_over_micro_batches_and_over_the_fleet(hire: Hire) -> None:
    transport = Scripted(2)
    worker = hire(transport)
    transport.slot("their own")

    def answer(number: int, facts: Facts) -> None:
        facts.add(transport.slot("their own"), 5.0)
        facts.add(transport.slot("seen"), 10.0)

    transport.answer = answer
    step = next(iter(worker.steps))
    for x, y in step:
        step.add(seen=len(x))
        step.backward(nn.functional.mse_loss(worker.model(x), y))
        step.add(seen=torch.full((4,), 0.125), after=1)
    step.add(after=2)
    step.commit(worker.optimizer)
    assert step.share == 4, "one micro-batch: a half of the global batch"
    assert step.sums == {"their own": 5.0, "seen": 14.5, "after": 3.0}
    assert step.record is not None
    assert step.record.sums == step.sums


def test_the_mean_is_over_what_the_whole_fleet_has_done(hire: Hire) -> None:
    transport = Scripted(2)
    worker = hire(transport)
    transport.answer = lambda number, facts: facts.write(1, samples=4.0, weight=12.0, loss=24.0)
    step = next(iter(worker.steps))
    worker.work(step, commit=False)
    own, (x, y) = linear(), (tensor[:4] for tensor in numbers().tensors)
    loss = nn.functional.mse_loss(own(x), y)
    loss.backward()
    step.reduce()
    assert step.loss == pytest.approx((4 * loss.item() + 24.0) / 16)
    for mine, theirs in zip(worker.model.parameters(), own.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(mine.grad, theirs.grad * 4 / 16, rtol=0, atol=1e-14), "the other's gradient is zero"
    step.commit(worker.optimizer)


def test_unlike_learning_rates_are_named_with_their_workers(hire: Hire) -> None:
    transport = Scripted(2)
    worker = hire(transport)
    theirs = [["group 0 of optimizer", {"lr": 0.2, "momentum": 0.9}]]
    transport.others = lambda label: [theirs] if label == "comparing learning rates" else []
    transport.answer = lambda number, facts: facts.write(1, settings_digest=77.0)
    before = worker.parameters()
    with pytest.raises(MisuseError, match=r"lr in group 0 of optimizer is 0\.05 on worker 0 and 0\.2 on worker 1"):
        worker.train()
    assert torch.equal(worker.parameters(), before), "before the update"


def test_rates_that_differ_by_rounding_alone_are_no_error(hire: Hire) -> None:
    transport = Scripted(2)
    worker = hire(transport)
    transport.answer = lambda number, facts: facts.write(
        1, settings_digest=77.0
    )  # and the settings are asked for: they are equal
    assert worker.train()


def test_a_worker_that_knows_no_optimizer_yet_is_not_compared(hire: Hire) -> None:
    transport = Scripted(2)
    worker = hire(transport)
    transport.others = lambda label: pytest.fail("nobody needs to ask") if label.startswith("comparing") else []
    step = next(iter(worker.steps))
    worker.work(step)
    assert step._step_state.settings_digest > 0
    assert step.applied, "the other's digest is 0"


# -- replicas are compared ---------------------------------------------------------------------------------------------

FAR = Repair(distances=(0.0, 0.5), devices=("cpu", "cpu"))
ROUNDED = Repair(distances=(0.0, 1e-4), devices=("cpu", "cuda"))


def parted(hire: Hire, at: set[int], *repairs: Repair, length: int = 1000) -> Worker:
    """Worker 1's parameters are another's in the rounds ``at``."""
    transport = Scripted(2)
    worker = hire(transport, length=length, batch=4, micro_batch=2)

    def answer(number: int, facts: Facts) -> None:
        own = facts.read(0, "fingerprint")
        facts.write(1, samples=2.0, fingerprint=own + (number in at) if own else 0.0)

    transport.answer, worker.repairs = answer, list(repairs)
    return worker


def test_replicas_are_compared_early_and_then_every_so_often(hire: Hire) -> None:
    worker = parted(hire, set())
    compared: list[int] = []
    plain_answer = worker.transport.answer  # type: ignore[attr-defined]

    def answer(number: int, facts: Facts) -> None:
        plain_answer(number, facts)
        if facts.read(0, "fingerprint"):
            compared.append(number)

    worker.transport.answer = answer  # type: ignore[attr-defined]
    worker.train()
    assert compared == sorted({0, *COMPARE_EARLY, *range(0, 250, COMPARE_EVERY)})
    assert worker.repaired == 0


def test_unlike_devices_are_not_compared_early(hire: Hire) -> None:
    worker = parted(hire, {1, 2, 4}, length=40)
    worker.loop.replica.alike = False
    worker.train()
    assert worker.repaired == 0


def test_replicas_that_differ_are_refused_before_the_update_and_what_differs_is_named(hire: Hire) -> None:
    worker = parted(hire, {2}, length=80)
    worker.loop.replica.contents = lambda: parameters_of([worker.model])
    theirs = {**worker.loop.replica.contents().by_name(), "parameter weight": 5}
    worker.transport.others = lambda label: [theirs] if label == "comparing replicas" else []  # type: ignore[attr-defined]
    steps = iter(worker.steps)
    for _ in range(2):
        worker.work(next(steps))
    step, before = next(steps), worker.parameters()
    with pytest.raises(MisuseError, match=r"in step 2 worker 1 does not hold what worker 0 does: parameter \w+ .*load"):
        worker.work(step)
    assert torch.equal(worker.parameters(), before)
    assert worker.repaired == 0


def test_modules_that_train_on_one_worker_and_evaluate_on_another_are_refused(hire: Hire) -> None:
    transport = Scripted(2)
    worker = hire(transport)
    transport.answer = lambda number, facts: facts.write(1, samples=2.0, modes=77.0)
    transport.others = lambda label: [["Linear"]] if label == "comparing modes" else []
    with pytest.raises(MisuseError, match=r"in step 0 the module Linear trains on worker 0 and evaluates on worker 1"):
        worker.train()


def test_unlike_devices_that_are_far_apart_stop_the_run(hire: Hire) -> None:
    worker = parted(hire, {100}, FAR)
    worker.loop.replica.alike = False
    with pytest.raises(MisuseError, match=r"after step 100 the parameters of workers \[1\] were not worker 0's"):
        worker.train()
    assert worker.repaired == 1


def test_the_rounding_of_unlike_devices_never_stops_the_run(hire: Hire) -> None:
    worker = parted(hire, {100, 200}, ROUNDED, ROUNDED)
    worker.loop.replica.alike = False
    worker.train()
    assert len(worker.notes) == worker.repaired == 2
    assert all("unlike devices (cpu, cuda) round differently" in text for text in worker.notes)
