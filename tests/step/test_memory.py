"""micro_batch="auto": running out of memory, for real or on an emulated machine, changes sizes and nothing else."""

from __future__ import annotations

import copy
import pickle
from collections import Counter, namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from lone import deep, flat, join, linear, numbers, plain, sgd, training
from paceline.step.micro_batch_size import Guard, OutOfMemory


class Heavy(torch.autograd.Function):
    """Does nothing, and runs out of memory in backward with more rows than ``room``."""

    room = 10**9

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if len(grad) > Heavy.room:
            raise OutOfMemory(f"no room for {len(grad)} rows")
        return grad


@pytest.fixture
def room_for_3() -> Iterator[None]:
    Heavy.room = 3
    yield
    Heavy.room = 10**9


def heavy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(Heavy.apply(model(x)), y)


def emulate(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setenv("PACELINE_EMULATE", machine)
    monkeypatch.setenv("PACELINE_SAMPLE_MS", "0.0001")


def auto(fleet: paceline.Fleet, model: nn.Module, **options: Any) -> Iterator[paceline.Step]:
    """With micro-batches that begin with the whole share: ``fixed_micro_batch`` leaves the search for a size out."""
    settings = {"global_batch": 16, "micro_batch": "auto", "fixed_micro_batch": True, "shuffle": False, "epochs": 2}
    return training(
        fleet,
        model,
        sgd(model),
        numbers(),
        **settings | options,
    )


def test_a_model_that_runs_out_of_memory_in_forward_trains_as_with_plenty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch, "1!3")
    with join(tmp_path) as fleet:
        model = fleet.model(deep())
        steps = list(auto(fleet, model))
    assert torch.allclose(flat(model), plain(deep(), numbers(), batch=16, epochs=2), rtol=0, atol=1e-12)
    assert [step.record.samples for step in steps] == [(16,), (16,), (8,)] * 2
    assert steps[0].record.micro_batches == (1,), "the first comes in halves, which the loop does not see"
    assert steps[1].record.micro_batches == (8,), "and from then on the micro-batches fit: 16, 8, 4, 2"
    warnings = (tmp_path / "run" / "events.jsonl").read_text()
    assert "worker 0 ran out of memory with 16 samples at once: micro_batch is now 8" in warnings


def test_a_model_that_runs_out_of_memory_in_backward_trains_as_with_plenty(tmp_path: Path, room_for_3: None) -> None:
    with join(tmp_path) as fleet:
        model = fleet.model(deep())
        steps = list(auto(fleet, model, loss=heavy))
    assert torch.allclose(flat(model), plain(deep(), numbers(), batch=16, epochs=2), rtol=0, atol=1e-12)
    assert [step.record.samples for step in steps] == [(16,), (16,), (8,)] * 2
    assert [step.record.micro_batches for step in steps[:3]] == [(8,), (8,), (4,)]


def test_samples_and_figures_of_a_micro_batch_that_comes_again_count_once(tmp_path: Path, room_for_3: None) -> None:
    counted: Counter[float] = Counter()
    with join(tmp_path) as fleet:
        model = fleet.model(linear())
        optimizer = sgd(model)
        for step in fleet.steps(numbers(), global_batch=16, micro_batch="auto", fixed_micro_batch=True):
            step.add(steps=1)
            for x, y in step:
                step.add(rows=len(x), total=y.sum())
                step.backward(heavy(model, x, y))
                step.add(after=1)
            step.commit(optimizer)
            counted.update(step.sums)
    assert counted["rows"] == 40
    assert counted["steps"] == 3
    assert counted["total"] == pytest.approx(float(numbers().tensors[1].sum()), abs=1e-9)
    assert [part for record in fleet.history for part in record.ranges[0]] == [(0, 16), (16, 32), (32, 40)]


