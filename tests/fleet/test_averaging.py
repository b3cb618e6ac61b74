"""Local steps and rounds of parameters, with real processes."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from crew import run

pytestmark = pytest.mark.fleet

CASE: dict[str, Any] = {"combine": "average", "length": 120, "global_batch": 24, "micro_batch": 3, "epochs": 2}


def check(told: list[dict[str, Any]], case: dict[str, Any]) -> None:
    """All workers end equal, agree on the records, and every sample of every epoch counted once."""
    for other in told[1:]:
        assert other["parameters"] == told[0]["parameters"], "workers disagree on parameters"
        assert other["evaluations"] == told[0]["evaluations"]
        assert other["records"] == told[0]["records"]
    counted = Counter(
        (r["epoch"], p) for r in told[0]["records"] for w in r["ranges"] for a, b in w for p in range(a, b)
    )
    assert counted == Counter((e, p) for e in range(case.get("epochs", 1)) for p in range(case["length"]))
    assert sum(r["sums"].get("seen", 0) for r in told[0]["records"]) == case["length"] * case.get("epochs", 1)
    assert all(count == case["length"] for _, count in told[0]["evaluations"])


def check_by_the_clock(told: list[dict[str, Any]], period_s: float) -> None:
    """Worker 0, which is faster than worker 2, makes more local steps, for it goes on until a period's time is up."""
    assert told[0]["local"] > told[2]["local"]
    done = [(record["samples"][0], record["planned"][0], record["seconds"][0]) for record in told[0]["records"]]
    assert median(seconds for samples, planned, seconds in done if 0 < samples < planned) > period_s / 2


def test_with_a_round_after_every_step_averaging_sgd_steps_is_averaging_gradients(tmp_path: Path) -> None:
    one = run("averaging_cases.py:train", 3, tmp_path, args=CASE | {"settings": {"every_steps": 1}})
    two = run("averaging_cases.py:train", 3, tmp_path, args=CASE | {"combine": "gradients"})
    check(one, CASE)
    apart = torch.tensor(one[0]["parameters"]) - torch.tensor(two[0]["parameters"])
    assert apart.abs().max() < 1e-6


@pytest.mark.parametrize("weights", ["wp", "uniform", "samples", "normalised", "mse"])
def test_every_rule_trains_and_leaves_replicas_equal(weights: str, tmp_path: Path) -> None:
    case = CASE | {"settings": {"every_steps": 2, "weights": weights}, "weight_decay": 0.01, "momentum": 0.5}
    check(run("averaging_cases.py:train", 3, tmp_path, args=case), case)


def test_by_the_clock_a_fast_worker_makes_more_local_steps(tmp_path: Path) -> None:
    case = CASE | {"settings": {"period_s": 0.3}, "length": 360, "pace": "adaptive"}
    env = {"PACELINE_EMULATE": "1,1,4", "PACELINE_SAMPLE_MS": "6"}
    told = run("averaging_cases.py:train", 3, tmp_path, args=case, env=env)
    check(told, case)
    check_by_the_clock(told, 0.3)
    assert max(told[0]["rounds"]) < told[0]["local"], "a round is not a step"


def test_an_outer_optimiser_keeps_replicas_equal(tmp_path: Path) -> None:
    case = CASE | {"settings": {"every_steps": 2}, "outer": {"lr": 0.7, "momentum": 0.9}}
    check(run("averaging_cases.py:train", 2, tmp_path, args=case), case)


def test_batch_norms_statistics_are_merged_too(tmp_path: Path) -> None:
    case = CASE | {"settings": {"every_steps": 2}, "batch_norm": True}
    check(run("averaging_cases.py:train", 2, tmp_path, args=case), case)


def test_evaluation_asked_for_at_unlike_moments_waits_for_everybody_and_nothing_hangs(tmp_path: Path) -> None:
    case = CASE | {"settings": {"period_s": 0.1}, "at": 2, "epochs": 1}
    env = {"PACELINE_EMULATE": "1,3", "PACELINE_SAMPLE_MS": "2"}
    told = run("averaging_cases.py:train", 2, tmp_path, args=case, env=env)
    assert told[0]["parameters"] == told[1]["parameters"]


@pytest.mark.parametrize("weights", ["fixed", "dynamic", "missed", "clipped", "known"])
def test_elastic_averages_end_at_the_centre_on_every_worker(weights: str, tmp_path: Path) -> None:
    case = CASE | {"combine": "elastic-average", "settings": {"tau": 2, "weights": weights}, "momentum": 0.9}
    check(run("averaging_cases.py:train", 3, tmp_path, args=case), case)


def test_by_arrival_a_fast_worker_meets_the_centre_more_often_and_waits_for_nobody(tmp_path: Path) -> None:
    case = CASE | {"combine": "elastic-average", "settings": {"tau": 2, "exchange": "arrival"}}
    sample_s, period_of_the_slow_s = 0.02, 2 * 8 * 4 * 0.02
    env = {"PACELINE_EMULATE": "1,1,4", "PACELINE_SAMPLE_MS": f"{1e3 * sample_s:g}"}
    told = run("averaging_cases.py:train", 3, tmp_path, args=case, env=env)
    assert told[0]["parameters"] == told[1]["parameters"] == told[2]["parameters"]
    assert told[0]["evaluations"] == told[1]["evaluations"] == told[2]["evaluations"]
    ranges = [[record["ranges"] for record in one["records"]] for one in told]
    assert ranges[0] == ranges[1] == ranges[2]
    counted = Counter(
        (r["epoch"], p) for r in told[0]["records"] for w in r["ranges"] for a, b in w for p in range(a, b)
    )
    assert counted == Counter((epoch, place) for epoch in range(2) for place in range(case["length"]))
    assert told[0]["local"] > 1.5 * told[2]["local"]
    assert max(told[0]["waited"]) < period_of_the_slow_s


