"""Rounds beside local steps. Real processes."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from crew import run
from test_averaging import CASE, check, check_by_the_clock
from test_averaging_groups import LINE, local_steps, sgd

pytestmark = pytest.mark.fleet

SLOW = {"PACELINE_NETWORK": "1gbit,50ms"}
"""An emulated link on which a round takes a tenth of a second: many local steps of these small models."""


def test_an_update_lands_one_period_late(tmp_path: Path) -> None:
    """Where no round is over before the next one is due, it lands then, every time."""
    case = LINE | {"settings": {"every_steps": 2, "overlap": True}, "length": 24 * 8, "lands_late": True}
    told = run("averaging_cases.py:line", 3, tmp_path, args=case, env=SLOW)
    start = torch.zeros(2, dtype=torch.float64)
    own = [start.clone() for _ in told]
    landing: list[torch.Tensor] = []
    for ranges in told[0]["ranges"]:
        own = [sgd(w, local_steps(ranges, [rank], 8), case) for rank, w in enumerate(own)]
        if landing:
            own, start = _land(own, start, landing)
        landing = [w - start for w in own]
    own, start = _land(own, start, landing)
    assert len(told[0]["ranges"]) == 4
    for one in told:
        assert (torch.tensor(one["weight"], dtype=torch.float64) - start).abs().max() < 1e-12
    assert told[0]["weight"] == told[1]["weight"] == told[2]["weight"]


def _land(
    own: list[torch.Tensor], start: torch.Tensor, updates: list[torch.Tensor]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    average = sum(updates) / len(updates)
    return [w + average - update for w, update in zip(own, updates, strict=True)], start + average  # type: ignore[return-value]


@pytest.mark.parametrize("outer", [None, {"lr": 0.7, "momentum": 0.9}])
def test_evaluation_in_the_middle_of_a_round_finds_equal_replicas(
    outer: dict[str, float] | None, tmp_path: Path
) -> None:
    case = CASE | {"settings": {"every_steps": 2, "overlap": True}, "every": 3, "momentum": 0.5, "outer": outer}
    told = run("averaging_cases.py:train", 3, tmp_path, args=case, env=SLOW)
    check(told, case)
    assert len(told[0]["evaluations"]) > 4


def test_by_the_clock_unlike_workers_overlap_their_rounds(tmp_path: Path) -> None:
    case = CASE | {"settings": {"period_s": 0.3, "overlap": True}, "length": 600, "pace": "adaptive", "epochs": 2}
    env = SLOW | {"PACELINE_EMULATE": "1,1,4", "PACELINE_SAMPLE_MS": "6"}
    told = run("averaging_cases.py:train", 3, tmp_path, args=case, env=env)
    check(told, case)
    check_by_the_clock(told, 0.3)


def test_a_slow_link_is_hidden(tmp_path: Path) -> None:
    case: dict[str, Any] = CASE | {"length": 480, "epochs": 1, "settings": {"every_steps": 5}}
    env = SLOW | {"PACELINE_EMULATE": "1,1", "PACELINE_SAMPLE_MS": "5"}  # 0.3 s a period, 0.1 s a round
    waited = {}
    for overlap in (False, True):
        settings = case["settings"] | {"overlap": overlap}
        told = run("averaging_cases.py:train", 2, tmp_path, args=case | {"settings": settings}, env=env)
        check(told, case)
        waited[overlap] = list(zip(*(one["waited"] for one in told), strict=True))
    # Who came last waits for nothing but the round, and a machine that stalls at the wrong moment holds up one round.
    assert min(map(max, waited[False])) > 0.09, "every round takes its time"
    assert median(map(min, waited[True][:-1])) < 0.09, "all but the epoch's last are hidden"


@pytest.mark.parametrize("settings", [{"every_steps": 2}, {"period_s": 0.2}])
def test_groups_overlap_their_rounds_too(settings: dict[str, Any], tmp_path: Path) -> None:
    case = CASE | {"settings": settings | {"groups": [[0, 1], [2]], "overlap": True}, "length": 240}
    env = SLOW | {"PACELINE_EMULATE": "1,2,1", "PACELINE_SAMPLE_MS": "1"}
    told = run("averaging_cases.py:train", 3, tmp_path, args=case, env=env)
    check(told, case)
    assert told[0]["local"] == told[1]["local"]


def test_batch_norm_bears_rounds_beside_local_steps(tmp_path: Path) -> None:
    case = CASE | {"settings": {"every_steps": 2, "overlap": True}, "batch_norm": True}
    check(run("averaging_cases.py:train", 2, tmp_path, args=case, env=SLOW), case)


def test_a_training_resumes_at_another_size(tmp_path: Path) -> None:
    path = str(tmp_path / "saved.pt")
    case = CASE | {"settings": {"every_steps": 2, "overlap": True}, "save": path}
    check(run("averaging_cases.py:train", 3, tmp_path, args=case), case)
    again = run("averaging_cases.py:train", 2, tmp_path, args=case | {"load": path, "save": None})
    assert {record["epoch"] for record in again[0]["records"]} == {1}
    assert sum(sum(record["samples"]) for record in again[0]["records"]) == case["length"]


def test_a_loop_that_is_left_leaves_no_round_behind_and_replicas_equal(tmp_path: Path) -> None:
    case = CASE | {"settings": {"every_steps": 2, "overlap": True}, "leave_after": 4}
    told = run("averaging_cases.py:train", 3, tmp_path, args=case, env=SLOW)
    assert [one["local"] for one in told] == [5, 5, 5]


def test_one_worker_alone_has_nothing_to_overlap(tmp_path: Path) -> None:
    one = run("averaging_cases.py:train", 1, tmp_path, args=CASE | {"settings": {"every_steps": 3, "overlap": True}})
    two = run("averaging_cases.py:train", 1, tmp_path, args=CASE | {"combine": "gradients"})
    apart = torch.tensor(one[0]["parameters"]) - torch.tensor(two[0]["parameters"])
    assert apart.abs().max() < 1e-12
