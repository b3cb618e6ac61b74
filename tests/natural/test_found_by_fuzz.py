"""What the fuzz of natural use (test_fuzz_of_habits.py) found, each as the smallest script that shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import elastic, refusals, results

pytestmark = pytest.mark.fleet

TRAINING = """
import sys
path, load = sys.argv[1:]
with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    SETUP
    if load:
        fleet.load(load)
    for step in fleet.steps(data, global_batch=12, micro_batch=3, epochs=2):
        for a, b in step:
            step.backward(loss_fn(model(a), b))
            INSIDE
        step.commit(optimizer)
        AFTER
        if step.index == 5:
            fleet.save(path)
    result = [step.index, flat(model), optimizer.param_groups[0]["lr"]]
"""


def script(setup: str, *, inside: str = "pass", after: str = "pass") -> str:
    return TRAINING.replace("SETUP", setup).replace("INSIDE", inside).replace("AFTER", after)


def refused_when_loaded(folder: Path, text: str) -> str:
    path = str(folder / "c.pt")
    results(folder / "before", text, args=[path, ""])
    return refusals(folder / "after", text, args=[path, path])


SCHEDULE = "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)"


@pytest.mark.parametrize(
    ("track", "named"),
    [("", "optimizer=SGD, scheduler=StepLR"), ("; fleet.track(scheduler=scheduler)", "optimizer=SGD")],
    ids=["nothing tracked", "the schedule tracked"],
)
def test_plain_sgd_has_state_where_a_schedule_has_changed_its_rate(tmp_path: Path, track: str, named: str) -> None:
    said = refused_when_loaded(tmp_path, script(SCHEDULE + track, after="scheduler.step()"))
    assert f"call fleet.track({named}) before it" in said


@pytest.mark.parametrize(("saved", "made"), [(5, "before loading"), (5, "after it"), (7, "before loading")])
def test_an_average_of_the_weights_that_began_anew_after_loading_is_refused(
    tmp_path: Path, saved: int, made: str
) -> None:
    ema = "ema = torch.optim.swa_utils.AveragedModel(model)"
    text = script(f"fleet.track(optimizer=optimizer); {ema}", after="ema.update_parameters(model)")
    text = text.replace("step.index == 5", f"step.index == {saved}")
    if made == "after it":
        text = text.replace(f"; {ema}", "").replace("    for step", f"    {ema}\n    for step")
    assert "began anew: call fleet.track(ema=AveragedModel)" in refused_when_loaded(tmp_path, text)


def test_what_is_tracked_after_loading_may_begin_anew(tmp_path: Path) -> None:
    path = str(tmp_path / "c.pt")
    results(tmp_path / "before", script("fleet.track(optimizer=optimizer)"), args=[path, ""])
    setup = "fleet.track(optimizer=optimizer); ema = torch.optim.swa_utils.AveragedModel(model)"
    text = script(setup, after="ema.update_parameters(model)")
    text = text.replace("fleet.load(load)", "fleet.load(load); fleet.track(ema=ema)")
    assert results(tmp_path / "after", text, args=[path, path])[0][0] == 7


def test_who_only_evaluates_an_average_of_its_own_is_not_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "c.pt")
    results(tmp_path / "before", script("fleet.track(optimizer=optimizer)"), args=[path, ""])
    setup = "fleet.track(optimizer=optimizer); ema = torch.optim.swa_utils.AveragedModel(model)"
    assert results(tmp_path / "after", script(setup), args=[path, path])[0][0] == 7


def test_a_rate_set_before_the_micro_batches_or_before_the_commit_is_no_concern(tmp_path: Path) -> None:
    text = script("fleet.track(optimizer=optimizer)")
    text = text.replace(
        "    for a, b in step:", "    optimizer.param_groups[0]['lr'] *= 0.9\n        for a, b in step:"
    )
    text = text.replace("    step.commit(", "    optimizer.param_groups[0]['lr'] *= 0.9\n        step.commit(")
    two = results(tmp_path / "two", text, args=[str(tmp_path / "c.pt"), ""])
    assert two[0] == two[1]
    assert two[0][2] == pytest.approx(0.1 * 0.9**16)


PHASES = """
import sys
path, load = sys.argv[1:]
made = []
with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = fleet.load(load)["phase"] if load else 0
    for phase in range(first, 2):
        for step in fleet.steps((data, TensorDataset(-x, y))[phase], global_batch=12, micro_batch=3, epochs=2):
            for a, b in step:
                step.backward(loss_fn(model(a), b))
            step.commit(optimizer)
            made.append(phase)
        if phase == 0:
            fleet.save(path, extra={"phase": 1})
    result = made
