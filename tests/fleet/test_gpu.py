"""Skipped where there is no GPU. One GPU is enough: a fleet mixes it with CPU workers, NCCL runs with one rank."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import exact_cases
import pytest
import torch
from crew import Crew, Outcome, run
from elastic_cases import replay
from flock import Flock
from gpu_cases import share_one_gpu
from groups import run_groups
from test_deadlines import CASE, one_machine, positions
from test_exactness import random_cases
from test_groups import alone

from paceline.observe import read_log
from paceline.observe.analysis.audit import audit

pytestmark = [pytest.mark.fleet, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_no_micro_batch_makes_the_host_wait_for_the_device(tmp_path: Path) -> None:
    assert run("gpu_cases.py:no_synchronisation", 1, tmp_path) == [32]


def test_a_gpu_alone_makes_the_host_wait_in_no_step(tmp_path: Path) -> None:
    value = run("gpu_cases.py:no_host_wait", 1, tmp_path)[0]
    assert value["ahead"] >= value["guarded"] >= 8
    assert value["parameters"][0] == value["parameters"][1]
    assert value["losses"][0] == value["losses"][1]


@pytest.mark.parametrize(
    ("case", "workers"), [("exact", 2), ("exact_over_nccl", 3)], ids=["mixed", "NCCL, three ranks"]
)
def test_a_fleet_with_gpus_equals_one_machine(tmp_path: Path, case: str, workers: int) -> None:
    cases = random_cases(6, "float64", seed=5)
    told = run(f"gpu_cases.py:{case}", workers, tmp_path, args=cases)
    for number, one in enumerate(cases):
        batches = list(exact_cases.batches_of(one, told[0][number]["batches"]))
        parameters, _ = exact_cases.one_machine(one, batches)
        for worker in told:
            error = (torch.tensor(worker[number]["parameters"], dtype=torch.float64) - parameters).abs().max()
            assert error < 1e-11, (one, float(error))


@pytest.mark.parametrize("sizes", [(2,), (1, 2)], ids=["alone", "beside one on the CPU"])
def test_two_processes_of_a_worker_divide_a_model_on_the_gpu(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    devices = ["cpu"] * (len(sizes) - 1) + ["cuda:0"] * 2
    pace = "adaptive" if len(sizes) == 1 else "fixed:1,3"
    told = run_groups("gpu_cases.py:divided", sizes, tmp_path, args={"pace": pace}, devices=devices)
    for value in told:
        for name in ("parameters", "losses", "norms", "predicted"):
            ours, theirs = torch.tensor(value[name]), torch.tensor(alone()[name])
            assert (ours - theirs).abs().max() < 1e-11, name


def test_an_overflow_on_the_gpu_skips_the_update_everywhere(tmp_path: Path) -> None:
    gpu, cpu = run("gpu_cases.py:mixed_precision", 2, tmp_path, args={"workers": 2})
    assert gpu["applied"] == cpu["applied"] == [True, True, True, False, True, True, True, True]
    assert gpu["scale"] == 512.0
    assert gpu["losses"][-1] < gpu["losses"][0]


def test_nccl_with_one_rank(tmp_path: Path) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777"}
    value = run("gpu_cases.py:mixed_precision", 1, tmp_path, args={"workers": 1}, env=place)[0]
    assert value["applied"] == [True, True, True, False, True, True, True, True]


def test_memory_that_runs_out_halves_the_micro_batch_and_the_step_goes_on(tmp_path: Path) -> None:
    value = run("gpu_cases.py:real_memory", 1, tmp_path, args={"epochs": 2, "fixed_micro_batch": True})[0]
    assert value["micro_batch"] < 32768
    assert value["samples"] == [32768, 32768]
    assert value["finite"]


def test_a_gpu_s_micro_batches_grow_as_far_as_memory_and_speed_allow(tmp_path: Path) -> None:
    value = run("gpu_cases.py:real_memory", 1, tmp_path, args={"epochs": 16})[0]
    assert value["found"][0] == [0]
    assert 1 <= value["found"][-1][0] == value["micro_batch"] < 32768
    assert value["samples"] == [32768] * 16
    assert value["finite"]


@pytest.mark.parametrize("kernel", [False, True], ids=["on the host", "in a kernel"])
@pytest.mark.parametrize("function", ["train", "train_over_nccl"], ids=["mixed", "NCCL, three ranks"])
def test_a_gpu_worker_that_is_stuck_is_not_waited_for(function: str, kernel: bool, tmp_path: Path) -> None:
    case = CASE | {
        "stalls": [(0, 4, 1, 4), (1, 12, 0, 4)],
        "long_s": 0.5,
        "gpu": True,
        "kernel": kernel,
        "batch_norm": kernel,
    }
    told = run(f"deadline_cases.py:{function}", 3, tmp_path, args=case)
    assert positions(told[0]["steps"]) == Counter((epoch, p) for epoch in range(2) for p in range(case["length"]))
    assert max(step["behind"][0] for step in told[1]["steps"] if step["behind"]) >= 3
    for worker in told[1:]:
        assert [step["samples"] for step in worker["steps"]] == [step["samples"] for step in told[0]["steps"]]
        apart = torch.tensor(worker["parameters"]) - torch.tensor(told[0]["parameters"])
        assert apart.abs().max() < 1e-9
    if not kernel:
        expected = one_machine(case, told[0]["steps"])
        assert (torch.tensor(told[1]["parameters"], dtype=torch.float64) - expected).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("case", "lost"), [("failure_cases.py:train_forever", "cpu"), ("gpu_cases.py:forever_over_nccl", "cuda:0")]
)
def test_a_worker_killed_beside_a_gpu_is_named(tmp_path: Path, case: str, lost: str) -> None:
    with Crew(case, 3, tmp_path, args={"folder": str(tmp_path)}) as crew:
        crew.wait_for("begun")
        os.kill(crew.workers[2].pid, signal.SIGKILL)
        outcomes = crew.wait(within=40)
    for outcome in outcomes[:2]:
        assert outcome.code == 75, outcome.err
        assert f"worker 2 ({lost}) went silent" in outcome.err


def must_equal_one_machine(folder: Path, outcomes: dict[int, Outcome]) -> None:
    assert all(outcome.code == 0 for outcome in outcomes.values()), [one.err[-2000:] for one in outcomes.values()]
    found = audit(read_log(folder / "run"))
    assert len(found) == 8
    assert all(epoch.sound and epoch.whole for epoch in found)
    expected = torch.tensor(replay(folder), dtype=torch.float64)
    for outcome in outcomes.values():
        assert outcome.value is not None, f"it came too late: {outcome.err[-2000:]}"
        error = (torch.tensor(outcome.value["weights"], dtype=torch.float64) - expected).abs().max()
        assert error < 1e-11, float(error)


@pytest.mark.parametrize("dies", [0, 1], ids=["the GPU worker dies", "a CPU worker dies"])
def test_a_gpu_worker_among_others_that_come_and_go(tmp_path: Path, dies: int) -> None:
    own = {0: {"PACELINE_DEVICE": "cuda:0"}, 1: {"PACELINE_DEVICE": "cpu"}, 2: {"PACELINE_DEVICE": "cpu"}}
    args = {"die": {str(dies): [["in round", 7]]}, "epochs": 8, "pause_s": 0.05}
    with Flock("elastic_cases.py:train", 3, tmp_path, args=args, own=own) as flock:
        flock.wait_for_step(12)
        flock.start(dies)
        outcomes = flock.wait()
    must_equal_one_machine(tmp_path, outcomes)


@pytest.mark.parametrize("point", ["in work", "in round", "after round"])
@pytest.mark.parametrize("dies", [0, 1], ids=["the leader", "another"])
def test_gpu_workers_that_sum_over_nccl_come_and_go(tmp_path: Path, dies: int, point: str) -> None:
    own = {slot: share_one_gpu(str(slot)) for slot in range(3)}
    args = {"die": {str(dies): [[point, 7]]}, "epochs": 8, "pause_s": 0.05}
    with Flock("elastic_cases.py:train", 3, tmp_path, args=args, own=own) as flock:
        flock.wait_for_step(12)
        flock.start(dies)
        outcomes = flock.wait()
    must_equal_one_machine(tmp_path, outcomes)
    assert outcomes[2].err.count("of 3 sums over nccl") >= 1
    assert outcomes[2].err.count("of 2 sums over nccl") >= 1


def test_a_frozen_gpu_worker_is_done_without_over_nccl_and_enters_anew(tmp_path: Path) -> None:
    own = {slot: share_one_gpu(str(slot)) for slot in range(3)}
    with Flock("elastic_cases.py:train", 3, tmp_path, args={"epochs": 8, "pause_s": 0.05}, own=own) as flock:
        flock.wait_for_step(8)
        flock.send(1, signal.SIGSTOP)
        flock.wait_for_workers(2)
        flock.send(1, signal.SIGCONT)
        outcomes = flock.wait()
    must_equal_one_machine(tmp_path, outcomes)


def test_a_cpu_worker_that_joins_gpu_workers_turns_nccl_into_gloo_and_back_when_it_dies(tmp_path: Path) -> None:
    own = {slot: share_one_gpu(str(slot)) for slot in range(2)} | {2: {"PACELINE_DEVICE": "cpu"}}
    with Flock("elastic_cases.py:train", 2, tmp_path, args={"epochs": 8, "pause_s": 0.05}, own=own) as flock:
        flock.wait_for_step(8)
        flock.start(2)
        flock.wait_for_workers(3)
        flock.kill(2)
        outcomes = flock.wait()
    del outcomes[2]
    must_equal_one_machine(tmp_path, outcomes)
    assert outcomes[0].err.count("sums over nccl") == 2
