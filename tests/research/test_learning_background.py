"""Learning while a run trains: a process of its own that leaves nothing behind, and whose failure is no drama."""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.pace import Adaptive
from paceline.records import StepRecord
from paceline.research.cutoff import Cutoff
from paceline.research.deep.background import BackgroundLearner
from paceline.research.deep.deep_forecast import Deep
from paceline.research.deep.recordings import LEAST_STEPS


def series(steps: int, workers: int = 4) -> tuple[np.ndarray, np.ndarray]:
    own = np.exp(0.1 * np.random.default_rng(0).standard_normal((steps, workers)))
    return own, np.zeros(own.shape, dtype=bool)


def followed(seconds: np.ndarray, late: np.ndarray) -> Any:
    """Return a forecast whose series is this one, whatever it observes."""
    return SimpleNamespace(series=lambda: [(seconds, late)])


def observe(learner: BackgroundLearner, steps: int) -> None:
    for step in range(steps):
        learner.after(record(step))


def record(step: int) -> StepRecord:
    seconds = tuple(np.exp(0.1 * np.random.default_rng(step).standard_normal(3)).tolist())
    return StepRecord(step, 0, 0, workers=(0, 1, 2), planned=(4, 4, 4), samples=(4, 4, 4), seconds=seconds)


def wait(learner: BackgroundLearner, seconds: float = 600.0) -> None:
    until = time.monotonic() + seconds
    while learner.busy and learner._process is not None and learner._process.poll() is None:
        assert time.monotonic() < until, "the trainer takes too long"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_only_a_forecast_that_learns_gets_a_learner() -> None:
    assert Adaptive().learner() is None
    assert Cutoff("smoothed").learner() is None
    assert Cutoff(Deep(learns=False)).learner() is None
    assert isinstance(Cutoff(Deep()).learner(), BackgroundLearner)
    with pytest.raises(ValueError, match="at least"):
        BackgroundLearner(every=LEAST_STEPS - 1, forecast=Deep())


def test_too_few_new_steps_start_nothing() -> None:
    with BackgroundLearner(every=50, forecast=followed(*series(49))) as learner:
        observe(learner, 49)
        assert not learner.busy
        assert learner.poll() is None


@pytest.mark.fleet
def test_a_run_gets_a_model_of_itself_without_waiting_for_it() -> None:
    pacer = Cutoff(Deep())
    forecast = pacer.forecast
    assert isinstance(forecast, Deep)
    with BackgroundLearner(every=40, updates=2, forecast=forecast) as learner:
        for step in range(41):
            pacer.observe(record(step))
            learner.after(record(step))
        assert learner.busy
        wait(learner)
        pacer.observe(record(41))
        learner.after(record(41))
        assert not learner.busy
        assert len(forecast.state_dict()["contenders"]) == 1
        for step in range(42, 42 + 37):
            learner.after(record(step))
        assert not learner.busy
        learner.after(record(80))
        assert learner.busy  # forty new steps since the last training began


@pytest.mark.fleet
def test_closing_ends_the_trainer_and_removes_its_files() -> None:
    learner = BackgroundLearner(every=40, updates=100_000, forecast=followed(*series(60)))
    observe(learner, 40)
    assert learner._process is not None
    assert learner._folder is not None
    pid, folder = learner._process.pid, Path(learner._folder.name)
    assert alive(pid)
    learner.close()
    assert not alive(pid)
    assert not folder.exists()
    learner.close()


@pytest.mark.fleet
def test_a_trainer_that_fails_is_warned_of_once_and_not_started_again(caplog: pytest.LogCaptureFixture) -> None:
    own, late = series(60)
    own[3, 1] = np.nan
    learner = BackgroundLearner(every=40, updates=2, forecast=followed(own, late))
    with learner, caplog.at_level(logging.WARNING, "paceline.learning"):
        observe(learner, 40)
        wait(learner)
        assert learner.poll() is None
        assert "general forecast stays in use" in caplog.text
        assert "worker 1" in caplog.text
        observe(learner, 200)
        assert not learner.busy
        assert len(caplog.records) == 1


@pytest.mark.fleet
def test_a_trainer_killed_from_outside_is_a_failure_too(caplog: pytest.LogCaptureFixture) -> None:
    learner = BackgroundLearner(every=40, updates=100_000, forecast=followed(*series(60)))
    with learner, caplog.at_level(logging.WARNING, "paceline.learning"):
        observe(learner, 40)
        assert learner._process is not None
        os.kill(learner._process.pid, 9)
        wait(learner)
        assert learner.poll() is None
        assert len(caplog.records) == 1


@pytest.mark.long
@pytest.mark.fleet
def test_a_trainer_whose_run_was_killed_ends_by_itself(tmp_path: Path) -> None:
    run = (
        "import numpy as np, time\n"
        "from paceline.research.deep.background import BackgroundLearner\n"
        "from types import SimpleNamespace\n"
        "part = np.ones((60, 4)) + np.random.rand(60, 4), np.zeros((60, 4), dtype=bool)\n"
        "forecast = SimpleNamespace(series=lambda: [part])\n"
        "learner = BackgroundLearner(every=40, updates=10_000_000, forecast=forecast)\n"
        "for _ in range(40): learner.after(None)\n"
        "print(learner._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", run], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.communicate()
    until = time.monotonic() + 600
    while alive(pid):
        assert time.monotonic() < until, "the trainer outlived its run"
        time.sleep(0.05)
    assert not list(tmp_path.glob("paceline-learning-*"))
