"""One step of a worker alone: what is misuse and says so, and what a step gives back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from lone import deep, flat, join, linear, mse, numbers, plain, sgd, training
from paceline import MisuseError
from paceline.machines import Machine


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[paceline.Fleet]:
    with join(tmp_path) as fleet:
        yield fleet


@pytest.fixture
def model(fleet: paceline.Fleet) -> nn.Linear:
    return fleet.model(linear())


def first(fleet: paceline.Fleet, **options: Any) -> paceline.Step:
    return next(iter(fleet.steps(numbers(), **{"global_batch": 8, "micro_batch": 4, "shuffle": False} | options)))


def test_an_emulated_machine_pays_its_constant_cost_once_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_EMULATE", "1+20ms")
    monkeypatch.setenv("PACELINE_SAMPLE_MS", "0.001")
    pads: list[tuple[int, bool]] = []
    pad = Machine.pad

    def noted(machine: Machine, step: int, samples: int, started: float, *, begins: bool = True) -> float:
        pads.append((step, begins))
        return pad(machine, step, samples, started, begins=begins)

    monkeypatch.setattr(Machine, "pad", noted)
    with join(tmp_path) as fleet:
        model = fleet.model(linear())
        steps = list(training(fleet, model, sgd(model), numbers(16), global_batch=8, micro_batch=4))
    assert pads == [(0, True), (0, False), (1, True), (1, False)]
    records = [step.record for step in steps if step.record is not None]
    assert len(records) == 2
    # A sleep that lasted too long shortens the next; and some passed before the clock of the work began.
    assert sum(record.seconds[0] for record in records) >= 0.03


# -- misuse that would be averaged in silently ---------------------------------------------------------------------


def test_backward_before_a_micro_batch_was_taken_is_an_error(fleet: paceline.Fleet, model: nn.Linear) -> None:
    step = first(fleet)
    with pytest.raises(MisuseError, match="without a micro-batch in step 0: none was taken"):
        step.backward(mse(model, *numbers().tensors))


def test_an_embedding_that_forward_rescales_is_refused_by_its_name(tmp_path: Path) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 2, max_norm=0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.table(x)
            return result

    with join(tmp_path) as fleet:
        model = fleet.model(Bag())
        step = next(iter(fleet.steps(torch.arange(8) % 4, global_batch=8, micro_batch=4, shuffle=False)))
        micro_batches = iter(step)
        step.backward(model(next(micro_batches)).mean())
        step.backward(model(next(micro_batches)).mean())
        with pytest.raises(MisuseError, match=r"changed parameter table.weight .*Embedding with max_norm=0.1"):
            step.reduce()


def test_a_step_taken_for_a_batch_says_what_it_is(fleet: paceline.Fleet, model: nn.Linear) -> None:
    with pytest.raises(TypeError, match=r"a step is not a batch.*on_train_batch_end.*step.record.samples"):
        first(fleet)[0]


def test_a_second_backward_for_one_micro_batch_is_an_error(fleet: paceline.Fleet, model: nn.Linear) -> None:
    step = first(fleet)
    x, y = next(iter(step))
    step.backward(mse(model, x, y))
    with pytest.raises(MisuseError, match=r"used already; for one set of parameters add the losses"):
        step.backward(mse(model, x, y))


def test_a_micro_batch_without_backward_is_an_error_that_offers_skip(fleet: paceline.Fleet, model: nn.Linear) -> None:
    step = first(fleet)
    with pytest.raises(MisuseError, match=r"a micro-batch of step 0 had no step\.backward.*step\.skip"):
        for _ in step:
            pass


def test_the_last_micro_batch_without_backward_is_an_error_at_commit(fleet: paceline.Fleet, model: nn.Linear) -> None:
    step = first(fleet, global_batch=4)
    for _ in step:
        break
    with pytest.raises(MisuseError, match=r"left half done: 4 of this worker's 4 samples"):
        step.commit(sgd(model))


def test_a_skipped_micro_batch_counts_its_samples_and_leaves_the_gradient_alone(
    fleet: paceline.Fleet, model: nn.Linear
) -> None:
    step = first(fleet)
    taken = list(numbers().tensors)
    for number, (x, y) in enumerate(step):
        if number:
            step.skip()
        else:
            step.backward(mse(model, x, y))
    step.reduce()
    expected = linear()
    mse(expected, taken[0][:4], taken[1][:4]).backward()
    torch.testing.assert_close(model.weight.grad, expected.weight.grad, rtol=1e-12, atol=1e-12)
    step.commit(sgd(model))
    assert step.record.samples == (8,)
    assert step.record.weight == 4.0


def test_a_script_that_sets_gradients_by_hand_and_skips_every_micro_batch_is_warned(
    fleet: paceline.Fleet, model: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, optimizer, texts = model.weight.detach().clone(), sgd(model), list[Any]()
    monkeypatch.setattr(fleet._context.recorder, "event", lambda kind, data: texts.append(data.get("text", "")))
    for step in fleet.steps(numbers(), global_batch=4, epochs=2):
        for x, y in step:
            model.weight.grad = torch.autograd.grad(mse(model, x, y), model.weight)[0]
            step.skip()
        model.weight.grad = None
        step.commit(optimizer)
    assert torch.equal(before, model.weight)
    assert sum("so nothing is trained" in text for text in texts) == 1


def test_skip_without_a_micro_batch_is_an_error(fleet: paceline.Fleet, model: nn.Linear) -> None:
    with pytest.raises(MisuseError, match=r"step\.skip\(\) without a micro-batch"):
        first(fleet).skip()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("when", ["between micro-batches", "before commit"])
def test_gradients_cleared_in_mid_step_are_an_error(
    fleet: paceline.Fleet, model: nn.Linear, set_to_none: bool, when: str
) -> None:
    optimizer, step = sgd(model), first(fleet)
    batches = iter(step)
    step.backward(mse(model, *next(batches)))
    if when == "before commit":
        step.backward(mse(model, *next(batches)))
    optimizer.zero_grad(set_to_none=set_to_none)
    with pytest.raises(MisuseError, match="cleared or changed in the middle of a step"):
        step.commit(optimizer) if when == "before commit" else step.backward(mse(model, *next(batches)))


def test_clipping_by_hand_before_commit_is_an_error_that_names_the_way(fleet: paceline.Fleet, model: nn.Linear) -> None:
    step = first(fleet, global_batch=4)
    for x, y in step:
        step.backward(mse(model, x, y))
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(MisuseError, match=r"step\.reduce\(\) first"):
        step.commit(sgd(model))


def test_zeroing_at_the_start_of_a_step_is_the_old_habit_and_harmless(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        model = fleet.model(linear())
        optimizer = sgd(model)
        for step in fleet.steps(numbers(), global_batch=8, micro_batch=4, shuffle=False):
            optimizer.zero_grad(set_to_none=step.index % 2 == 0)
            for x, y in step:
                step.backward(mse(model, x, y))
            step.commit(optimizer)
            optimizer.zero_grad()
    assert torch.allclose(flat(model), plain(linear(), numbers(), batch=8), atol=1e-12)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_plain_backward_is_an_error_wherever_it_stands_in_the_step(
    fleet: paceline.Fleet, model: nn.Linear, before: int
) -> None:
    step = first(fleet)
    batches = iter(step)
    for _ in range(before):
        step.backward(mse(model, *next(batches)))
    x, y = numbers().tensors
    with pytest.raises(MisuseError, match=r"a plain loss\.backward\(\).*step\.backward\(loss\)"):
        mse(model, x, y).backward()


def test_a_plain_backward_between_steps_never_reaches_the_next_step(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        model = fleet.model(linear())
        for _ in training(fleet, model, sgd(model), numbers(), global_batch=8, micro_batch=4, shuffle=False):
            with pytest.raises(MisuseError):
                mse(model, *numbers().tensors).backward()
    assert torch.allclose(flat(model), plain(linear(), numbers(), batch=8), atol=1e-12)


def test_gradients_with_respect_to_inputs_are_the_users_own_business(fleet: paceline.Fleet, model: nn.Linear) -> None:
    step = first(fleet, global_batch=4)
    for x, y in step:
        x.requires_grad_(True)
        (slope,) = torch.autograd.grad(model(x).sum(), x)
        assert torch.allclose(slope, model.weight.detach().expand(4, 3))
        step.backward(mse(model, x, y))
    step.commit(sgd(model))
    assert step.applied


def test_a_gradient_penalty_trains_as_in_plain_torch(fleet: paceline.Fleet) -> None:
    def penalty(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        return mse(net, x, y) + slope.square().mean()

    model = fleet.model(deep())
    step = first(fleet)
    for x, y in step:
        step.backward(penalty(model, x, y))
    step.reduce()
    expected = deep()
    x, y = (tensor[:8] for tensor in numbers().tensors)
    penalty(expected, x, y).backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)


def test_commit_twice_is_an_error(fleet: paceline.Fleet, model: nn.Linear) -> None:
    optimizer = sgd(model)
    for step in training(fleet, model, optimizer, numbers(), global_batch=8):
        with pytest.raises(MisuseError, match="step 0 was committed before"):
            step.commit(optimizer)
        break


def test_combine_twice_or_after_commit_is_an_error(fleet: paceline.Fleet, model: nn.Linear) -> None:
    step = first(fleet, global_batch=4)
    for x, y in step:
        step.backward(mse(model, x, y))
    step.reduce()
    with pytest.raises(MisuseError, match="has had its round"):
        step.reduce()
    step.commit(sgd(model))
    with pytest.raises(MisuseError, match="has had its round"):
        step.reduce()


def test_iterating_a_step_twice_is_an_error(fleet: paceline.Fleet, model: nn.Linear) -> None:
    step = first(fleet)
    for x, y in step:
        step.backward(mse(model, x, y))
    with pytest.raises(MisuseError, match="iterated before"):
        next(iter(step))


def test_breaking_out_of_the_inner_loop_is_an_error_at_commit(fleet: paceline.Fleet, model: nn.Linear) -> None:
    step = first(fleet, global_batch=12)
    for x, y in step:
        step.backward(mse(model, x, y))
        break
    with pytest.raises(MisuseError, match="left half done: 8 of this worker's 12 samples"):
        step.commit(sgd(model))


def test_a_step_never_worked_on_cannot_be_committed(fleet: paceline.Fleet, model: nn.Linear) -> None:
    with pytest.raises(MisuseError, match="left half done: 8 of this worker's 8 samples"):
        first(fleet).commit(sgd(model))


def test_continuing_the_outer_loop_without_a_commit_is_an_error(fleet: paceline.Fleet, model: nn.Linear) -> None:
    steps = iter(fleet.steps(numbers(), global_batch=8))
    step = next(steps)
    for x, y in step:
        step.backward(mse(model, x, y))
    with pytest.raises(MisuseError, match="step 0 was not committed"):
        next(steps)


@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_loop_left_in_mid_step_and_entered_again_does_not_keep_half_a_gradient(tmp_path: Path, done: int) -> None:
    with join(tmp_path) as fleet:
        model = fleet.model(linear())
        optimizer = sgd(model)
        steps = fleet.steps(numbers(), global_batch=8, micro_batch=4, shuffle=False)
        for step in steps:
            batches = iter(step)
            for _ in range(done):
                step.backward(mse(model, *next(batches)))
            break
        try:
            for step in steps:
                for x, y in step:
                    step.backward(mse(model, x, y))
                step.commit(optimizer)
        except MisuseError:
            return  # a clear refusal is as good
    assert torch.allclose(flat(model), plain(linear(), numbers(), batch=8), atol=1e-12)


@pytest.mark.parametrize("ended_by", ["a later loop", "leaving the fleet"])
def test_steps_of_a_loop_that_was_ended_cannot_go_on_silently(tmp_path: Path, ended_by: str) -> None:
    with join(tmp_path) as fleet:
        fleet.model(linear())
        steps = fleet.steps(numbers(), global_batch=8)
        if ended_by == "a later loop":
            fleet.steps(numbers(), global_batch=8)
    with pytest.raises(MisuseError, match=r"ended|over|closed|left"):
        next(iter(steps))


def test_parameters_frozen_between_micro_batches_are_an_error(fleet: paceline.Fleet, model: nn.Linear) -> None:
    step = first(fleet)
    batches = iter(step)
    step.backward(mse(model, *next(batches)))
    model.bias.requires_grad_(False)
    step.backward(mse(model, *next(batches)))
    with pytest.raises(MisuseError, match="frozen or unfrozen in the middle of a step"):
        step.commit(sgd(model))


# -- bad arguments, after which the step goes on -------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss",
    [lambda m, x, y: (m(x) - y) ** 2, lambda m, x, y: 0.5, lambda m, x, y: None, lambda m, x, y: [mse(m, x, y)]],
    ids=["per sample", "a float", "None", "a list"],
)
def test_a_loss_that_is_not_a_scalar_is_refused_and_the_micro_batch_stays_open(
    fleet: paceline.Fleet, model: nn.Linear, loss: Any
) -> None:
    step = first(fleet, global_batch=4)
    for x, y in step:
        with pytest.raises(ValueError, match="the loss must be a scalar tensor, the mean over the micro-batch"):
            step.backward(loss(model, x, y))
        step.backward(mse(model, x, y))
    step.commit(sgd(model))
    assert step.record.samples == (4,)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), torch.tensor(-2.0), torch.ones(2), "many"])
def test_a_weight_that_is_no_finite_number_from_zero_is_refused(
    fleet: paceline.Fleet, model: nn.Linear, weight: Any
) -> None:
    step = first(fleet, global_batch=4)
    for x, y in step:
        with pytest.raises(ValueError, match="weight must be"):
            step.backward(mse(model, x, y), weight=weight)
        step.backward(mse(model, x, y))
    step.commit(sgd(model))
    assert step.record.weight == 4.0


@pytest.mark.parametrize("clip_norm", [0, -1.0, float("nan")])
def test_a_clip_norm_that_is_not_positive_is_refused_before_the_round(
    fleet: paceline.Fleet, model: nn.Linear, clip_norm: float
) -> None:
    optimizer, step = sgd(model), first(fleet, global_batch=4)
    for x, y in step:
        step.backward(mse(model, x, y))
    with pytest.raises(ValueError, match="clip_norm must be positive"):
        step.commit(optimizer, clip_norm=clip_norm)
    step.commit(optimizer)
    assert step.applied


class Lookahead:
    """An optimiser that is none of torch's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def step(self) -> None:
        self.inner.step()


