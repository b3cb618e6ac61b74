"""Transformers' Trainer on real workers: shares 1:3, another number of workers, a kill and a return."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crew import Crew, Outcome, nursery
from flock import Flock, sound

from paceline.observe import read_log
from paceline.observe.analysis.audit import audit

if find_spec("transformers") is None:
    pytest.skip("needs pip install 'paceline[transformers]'", allow_module_level=True)

from transformers_cases import SAMPLES

pytestmark = pytest.mark.fleet


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Every worker would take seconds to import it."""
    for module in ("paceline.adapters.transformers", "transformers.models.gpt2.modeling_gpt2", "safetensors.torch"):
        nursery().load(module)


def crew(case: str, size: int, folder: Path, **args: Any) -> list[Outcome]:
    given = {"folder": str(folder / "out"), "pace": "fixed:1,3" if size == 2 else "auto", **args}
    with Crew(f"transformers_cases.py:{case}", size, folder, args=given, env={"QUICK_EXIT": "1"}) as workers:
        outcomes = workers.wait()
    for outcome in outcomes:
        assert outcome.code == 0, outcome.err[-4000:]
    return outcomes


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Outcome]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, crew("tokens", 2, folder)


def test_shares_of_one_to_three_equal_one_process(two: tuple[Path, list[Outcome]], tmp_path: Path) -> None:
    (alone,), (first, second) = crew("tokens", 1, tmp_path), two[1]
    one, other = first.value, alone.value
    assert one["weights"] == second.value["weights"]
    assert np.abs(np.array(one["weights"]) - np.array(other["weights"])).max() < 1e-6
    assert one["step"] == other["step"] == 6
    assert one["log"] == second.value["log"]
    for mine, theirs in zip(one["log"], other["log"], strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5), "losses, norms, rates, tokens, metrics"
    assert one["samples"] == pytest.approx(2 * SAMPLES, rel=0.01), "train_samples_per_second is the fleet's"
    assert np.allclose(one["predictions"], other["predictions"], atol=1e-5)
    assert first.out.count("'loss'") == alone.out.count("'loss'") == 6
    assert second.out == "", "only the leader speaks"


def test_a_mean_over_samples_equals_one_process_too(tmp_path: Path) -> None:
    (alone,), both = crew("classifier", 1, tmp_path / "1"), crew("classifier", 2, tmp_path / "2")
    assert both[0].value == both[1].value
    assert np.abs(np.array(both[0].value) - np.array(alone.value)).max() < 1e-6


def test_a_worker_that_stalls_under_deadlines_catches_up(tmp_path: Path) -> None:
    args = {"folder": str(tmp_path / "out"), "pace": "joint", "epochs": 12, "stall_s": 1.5}
    with Crew("transformers_cases.py:stalling", 2, tmp_path, args=args, env={"QUICK_EXIT": "1"}) as workers:
        first, second = workers.wait()
    assert (first.code, second.code) == (0, 0), first.err[-3000:] + second.err[-3000:]
    assert first.value == second.value, "weights, steps, and those of the schedule"
    assert first.value["step"] == first.value["rate_step"] > 20
    assert first.value["epoch"] == 12.0
    run = read_log(tmp_path / "run")
    assert all(epoch.sound and epoch.counted == SAMPLES for epoch in audit(run))
    assert any(record.deadline_s is not None for record in run.records)


def test_two_workers_checkpoint_is_gone_on_from_by_one(two: tuple[Path, list[Outcome]], tmp_path: Path) -> None:
    folder, (first, _) = two
    (alone,) = crew("tokens", 1, tmp_path, resume=str(folder / "out" / "checkpoint-3"))
    assert alone.value["step"] == 6
    assert alone.out.count("'loss'") == 3, "the second epoch's"
    assert np.abs(np.array(alone.value["weights"]) - np.array(first.value["weights"])).max() < 1e-6
    for mine, theirs in zip(alone.value["log"][:-1], first.value["log"][:-1], strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5)


def test_a_killed_worker_and_a_frozen_one_come_back_to_the_right_step(tmp_path: Path) -> None:
    args = {"folder": str(tmp_path / "out"), "epochs": 60}
    with Flock("transformers_cases.py:elastic", 3, tmp_path, args=args) as flock:
        flock.wait_for_step(8)
        flock.kill(0)  # the leader
        flock.wait_for_workers(2)
        flock.start(0)
        flock.wait_for_workers(3)
        flock.send(2, signal.SIGSTOP)
        flock.wait_for_workers(2)
        flock.send(2, signal.SIGCONT)
        flock.wait_for_workers(3)
        outcomes = flock.hurry()
    _, values = sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=60, length=SAMPLES)
    back, *others = values
    for value in values:
        for name in ("step", "epoch", "max_steps", "rate", "worse"):
            assert value[name] == others[0][name], name
        assert value["log"][:-1] == others[0]["log"][:-1], "the last entry is of the worker's own time"
        assert value["step"] == value["max_steps"] >= 180
        assert value["epoch"] == 60.0
    assert others[0]["steps"] == list(range(1, others[0]["step"] + 1))
    assert back["steps"] == others[0]["steps"][-len(back["steps"]) :]
    assert 8 < back["steps"][0] < 180, "it came back in the middle"
    leaders = [slot for slot in (1, 2) if outcomes[slot].out.count("'loss'")]
    assert len(leaders) == 1, "whoever leads speaks"


def test_what_is_lost_in_an_epochs_last_step_is_made_up_for(tmp_path: Path) -> None:
    """The last step of the first epoch has the index 2, that of the whole training 5: one more follows it."""
    args = {"folder": str(tmp_path / "out"), "epochs": 2, "die": {"2": 2, "1": 5}}
    with Flock("transformers_cases.py:elastic", 3, tmp_path, args=args) as flock:
        outcomes = flock.wait()
    _, (value,) = sound(tmp_path, outcomes, ended={0}, epochs=2, length=SAMPLES)
    assert value["steps"] == list(range(1, 8))
    assert (value["step"], value["max_steps"], value["epoch"]) == (7, 7, 2.0)
    assert value["epochs"] == 2, "on_epoch_end"
