"""Scripts in the manner of Accelerate's by-feature examples: only the import differs, and one process is equalled."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crew import Crew, nursery, run
from flock import Flock

from paceline.observe import read_log

if find_spec("accelerate") is None:
    pytest.skip("needs pip install 'paceline[accelerate]'", allow_module_level=True)

pytestmark = pytest.mark.fleet
CASE, UNEQUAL = "accelerate_cases.py:by_feature", {"PACELINE_PACE": "fixed:1,3", "PACELINE_QUIET": "1"}


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Every worker would take seconds to import it."""
    nursery().load("paceline.adapters.accelerate")


def fleet(script: str, where: Path, size: int = 2, **given: Any) -> list[Any]:
    """Two workers with shares 1:3."""
    env = UNEQUAL if size == 2 else {}
    return run(CASE, size, where / f"of{size}", args={"script": script, "given": given}, env=env)


def alone(script: str, where: Path, **given: Any) -> Any:
    """Accelerate itself, in one process."""
    (found,) = run(CASE, 1, where / "plain", args={"script": script, "plain": True, "given": given})
    return found


def ended(script: str, folder: Path, **given: Any) -> list[str]:
    """Return what two workers have written, who have not come to the end."""
    with Crew(CASE, 2, folder, args={"script": script, "given": given}, env=UNEQUAL) as crew:
        outcomes = crew.wait()
    assert all(one.code for one in outcomes)
    return [one.err for one in outcomes]


def equal(ones: Any, others: Any) -> None:
    assert float(np.abs(np.array(ones) - np.array(others)).max()) < 1e-12


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradient_accumulation(accumulate: int, tmp_path: Path) -> None:
    first, second = fleet("gradient_accumulation", tmp_path, batch_size=4, accumulate=accumulate)
    one = alone("gradient_accumulation", tmp_path, batch_size=8, accumulate=accumulate)
    equal(first["weights"], one["weights"])
    assert first == second
    assert first["accuracy"] == one["accuracy"]


def test_checkpointing(tmp_path: Path) -> None:
    one = alone("checkpointing", tmp_path, batch_size=8, folder=str(tmp_path / "one"))
    state = str(tmp_path / "fleet")
    assert fleet("checkpointing", tmp_path / "a", batch_size=4, folder=state, stop_at=13) == [None, None]
    first, second = fleet("checkpointing", tmp_path / "b", batch_size=4, folder=state, resume=12)
    equal(first["weights"], one["weights"])
    assert first == second
    assert first["updates"] == one["updates"] == 30


def test_early_stopping(tmp_path: Path) -> None:
    first, second = fleet("early_stopping", tmp_path, batch_size=4)
    one = alone("early_stopping", tmp_path, batch_size=8)
    equal(first["weights"], one["weights"])
    assert first == second
    assert 10 < first["updates"] == one["updates"] < 300


def test_tracking(tmp_path: Path) -> None:
    first, second = fleet("tracking", tmp_path, batch_size=4)
    one = alone("tracking", tmp_path, batch_size=8)
    equal(first["weights"], one["weights"])
    assert first["config"] == {"lr": 0.02}
    assert (first["finished"], second["finished"], second["config"]) == (True, False, None)
    figures = [[[step, row["right"], row["epoch"], row["loss"]] for step, row in each["rows"]] for each in (first, one)]
    equal(*figures)


def test_cross_validation(tmp_path: Path) -> None:
    first, second = fleet("cross_validation", tmp_path, batch_size=4)
    one = alone("cross_validation", tmp_path, batch_size=8)
    equal(first["weights"], one["weights"])
    assert first == second
    assert (first["right"], first["count"]) == (one["right"], one["count"])


def test_automatic_accumulation(tmp_path: Path) -> None:
    first, second = fleet("automatic_accumulation", tmp_path, batch_size=8, largest=2)
    one = alone("automatic_accumulation", tmp_path, batch_size=16, largest=16)
    equal(first["weights"], one["weights"])
    assert first == second
    assert first["tried"] == [8, 4, 2]


def test_local_sgd_is_refused_unless_it_is_off(tmp_path: Path) -> None:
    assert fleet("local_sgd", tmp_path, batch_size=4, enabled=False) == [{}, {}]
    for text in ended("local_sgd", tmp_path / "on", batch_size=4, enabled=True):
        assert "LocalSGD" in text
        assert "leave it out" in text


def test_two_losses_with_two_updates_per_batch_are_refused(tmp_path: Path) -> None:
    for text in ended("gan", tmp_path, batch_size=4):
        assert "docs/sharding.md" in text


def test_a_worker_that_runs_out_of_memory_alone_is_named(tmp_path: Path) -> None:
    texts = ended("automatic_accumulation", tmp_path, batch_size=8, largest=4)
    assert all("worker 1 (cpu) called the end of the run" in text for text in texts)
    assert not any("Exception ignored" in text for text in texts)


ACCUMULATION, TRACKING = "gradient_accumulation", "tracking"
KILLS = [
    (ACCUMULATION, 0, 0, "before"),
    (ACCUMULATION, 1, 1, "behind"),
    (ACCUMULATION, 0, 2, "before"),
    (TRACKING, 0, 1, "behind"),
]
MORE_KILLS = [
    (script, victim, at, when)
    for script in (ACCUMULATION, TRACKING)
    for victim in (0, 1)
    for at in range(8)
    for when in ("before", "behind")
]


@pytest.mark.parametrize(
    ("script", "victim", "at", "when"),
    [*KILLS, *(pytest.param(*kill, marks=pytest.mark.long) for kill in MORE_KILLS)],
)
def test_a_worker_killed_at_any_micro_batch_returns(
    script: str, victim: int, at: int, when: str, tmp_path: Path
) -> None:
    """The peer is Accelerate in one process, with the samples that each update had."""
    given = {"batch_size": 2, "epochs": 6, **({"accumulate": 1} if script == ACCUMULATION else {})}
    args = {"script": script, "elastic": 8, "given": given, "victim": victim, "at": at, "when": when}
    with Flock(CASE, 2, tmp_path, args=args, env={"PACELINE_QUIET": "1"}) as flock:
        flock.wait_for("died")
        flock.wait_for_end(victim)
        before = flock.server.snapshot()["generation"]
        flock.tell_death(victim)
        flock.start(victim)
        flock.wait_until(lambda: flock.together_since(before))
        outcomes = flock.hurry()
    assert [one.code for one in outcomes.values()] == [0, 0], [one.err[-2000:] for one in outcomes.values()]
    epochs: list[list[list[int]]] = [[] for _ in range(given["epochs"])]
    for record in read_log(tmp_path / "run").records:
        pieces = [range(*piece) for mine in record.ranges for piece in mine]
        epochs[record.epoch].append([row for piece in pieces for row in piece])
    for updates in epochs:
        assert sorted(row for rows in updates for row in rows) == list(range(80)), "each sample once in each epoch"
    replay = {"script": script, "plain": True, "batches": epochs, "given": {**given, "batch_size": 8}}
    (one,) = run(CASE, 1, tmp_path / "replay", args=replay)
    for found in outcomes.values():
        equal(found.value["weights"], one["weights"])
        if script == ACCUMULATION:
            assert found.value["accuracy"][-1] == one["accuracy"][-1]
    if script == TRACKING:
        (rows,) = [found.value["rows"] for found in outcomes.values() if found.value["rows"]]
        assert [step for step, _ in rows] == list(range(6)), "whoever leads has trackers, also after a leader's death"
        assert rows[-1][1] == pytest.approx(one["rows"][-1][1], rel=1e-12)