def test_commit_without_or_with_a_foreign_optimizer_is_refused_before_the_round(
    fleet: paceline.Fleet, model: nn.Linear
) -> None:
    step = first(fleet, global_batch=4)
    for x, y in step:
        step.backward(mse(model, x, y))
    with pytest.raises(ValueError, match=r"step\.commit needs the optimizer"):
        step.commit()
    with pytest.raises(ValueError, match=r"parameters that are not in fleet\.model"):
        step.commit(sgd(nn.Linear(3, 1)))
    with pytest.raises(ValueError, match=r"step\.commit takes optimizers, got Linear"):
        step.commit(model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"step\.reduce\(\); lookahead\.step\(\); step\.commit\(\)"):
        step.commit(Lookahead(sgd(model)))  # type: ignore[arg-type]
    step.reduce()
    Lookahead(sgd(model)).step()
    step.commit()
    assert step.applied


def test_results_are_refused_until_the_round(fleet: paceline.Fleet, model: nn.Linear) -> None:
    step = first(fleet)
    for name in ("loss", "sums", "grad_norm"):
        with pytest.raises(MisuseError):
            getattr(step, name)


def test_figures_added_after_the_round_are_refused(fleet: paceline.Fleet, model: nn.Linear) -> None:
    for step in training(fleet, model, sgd(model), numbers(), global_batch=8):
        with pytest.raises(MisuseError, match=r"step\.add after the round of step"):
            step.add(correct=1)
        break


