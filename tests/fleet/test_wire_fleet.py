"""Rounds over a narrower wire with real processes: one machine's training to the wire's precision, equal replicas, and
nothing lost when workers die."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import elastic_cases
import exact_cases
import pytest
import torch
from crew import run
from flock import Flock, sound
from test_deadlines import CASE, one_machine, positions
from test_exactness import random_cases

pytestmark = pytest.mark.fleet

PRECISION = {"bf16": 2**-8, "fp16": 2**-11}
"""By which a number is off that was rounded once, of itself, at most."""


def over(wire: str) -> dict[str, str]:
    return {"PACELINE_COMM_DTYPE": wire, "WIRE_ALL": "1"}


def error(ours: Any, theirs: torch.Tensor, start: torch.Tensor) -> float:
    """How far two trainings end apart, over the way that one of them has gone."""
    apart = torch.as_tensor(ours, dtype=torch.float64) - theirs
    return float(apart.norm() / (theirs - start).norm())


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


@pytest.mark.parametrize(("size", "wire"), [(2, "fp16"), (3, "bf16")])
def test_ten_steps_equal_one_machines_to_the_wires_precision(size: int, wire: str, tmp_path: Path) -> None:
    cases = [case | {"optimizer": "sgd"} for case in random_cases(6, "float32", seed=size)]
    told = run("exact_cases.py:train_all", size, tmp_path, args=cases, env=over(wire))
    for number, case in enumerate(cases):
        ours = told[0][number]
        parameters, _ = exact_cases.one_machine(case, list(exact_cases.batches_of(case, ours["batches"])))
        off = error(ours["parameters"], parameters, flat(exact_cases.build(torch.float32)))
        assert PRECISION[wire] / 100 < off < PRECISION[wire], (case, off)
        assert all(other[number] == ours for other in told), "workers disagree on parameters, losses or records"


def test_rounds_with_a_deadline_too_with_a_loss_scale_and_clipping(tmp_path: Path) -> None:
    case = {**CASE, "epochs": 1, "chance": 0.05, "long_s": 0.1}
    told = run("deadline_cases.py:train", 3, tmp_path, args=case, env=over("bf16"))
    for other in told[1:]:
        assert all(other[key] == told[0][key] for key in ("parameters", "ema", "optimizer", "scale"))
    steps = told[0]["steps"]
    assert set(positions(steps).values()) == {1}
    assert len(positions(steps)) == case["length"]
    off = error(told[0]["parameters"], one_machine(case, steps), flat(exact_cases.build(torch.float64)))
    assert 1e-6 < off < 2 * PRECISION["bf16"]


@pytest.mark.parametrize(("point", "sites"), [("in round", "aaaa"), ("after round", "aaaa"), ("in round", "abab")])
def test_the_leader_may_die_in_a_round_that_is_handed_over_or_run_again(point: str, sites: str, tmp_path: Path) -> None:
    """Between two sites the leader is one of those who cross."""
    args, own = {"die": {"0": [[point, 7]]}}, {slot: {"PACELINE_SITE": site} for slot, site in enumerate(sites)}
    with Flock("elastic_cases.py:train", 4, tmp_path, args=args, env=over("bf16"), own=own) as flock:
        outcomes = flock.wait()
    _, values = sound(tmp_path, outcomes, ended={1, 2, 3}, epochs=4, length=elastic_cases.LENGTH)
    off = error(values[0]["weights"], torch.tensor(elastic_cases.replay(tmp_path)), flat(elastic_cases.network()))
    assert 1e-6 < off < PRECISION["bf16"]


def test_averages_in_int8_go_on_when_workers_die_and_come_back_and_another_wire_is_refused(tmp_path: Path) -> None:
    args = {"combine": "average", "settings": {"every_steps": 2}, "epochs": 16, "pause_s": 0.05}
    with Flock("elastic_averaging_cases.py:train", 3, tmp_path, args=args, env=over("int8")) as flock:
        flock.wait_for_step(6)
        flock.kill(1)
        flock.wait_for_workers(2)
        flock.start(3, PACELINE_COMM_DTYPE="bf16")
        flock.wait_for_end(3)
        flock.start(1)
        flock.wait_for_workers(3)
        outcomes = flock.hurry()
    sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=16, length=elastic_cases.LENGTH)
    assert "comm_dtype is 'bf16' here and 'int8' there" in outcomes[3].err
