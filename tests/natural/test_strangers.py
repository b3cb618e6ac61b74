"""Workers that another launcher has started with other arguments, or with another script, than the fleet's."""

from __future__ import annotations

from pathlib import Path

import pytest
from flock import sound
from programs import elastic

pytestmark = pytest.mark.fleet

DIFFERS = {
    "pace": "paceline.join(): pace is 'equal'",
    "model": "fleet.model(): 2.bias is '[3]",
    "batch": "fleet.steps(): global_batch is 12",
    "test set": "fleet.evaluate(): dataset length is 48",
    "samples": "the workers' data differ",
}
SCRIPT = """
other = os.environ["PACELINE_WORKER"] == "1" and DIFFERS
with paceline.join(seed=0) as fleet:
    model = fleet.model(network() if other != "model" else network()[:2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fleet.track(optimizer=optimizer)
    batch = 6 if other == "batch" else 12
    held_out = torch.utils.data.Subset(data, range(40)) if other == "test set" else data
    if other == "samples":
        data = TensorDataset(-x, y)
    for step in fleet.steps(data, global_batch=batch, micro_batch=3, epochs=2):
        for a, b in step:
            step.backward(loss_fn(model(a), b))
        step.commit(optimizer)
        if step.index == 3:
            fleet.evaluate(lambda a, b: {"hit": model(a).argmax(1) == b}, held_out)
    result = {"weights": flat(model)}
"""


@pytest.mark.parametrize("what", DIFFERS)
def test_a_worker_of_another_launcher_that_differs_is_refused_alone(tmp_path: Path, what: str) -> None:
    pace = {"PACELINE_PACE": "adaptive"} if what == "pace" else {}
    own = {1: {"PACELINE_LAUNCHER": "2", **pace}}
    with elastic(tmp_path, SCRIPT.replace("DIFFERS", repr(what)), workers=3, own=own) as fleet:
        ended = fleet.wait()
    sound(tmp_path, ended, ended={0, 2}, epochs=2, length=48)
    assert ended[1].code != 0
    assert DIFFERS[what] in ended[1].err, ended[1].err[-2000:]
    assert what == "samples" or "the others go on without it" in ended[1].err


def test_workers_of_one_launcher_that_differ_end_together(tmp_path: Path) -> None:
    with elastic(tmp_path, SCRIPT.replace("DIFFERS", repr("batch")), workers=3) as fleet:
        ended = fleet.wait()
    assert all(DIFFERS["batch"] in one.err for one in ended.values())
