"""Rounds with a deadline under hard use: loops left early, misuse, saves and scores in mid-step, workers that end."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, run
from failure_cases import STORE_GONE
from hard_cases import Numbered, net
from torch import nn

pytestmark = pytest.mark.fleet

CASE: dict[str, Any] = {"length": 400, "global_batch": 48, "micro_batch": 4}
LONG: dict[str, Any] = CASE | {"pace": {"deadline_s": 60.0}}
"""A deadline that never comes: all that is dealt is done."""
SHORT: dict[str, Any] = CASE | {"pace": {"deadline_s": 0.06, "over": 1.4}}


def positions(steps: list[Any]) -> Counter[tuple[int, int]]:
    """How often each position of each epoch counted; a step is [index, epoch, ranges, ...]."""
    return Counter((step[1], p) for step in steps for worker in step[2] for a, b in worker for p in range(a, b))


def once(case: dict[str, Any], *, first: int = 0) -> Counter[tuple[int, int]]:
    epochs = range(first, first + case.get("epochs", 1))
    return Counter((epoch, p) for epoch in epochs for p in range(case["length"]))


def one_machine(told: list[dict[str, Any]], length: int) -> torch.Tensor:
    """Plain torch with the samples that the workers say they trained on in each step."""
    model, data = net(), Numbered(length).tokens
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for index, *_, applied, _ in told[0]["steps"]:
        # What ran out of memory came again.
        batch = sorted({number for worker in told for step, number in worker["trained"] if step == index})
        if not applied:
            continue
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data.x[batch]), data.y[batch]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def check_equal(told: list[dict[str, Any]]) -> None:
    for other in told[1:]:
        assert other["parameters"] == told[0]["parameters"], "replicas differ"
        assert other["steps"] == told[0]["steps"]


@pytest.mark.parametrize(
    "unusual",
    [
        {"skip": 3},
        {"combine": True},
        {"overflow": [1, 3]},
        {"micro_batch": "auto", "tight": True},
        {"compiled": True, "fixed_micro_batch": True},
        {"loaders": 1},
        {"order": True, "epochs": 2},
    ],
    ids=lambda unusual: next(iter(unusual)) if "tight" not in unusual else "out of memory in backward",
)
def test_a_step_is_exact_however_the_loop_is_written(unusual: dict[str, Any], tmp_path: Path) -> None:
    case = LONG | unusual
    told = run("hard_cases.py:train", 2, tmp_path, args=case)
    check_equal(told)
    assert positions(told[0]["steps"]) == once(case)
    applied = [step[3] for step in told[0]["steps"]]
    assert applied.count(False) == ("overflow" in unusual)
    error = (torch.tensor(told[0]["parameters"], dtype=torch.float64) - one_machine(told, case["length"])).abs().max()
    assert error < 1e-12, float(error)


@pytest.mark.parametrize(
    "unusual",
    [{"skip": 3}, {"combine": True}, {"overflow": [0, 6]}, {"loaders": 1, "epochs": 2}, {"order": True, "epochs": 3}],
    ids=lambda unusual: next(iter(unusual)),
)
def test_replicas_stay_equal_and_samples_count_once_with_a_late_worker(unusual: dict[str, Any], tmp_path: Path) -> None:
    case = SHORT | {"stalls": [(1, 4, 1, 4)]} | unusual
    told = run("hard_cases.py:train", 3, tmp_path, args=case)
    check_equal(told)
    assert len({worker["scale"] for worker in told}) == 1
    assert positions(told[0]["steps"]) == once(case)


@pytest.mark.parametrize("most_bytes", [1000, 2500])
def test_a_worker_that_asked_for_a_copy_is_not_forgotten_when_the_others_meet(most_bytes: int, tmp_path: Path) -> None:
    # One round's sums take 984 bytes: it asks in the round of step 6 or of step 7, after which the others evaluate.
    case = SHORT | {"stalls": [(2, 4, 0, 4)], "linger_s": 0.5, "epochs": 2, "evaluate_after": 7}
    case["most_bytes"] = {"2": most_bytes}
    told = run("hard_cases.py:train", 3, tmp_path, args=case)
    check_equal(told[:2])
    assert told[2]["parameters"] == told[0]["parameters"]
    assert positions(told[0]["steps"]) == once(case)


# -- loops that are left -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dawdles", [[], [0], [1]])
@pytest.mark.parametrize("leave_at", [3, 8])
def test_a_loop_left_in_mid_step_leaves_nobody_in_a_round_and_a_new_one_is_whole(
    leave_at: int, dawdles: list[int], tmp_path: Path
) -> None:
    case = SHORT | {"leave_at": leave_at, "dawdle": dawdles, "again": True}
    told = run("hard_cases.py:leave_and_begin_again", 2, tmp_path, args=case)
    check_equal(told)
    assert positions(told[0]["steps"]) == once(case, first=1), "a new pass over the data"
    assert told[0]["steps"][0][0] == leave_at, "the step that was left has its number again"


def test_a_loop_left_in_mid_step_and_entered_again_goes_on_with_every_sample(tmp_path: Path) -> None:
    case = SHORT | {"leave_at": 3, "half_done": True, "same": True}
    told = run("hard_cases.py:leave_and_begin_again", 2, tmp_path, args=case)
    check_equal(told)
    assert told[0]["steps"][0][0] == 3


@pytest.mark.parametrize("leave_at", [3, 8])
def test_a_fleet_whose_loop_is_left_in_mid_step_ends_at_once(leave_at: int, tmp_path: Path) -> None:
    told = run("hard_cases.py:leave_and_begin_again", 2, tmp_path, args=SHORT | {"leave_at": leave_at})
    assert not any(worker["proxy_lives"] for worker in told), "nobody is waited for in a round that nobody needs"
    assert max(worker["seconds"] for worker in told) < 30.0


# -- between the begin of a step and its work --------------------------------------------------------------------------


def test_a_checkpoint_written_while_its_steps_deadline_passes_belongs_to_the_weights(tmp_path: Path) -> None:
    path = str(tmp_path / "saved.pt")
    case = CASE | {"pace": {"deadline_s": 2.0, "over": 1.4}, "save_at": 4, "save": path}
    told = run("hard_cases.py:save_before_the_work", 2, tmp_path, args=case)
    again = run("hard_cases.py:save_before_the_work", 2, tmp_path, args=case | {"load": path})
    assert again[0]["steps"][0][0] == 4
    assert sum(positions(told[0]["steps"][4:5]).values()) > 0, "the step was closed with samples while it was saved"
    assert positions(told[0]["steps"][:4]) + positions(again[0]["steps"]) == once(case)


def test_an_evaluation_while_a_steps_deadline_passes_sees_every_sample_once(tmp_path: Path) -> None:
    case = CASE | {"pace": {"deadline_s": 0.03, "over": 1.2}}
    for results in run("hard_cases.py:score_before_the_work", 3, tmp_path, args=case):
        assert results == [[sum(range(997)), 997]] * 3


# -- misuse ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize(
    ("do", "says"),
    [
        ("zero", "cleared or changed"),
        ("zero in place", "cleared or changed"),
        ("clip", "cleared or changed"),
        ("update", "SGD stepped in the middle of step"),
    ],
)
def test_meddling_between_micro_batches_is_an_error_and_never_averaged_in(
    do: str, says: str, at: int, tmp_path: Path
) -> None:
    for said in run("hard_cases.py:misuse", 2, tmp_path, args={"do": do, "at": at}):
        assert says in said or said.startswith("another's")


def test_custom_orders_that_differ_between_workers_in_a_later_epoch_are_an_error(tmp_path: Path) -> None:
    for said in run("hard_cases.py:unlike_orders", 2, tmp_path, args={"pace": {"deadline_s": 0.1}}):
        assert "workers disagree in order(1)" in said


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "who", "pace", "named"),
    [
        ("kill", [1], SHORT["pace"], "worker 1"),
        ("raise", [1], SHORT["pace"], "ValueError: a bug in the script"),
        ("interrupt", [2], SHORT["pace"], "KeyboardInterrupt"),
        ("raise", [1, 2], {"deadline_s": None, "wait_for": 2}, "a bug in the script"),
        ("stop", [1], SHORT["pace"], "worker 1"),
    ],
    ids=["killed", "an error", "ctrl-c", "too few to count to", "stopped"],
)
def test_a_worker_that_ends_in_a_step_with_a_deadline_is_named_on_all_others(
    how: str, who: list[int], pace: dict[str, Any], named: str, tmp_path: Path
) -> None:
    case = {"how": how, "who": who, "pace": pace, "folder": str(tmp_path)}
    with Crew("hard_cases.py:end", 3, tmp_path, args=case, env={"QUICK_EXIT": "1"}) as crew:
        for rank in who:
            crew.wait_for(f"ends.{rank}")
        ended = time.monotonic()
        while any(worker.poll() is None for rank, worker in enumerate(crew.workers) if rank not in who):
            assert time.monotonic() - ended < 60.0, "a survivor hangs"
            time.sleep(0.05)
        if how == "stop":
            os.kill(crew.workers[1].pid, signal.SIGKILL)
        outcomes = crew.wait(within=60.0)
    for rank, outcome in enumerate(outcomes):
        if rank not in who:
            assert outcome.value is not None, outcome.err[-2000:]
            assert outcome.value["error"].startswith("WorkerLost"), outcome.value
            # Where one cannot hear, worker 0 does not stay for long: who is slow to listen finds it gone.
            deaf = how in ("kill", "stop") and rank > 0 and STORE_GONE in outcome.value["error"]
            assert named in outcome.value["error"] or deaf