def test_more_figures_than_a_round_carries_are_refused_with_the_limit(fleet: paceline.Fleet, model: nn.Linear) -> None:
    step = first(fleet, global_batch=4)
    for x, y in step:
        step.backward(mse(model, x, y))
    step.add(**{f"figure{number}": 1.0 for number in range(65)})
    with pytest.raises(ValueError, match="64 different figures"):
        step.commit(sgd(model))


# -- what a step gives back ----------------------------------------------------------------------------------------


def test_figures_add_up_over_micro_batches_wherever_they_are_added(fleet: paceline.Fleet, model: nn.Linear) -> None:
    step = first(fleet)
    step.add(before=5)
    for x, y in step:
        step.add(rows=len(x), total=torch.ones(2, 2, dtype=torch.bool))
        step.backward(mse(model, x, y))
        step.add(rows=len(x))
    step.add(after=True)
    step.commit(sgd(model))
    assert step.sums == {"before": 5.0, "rows": 16.0, "total": 8.0, "after": 1.0}
    assert step.record.sums == step.sums


def test_a_figure_of_several_numbers_is_refused_unless_they_are_of_single_samples(
    fleet: paceline.Fleet, model: nn.Linear
) -> None:
    step = first(fleet, global_batch=6, micro_batch=6)
    for x, y in step:
        with pytest.raises(
            ValueError, match=r"shape \(3,\), and a figure is one number: give per_class=values.sum\(\)"
        ):
            step.add(per_class=torch.bincount(torch.arange(6) % 3))
        step.add(each=torch.ones(6), one=torch.ones(1, 1))
        step.backward(mse(model, x, y))
        step.add(each=torch.ones(6))
    with pytest.raises(ValueError, match="a figure is one number"):
        step.add(each=torch.ones(6))
    step.commit(sgd(model))
    assert step.sums == {"each": 12.0, "one": 1.0}


