"""``for epoch in range(E)`` around ``fleet.steps(..., epochs=1)``, and phase after phase: as one loop, and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import apart, back_after_a_kill, refusals, results

pytestmark = pytest.mark.fleet

NOISY = """
class Noisy(Dataset):
    def __len__(self):
        return len(x)
    def __getitem__(self, i):
        return x[i] + 0.1 * torch.randn(4, dtype=torch.float64), y[i]

def train(step, model, optimizer):
    for a, b in step:
        step.backward(loss_fn(nn.functional.dropout(model(a), 0.2), b))
    step.commit(optimizer)
"""

HEAD = (
    NOISY
    + """
noisy, seen = Noisy(), []
fleet = paceline.join()
model = fleet.model(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
fleet.track(optimizer=optimizer, scheduler=scheduler)
"""
)

TAIL = """
fleet.leave()
result = {"weights": flat(model), "seen": seen}
"""

ONE_LOOP = (
    HEAD
    + """
for step in fleet.steps(noisy, global_batch=12, micro_batch=3, epochs=4):
    train(step, model, optimizer)
    seen.append([step.epoch, step.index])
    if step.ends_epoch:
        scheduler.step()
"""
    + TAIL
)

OWN_LOOP = (
    HEAD
    + """
import sys
path, stop, way = sys.argv[1:] if len(sys.argv) > 1 else ("", "", "")
first = 0
if way:
    first = fleet.load(path, loops=way if way in ("all", "rest") else None)
first = first if way == "rest" else 0
for epoch in range(first, 4):
    for step in fleet.steps(DataLoader(noisy, shuffle=True), global_batch=12, micro_batch=3, epochs=1):
        train(step, model, optimizer)
        seen.append([step.epoch, step.index])
        if stop == "inside" and step.index == 9:
            fleet.save(path, extra=epoch)
            break
    else:
        scheduler.step()
        if path:
            fleet.save(path, extra=epoch + 1)
        if stop == "between" and epoch == 1:
            break
        continue
    break
"""
    + TAIL
)


def test_an_epoch_loop_of_ones_own_trains_as_one_loop_does(tmp_path: Path) -> None:
    whole = results(tmp_path / "whole", ONE_LOOP, workers=1)[0]
    own = results(tmp_path / "own", OWN_LOOP)
    assert own[0]["seen"] == whole["seen"] == [[step // 4, step] for step in range(16)]
    assert own[0] == own[1]
    assert apart(own[0]["weights"], whole["weights"]) < 1e-12


@pytest.mark.parametrize("stop", ["inside", "between"])
@pytest.mark.parametrize("way", ["all", "rest"])
def test_it_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path: Path, stop: str, way: str) -> None:
    whole = results(tmp_path / "whole", ONE_LOOP, workers=1)[0]
    path = str(tmp_path / "saved.pt")
    before = results(tmp_path / "before", OWN_LOOP, args=[path, stop, ""])[0]["seen"]
    after = results(tmp_path / "after", OWN_LOOP, args=[path, "", way])
    assert before + after[0]["seen"] == whole["seen"]
    assert apart(after[0]["weights"], whole["weights"]) < 1e-12


def test_a_checkpoint_that_holds_the_loops_number_asks_which_loops_the_script_makes(tmp_path: Path) -> None:
    path = str(tmp_path / "saved.pt")
    results(tmp_path / "before", OWN_LOOP, args=[path, "between", ""])
    said = refusals(tmp_path / "after", OWN_LOOP, args=[path, "", "unsaid"])
    assert 'loops="rest"' in said
    assert "range(2, epochs)" in said


PHASES = (
    HEAD
    + """
import sys
path, stop = sys.argv[1:] if len(sys.argv) > 1 else ("", "")
if path and not stop:
    fleet.load(path)
small = TensorDataset(x[:LENGTH], y[:LENGTH])
scores = []
for name, phase, epochs in (("pre-train", noisy, 2), ("fine-tune", small, 2)):
    for step in fleet.steps(phase, global_batch=12, micro_batch=3, epochs=epochs):
        train(step, model, optimizer)
        seen.append([name, step.epoch, step.index])
        if stop and step.index == int(stop):
            fleet.save(path)
            break
    else:
        scheduler.step()
        scores.append(fleet.evaluate(lambda a, b: {"right": model(a).argmax(1) == b}, data)["right"])
        continue
    break
fleet.leave()
result = {"weights": flat(model), "seen": seen, "scores": scores}
"""
)


@pytest.mark.parametrize("length", [48, 30], ids=["of equal length", "of unlike lengths"])
def test_a_script_of_two_phases_resumes_in_the_phase_it_was_saved_in(tmp_path: Path, length: int) -> None:
    script, path = PHASES.replace("LENGTH", str(length)), str(tmp_path / "saved.pt")
    whole = results(tmp_path / "whole", script, workers=1)[0]
    before = results(tmp_path / "before", script, args=[path, "9"])[0]
    after = results(tmp_path / "after", script, args=[path, ""])
    assert before["seen"] + after[0]["seen"] == whole["seen"]
    assert apart(after[0]["weights"], whole["weights"]) < 1e-12
    assert after[0]["scores"] == after[1]["scores"] == whole["scores"]


GATHERED = (
    HEAD
    + """
import sys
path, epochs, way = sys.argv[1], int(sys.argv[2]), sys.argv[3]
first = fleet.load(path, loops=way, missing_ok=True) or 0
for epoch in range(first if way == "rest" else 0, epochs):
    for step in fleet.steps(noisy, global_batch=12, micro_batch=3, epochs=1):
        train(step, model, optimizer)
    seen.append(fleet.predict(lambda a, b: model(a), data).flatten().tolist())
    fleet.save(path, extra=epoch + 1)
"""
    + TAIL
)


def test_predictions_of_a_loop_that_is_passed_over_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "saved.pt")
    assert len(results(tmp_path / "before", GATHERED, args=[path, 2, "all"])[0]["seen"]) == 2
    said = refusals(tmp_path / "all", GATHERED, args=[path, 3, "all"])
    assert "fleet.predict behind loop 1 of the script, which is passed over" in said
    assert len(results(tmp_path / "rest", GATHERED, args=[path, 3, "rest"])[0]["seen"]) == 1


def test_predictions_behind_the_loop_that_was_saved_are_those_of_that_time(tmp_path: Path) -> None:
    path = str(tmp_path / "saved.pt")
    before = results(tmp_path / "before", GATHERED, args=[path, 1, "all"])[0]["seen"]
    after = results(tmp_path / "after", GATHERED, args=[path, 2, "all"])[0]["seen"]
    assert after[0] == before[0]
    assert len(after) == 2


EARLY_STOP = """
import sys, time
from pathlib import Path
FOLDER = Path(os.environ["PACELINE_RUN_DIR"]).parent
path, stop, way = (sys.argv[1:] + ["", "", ""])[:3]
with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    fleet.track(optimizer=optimizer, scheduler=scheduler)
    fleet.state.best, fleet.state.bad = 1e9, 0
    if way:
        fleet.load(path, loops=way)
    figures, seen = [5.0, 4.0, 4.5, 4.6, 3.0, 2.0, 2.5, 2.6, 2.7, 1.0] * 50, []
    for epoch in range(EPOCHS):
        for step in fleet.steps(data, global_batch=12, micro_batch=3):
            for a, b in step:
                step.backward(loss_fn(model(a), b))
            step.commit(optimizer)
            seen.append(step.index)
            if PAUSE and not (FOLDER / "hurry").exists():
                time.sleep(PAUSE)
        score = fleet.evaluate(lambda a, b: {"figure": torch.full((len(a),), figures[epoch])}, data)["figure"]
        if score < fleet.state.best:
            fleet.state.best, fleet.state.bad = score, 0
            if path:
                fleet.save(path)
        else:
            fleet.state.bad += 1
        scheduler.step()
        if fleet.state.bad >= 3 and not PAUSE:
            break
        if stop and epoch == int(stop):
            break
    result = {"weights": flat(model), "seen": seen, "best": fleet.state.best, "rate": scheduler.get_last_lr()}
"""


def test_what_was_decided_between_loops_is_decided_so_again(tmp_path: Path) -> None:
    """Saved only where the figure was better, before the schedule's step: at epochs 0, 1, 4 and 5."""
    script, path = EARLY_STOP.replace("EPOCHS", "10").replace("PAUSE", "0"), str(tmp_path / "best.pt")
    whole = results(tmp_path / "whole", script, workers=1)[0]
    results(tmp_path / "before", script, args=[path, "4", ""])
    after = results(tmp_path / "after", script, args=[path, "", "all"])
    assert after[0]["seen"] == [step for step in whole["seen"] if step >= 20]
    assert len(whole["seen"]) == 9 * 4
    assert (after[0]["best"], after[0]["rate"]) == (whole["best"], whole["rate"])
    assert apart(after[0]["weights"], whole["weights"]) < 1e-12


def test_a_script_that_does_not_come_by_the_save_again_is_refused(tmp_path: Path) -> None:
    script, path = EARLY_STOP.replace("EPOCHS", "10").replace("PAUSE", "0"), str(tmp_path / "best.pt")
    results(tmp_path / "before", script, args=[path, "4", ""])
    said = refusals(tmp_path / "after", script.replace("if path:", "if False:"), args=[path, "", "all"])
    assert "which the script did not come by" in said


def test_a_checkpoint_that_does_not_fit_is_refused_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "saved.pt")
    results(tmp_path / "before", OWN_LOOP, args=[path, "between", ""])
    other = f"""
    with paceline.join() as fleet:
        model = fleet.model(nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3)).double())
        fleet.load({path!r})
    """
    assert "does not fit the model" in refusals(tmp_path / "after", other)


def test_a_worker_that_returns_passes_loops_by_and_decides_as_the_others_did(tmp_path: Path) -> None:
    text = EARLY_STOP.replace("EPOCHS", "40").replace("PAUSE", "0.03")
    ended = back_after_a_kill(tmp_path, text, at_step=9)
    for what in ("weights", "best", "rate"):
        assert ended[0][what] == ended[1][what]
    seen = ended[0]["seen"]
    assert seen == list(range(len(seen)))
    assert len(seen) - 40 * 4 in (0, 1), "one more where it was killed in an epoch's last step"
    assert ended[1]["seen"][-1] == seen[-1]
