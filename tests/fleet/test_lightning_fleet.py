"""Lightning on real fleets: unequal shares, workers that are killed, leave and come back, launchers, other sizes."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="Lightning is not installed: pip install 'paceline[lightning]'")

from crew import nursery, run
from flock import Flock, sound
from lightning_cases import LENGTH, trained
from test_examples_digits import EPOCH, EXAMPLES, PACELINE, TORCHRUN, start

from paceline.adapters.lightning import PacelineStrategy
from paceline.observe import read_log
from paceline.observe.analysis.audit import audit

pytestmark = pytest.mark.fleet

CASE = "lightning_cases.py:fit"
THE_FLEETS = ("global_step", "epoch", "rate", "best", "stop")
"""What every worker has, to the last bit."""


@pytest.fixture(scope="module")
def loaded() -> None:
    """Workers of this module's fleets start with Lightning imported."""
    nursery().load("lightning.pytorch")


def close(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Of two trainings: the weights, what was logged, saved and found, to 1e-6."""
    assert ours["weights"] == pytest.approx(theirs["weights"], abs=1e-6)
    assert ours["metrics"] == pytest.approx(theirs["metrics"], abs=1e-6)
    assert ours["test"] == [pytest.approx(one, abs=1e-6) for one in theirs["test"]]
    assert ours["epoch_losses"] == pytest.approx(theirs["epoch_losses"], abs=1e-6)
    assert ours["scores"] == pytest.approx(theirs["scores"], abs=1e-6)
    assert {name: ours[name] for name in THE_FLEETS} == {name: theirs[name] for name in THE_FLEETS}


@pytest.mark.usefixtures("loaded")
def test_shares_of_one_to_three_train_validate_and_save_as_one_process_and_one_goes_on(tmp_path: Path) -> None:
    args: dict[str, Any] = {"module": {"schedule": "epoch"}, "trainer": {"gradient_clip_val": 0.2}, "average": True}
    plain = trained("auto", tmp_path / "plain", args)
    workers = run(CASE, 2, tmp_path / "two", args={**args, "pace": "fixed:1,3", "every": 7})
    for one in workers:
        close(one, plain)
    assert workers[0]["weights"] == workers[1]["weights"]
    assert [one["leader"] for one in workers] == [True, False]
    assert sum(one["seen"] for one in workers) == 3 * LENGTH
    assert workers[1]["seen"] > 2.5 * workers[0]["seen"]
    assert sum(one["validated"] for one in workers) == 3 * 70 + 50
    assert len(list((tmp_path / "two").rglob("metrics.csv"))) == 1, "one worker logs"

    saved = next((tmp_path / "two" / "lightning" / "every").glob("*step=14.ckpt"))  # in the middle of the last epoch
    strategy = PacelineStrategy(32, 8, quiet=True, run_dir=tmp_path / "alone")
    rest = trained(strategy, tmp_path / "rest", {**args, "ckpt_path": str(saved), "weights": 9})
    strategy.close()
    assert rest["weights"] == pytest.approx(plain["weights"], abs=1e-6)
    assert (rest["global_step"], rest["seen"]) == (15, LENGTH - 4 * 32)


@pytest.mark.usefixtures("loaded")
def test_workers_are_killed_freeze_come_back_and_leave_with_equal_replicas_and_the_right_step(tmp_path: Path) -> None:
    args = {"module": {"pause_s": 0.05}, "average": True, "trainer": {"max_epochs": 24}}
    with Flock(CASE, 3, tmp_path, args=args) as flock:
        flock.wait_for_step(8)
        flock.kill(1)
        flock.wait_for_workers(2)
        flock.start(1)
        flock.wait_for_workers(3)
        (tmp_path / "freeze").touch()
        flock.wait_for("frozen")
        flock.wait_for_workers(2)
        flock.send(0, signal.SIGCONT)
        flock.wait_for_workers(3)
        flock.send(0, signal.SIGTERM)
        flock.wait_for_workers(2)
        outcomes = flock.hurry()
    assert outcomes[0].code == 143, outcomes[0].err[-3000:]
    log, values = sound(tmp_path, outcomes, ended={1, 2}, epochs=24, length=LENGTH)
    assert [len(change.workers) for change in log.changes] == [2, 3, 2, 3, 2]
    newcomer, other = values
    assert newcomer["global_step"] == other["global_step"] == len(log.records)
    for name in (*THE_FLEETS, "metrics", "scores"):
        assert newcomer[name] == other[name], name
    its, theirs = (dict(zip(one["epochs"], one["epoch_losses"], strict=True)) for one in values)
    assert list(theirs) == list(range(24))
    assert its == {epoch: theirs[epoch] for epoch in its}, "those that it entered in as well"
    assert 2 <= len(its) < 24


@pytest.mark.usefixtures("loaded")
def test_a_worker_lost_in_an_epochs_last_step_or_in_validation_changes_no_figure(tmp_path: Path) -> None:
    die = {"last step": ("1", 1), "validation": ("2", 2)}
    args: dict[str, Any] = {"module": {"schedule": "epoch", "pause_s": 0.01}, "trainer": {"max_epochs": 4}}
    lossy = {**args, "module": {**args["module"], "die": die}}
    with Flock(CASE, 3, tmp_path, args=lossy, env={"PACELINE_PACE": "equal"}) as flock:
        outcomes = flock.wait()
    log, (left,) = sound(tmp_path, outcomes, ended={0}, epochs=4, length=LENGTH)
    assert [len(change.workers) for change in log.changes] == [2, 1]
    steps = Counter(record.epoch for record in log.records)
    assert [steps[epoch] for epoch in range(4)] == [5, 6, 4, 5], "what was lost with the last step made one more"
    assert (left["global_step"], left["epoch"], left["size"]) == (len(log.records), 4, 1)
    assert left["counted"] == [70] * 4, "once each epoch, each sample once"
    means = [sum(one.loss * one.weight for one in log.records if one.epoch == n) / LENGTH for n in range(4)]
    assert left["epoch_losses"] == pytest.approx(means, abs=1e-6)


@pytest.mark.usefixtures("loaded")
def test_what_a_module_collects_of_its_own_part_is_refused_where_it_logs_it(tmp_path: Path) -> None:
    for said in run("lightning_cases.py:collects", 2, tmp_path):
        assert "self.log('sum') in on_validation_epoch_end: the workers' values differ" in said
        assert "log in the step itself, or use a torchmetrics metric" in said


@pytest.mark.usefixtures("loaded")
def test_a_worker_that_has_no_batch_knows_every_figure_too(tmp_path: Path) -> None:
    args = {"pace": "fixed:0,1", "trainer": {"max_epochs": 2}}
    idle, busy = run(CASE, 2, tmp_path, args=args)
    assert {"accuracy", "auc"} <= {*busy["metrics"]}
    for name in ("metrics", "test", "epoch_losses", "weights"):
        assert idle[name] == busy[name], name


@pytest.mark.usefixtures("loaded")
def test_with_deadlines_an_epoch_is_as_long_as_it_takes_and_everybody_counts_the_same(tmp_path: Path) -> None:
    args = {"pace": "joint", "average": True, "module": {"schedule": "epoch"}, "trainer": {"max_epochs": 8}}
    emulated = {"PACELINE_EMULATE": "1,1,1~1.2", "PACELINE_SAMPLE_MS": "2"}
    workers = run(CASE, 3, tmp_path, args=args, env=emulated)
    log = read_log(tmp_path / "run")
    assert all(entry.sound and entry.whole for entry in audit(log))
    assert any(record.deadline_s is not None for record in log.records)
    for name in (*THE_FLEETS, "weights", "metrics", "epoch_losses", "scores", "counted"):
        assert workers[0][name] == workers[1][name] == workers[2][name], name
    assert workers[0]["global_step"] == len(log.records)
    assert workers[0]["counted"] == [70] * 8


@pytest.mark.long
@pytest.mark.parametrize("launcher", [TORCHRUN, (*PACELINE, "--pace", "adaptive")], ids=["torchrun", "paceline run"])
def test_the_example_learns_under_every_launcher(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    epochs, _ = start(tmp_path, *launcher, str(EXAMPLES / "lightning_digits.py"), "--epochs", "3")
    must_have_learned(epochs, tmp_path / "lightning", "lr-AdamW")


@pytest.mark.long
@pytest.mark.usefixtures("loaded")
def test_the_example_with_fabric_learns(tmp_path: Path) -> None:
    run("lightning_cases.py:example", 2, tmp_path, args={"name": "fabric_digits.py"})
    said = "".join((tmp_path / f"out.{rank}").read_text() for rank in range(2))
    epochs = [(float(loss), float(accuracy)) for _, loss, accuracy in EPOCH.findall(said)]
    must_have_learned(epochs, tmp_path / "example" / "fabric", "loss")


def must_have_learned(epochs: list[tuple[float, float]], folder: Path, logged: str) -> None:
    assert len(epochs) == 3, "one worker prints"
    assert epochs[-1][1] > 85
    (table,) = folder.rglob("metrics.csv")
    assert logged in table.read_text().splitlines()[0]
