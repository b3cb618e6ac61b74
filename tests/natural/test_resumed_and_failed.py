"""A run that was loaded from a checkpoint and then fails: it must not be said that all was for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import outcomes

from paceline.launcher.output import resume_hint
from paceline.observe import read_log

pytestmark = pytest.mark.fleet

TRAIN = """
import sys
with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fleet.track(optimizer=optimizer)
    fleet.load("best.pt", missing_ok=True)
    for step in fleet.steps(data, global_batch=12, micro_batch=3, epochs=2):
        for x, y in step:
            step.backward(loss_fn(model(x), y))
        step.commit(optimizer)
        if step.index == 2:
            fleet.save("best.pt")
            result = "saved"
            break
        assert step.index < 5, "the disk is full"
"""


def test_a_run_that_loaded_a_checkpoint_and_failed_names_it(tmp_path: Path) -> None:
    script = TRAIN.replace("best.pt", str(tmp_path / "best.pt"))
    first = outcomes(tmp_path / "first", script)
    assert [outcome.value for outcome in first] == ["saved", "saved"], first[0].err
    second = outcomes(tmp_path / "second", script)
    assert all("the disk is full" in outcome.err for outcome in second)
    hint = resume_hint(read_log(tmp_path / "second" / "run"))
    assert hint.startswith(f"Nothing was saved since {tmp_path / 'best.pt'} (step 3) was loaded")