def test_figures_added_after_the_backward_that_failed_are_not_counted_either(tmp_path: Path, room_for_3: None) -> None:
    with join(tmp_path) as fleet:
        model = fleet.model(linear())
        optimizer = sgd(model)
        for step in fleet.steps(numbers(), global_batch=16, micro_batch="auto", fixed_micro_batch=True):
            for x, y in step:
                step.backward(heavy(model, x, y))
                step.add(rows=len(x))
            step.commit(optimizer)
            assert step.sums["rows"] == step.record.total


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_at_a_single_sample_running_out_of_memory_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(Heavy, "room", 0)
    raising = Raising() if where == "forward" else None
    with join(tmp_path) as fleet:
        model = fleet.model(nn.Sequential(linear(), raising) if raising else linear())
        with pytest.raises(OutOfMemory, match="no room for 1 rows"):
            list(auto(fleet, model, loss=heavy))


class Raising(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise OutOfMemory(f"no room for {len(x)} rows")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_without_auto_running_out_of_memory_stays_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room_for_3: None, where: str
) -> None:
    if where == "forward":
        emulate(monkeypatch, "1!3")
    with join(tmp_path) as fleet:
        model = fleet.model(linear())
        with pytest.raises(OutOfMemory, match="16"):
            list(auto(fleet, model, loss=heavy, micro_batch=16))


def test_a_second_loop_learns_the_size_that_fits_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, "1!3")
    with join(tmp_path) as fleet:
        model = fleet.model(deep())
        for _ in range(2):
            steps = list(auto(fleet, model))
            assert steps[1].record.micro_batches == (8,)


def test_evaluation_survives_a_batch_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, "1!3")
    with join(tmp_path) as fleet:
        model = fleet.model(linear())
        next(auto(fleet, model))
        x = numbers().tensors[0]
        with torch.no_grad():
            expected = float((model.weight @ x.T).sum() + 40 * model.bias.sum())
        result = fleet.evaluate(lambda x, y: {"sum": model(x)}, numbers(), batch_size=32, sums="sum")
    assert result == {"sum": pytest.approx(expected, abs=1e-12), "count": 40}


def test_the_gradient_of_a_halved_forward_has_the_dropout_that_its_output_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch, "1!3")
    with join(tmp_path) as fleet:
        model = fleet.model(nn.Sequential(nn.Linear(3, 1, bias=False).double(), nn.Dropout(0.5)))
        step = next(iter(fleet.steps(numbers(), global_batch=16, micro_batch="auto", fixed_micro_batch=True)))
        for x, y in step:
            out = model(x)
            step.backward(nn.functional.mse_loss(out, y))
        step.reduce()
        kept = out.detach() / (x @ model[0].weight.detach().T)
        assert set(kept.round().flatten().tolist()) == {0.0, 2.0}
        expected = 2 * ((out.detach() - y) * kept * x).mean(0, keepdim=True)
        torch.testing.assert_close(model[0].weight.grad, expected, rtol=1e-12, atol=1e-13)
        step.commit(sgd(model))


def test_a_guarded_model_stays_what_it_was_for_deepcopy_pickle_and_isinstance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch, "1!3")
    with join(tmp_path) as fleet:
        model = fleet.model(deep())
        for _ in auto(fleet, model):
            ema = copy.deepcopy(model)
            assert torch.equal(flat(ema), flat(model))
            assert isinstance(ema, nn.Sequential)
            assert torch.equal(flat(pickle.loads(pickle.dumps(model))), flat(model))
            break
        assert list(model.state_dict()) == list(deep().state_dict())


def test_after_the_fleet_is_left_the_model_has_its_own_forward_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch, "1!3")
    with join(tmp_path) as fleet:
        model = fleet.model(deep())
        list(auto(fleet, model))
    assert type(model) is nn.Sequential
    assert len(model(numbers().tensors[0])) == 40