def test_the_loss_is_the_mean_over_samples_for_uneven_micro_batches(fleet: paceline.Fleet, model: nn.Linear) -> None:
    expected = mse(model, *(tensor[:7] for tensor in numbers().tensors)).item()
    step = first(fleet, global_batch=7, micro_batch=2)
    for x, y in step:
        step.backward(mse(model, x, y))
    step.commit(sgd(model))
    assert step.loss == pytest.approx(expected, abs=1e-13)
    assert step.record.micro_batches == (4,)


def test_weights_count_and_weight_zero_drops_a_micro_batch(fleet: paceline.Fleet, model: nn.Linear) -> None:
    weights = [3.0, 0, torch.tensor(1.5)]
    step, expected = first(fleet, global_batch=12), linear()
    x, y = numbers().tensors
    for number, (a, b) in enumerate(step):
        step.backward(mse(model, a, b), weight=weights[number])
    total = sum(float(weight) for weight in weights)
    for number, weight in enumerate(weights):
        part = slice(4 * number, 4 * number + 4)
        (mse(expected, x[part], y[part]) * float(weight) / total).backward()
    step.reduce()
    torch.testing.assert_close(model.weight.grad, expected.weight.grad, rtol=1e-12, atol=1e-13)
    step.commit(sgd(model))
    assert step.record.weight == 4.5
    assert step.record.samples == (12,)