"""


def test_a_script_that_leaves_its_first_phase_out_does_not_leave_the_second_out_in_silence(tmp_path: Path) -> None:
    path = str(tmp_path / "c.pt")
    assert results(tmp_path / "before", PHASES, args=[path, ""])[0] == [0] * 8 + [1] * 8
    said = refusals(tmp_path / "unsaid", PHASES, args=[path, path])
    assert 'fleet.load(..., loops="rest")' in said
    rest = PHASES.replace("fleet.load(load)", 'fleet.load(load, loops="rest")')
    assert results(tmp_path / "rest", rest, args=[path, path])[0] == [1] * 8


def test_a_second_phase_that_is_resumed_counts_its_own_epochs(tmp_path: Path) -> None:
    path = str(tmp_path / "c.pt")
    text = PHASES.replace("fleet.load(load)", 'fleet.load(load, loops="rest")')
    text = text.replace("made.append(phase)", "made.append([phase, step.epoch, step.index, step.loss])")
    whole = results(tmp_path / "before", text, args=[path, ""])[0]
    assert results(tmp_path / "rest", text, args=[path, path])[0] == whole[8:]


@pytest.mark.parametrize("end", ["pass", "break"])
def test_an_average_that_began_anew_is_refused_though_only_one_step_was_left(tmp_path: Path, end: str) -> None:
    setup = "fleet.track(optimizer=optimizer); ema = torch.optim.swa_utils.AveragedModel(model)"
    text = script(setup, after="ema.update_parameters(model)").replace("step.index == 5", "step.index == 6")
    text = text.replace("    result =", f"        if step.index == 7:\n            {end}\n    result =")
    assert "began anew: call fleet.track(ema=AveragedModel)" in refused_when_loaded(tmp_path, text)


def test_a_checkpoint_that_does_not_fit_the_rest_of_a_script_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    path = str(tmp_path / "c.pt")
    text = PHASES.replace("TensorDataset(-x, y)", "TensorDataset(-x[:30], y[:30])")
    text = text.replace("fleet.save(", "fleet.track(more=nn.Linear(1, 1))\n            fleet.save(")
    results(tmp_path / "before", text, args=[path, ""])
    assert "holds more, which the script does not track" in refusals(tmp_path / "after", text, args=[path, path])


WAITING = """
from pathlib import Path
import time

FOLDER = Path(os.environ["PACELINE_RUN_DIR"]).parent
returned = os.environ.get("RETURNED")

def wait_for(name):
    while not (FOLDER / name).exists():
        time.sleep(0.01)

with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fleet.track(optimizer=optimizer)
    for epoch in range(14):
        steps = fleet.steps(data, global_batch=12, micro_batch=3)
        if returned and epoch == 2:
            (FOLDER / "waiting").touch()
        for step in steps:
            for a, b in step:
                step.backward(loss_fn(model(a), b))
            step.commit(optimizer)
            if epoch > 2 and not (FOLDER / "over").exists():
                time.sleep(0.2)
        if not returned and epoch == 2:
            (FOLDER / "between").touch()
            wait_for("go")
    result = flat(model)
"""


def test_a_worker_that_waits_to_enter_while_the_fleet_begins_another_loop_enters_there(tmp_path: Path) -> None:
    with elastic(tmp_path, WAITING) as fleet:
        fleet.wait_for("between")
        fleet.kill(1)
        fleet.start(1, RETURNED="1")
        fleet.wait_for("waiting")
        (tmp_path / "go").touch()
        fleet.wait_until(lambda: any(one["step"] >= 12 and len(one["workers"]) == 2 for one in fleet.records()))
        (tmp_path / "over").touch()
        ended = fleet.wait()
    assert [one.code for one in ended.values()] == [0, 0], fleet.complaints()
    assert ended[0].value == ended[1].value