@pytest.mark.parametrize("how", ["before", "in place"])
def test_a_compiled_model_on_a_small_machine_trains_as_with_plenty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    torch.compiler.reset()
    emulate(monkeypatch, "1!3")
    with join(tmp_path) as fleet:
        net = linear()
        model = fleet.model(torch.compile(net, backend="eager") if how == "before" else net)
        if how == "in place":
            model.compile(backend="eager")
        steps = list(auto(fleet, model))
    assert torch.allclose(flat(net), plain(linear(), numbers(), batch=16, epochs=2), rtol=0, atol=1e-12)
    assert max(steps[2].record.micro_batches) > 1, "the emulated memory was not felt"


# -- the guard by itself -------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "left right")


class Shapes(nn.Module):
    """Gives back whatever it was made to, from inputs in whatever form."""

    def __init__(self, give: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.give = give

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.give(self.scale, *args, **kwargs)


def guarded(give: Any, room: int) -> tuple[nn.Module, list[int]]:
    halved: list[int] = []
    model = Shapes(give)

    def enter(samples: int) -> None:
        if samples > room:
            raise OutOfMemory(f"no room for {samples}")

    Guard(model, enter=enter, shrink=halved.append)
    return model, halved


@pytest.mark.parametrize(
    ("give", "args", "kwargs"),
    [
        (lambda s, x: s * x, "x", {}),
        (lambda s, *, x: s * x, "", {"x": "x"}),
        (lambda s, batch: s * batch["x"] + batch["y"], {"x": "x", "y": "x"}, {}),
        (lambda s, pair: s * pair[0] + pair[1], ("x", "x"), {}),
        (lambda s, pair: Pair(s * pair.left, pair.right), Pair("x", "x"), {}),
        (lambda s, x: {"logits": s * x, "hidden": (x, [x])}, "x", {}),
        (lambda s, x, flag=None: s * x if flag else x, "x", {"flag": True}),
    ],
    ids=["one", "keyword", "dict", "tuple", "namedtuple", "nested output", "plain values"],
)
@pytest.mark.parametrize("room", [1, 3, 5])
def test_inputs_and_outputs_of_any_form_come_through_in_halves(give: Any, args: Any, kwargs: Any, room: int) -> None:
    x = torch.randn(7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def fill(form: Any) -> Any:
        if isinstance(form, str):
            return x
        if isinstance(form, dict):
            return {key: fill(value) for key, value in form.items()}
        if isinstance(form, Pair):
            return Pair(*(fill(value) for value in form))
        return tuple(fill(value) for value in form) if isinstance(form, tuple) else form

    model, halved = guarded(give, room)
    inputs = [fill(args)] if args != "" else []
    ours = model(*inputs, **fill(kwargs))
    expected = give(model.scale, *inputs, **fill(kwargs))
    assert type(ours) is type(expected)
    for mine, right in zip(leaves(ours), leaves(expected), strict=True):
        assert torch.equal(mine, right)
    (slope,) = torch.autograd.grad(sum(t.sum() for t in leaves(ours)), model.scale, allow_unused=True)
    (right,) = torch.autograd.grad(sum(t.sum() for t in leaves(expected)), model.scale, allow_unused=True)
    assert (slope is None and right is None) or torch.allclose(slope, right)
    assert halved[0] == 7


def leaves(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for part in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(part)]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_model_that_returns_its_own_loss_is_never_given_half_of_it(reduction: str) -> None:
    """A scalar of a whole batch cannot be put together from halves without knowing how it was made."""
    x = torch.arange(8.0, dtype=torch.float64)
    model, _ = guarded(lambda s, x: getattr(s * x, reduction)(), 5)
    try:
        loss: Any = float(model(x).detach())
    except ValueError as error:
        loss = str(error)
    assert loss == float(getattr(2 * x, reduction)()) or "scalar" in str(loss)


def test_a_model_without_tensor_inputs_is_left_alone() -> None:
    model, halved = guarded(lambda s: s * 2, 0)
    assert float(model().detach()) == 4.0
    assert halved == []
