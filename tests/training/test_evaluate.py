"""Evaluation: exact means and sums over the whole set for any shares, and models left as they were."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline
from lone import deep, join, linear, numbers, sgd, training
from paceline.feed import EvaluationNumbers, Source
from paceline.training import evaluate as evaluating

CPU = torch.device("cpu")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[paceline.Fleet]:
    with join(tmp_path) as fleet:
        yield fleet


@given(data=st.data(), workers=st.integers(1, 5), length=st.integers(1, 40), batch_size=st.integers(1, 50))
def test_means_sums_and_tables_are_exact_for_any_shares(
    data: st.DataObject, workers: int, length: int, batch_size: int
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, length), min_size=workers - 1, max_size=workers - 1)))
    shares = [stop - start for start, stop in zip([0, *cuts], [*cuts, length], strict=True)]
    numbers = torch.arange(length)

    def score(x: torch.Tensor) -> dict[str, Any]:
        table = torch.zeros(3, 4, dtype=torch.int64)
        for value in x.tolist():
            table[value % 3, value % 4] += 1
        return {"sum": x.sum(), "mean": x, "squares": (x**2)[:, None], "table": table, "rows": len(x)}

    kinds, parts = evaluating.Kinds.read(["sum", "squares", "rows"], "table"), []
    for rank in range(workers):
        source = Source(TensorDataset(numbers), device=CPU, seed=0)
        batches = evaluating.each_batch(
            source, shares=shares, rank=rank, batch_size=batch_size, numbers=EvaluationNumbers(5, CPU)
        )
        own = evaluating.own_sums(score, batches, kinds)
        parts.append(json.loads(json.dumps(own)))  # as it travels
    result = evaluating.final_figures(parts, kinds)
    expected = score(numbers)
    assert torch.equal(result.pop("table"), expected.pop("table").double())
    total, squares = float(numbers.sum()), float((numbers**2).sum())
    assert result.pop("mean") == pytest.approx(total / length, rel=1e-14)
    assert result == {"sum": total, "squares": squares, "rows": length, "count": length}


def test_values_per_sample_give_their_mean_and_sums_are_named(fleet: paceline.Fleet) -> None:
    model = fleet.model(linear())
    x, y = numbers().tensors
    with torch.no_grad():
        errors = (model(x) - y).abs()
    mean, total = (pytest.approx(float(found), abs=1e-12) for found in (errors.mean(), errors.sum()))

    def score(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        error = (model(x) - y).abs()
        return {"error": error, "listed": error.flatten().tolist(), "total": error.sum(), "each": error}

    result = fleet.evaluate(score, numbers(), batch_size=7, sums=("total", "each"))
    assert result == {"error": mean, "listed": mean, "total": total, "each": total, "count": 40}
    assert fleet.evaluate(lambda x, y: (model(x) - y).abs(), numbers()) == {"mean": mean, "count": 40}


@pytest.mark.parametrize("value", [lambda loss: loss, lambda loss: loss.item()])
def test_one_number_for_a_batch_is_refused_with_both_ways_to_write_it(fleet: paceline.Fleet, value: Any) -> None:
    model = fleet.model(linear())
    loss_fn = nn.MSELoss()
    with pytest.raises(ValueError) as error:
        fleet.evaluate(lambda x, y: {"loss": value(loss_fn(model(x), y))}, numbers(), batch_size=7)
    said = str(error.value)
    assert "'loss' is one number for a batch of 7 samples, which may be their mean or their sum" in said
    assert 'reduction="none"' in said
    assert 'fleet.evaluate(..., sums=("loss",))' in said
    with pytest.raises(ValueError, match="'mean' is one number"):
        fleet.evaluate(lambda x, y: value(loss_fn(model(x), y)), numbers())


def test_a_name_is_a_sum_or_a_table_and_not_both(fleet: paceline.Fleet) -> None:
    with pytest.raises(ValueError, match="'n' is in sums= and in tables="):
        fleet.evaluate(lambda x, y: {"n": len(x)}, numbers(), sums="n", tables=["n"])
    with pytest.raises(ValueError, match="returns nothing called 'n'"):
        fleet.evaluate(lambda x, y: {}, numbers(), sums="n")


def test_a_table_is_in_the_result_and_in_the_log(fleet: paceline.Fleet) -> None:
    result = fleet.evaluate(lambda x, y: {"table": torch.eye(2) * len(x)}, numbers(), tables="table")
    assert torch.equal(result["table"], torch.eye(2, dtype=torch.float64) * 40)
    fleet.leave()
    events = [json.loads(line) for line in (fleet.run_dir / "events.jsonl").read_text().splitlines()]
    logged = [(event["result"], event["means"]) for event in events if event["event"] == "evaluate"]
    assert logged == [({"table": [[40.0, 0.0], [0.0, 40.0]], "count": 40}, [])]


@pytest.mark.parametrize("raised", [False, True])
def test_every_module_is_in_its_own_mode_again_afterwards(fleet: paceline.Fleet, raised: bool) -> None:
    model = fleet.model(nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.BatchNorm1d(3)).double())
    model[2].eval()
    seen = []

    def score(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        seen.append((model.training, model[1].training, torch.is_grad_enabled()))
        if raised:
            raise KeyError("a bug in the script")
        return {"mean": model(x).mean(1)}

    with pytest.raises(KeyError) if raised else join(fleet.run_dir.parent / "unused"):
        fleet.evaluate(score, numbers())
    assert set(seen) == {(False, False, False)}
    assert [module.training for module in model.modules()] == [True, True, True, False]
    assert torch.is_grad_enabled()


def test_evaluating_between_steps_changes_nothing_in_the_training(tmp_path: Path) -> None:
    results = []
    for evaluates in (False, True):
        with join(tmp_path) as fleet:
            model = fleet.model(nn.Sequential(deep(), nn.Dropout(0.3), nn.BatchNorm1d(1).double()))
            for _ in training(fleet, model, sgd(model), numbers(), global_batch=8, micro_batch=4):
                if evaluates:
                    fleet.evaluate(lambda x, y, model=model: model(x), numbers(), batch_size=3)
            results.append(torch.cat([t.double().flatten() for t in model.state_dict().values()]))
    assert torch.equal(*results)


def test_a_loop_that_was_let_go_of_late_changes_no_later_numbers(tmp_path: Path) -> None:
    with join(tmp_path / "first") as fleet:
        model = fleet.model(linear())
        lingering = iter(fleet.steps(numbers(), global_batch=8, micro_batch=4))
        for x, y in (step := next(lingering)):
            step.backward(nn.functional.mse_loss(model(x), y))
    before = np.random.mtrand._rand._bit_generator  # type: ignore[attr-defined]
    torch.manual_seed(1)
    random.seed(1)
    lingering.close()  # type: ignore[attr-defined]
    assert (float(torch.rand(())), random.random()) == pytest.approx((0.757631, 0.134364), abs=1e-6)
    assert np.random.mtrand._rand._bit_generator is before  # type: ignore[attr-defined]


def test_evaluating_in_the_middle_of_a_step_leaves_its_gradient_alone(fleet: paceline.Fleet) -> None:
    model = fleet.model(linear())
    step = next(iter(fleet.steps(numbers(), global_batch=8, micro_batch=4)))
    for x, y in step:
        step.backward(nn.functional.mse_loss(model(x), y))
        assert fleet.evaluate(lambda x, y: model(x), numbers())["count"] == 40
    step.commit(sgd(model))
    assert step.applied


@pytest.mark.parametrize("kind", ["dataset", "loader", "loader with a process", "dicts"])
def test_any_data_with_a_length_can_be_evaluated(fleet: paceline.Fleet, kind: str) -> None:
    data: Any = numbers()
    if kind.startswith("loader"):
        data = DataLoader(data, batch_size=7, shuffle=True, drop_last=True, num_workers=int("process" in kind))
    if kind == "dicts":
        rows = [{"x": row, "y": row.sum()} for row in numbers().tensors[0]]
        result = fleet.evaluate(lambda batch: {"sum": batch["y"].sum()}, rows, sums="sum")
    else:
        result = fleet.evaluate(lambda x, y: {"sum": y.sum()}, data, sums="sum")
    assert result == {"sum": pytest.approx(float(numbers().tensors[1].sum()), abs=1e-12), "count": 40}


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (lambda x, y: None, "must return one value per sample of the batch, or a dict of such"),
        (lambda x, y: [1.0], "must return one value per sample of the batch, or a dict of such"),
        (lambda x, y: {"count": 3}, '"count" is its own name'),
        (lambda x, y: {"name": "many"}, "name"),
        (lambda x, y: {"logits": x}, "(7, 3) for a batch of 7 samples, and must have one value per sample"),
        (lambda x, y: {"few": y[:3]}, "For predictions of each sample call fleet.predict"),
        (lambda x, y: {"table": torch.eye(3)}, 'is named: tables=("table",)'),
        (lambda x, y: {"rare": y} if len(x) == 7 else {}, "'rare' for one batch and not for another"),
    ],
)
def test_a_score_without_one_value_per_sample_is_refused(fleet: paceline.Fleet, score: Any, said: str) -> None:
    with pytest.raises(ValueError) as error:
        fleet.evaluate(score, numbers(), batch_size=7)
    assert said in str(error.value)
    assert fleet.evaluate(lambda x, y: {}, numbers()) == {"count": 40}


def test_a_table_that_changes_its_shape_or_is_not_there_is_refused(fleet: paceline.Fleet) -> None:
    def score(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        return {"guess": x[:, 0] > 0}

    with pytest.raises(ValueError, match=r"has the shape \(7,\) for one batch and \(5,\) for another"):
        fleet.evaluate(score, numbers(), batch_size=7, tables=["guess"])
    with pytest.raises(ValueError, match="returns nothing called 'confusion'"):
        fleet.evaluate(lambda x, y: {}, numbers(), tables=["confusion"])


def test_names_that_only_one_worker_returned_are_refused() -> None:
    with pytest.raises(ValueError, match="returned 'rare' on one worker and not on another"):
        evaluating.final_figures([{"sum": 1.0, "count": 3}, {"sum": 1.0, "rare": 2.0, "count": 4}, {"count": 0}])
    sums = evaluating.Kinds.read("sum", ())
    assert evaluating.final_figures([{"sum": 1.0, "count": 3}, {"count": 0}], sums) == {"sum": 1.0, "count": 3}


@pytest.mark.parametrize("batch_size", [0, -3, 2.5, "many"])
def test_a_batch_size_that_is_no_whole_number_is_refused(fleet: paceline.Fleet, batch_size: Any) -> None:
    with pytest.raises(ValueError, match="batch_size"):
        fleet.evaluate(lambda x, y: {}, numbers(), batch_size=batch_size)


def test_a_stream_cannot_be_evaluated_exactly_and_is_refused(fleet: paceline.Fleet) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(3)

    with pytest.raises(ValueError, match="needs a dataset with a length, so that every sample counts once"):
        fleet.evaluate(lambda x: {}, Stream())


def test_agreeing_alone_is_having_ones_own_way(fleet: paceline.Fleet) -> None:
    assert fleet.any(True) is True
    assert fleet.any(False) is False
