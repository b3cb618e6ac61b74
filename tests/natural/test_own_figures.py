"""``fleet.log`` as people write it, in the middle of the loop, on every worker."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from programs import elastic, refusals, results

pytestmark = pytest.mark.fleet

FIXED = """
told = []
with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fleet.track(optimizer=optimizer)
    fleet.log_to(lambda figures, step: told.append([step, figures["loss"]]))
    losses = []
    for step in fleet.steps(data, global_batch=12, micro_batch=3):
        for x, y in step:
            step.backward(loss_fn(model(x), y))
        step.commit(optimizer)
        fleet.log(loss=step.loss)
        losses.append([step.index, step.loss])
    result = [told, losses]
"""

COMING_AND_GOING = """
import json, sys, time
from pathlib import Path
folder = Path(os.environ["FIGURES"])

class Run:
    '''As a wandb run: whoever makes one writes a file.'''
    def __init__(self):
        self.file = open(folder / f"figures.{os.environ['PACELINE_WORKER']}", "a", buffering=1)
    def log(self, data, step=None, commit=None):
        self.file.write(json.dumps([step, data["loss"]]) + "\\n")

with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fleet.track(optimizer=optimizer)
    fleet.log_to(make=Run)
    for step in fleet.steps(data, global_batch=12, micro_batch=3, epochs=1000):
        for x, y in step:
            step.backward(loss_fn(model(x), y))
        step.commit(optimizer)
        fleet.log(loss=step.loss)
        if fleet.any((folder / "enough").exists()):
            break
        time.sleep(0.02)  # nothing to hurry for
    result = step.index
"""


def test_figures_are_written_once_by_the_leader(tmp_path: Path) -> None:
    (told, losses), (others, same) = results(tmp_path, FIXED)
    assert told == losses == same
    assert len(told) == 4
    assert others == []


def test_when_the_leader_is_lost_the_next_one_makes_a_writer_of_its_own(tmp_path: Path) -> None:
    with elastic(tmp_path, COMING_AND_GOING, workers=2, env={"FIGURES": str(tmp_path)}) as flock:
        leader = _first_with_figures(tmp_path, {0, 1})
        flock.wait_for_step(3)
        flock.kill(leader)
        other = _first_with_figures(tmp_path, {1 - leader})
        (tmp_path / "enough").touch()
        flock.workers[other].wait(timeout=60)
    first, second = _steps(tmp_path, leader), _steps(tmp_path, other)
    assert first == list(range(len(first)))
    assert second == list(range(second[0], second[0] + len(second)))
    assert len(first) - 1 <= second[0] <= len(first) + 1, "what a leader did not live to write may be missing"


def _first_with_figures(folder: Path, slots: set[int]) -> int:
    until = time.monotonic() + 60
    while not (found := [slot for slot in slots if _steps(folder, slot)]):
        assert time.monotonic() < until, "nobody wrote figures"
        time.sleep(0.02)
    return found[0]


def _steps(folder: Path, slot: int) -> list[int]:
    file = folder / f"figures.{slot}"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)[0] for line in lines]


BEST_OF_ITS_OWN = """
import copy
with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = copy.deepcopy(model.state_dict())
    for step in fleet.steps(data, global_batch=12, micro_batch=3):
        for a, b in step:
            step.backward(loss_fn(model(a), b))
        step.commit(optimizer)
    if fleet.rank == 1:  # as where a list of this worker's own losses chooses
        model.load_state_dict(kept)
    CALL
"""


@pytest.mark.parametrize(
    "call",
    [
        "fleet.evaluate(lambda a, b: {'right': model(a).argmax(1) == b}, data)",
        "fleet.predict(lambda a, b: model(a), data)",
    ],
    ids=["evaluate", "predict"],
)
def test_unlike_weights_are_refused_where_they_are_evaluated(tmp_path: Path, call: str) -> None:
    said = refusals(tmp_path, BEST_OF_ITS_OWN.replace("CALL", call))
    assert (
        f"at fleet.{call[6:14].partition('(')[0]}() worker 1 does not hold what worker 0 does: parameter 0.weight"
        in said
    )
    assert "decide by step.loss or fleet.evaluate" in said
