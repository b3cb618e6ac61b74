"""Errors of the script's own code inside of a call of all workers, in an elastic fleet: they end whom they concern."""

from __future__ import annotations

from pathlib import Path

import pytest
from flock import sound
from programs import elastic

pytestmark = pytest.mark.fleet

FAILS = """
with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fleet.track(optimizer=optimizer)
    def failing():
        raise RuntimeError("shapes cannot be multiplied")
    for step in fleet.steps(data, global_batch=6, micro_batch=2):
        for a, b in step:
            step.backward(loss_fn(model(a), b))
        step.commit(optimizer)
        if step.index == 3 and (os.environ["PACELINE_WORKER"] == "1" or ALL):
            optimizer.state_dict = failing
            score = lambda a, b: failing()
        else:
            score = lambda a, b: {"hit": model(a).argmax(1) == b}
        CALL
    result = {"weights": flat(model)}
"""
CALLS = {
    "evaluate": "fleet.evaluate(score, data)",
    "predict": 'fleet.predict(lambda a, b: score(a, b)["hit"], data)',
    "save": 'fleet.save(os.environ["CHECKPOINT"])',
}


@pytest.mark.parametrize("call", CALLS)
def test_a_runtime_error_of_all_scripts_in_a_call_ends_the_run(tmp_path: Path, call: str) -> None:
    script = FAILS.replace("CALL", CALLS[call]).replace("ALL", "True")
    with elastic(tmp_path, script, env={"CHECKPOINT": str(tmp_path / "saved")}) as fleet:
        ended = fleet.wait()
    assert [one.code for one in ended.values()] == [1, 1]
    assert all("RuntimeError: shapes cannot be multiplied" in one.err for one in ended.values())


def test_a_runtime_error_of_one_script_in_a_call_ends_that_worker_alone(tmp_path: Path) -> None:
    script = FAILS.replace("CALL", CALLS["evaluate"]).replace("ALL", "False")
    with elastic(tmp_path, script, workers=3) as fleet:
        ended = fleet.wait()
    run, _ = sound(tmp_path, ended, ended={0, 2}, epochs=1, length=48)
    assert ended[1].code == 1
    assert "shapes cannot be multiplied" in run.changes[0].left[0].text
