"""``fleet.state``: plain values that decide about the training, for a worker that returns and a run that resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import back_after_a_kill, outcomes, refusals, results

pytestmark = pytest.mark.fleet

EARLY_STOP = """
from pathlib import Path
import time

FOLDER = Path(os.environ["PACELINE_RUN_DIR"]).parent
with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    fleet.track(optimizer=optimizer)
    fleet.state.worst, fleet.state.epochs = 0.0, 0
    for step in fleet.steps(data, global_batch=12, micro_batch=3, epochs=EPOCHS):
        for a, b in step:
            step.backward(loss_fn(model(a), b))
        step.commit(optimizer)
        if not (FOLDER / "hurry").exists():
            time.sleep(0.01)
        if step.ends_epoch:
            total = fleet.evaluate(lambda a, b: {"loss": loss_fn(model(a), b) * len(a)}, data, sums="loss")["loss"]
            fleet.state.epochs += 1
            if total > fleet.state.worst:  # only the first time: the loss falls
                fleet.state.worst = total
                fleet.save(FOLDER / "worst.pt")
    result = {"weights": flat(model), "epochs": fleet.state.epochs, "worst": fleet.state.worst}
"""


def test_a_worker_that_returns_decides_as_the_others_do(tmp_path: Path) -> None:
    ended = back_after_a_kill(tmp_path, EARLY_STOP.replace("EPOCHS", "30"), at_step=9)
    assert ended[0] == ended[1]
    assert ended[0]["epochs"] == 30


def test_a_plain_variable_in_its_place_is_an_error_that_names_fleet_state(tmp_path: Path) -> None:
    plain = (
        EARLY_STOP.replace("EPOCHS", "3000").replace("fleet.state.", "").replace("if total", "if fleet.rank or total")
    )
    plain = plain.replace("fleet.save(", "fleet.any(not ")
    assert "belongs in fleet.state" in refusals(tmp_path, plain)


SAVED = """
with paceline.join() as fleet:
    model = fleet.model(network())
    FIRST
    result = [fleet.state.best, fleet.state.names]
"""


def test_values_are_saved_and_loaded(tmp_path: Path) -> None:
    path = str(tmp_path / "c.pt")
    first = f"fleet.state.best, fleet.state.names = 0.5, ['a']\n    fleet.save({path!r})"
    assert results(tmp_path / "save", SAVED.replace("FIRST", first))[1] == [0.5, ["a"]]
    again = f"fleet.state.best, fleet.state.names = 0.0, []\n    fleet.load({path!r})"
    assert results(tmp_path / "load", SAVED.replace("FIRST", again))[1] == [0.5, ["a"]]
    late = f"fleet.load({path!r})\n    fleet.state.best = 0.0"
    ended = outcomes(tmp_path / "late", SAVED.replace("FIRST", late))
    assert all("give it its first value before fleet.load" in one.err for one in ended)
    other = "if fleet.rank:\n        fleet.state.more = 1\n    fleet.save('c.pt')"
    said = refusals(tmp_path / "other", SAVED.replace("FIRST", other))
    assert "the names in fleet.state is [] on worker 0 and ['more'] on worker 1" in said
