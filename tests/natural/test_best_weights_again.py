"""``fleet.load`` behind a loop of the same run: the best weights for the last evaluation, and for what comes then."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import outcomes, refusals, results

pytestmark = pytest.mark.fleet

BEST = """
path = os.environ["CHECKPOINT"]

def total(model):
    with torch.no_grad():
        return float(loss_fn(model(x), y) * len(x))

with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fleet.track(optimizer=optimizer)
    fleet.state.saved = 0
    for step in fleet.steps(data, global_batch=12, micro_batch=3, epochs=4):
        for a, b in step:
            step.backward(loss_fn(model(a), b))
        step.commit(optimizer)
        if step.ends_epoch and step.epoch == 1:
            fleet.state.saved = 1
            fleet.save(path)
            fleet.state.saved = 2
        LEAVE
    fleet.load(path)
    best = network()
    best.load_state_dict(torch.load(path)["models"][0])
    found = fleet.evaluate(lambda a, b: {"loss": loss_fn(model(a), b) * len(a)}, data, sums="loss")["loss"]
    result = {"weights": flat(model) == flat(best), "apart": abs(found - total(best)), "state": fleet.state.saved}
    for step in fleet.steps(data, global_batch=12, micro_batch=3, epochs=1):
        for a, b in step:
            step.backward(loss_fn(model(a), b))
        step.commit(optimizer)
    result["epoch"] = step.epoch
"""


@pytest.mark.parametrize(
    "how",
    [
        {"PACELINE_PACE": "equal"},
        {"PACELINE_PACE": "joint"},
        {"PACELINE_COMBINE": "average"},
        {"PACELINE_COMBINE": "elastic-average"},
    ],
    ids=["gradients", "deadlines", "averages", "elastic averages"],
)
@pytest.mark.parametrize("leave", ["pass", "if step.ends_epoch and step.epoch == 2: break"], ids=["over", "left"])
def test_the_best_weights_are_back_and_what_comes_then_goes_on_from_them(
    tmp_path: Path, how: dict[str, str], leave: str
) -> None:
    told = results(tmp_path, BEST.replace("LEAVE", leave), CHECKPOINT=str(tmp_path / "best"), **how)
    for one in told:
        assert one.pop("apart") < 1e-9
        assert one.pop("epoch") > 2, "passes are not set back"
        assert one == {"weights": True, "state": 1}


def test_in_the_middle_of_a_loop_it_is_refused(tmp_path: Path) -> None:
    said = refusals(
        tmp_path, BEST.replace("LEAVE", "if step.index == 9: fleet.load(path)"), CHECKPOINT=str(tmp_path / "b")
    )
    assert "call it before the first step, or behind the loop" in said


SCHEDULED = """
with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = fleet.steps(data, global_batch=12, micro_batch=3, epochs=4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, LENGTH * len(steps))
    fleet.track(optimizer=optimizer, schedule=schedule)
    for step in steps:
        for a, b in step:
            step.backward(loss_fn(model(a), b))
        step.commit(optimizer)
        schedule.step()
        if step.ends_epoch and step.epoch == 0:
            fleet.save(os.environ["CHECKPOINT"])
    fleet.load(os.environ["CHECKPOINT"])
"""


@pytest.mark.parametrize(("length", "warned"), [(1, False), (2, True)])
def test_a_schedule_is_judged_by_where_the_loop_left_it(tmp_path: Path, length: int, warned: bool) -> None:
    (ended,) = outcomes(
        tmp_path, SCHEDULED.replace("LENGTH", str(length)), workers=1, CHECKPOINT=str(tmp_path / "best")
    )
    assert ended.code == 0, ended.err[-3000:]
    assert ended.err.count("steps when training ended") == warned
