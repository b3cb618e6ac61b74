"""Invariant 4: no wait is unbounded, and whoever is waited for is named. Real processes, real signals."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from crew import Crew, Outcome, run
from failure_cases import STORE_GONE

pytestmark = pytest.mark.fleet

FLEET_FAILED = 75


def last_line(outcome: Outcome) -> str:
    return outcome.err.strip().splitlines()[-1]


def tells(outcome: Outcome, rank: int, what: str) -> bool:
    """Whether the last line says ``what``; a worker other than 0 may have come too late to hear it from worker 0."""
    return any(said in last_line(outcome) for said in ([what, STORE_GONE] if rank else [what]))


@pytest.mark.parametrize("victim", [0, 2])
def test_kill_9_ends_the_run_with_one_line_that_names_the_worker(victim: int, tmp_path: Path) -> None:
    with Crew("failure_cases.py:train_forever", 3, tmp_path, args={"folder": str(tmp_path)}) as crew:
        crew.wait_for("begun")
        os.kill(crew.workers[victim].pid, signal.SIGKILL)
        outcomes = crew.wait(within=60)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert outcome.code == FLEET_FAILED, outcome.err
        if victim == 0:  # without a launcher worker 0 holds the store, so its death shows as the store's
            assert STORE_GONE in last_line(outcome)
        else:
            assert tells(outcome, rank, f"worker {victim} (cpu) went silent")
            lines = [line for line in outcome.err.splitlines() if ": waiting for " not in line]
            assert len(lines) == 1 or STORE_GONE in last_line(outcome), "one clear line, no engine's stack trace"


def test_a_frozen_worker_ends_the_run_with_one_line_that_names_it(tmp_path: Path) -> None:
    with Crew("failure_cases.py:train_forever", 3, tmp_path, args={"folder": str(tmp_path)}) as crew:
        crew.wait_for("begun")
        os.kill(crew.workers[1].pid, signal.SIGSTOP)
        for rank in (0, 2):
            crew.workers[rank].wait(timeout=60)
        os.kill(crew.workers[1].pid, signal.SIGKILL)
        outcomes = crew.wait(within=60)
    for rank in (0, 2):
        assert outcomes[rank].code == FLEET_FAILED
        assert tells(outcomes[rank], rank, "worker 1 (cpu) went silent")


@pytest.mark.parametrize("who", [0, 1])
def test_a_script_that_raises_keeps_its_traceback_and_the_others_name_it(who: int, tmp_path: Path) -> None:
    with Crew("failure_cases.py:one_raises", 3, tmp_path, args={"who": who}) as crew:
        outcomes = crew.wait()
    assert outcomes[who].code == 1
    assert "KeyError: 'a bug in the script'" in outcomes[who].err
    for rank in {0, 1, 2} - {who}:
        assert outcomes[rank].code == FLEET_FAILED
        assert "Traceback" not in outcomes[rank].err
        assert f"worker {who} (cpu) ended with KeyError" in outcomes[rank].err


@pytest.mark.parametrize("call", ["evaluate", "save", "any", "barrier"])
def test_a_call_made_by_the_leader_alone_is_named_within_seconds(call: str, tmp_path: Path) -> None:
    with Crew("failure_cases.py:leader_calls_alone", 3, tmp_path, args={"folder": str(tmp_path), "call": call}) as crew:
        outcomes = crew.wait()
    assert float((tmp_path / "took").read_text()) < 30
    for outcome in outcomes:
        assert outcome.code == FLEET_FAILED, outcome.err
        assert f"fleet.{call}()" in last_line(outcome)
        # Of one that has begun the step, and was not seen to wait in its round yet, it is said that it is in the step.
        assert "the round of step 4" in last_line(outcome) or "step 4 without it" in last_line(outcome)
        assert "worker 0 (cpu)" in last_line(outcome)


def test_a_worker_that_leaves_the_loop_early_is_named(tmp_path: Path) -> None:
    with Crew("failure_cases.py:one_leaves_early", 2, tmp_path) as crew:
        outcomes = crew.wait()
    for outcome in outcomes:
        assert outcome.code == FLEET_FAILED, outcome.err
        assert "worker 1 (cpu) called the end of the run" in last_line(outcome).replace("but ", "")


def test_a_busy_leader_is_waited_for_and_named(tmp_path: Path) -> None:
    with Crew("failure_cases.py:leader_is_busy", 2, tmp_path, args={"seconds": 13}) as crew:
        outcomes = crew.wait()
    assert [outcome.value for outcome in outcomes] == [25, 25], outcomes
    assert "waiting for worker 0 (cpu) (its own code after step 3)" in outcomes[1].err


def test_workers_that_disagree_are_told_which_and_how(tmp_path: Path) -> None:
    errors = run("failure_cases.py:disagree", 2, tmp_path)
    assert errors[0] == errors[1]
    assert "bias is '[1] torch.float32' on worker 0 and '[2] torch.float32' on worker 1" in errors[0]["model"]
    assert "dataset length is 400 on worker 0 and 401 on worker 1" in errors[0]["length"]
    assert "global_batch is 16 on worker 0 and 17 on worker 1" in errors[0]["settings"]
    assert "pace is 'adaptive' on worker 0 and 'equal' on worker 1" in errors[0]["pace"]
    assert "worker 1 (cpu) called freezing or unfreezing parameters" in errors[0]["frozen"].replace("but ", "")


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_nan_gradients_stop_the_run_with_worker_and_step(where: str, tmp_path: Path) -> None:
    with Crew("failure_cases.py:nan_on_one", 2, tmp_path, args={"nonfinite": "stop", "where": where}) as crew:
        outcomes = crew.wait()
    for outcome in outcomes:
        assert outcome.code != 0
        assert "worker 1 had NaN or infinite gradients in step 2" in last_line(outcome)


def test_nan_gradients_can_be_skipped_and_their_samples_still_count(tmp_path: Path) -> None:
    values = run("failure_cases.py:nan_on_one", 2, tmp_path, args={"nonfinite": "skip", "where": "gradient"})
    for value in values:
        assert value["applied"] == [True, True, False, True, True]
        assert value["samples"] == 80
        assert value["finite"]


def test_a_checkpoint_of_another_dataset_length_is_refused(tmp_path: Path) -> None:
    said = run("failure_cases.py:checkpoint_of_another_length", 2, tmp_path, args={"folder": str(tmp_path)})
    assert said[0] == said[1]
    assert "400" in said[0]
    assert "399" in said[0]


@pytest.mark.parametrize(
    ("pace", "global_batch", "samples"), [("fixed:1,0", 2, 12), ("equal", 1, 12), ("equal", 4, 24)]
)
def test_streams_end_though_a_worker_never_gets_a_sample(
    pace: str, global_batch: int, samples: int, tmp_path: Path
) -> None:
    args = {"pace": pace, "global_batch": global_batch}
    first, second = run("failure_cases.py:stream_with_an_idle_worker", 2, tmp_path, args=args)
    assert first["samples"] == samples
    assert first["ends"].count(True) == 2
    assert first["ends"][-1]
    assert not set(first["noise"]) & set(second["noise"])


def test_orders_that_differ_between_workers_are_refused(tmp_path: Path) -> None:
    said = run("failure_cases.py:unlike_orders", 2, tmp_path)
    assert said[0] == said[1]
    assert "workers disagree in order(0)" in said[0]
