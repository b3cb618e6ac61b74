"""What is tracked and has a state that no peer could be given: it is refused early, and a newcomer harms nobody."""

from __future__ import annotations

from pathlib import Path

import pytest
from flock import sound
from programs import elastic

pytestmark = pytest.mark.fleet

TRACKS = """
import time
import numpy as np
class Meter:
    def state_dict(self):
        if os.path.exists(os.environ["ODD"]) and os.environ["PACELINE_WORKER"] != "2":
            PROBLEM
        return {"values": [0.0]}
    def load_state_dict(self, state):
        pass
with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fleet.track(optimizer=optimizer, meter=Meter())
    for step in fleet.steps(data, global_batch=12, micro_batch=3, epochs=20):
        for a, b in step:
            time.sleep(0.005 if os.path.exists(os.environ["LEFT"]) else 0.03)
            step.backward(loss_fn(model(a), b))
        step.commit(optimizer)
    result = {"weights": flat(model)}
"""
PROBLEMS = {
    "a NumPy array": 'return {"values": np.zeros(1)}',
    "an error": 'raise RuntimeError("no state is there")',
}


def test_a_state_that_is_not_plain_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "odd").touch()
    script = TRACKS.replace("PROBLEM", PROBLEMS["a NumPy array"])
    env = {"ODD": str(tmp_path / "odd"), "LEFT": str(tmp_path / "left")}
    with elastic(tmp_path, script, env=env) as fleet:
        ended = fleet.wait()
        assert not fleet.records()
    assert [one.code for one in ended.values()] == [1, 1]
    assert "the state of meter['values'] is a numpy.ndarray" in ended[0].err


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_newcomer_that_can_be_given_no_state_ends_alone(tmp_path: Path, problem: str) -> None:
    env = {"ODD": str(tmp_path / "odd"), "LEFT": str(tmp_path / "left")}
    with elastic(tmp_path, TRACKS.replace("PROBLEM", PROBLEMS[problem]), env=env) as fleet:
        fleet.wait_for_step(3)
        (tmp_path / "odd").touch()
        fleet.start(2)
        fleet.wait_for_end(2)
        (tmp_path / "left").touch()
        ended = fleet.wait()
    run, _ = sound(tmp_path, ended, ended={0, 1}, epochs=20, length=48)
    assert ended[2].code == 75
    assert "a newcomer was given no state" in ended[2].err
    assert any("was given no state" in one.text for change in run.changes for one in change.left)
