"""Bad input and misuse in a fleet of two: every worker gets the same clear words, and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import misuse_cases
import pytest
from crew import Crew, run

pytestmark = pytest.mark.fleet


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run("misuse_cases.py:everything", 2, tmp_path_factory.mktemp("bad"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("global_batch=0", "ValueError: global_batch must be at least 1, got 0"),
        ("micro_batch too large", "ValueError: micro_batch (13) is larger than global_batch (12)"),
        ("one micro_batch too large", "ValueError: micro_batch (13) is larger than global_batch (12)"),
        ("one entry missing", "ValueError: micro_batch has 1 entries for 2 workers"),
        ("epochs=-1", "ValueError: epochs must be at least 1"),
        ("bad order", "ValueError: order(0) gave the index 99"),
        ("all dropped", "ValueError: epoch 0 has nothing to deal: drop_last"),
        ("not a scalar", "ValueError: the loss must be a scalar tensor"),
        ("weight", "ValueError: weight must be a finite number"),
        ("foreign", "ValueError: the optimizer has parameters that are not in fleet.model"),
        ("clip_norm", "ValueError: clip_norm must be positive"),
        ("no optimizer", "ValueError: step.commit needs the optimizer"),
    ],
)
def test_a_bad_setting_is_the_same_value_error_on_every_worker(told: list[Any], name: str, said: str) -> None:
    for worker in told:
        assert worker["settings"][name].startswith(said)


def test_after_all_those_errors_the_same_fleet_takes_an_exact_step(told: list[Any]) -> None:
    for worker in told:
        assert worker["settings"]["difference"] < 1e-12


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("three ratios", "ValueError: 3 ratios for 2 workers: give one for each"),
        ("unknown pace", "ValueError: unknown pace 'fastest'. Known names: equal,"),
        ("unknown combine", "ValueError: unknown combine 'mean'; known: gradients"),
        ("folder", "ValueError: the run's folder /proc/nowhere cannot be written"),
        ("afterwards", "True"),
    ],
)
def test_a_bad_join_is_the_same_value_error_on_every_worker_and_the_next_join_works(
    told: list[Any], name: str, said: str
) -> None:
    for worker in told:
        assert worker["at_join"][name].startswith(said)


@pytest.mark.parametrize(
    "name", ["no default group", "unlike micro-batches", "a tail", "a share that is not whole", "moving shares"]
)
def test_sync_batch_norm_is_refused_where_counts_would_differ(told: list[Any], name: str) -> None:
    for worker in told:
        assert worker["sync_batch_norm"][name].startswith("ValueError: SyncBatchNorm needs the same number")


def test_sync_batch_norm_is_taken_where_counts_are_equal(told: list[Any]) -> None:
    assert [worker["sync_batch_norm"]["equal counts"] for worker in told] == ["no error"] * 2


@pytest.mark.parametrize("name", [name for name in misuse_cases.MISUSES if name != "enters again"])
def test_misuse_is_the_same_error_on_every_worker(told: list[Any], name: str) -> None:
    words = {
        "zero_grad": "gradients were cleared or changed in the middle of a step",
        "plain backward": "a plain loss.backward() ran on the fleet's model",
        "half done": "was left half done",
        "no backward": "had no step.backward(loss)",
        "commit twice": "was committed before",
        "not committed": "was not committed",
    }
    expected = next(text for start, text in words.items() if name.startswith(start))
    for worker in told:
        assert worker["misuses"][name].startswith("MisuseError: ")
        assert expected in worker["misuses"][name]


def test_a_loop_entered_again_in_mid_step_is_an_error_or_exact(told: list[Any]) -> None:
    for worker in told:
        said = worker["misuses"]["enters again"]
        assert said == "no error" or said.startswith("MisuseError"), said


def test_the_misuse_of_one_worker_is_named_on_the_other(tmp_path: Path) -> None:
    with Crew("misuse_cases.py:one_misuses", 2, tmp_path) as crew:
        first, second = crew.wait(within=40)
    assert second.code == 1
    assert "MisuseError: a plain loss.backward() ran on the fleet's model" in second.err
    assert first.code == 75
    assert first.err.strip().splitlines()[-1].startswith("paceline: worker 1 (cpu) ended with MisuseError: a plain")
