"""Invariants 1 to 3 with real processes: the step equals one machine's, samples count once, replicas are equal."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import exact_cases
import pytest
import torch
from crew import run

pytestmark = pytest.mark.fleet


def random_cases(count: int, dtype: str, seed: int) -> list[dict[str, Any]]:
    dice = random.Random(seed)
    return [
        {
            "seed": dice.randrange(1000),
            "dtype": dtype,
            "optimizer": ("sgd", "adamw")[number % 2],
            "length": dice.randrange(20, 150),
            "global_batch": dice.randrange(5, 60),
            "micro_batch": dice.randrange(1, 6),
            "weighted": number % 3 == 0,
            "clip": (None, 0.5)[number % 4 == 3],
        }
        for number in range(count)
    ]


@pytest.mark.parametrize(("size", "case"), [(2, "train_all"), (3, "train_all_on_many_cores"), (4, "train_all")])
def test_for_any_shares_ten_steps_equal_one_machines_in_float64(size: int, case: str, tmp_path: Path) -> None:
    cases = random_cases(10, "float64", seed=size)
    told = run(f"exact_cases.py:{case}", size, tmp_path, args=cases)
    for number, one in enumerate(cases):
        ours = told[0][number]
        batches = list(exact_cases.batches_of(one, ours["batches"]))
        parameters, losses = exact_cases.one_machine(one, batches)
        error = (torch.tensor(ours["parameters"], dtype=torch.float64) - parameters).abs().max()
        assert error < 1e-12, (one, float(error))
        assert max(abs(a - b) for a, b in zip(ours["losses"], losses, strict=True)) < 1e-12
        assert all(other[number] == ours for other in told), "workers disagree on parameters, losses or records"


def test_random_shares_do_contain_zeros_and_tails(tmp_path: Path) -> None:
    case = random_cases(1, "float64", seed=3)[0] | {"length": 47, "global_batch": 20}
    shares = run("exact_cases.py:train", 3, tmp_path, args=case)[0]["shares"]
    assert any(0 in step for step in shares)
    assert {sum(step) for step in shares} == {20, 7}


def test_in_float32_the_fleet_is_within_twice_the_spread_of_summation_orders(tmp_path: Path) -> None:
    cases = random_cases(8, "float32", seed=11)
    told = run("exact_cases.py:train_all", 3, tmp_path, args=cases)[0]
    errors, spreads = [], []
    for case, ours in zip(cases, told, strict=True):
        batches = list(exact_cases.batches_of(case, ours["batches"]))
        whole, _ = exact_cases.one_machine(case, batches)
        pieces = [exact_cases.one_machine(case, batches, pieces=number)[0] for number in (2, 3, 5, 6, 8)]
        errors.append(float((torch.tensor(ours["parameters"], dtype=torch.float64) - whole).abs().max()))
        spreads.append(max(float((order - whole).abs().max()) for order in pieces))  # one order may be near by luck
    assert max(errors) <= max(2 * max(spreads), 1e-6), (errors, spreads)


def test_replicas_are_bitwise_equal_with_batch_norm_dropout_and_unlike_initial_weights(tmp_path: Path) -> None:
    states = run("exact_cases.py:replicas", 3, tmp_path)
    assert len(set(states)) == 1


def union(values: list[Any], epoch: int) -> Counter[int]:
    return Counter(sample for value in values for sample in value["seen"].get(str(epoch), []))


@pytest.mark.parametrize("pace", [None, "adaptive", "epoch", "equal", "fixed:1,0,2"])
def test_every_sample_of_every_epoch_counts_exactly_once(pace: str | None, tmp_path: Path) -> None:
    args = {"length": 101, "global_batch": 24, "epochs": 3, "pace": pace}
    values = run("exact_cases.py:count_samples", 3, tmp_path, args=args)
    for epoch in range(3):
        assert union(values, epoch) == Counter(range(101))
    assert values[0]["steps"] == 15


def test_a_resume_at_another_fleet_size_keeps_exactly_once(tmp_path: Path) -> None:
    saved = str(tmp_path / "half.pt")
    args = {"length": 101, "global_batch": 24, "epochs": 2}
    before = run("exact_cases.py:count_samples", 3, tmp_path / "a", args=args | {"stop_after": 6, "save": saved})
    after = run("exact_cases.py:count_samples", 2, tmp_path / "b", args=args | {"load": saved})
    assert after[0]["extra"] == {"note": "half-way"}
    assert after[0]["index"] == 9
    for epoch in range(2):
        assert union(before + after, epoch) == Counter(range(101))
    alone = run("exact_cases.py:count_samples", 1, tmp_path / "c", args=args | {"load": saved})
    assert union(before + alone, 1) == Counter(range(101))
