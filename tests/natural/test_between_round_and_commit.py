"""A step whose round is over and that this worker has yet to commit: who is lost, saves or calls then."""

from __future__ import annotations

from pathlib import Path

import pytest
from flock import sound
from programs import elastic, refusals, results

pytestmark = pytest.mark.fleet

LATE_LEADER = """
import time
from pathlib import Path
from deadline_cases import Deadline

folder = os.environ["KEPT"]
with paceline.join(Deadline(0.2)) as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fleet.track(optimizer=optimizer)
    fleet.autosave(folder, every_steps=1, keep=100)
    steps = fleet.steps(data, global_batch=12, micro_batch=2, epochs=2)._loop
    records = []
    for step in steps:
        fleet._saving._autosaver._finish()  # each step has its checkpoint
        for a, b in step:
            time.sleep(0.002)
            step.backward(loss_fn(model(a), b))
        step.commit(optimizer)
        records.append(step.record)
        while fleet.rank == 0 and step.index == 2 and steps.training.index < 4:
            time.sleep(0.005)  # the epoch's last step is made without the leader

def done(dealing):
    pieces = [*dealing["pool"], *(piece for queue in dealing["queues"] for piece in queue)]
    return dealing["length"] - sum(end - begin for begin, end in pieces)

kept = [torch.load(path)["steps"] for path in sorted(Path(folder).iterdir())] if fleet.rank == 0 else []
kept = [one for one in kept if one["dealing"] is not None]
result = {
    "shares": [record.samples for record in records],
    "steps": [one["step"] for one in kept],
    "done": [done(one["dealing"]) for one in kept],
    "counted": [
        sum(sum(r.samples) for r in records if r.step < one["step"] and r.epoch == one["epoch"]) for one in kept
    ],
}
"""


def test_a_late_leader_saves_as_done_what_its_updates_counted(tmp_path: Path) -> None:
    told, _ = results(tmp_path, LATE_LEADER, PACELINE_PACE="", KEPT=str(tmp_path / "kept"))
    assert told["shares"][3][0] == 0, "the other worker had its share and, in a lap, the leader's"
    assert {3, 4} <= set(told["steps"]), "before and behind the step with a lap"
    assert told["done"] == told["counted"]


def test_a_worker_lost_in_a_call_between_reduce_and_commit_takes_nobody_with_it(tmp_path: Path) -> None:
    script = """
    steps = []
    with paceline.join() as fleet:
        model = fleet.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fleet.track(optimizer=optimizer)
        for step in fleet.steps(data, global_batch=6, micro_batch=2, epochs=1):
            for a, b in step:
                step.backward(loss_fn(model(a), b))
            step.reduce()
            optimizer.step()
            if step.index == 3 and os.environ["PACELINE_WORKER"] == "2":
                os._exit(9)
            fleet.any(False)
            step.commit()
            steps.append(step.index)
        result = {"weights": flat(model), "steps": steps}
    """
    with elastic(tmp_path, script, workers=3) as fleet:
        fleet.wait_for_end(2)
        fleet.tell_death(2)
        ended = fleet.wait()
    run, told = sound(tmp_path, ended, ended={0, 1}, epochs=1, length=48)
    assert [one["steps"] for one in told] == [list(range(8))] * 2
    assert [record.step for record in run.records] == list(range(8))
    assert [len(record.samples) for record in run.records] == [3] * 4 + [2] * 4


def test_a_save_between_reduce_and_commit_is_refused(tmp_path: Path) -> None:
    script = """
    with paceline.join() as fleet:
        model = fleet.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fleet.track(optimizer=optimizer)
        for step in fleet.steps(data, global_batch=12, micro_batch=3):
            for a, b in step:
                step.backward(loss_fn(model(a), b))
            step.reduce()
            optimizer.step()
            fleet.save(os.environ["CHECKPOINT"])
            step.commit()
    """
    path = tmp_path / "checkpoint"
    assert "save behind step.commit" in refusals(tmp_path, script, CHECKPOINT=str(path))
    assert not path.exists()


@pytest.mark.parametrize("where", ["behind reduce", "in the micro-batches"])
def test_a_call_in_the_middle_of_a_local_step_is_refused(tmp_path: Path, where: str) -> None:
    script = """
    with paceline.join(combine=paceline.Averaging(every_steps=4)) as fleet:
        model = fleet.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in fleet.steps(data, global_batch=12, micro_batch=3):
            for a, b in step:
                step.backward(loss_fn(model(a), b))
                if step.index == 1 and WHERE == "in the micro-batches":
                    fleet.any(False)
            step.reduce()
            if step.index == 1:
                fleet.any(False)
            optimizer.step()
            step.commit()
    """
    said = refusals(tmp_path, script.replace("WHERE", repr(where)))
    assert "in the middle of local step 1" in said