@pytest.mark.parametrize("failures", ["lost:0.5", "frozen:0.3x2", "restart:0.3x2"])
def test_emulated_failures_leave_the_books_balanced(failures: str, tmp_path: Path) -> None:
    case = CASE | {"combine": "elastic-average", "settings": {"tau": 1}, "epochs": 3}
    told = run("averaging_cases.py:train", 3, tmp_path, args=case, env={"PACELINE_FAILURES": failures})
    check(told, case)
    again = run("averaging_cases.py:train", 3, tmp_path, args=case, env={"PACELINE_FAILURES": failures})
    assert again[0]["parameters"] == told[0]["parameters"], "failures are seeded"
    without = run("averaging_cases.py:train", 3, tmp_path, args=case)
    assert without[0]["parameters"] != told[0]["parameters"], "failures do something"


@pytest.mark.parametrize("combine", ["average", "elastic-average"])
def test_a_training_resumes_at_a_round_and_at_another_size(combine: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.pt")
    settings = {"every_steps": 2} if combine == "average" else {"tau": 2}
    case = CASE | {"combine": combine, "settings": settings, "save": path}
    check(run("averaging_cases.py:train", 3, tmp_path, args=case), case)
    again = run("averaging_cases.py:train", 2, tmp_path, args=case | {"load": path, "save": None})
    assert again[0]["extra"] == {"epoch": 0}
    counted = Counter(p for r in again[0]["records"] for w in r["ranges"] for a, b in w for p in range(a, b))
    assert {r["epoch"] for r in again[0]["records"]} == {1}
    assert counted == Counter(range(case["length"]))


def test_one_worker_alone_trains_as_without_an_average(tmp_path: Path) -> None:
    one = run("averaging_cases.py:train", 1, tmp_path, args=CASE | {"settings": {"every_steps": 3}})
    two = run("averaging_cases.py:train", 1, tmp_path, args=CASE | {"combine": "gradients"})
    apart = torch.tensor(one[0]["parameters"]) - torch.tensor(two[0]["parameters"])
    assert apart.abs().max() < 1e-12


def test_an_overlap_counts_the_common_part_once_for_every_worker(tmp_path: Path) -> None:
    case = {"combine": "elastic-average", "settings": {"overlap": 0.25}, "length": 80}
    told = run("averaging_cases.py:samples_seen", 3, tmp_path, args=case)
    counts = Counter(sample for worker in told for sample in worker)
    assert sorted(Counter(counts.values()).items()) == [(1, 60), (3, 20)]
    common = {sample for sample, count in counts.items() if count == 3}
    assert all(common <= set(worker) for worker in told), "everybody saw the common part"


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_left_of_an_epoch_does_not_lie_with_a_worker_that_waits(overlap: bool, tmp_path: Path) -> None:
    """Worker 1 waits after one step of four samples, and worker 0 needs all others to get there."""
    case = {"combine": "average", "settings": {"every_steps": 1, "overlap": overlap}, "length": 60, "at": [12, 0]}
    told = run("averaging_cases.py:meets", 2, tmp_path, args=case)
    assert told[0] == told[1] != []


@pytest.mark.parametrize("groups", [None, [[0, 2], [1]]])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("every", [{"every_steps": 3}, {"period_s": 0.05}])
def test_every_sample_is_really_given_to_one_worker(
    every: dict[str, Any], overlap: bool, groups: list[list[int]] | None, tmp_path: Path
) -> None:
    settings = every | {"overlap": overlap, "groups": groups}
    case = {"combine": "average", "settings": settings, "length": 203, "epochs": 2}
    case |= {"every": 4} if "every_steps" in every else {}
    env = {"PACELINE_NETWORK": "1gbit,10ms", "PACELINE_EMULATE": "1,2,1", "PACELINE_SAMPLE_MS": "1"}
    told = run("averaging_cases.py:samples_seen", 3, tmp_path, args=case, env=env)
    assert Counter(sample for worker in told for sample in worker) == Counter(2 * list(range(203)))


def test_a_worker_may_wait_for_long_periods_of_others(tmp_path: Path) -> None:
    """It is not taken for one that was left behind: the others step on, and come when their period is over."""
    case = {"combine": "average", "settings": {"period_s": 2.5}, "length": 8000, "at": [250, 6], "sleep": 0.01}
    told = run("averaging_cases.py:meets", 2, tmp_path, args=case)
    assert told[0] == told[1] != []


@pytest.mark.long
def test_adahessian_in_several_processes_under_failures_equals_its_twin_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pytorch_optimizer")
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    folders = [str(benchmarks / "papers"), str(benchmarks)]
    monkeypatch.setattr(sys, "path", [*folders, *sys.path])
    from _p4_fleet import apart

    failures = "restart:0.3x2,lost:0.2"
    settings = {"tau": 2, "weights": "dynamic", "overlap": 0.25, "warm_up": 1}
    case = {"dataset": "none", "samples": 96, "epochs": 2, "seed": 5, "optimiser": "adahessian"}
    case |= {"settings": settings, "failures": failures, "benchmarks": folders}
    told = run("averaging_cases.py:against_twin", 3, tmp_path, args=case, env={"PACELINE_FAILURES": failures})
    assert told[0]["rounds"] > 5
    assert min(len(one["steps"]) for one in told) < max(len(one["steps"]) for one in told), "somebody was away"
    assert apart(case, told) < 1e-11