def test_a_step_in_which_all_weights_are_zero_updates_nothing_and_counts_its_samples(
    fleet: paceline.Fleet, model: nn.Linear
) -> None:
    before, step = flat(model), first(fleet)
    for x, y in step:
        step.backward(mse(model, x, y), weight=0)
    step.commit(sgd(model))
    assert not step.applied
    assert math.isnan(step.loss)
    assert step.record.samples == (8,)
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize("clip_norm", [None, 1e-3, 1e6])
@pytest.mark.parametrize("way", ["commit", "combine, then commit"])
def test_the_gradient_norm_and_the_clipping_are_torchs(tmp_path: Path, clip_norm: float | None, way: str) -> None:
    with join(tmp_path) as fleet:
        model = fleet.model(deep())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = first(fleet)
        for x, y in step:
            step.backward(mse(model, x, y))
        if way != "commit":
            step.reduce()
        step.commit(optimizer, clip_norm=clip_norm)
        norm = step.grad_norm
    expected = deep()
    mse(expected, *(tensor[:8] for tensor in numbers().tensors)).backward()
    limit = float("inf") if clip_norm is None else clip_norm
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(expected.parameters(), limit)), rel=1e-12)
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    assert torch.allclose(flat(model), flat(expected), rtol=0, atol=1e-14)


