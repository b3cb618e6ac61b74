"""The plainest training, as every page shows it: the rig itself, and what the other tests compare with."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import apart, results

pytestmark = pytest.mark.fleet

PLAIN = """
with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fleet.track(optimizer=optimizer)
    for step in fleet.steps(data, global_batch=12, micro_batch=3, epochs=2):
        for x, y in step:
            step.backward(loss_fn(model(x), y))
        step.commit(optimizer)
    result = flat(model)
"""


def test_two_workers_train_as_one_does(tmp_path: Path) -> None:
    two, alone = results(tmp_path / "two", PLAIN), results(tmp_path / "one", PLAIN, workers=1)
    assert two[0] == two[1]
    assert apart(two[0], alone[0]) < 1e-12
