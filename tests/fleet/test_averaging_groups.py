"""Groups: gradients inside, averages between them. Real processes."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from averaging_cases import line_data
from crew import Crew, run
from test_averaging import CASE, check
from test_failures import tells

pytestmark = pytest.mark.fleet

GROUPS = [[0, 1], [2]]
LINE: dict[str, Any] = {"combine": "average", "length": 100, "global_batch": 24, "lr": 0.1}


def sgd(start: torch.Tensor, positions: list[list[int]], case: dict[str, Any]) -> torch.Tensor:
    """Plain SGD on these samples, one list a step."""
    x, y = line_data(case["length"]).tensors
    weight = start.clone()
    for batch in positions:
        weight -= case["lr"] * (x[batch].T @ (x[batch] @ weight - y[batch])) / len(batch)
    return weight


def local_steps(ranges: list[list[list[int]]], members: list[int], batch: int) -> list[list[int]]:
    """The samples of each of a group's local steps, from what its members were dealt."""
    queues = [[p for begin, end in ranges[rank] for p in range(begin, end)] for rank in members]
    count = max(-(-len(queue) // batch) for queue in queues)
    return [[p for queue in queues for p in queue[at * batch : (at + 1) * batch]] for at in range(count)]


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_a_group_counts_as_one_worker_with_its_members_batches_together(weights: str, tmp_path: Path) -> None:
    case = LINE | {"settings": {"every_steps": 2, "groups": GROUPS, "weights": weights}}
    told = run("averaging_cases.py:line", 3, tmp_path, args=case)
    expected = torch.zeros(2, dtype=torch.float64)
    for ranges in told[0]["ranges"]:
        each = [local_steps(ranges, group, 8) for group in GROUPS]
        done = [sum(map(len, steps)) for steps in each]
        share = [1 / 2, 1 / 2] if weights == "uniform" else [count / sum(done) for count in done]
        ends = [sgd(expected, steps, case) for steps in each]
        expected = sum(part * end for part, end in zip(share, ends, strict=True))  # type: ignore[assignment]
    assert len(told[0]["ranges"]) == 3
    for one in told:
        assert (torch.tensor(one["weight"], dtype=torch.float64) - expected).abs().max() < 1e-12
    assert told[0]["weight"] == told[1]["weight"] == told[2]["weight"]


def test_members_make_the_same_steps_and_see_their_groups_loss(tmp_path: Path) -> None:
    case = LINE | {"settings": {"every_steps": 2, "groups": GROUPS}}
    told = run("averaging_cases.py:line", 3, tmp_path, args=case)
    together = [[loss, samples] for loss, samples, _ in told[0]["seen"]]
    assert together == [[loss, samples] for loss, samples, _ in told[1]["seen"]]
    assert together[0][1] == 16
    assert told[2]["seen"][0][1] == 8


def test_groups_of_one_are_no_groups(tmp_path: Path) -> None:
    settings = {"every_steps": 2, "weights": "normalised"}
    one = run("averaging_cases.py:train", 3, tmp_path, args=CASE | {"settings": settings})
    two = run("averaging_cases.py:train", 3, tmp_path, args=CASE | {"settings": settings | {"groups": [[0], [1], [2]]}})
    assert one[0]["parameters"] == two[0]["parameters"]


def test_one_group_of_all_is_gradients_at_every_step(tmp_path: Path) -> None:
    one = run("averaging_cases.py:train", 2, tmp_path, args=CASE | {"settings": {"every_steps": 1, "groups": [[0, 1]]}})
    two = run("averaging_cases.py:train", 2, tmp_path, args=CASE | {"combine": "gradients"})
    apart = torch.tensor(one[0]["parameters"]) - torch.tensor(two[0]["parameters"])
    assert apart.abs().max() < 1e-12


def check_divided_by_speed(records: list[dict[str, Any]], members: tuple[int, int]) -> None:
    """Whoever was faster in one period is dealt no less for the next, and more where it was much faster."""
    unlike = 0
    for last, then in pairwise(records):
        speeds = [last["samples"][member] / max(last["seconds"][member], 1e-9) for member in members]
        dealt = [then["planned"][member] for member in members]
        if min(speeds) > 0 and sum(dealt) > 8:  # else one's speed is not known, or little is left to be dealt
            (slow, less), (fast, more) = sorted(zip(speeds, dealt, strict=True))
            assert more >= less + (fast > 1.5 * slow), (last, then)
            unlike += fast > 1.5 * slow
    assert unlike > 0, "neither was ever much faster"


@pytest.mark.parametrize("weights", ["wp", "mse"])
def test_by_the_clock_a_group_steps_as_one_and_divides_its_batch_by_speed(weights: str, tmp_path: Path) -> None:
    settings = {"period_s": 0.2, "groups": [[0, 2], [1]], "weights": weights}
    case = CASE | {"settings": settings, "length": 480, "pace": "adaptive", "weight_decay": 0.01}
    env = {"PACELINE_EMULATE": "1,1,3", "PACELINE_SAMPLE_MS": "6"}
    told = run("averaging_cases.py:train", 3, tmp_path, args=case, env=env)
    check(told, case)
    assert told[0]["local"] == told[2]["local"], "members step together"
    check_divided_by_speed(told[0]["records"], (0, 2))
    fast, slow = (sum(record["samples"][rank] for record in told[0]["records"]) for rank in (0, 2))
    assert fast > slow, "the slow member has the smaller part"


def test_batch_norm_in_groups_counts_every_micro_batch_once(tmp_path: Path) -> None:
    case = CASE | {"settings": {"every_steps": 2, "groups": GROUPS}, "batch_norm": True}
    told = run("averaging_cases.py:train", 3, tmp_path, args=case)
    check(told, case)
    alone = run("averaging_cases.py:train", 3, tmp_path, args=case | {"settings": {"every_steps": 2}})
    where = 6 * 6 + 6 + 4 * 6  # the layer's count of micro-batches
    assert told[0]["parameters"][where] == alone[0]["parameters"][where] == 2 * 120 / 8 * 3


def test_a_training_in_groups_resumes(tmp_path: Path) -> None:
    path = str(tmp_path / "saved.pt")
    case = CASE | {"settings": {"every_steps": 2, "groups": GROUPS}, "save": path}
    check(run("averaging_cases.py:train", 3, tmp_path, args=case), case)
    again = run("averaging_cases.py:train", 3, tmp_path, args=case | {"load": path, "save": None})
    assert again[0]["parameters"] == again[1]["parameters"] == again[2]["parameters"]
    assert sum(sum(record["samples"]) for record in again[0]["records"]) == case["length"]


def test_members_of_a_group_are_told_facts_and_sums_of_their_own(tmp_path: Path) -> None:
    told = run("averaging_cases.py:group_facts", 3, tmp_path, args={"groups": [[2, 0], [1]], "large": 1 << 20})
    names = [{"name": "worker 2" * 3}, {"name": "worker 0"}]
    assert told[0] == [1, 2, names, [4.0] * 3, [4.0, 4.0], True]
    assert told[2] == [0, 2, names, [4.0] * 3, [4.0, 4.0], True]
    assert told[1][:4] == [0, 1, [{"name": "worker 1" * 2}], [1.0] * 3]


def test_a_dead_member_is_named(tmp_path: Path) -> None:
    with Crew("averaging_cases.py:a_member_fails", 3, tmp_path, args={"how": "", "folder": str(tmp_path)}) as crew:
        crew.wait_for("begun")
        os.kill(crew.workers[1].pid, signal.SIGKILL)
        outcomes = crew.wait()
    for rank in (0, 2):
        assert outcomes[rank].code == 75
        assert tells(outcomes[rank], rank, "worker 1 (cpu) went silent")


def test_a_member_that_makes_a_call_by_itself_is_named(tmp_path: Path) -> None:
    args = {"how": "agrees alone", "folder": str(tmp_path)}
    with Crew("averaging_cases.py:a_member_fails", 3, tmp_path, args=args) as crew:
        outcomes = crew.wait()
    assert outcomes[0].code == outcomes[1].code == 75
    assert "worker 1 (cpu) called the round after" in outcomes[0].err
    assert "worker 0 (cpu) called local step" in outcomes[0].err


def test_a_bad_gradient_is_put_down_to_the_right_worker(tmp_path: Path) -> None:
    args = {"how": "bad gradient", "folder": str(tmp_path)}
    with Crew("averaging_cases.py:a_member_fails", 3, tmp_path, args=args) as crew:
        outcomes = crew.wait()
    assert "worker 1 had NaN or infinite gradients" in outcomes[0].err
    assert "worker 1 had NaN or infinite gradients" in outcomes[1].err


def test_emulated_failures_are_refused_in_groups(tmp_path: Path) -> None:
    case = CASE | {"settings": {"every_steps": 2, "groups": GROUPS}}
    with Crew("averaging_cases.py:train", 3, tmp_path, args=case, env={"PACELINE_FAILURES": "lost:0.5"}) as crew:
        outcomes = crew.wait()
    assert all("emulated failures cannot be had with groups" in outcome.err for outcome in outcomes)