def test_a_clipped_step_has_its_gradient_norm_in_the_record(fleet: paceline.Fleet, model: nn.Linear) -> None:
    for step in training(fleet, model, sgd(model), numbers(), global_batch=8, clip_norm=0.1):
        assert step.record.grad_norm == pytest.approx(step.grad_norm)
        break


def test_the_gradient_norm_of_an_older_step_is_refused(fleet: paceline.Fleet, model: nn.Linear) -> None:
    steps = list(training(fleet, model, sgd(model), numbers(), global_batch=8))
    with pytest.raises(MisuseError, match="no longer there: ask before the next step begins"):
        _ = steps[0].grad_norm


def test_after_combine_the_users_own_code_may_change_the_gradient(fleet: paceline.Fleet, model: nn.Linear) -> None:
    before, step = flat(model), first(fleet)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for x, y in step:
        step.backward(mse(model, x, y))
    step.reduce()
    assert step.loss > 0
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    step.commit(optimizer)
    assert torch.allclose(flat(model), before - 1)
    assert all(p.grad is None for p in model.parameters())


def test_after_combine_a_commit_without_optimizers_leaves_the_update_to_the_user(
    fleet: paceline.Fleet, model: nn.Linear
) -> None:
    step = first(fleet)
    for x, y in step:
        step.backward(mse(model, x, y))
    step.reduce()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= parameter.grad
    step.commit()
    assert step.committed
    assert fleet.history.last == step.record


def test_two_optimizers_update_in_one_commit(fleet: paceline.Fleet) -> None:
    model, expected = fleet.model(deep()), deep()
    optimizers = [
        (torch.optim.SGD(net[0].parameters(), lr=0.1), torch.optim.AdamW(net[2:].parameters(), lr=0.01))
        for net in (model, expected)
    ]
    step = first(fleet)
    for x, y in step:
        step.backward(mse(model, x, y))
    step.commit(*optimizers[0])
    mse(expected, *(tensor[:8] for tensor in numbers().tensors)).backward()
    for optimizer in optimizers[1]:
        optimizer.step()
    assert torch.allclose(flat(model), flat(expected), rtol=0, atol=1e-13)


def test_finite_gradients_are_never_called_infinite_however_large(fleet: paceline.Fleet) -> None:
    model = fleet.model(linear(dtype=torch.float32))
    step = first(fleet, global_batch=4)
    for x, _ in step:
        step.backward((model(x.float()) * 1e25).mean())
    step.commit(torch.optim.SGD(model.parameters(), lr=1e-30))
    assert step.applied


def test_a_step_says_what_it_is(fleet: paceline.Fleet, model: nn.Linear) -> None:
    step = first(fleet)
    assert repr(step) == "<Step 0 of epoch 0: 8 samples here>"
    assert (step.index, step.epoch, step.share, step.ends_epoch) == (0, 0, 8, False)
