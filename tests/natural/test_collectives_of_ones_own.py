"""Collectives of the script's own in the inner loop: a fleet that waits for one for ever says so, and ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import outcomes, results

pytestmark = pytest.mark.fleet

SCRIPT = """
import torch.distributed as dist
from paceline.transport import heartbeat

heartbeat.FOREIGN_S = 2.0
dist.init_process_group("gloo")

def summed(loss):
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total)

with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in fleet.steps(data, global_batch=12, micro_batch=3):
        for a, b in step:
            loss = loss_fn(model(a), b)
            step.backward(loss)
            INSIDE
        step.commit(optimizer)
        BEHIND
    result = flat(model)
"""


def script(inside: str = "pass", behind: str = "pass") -> str:
    return SCRIPT.replace("INSIDE", inside).replace("BEHIND", behind)


def test_one_that_workers_call_unequally_often_is_named_with_its_line(tmp_path: Path) -> None:
    ended = outcomes(tmp_path, script(inside="summed(loss)"), PACELINE_PACE="fixed:1,3")
    assert all(one.code for one in ended)
    said = "\n".join(one.err for one in ended)
    assert "has been in torch.distributed.all_reduce, called in train.py, line" in said
    assert "and the others wait in the round of step 0: neither can end" in said
    assert "step.add(name=...)" in said


def test_one_behind_the_commit_is_right(tmp_path: Path) -> None:
    first, second = results(tmp_path, script(behind="summed(loss)"), PACELINE_PACE="fixed:1,3")
    assert first == second
