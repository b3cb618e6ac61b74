"""Automatic saving with real workers: kill -9 at any time loses no checkpoint and no sample, at any fleet size."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, _text, run
from flock import Flock

from paceline.checkpoint import file as checkpoint_file

pytestmark = pytest.mark.fleet

ARGS = {"epochs": 2, "length": 1600, "global_batch": 16, "every": 1}
LAST = 200
"""Steps: enough for a kill to come in time on the slowest disk. What is run to its end does so without pauses."""
END = {"pause_s": 0.0, "every": 50}
ONCE = [[1] * 1600] * 2
CASE = "saving_cases.py:counted"


def check_whole(folder: Path) -> None:
    for file in checkpoint_file.newest_first(folder):
        assert checkpoint_file.checked_version(memoryview(file.read_bytes()), file) == 2


def kill(crew: Crew) -> None:
    for worker in crew.workers:
        worker.kill_group()
    for worker in crew.workers:
        assert worker.wait() == -signal.SIGKILL


def wait_until_saved(crew: Crew, folder: Path, step: int) -> None:
    until = time.monotonic() + 60
    while not any((checkpoint_file.step_of(file) or 0) >= step for file in checkpoint_file.newest_first(folder)):
        assert time.monotonic() < until, [outcome.err[-2000:] for outcome in crew._read()]
        time.sleep(0.005)


def test_killed_again_and_again_and_resumed_at_other_sizes_every_sample_counts_once(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    args = ARGS | {"folder": str(folder), "pause_s": 0.05}
    for number, (size, step) in enumerate([(3, 2), (2, 5), (1, 8), (3, 11)]):
        with Crew(CASE, size, tmp_path / str(number), args=args) as crew:
            wait_until_saved(crew, folder, step)
            kill(crew)
        check_whole(folder)
    values = run(CASE, 2, tmp_path / "end", args=args | END)
    assert values[0]["first"] >= 11
    assert values[0]["last"] == LAST - 1
    assert [value["tally"] for value in values] == [ONCE, ONCE]
    assert values[0]["extra"] == values[1]["extra"] == "x"
    assert values[0]["weights"] == values[1]["weights"]


def test_a_kill_in_the_middle_of_a_write_leaves_the_one_before_whole(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    args = ARGS | {"folder": str(folder), "every": 4, "pause_s": 0.02}
    stuck = {"stuck_at": 3, "sign": str(tmp_path / "crew" / "writing")}
    with Crew(CASE, 2, tmp_path / "crew", args=args | stuck) as crew:
        crew.wait_for("writing")
        kill(crew)
    whole = checkpoint_file.newest_first(folder)
    half = [file.name for file in folder.iterdir() if file not in whole]
    assert (len(whole), len(half)) == (2, 1)
    assert half[0].startswith(".step-000000")
    check_whole(folder)
    values = run(CASE, 2, tmp_path / "end", args=args | END)
    assert values[0]["first"] == checkpoint_file.step_of(whole[0])
    assert values[0]["tally"] == ONCE
    assert checkpoint_file.newest_first(folder)[0] == checkpoint_file.path_of(folder, LAST)
    assert half[0] not in [file.name for file in folder.iterdir()]


def test_a_disk_that_does_not_answer_holds_up_nobody(tmp_path: Path) -> None:
    """The write is stuck from the first checkpoint on, and the training goes on to its end."""
    args = ARGS | {"folder": str(tmp_path / "kept"), "every": 4}
    stuck = {"stuck_at": 1, "sign": str(tmp_path / "crew" / "writing")}
    with Crew(CASE, 2, tmp_path / "crew", args=args | stuck) as crew:
        crew.wait_for("writing")
        log = tmp_path / "crew" / "run" / "events.jsonl"
        until = time.monotonic() + 60
        while _text(log).count('"event": "step"') < LAST - 1:  # at the end of the loop it is waited for
            assert time.monotonic() < until, "the training stands still"
            time.sleep(0.02)
        kill(crew)


def saves(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "save"]


def test_when_the_leader_dies_the_next_one_goes_on_saving_and_the_run_resumes_without_an_elastic_fleet(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "kept"
    args = ARGS | {"folder": str(folder), "pause_s": 0.1}
    with Flock(CASE, 3, tmp_path / "flock", args=args) as flock:
        flock.wait_until(lambda: bool(checkpoint_file.newest_first(folder)))
        flock.kill(0)
        flock.start(0)  # it finds checkpoints in the folder, and takes a peer's state all the same
        flock.wait_for_step(11)
        flock.wait_until(lambda: (checkpoint_file.step_of(checkpoint_file.newest_first(folder)[0]) or 0) >= 9)
        for slot in (1, 2, 0):
            flock.workers[slot].kill_group()
        for worker in flock.workers.values():
            worker.wait()
    check_whole(folder)
    newest = checkpoint_file.step_of(checkpoint_file.newest_first(folder)[0])
    values = run(CASE, 2, tmp_path / "end", args=args | END)
    assert values[0]["first"] == newest
    assert [value["tally"] for value in values] == [ONCE, ONCE]


def test_a_lone_worker_that_is_told_to_leave_saves_its_last_step_first(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    args = ARGS | {"folder": str(folder), "every": 1000, "pause_s": 0.05}
    with Flock(CASE, 1, tmp_path / "flock", args=args) as flock:
        flock.wait_for_step(4)
        flock.send(0, signal.SIGTERM)
        assert flock.workers[0].wait() == 143
    newest = checkpoint_file.step_of(checkpoint_file.newest_first(folder)[0])
    assert newest is not None
    assert newest > 4
    assert [save["step"] for save in saves(tmp_path / "flock")] == [newest]
    values = run(CASE, 1, tmp_path / "end", args=args | END)
    assert values[0]["first"] == newest
    assert values[0]["tally"] == ONCE


def test_only_the_leader_writes(tmp_path: Path) -> None:
    run(CASE, 3, tmp_path, args=ARGS | {"folder": str(tmp_path / "kept"), "apart": True, "every": 100})
    assert [file.name for file in (tmp_path / "kept").iterdir()] == ["0"]
    assert checkpoint_file.newest_first(tmp_path / "kept" / "0")[0].name == "step-00000200.paceline"


@pytest.mark.parametrize(
    ("pace", "combine"),
    [("joint", "gradients"), ("cutoff", "gradients"), ("equal", "average"), ("equal", "elastic-average")],
)
def test_saving_fits_every_pace_and_combine(tmp_path: Path, pace: str, combine: str) -> None:
    folder = tmp_path / "kept"
    args = ARGS | {"folder": str(folder), "pause_s": 0.04, "pace": pace}
    if combine != "gradients":
        args["combine"] = combine
    with Crew(CASE, 2, tmp_path / "crew", args=args) as crew:
        wait_until_saved(crew, folder, 6)
        kill(crew)
    check_whole(folder)
    newest = max(checkpoint_file.step_of(file) or 0 for file in checkpoint_file.newest_first(folder))
    values = run(CASE, 3, tmp_path / "end", args=args | END)
    assert values[0]["first"] == newest
    assert values[0]["tally"] == ONCE


def test_a_damaged_newest_checkpoint_is_named_by_the_leader_and_the_one_before_taken_by_all(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    args = ARGS | {"folder": str(folder), "every": 50}
    run(CASE, 2, tmp_path / "a", args=args)
    newest, before = checkpoint_file.newest_first(folder)[:2]
    damaged = bytearray(newest.read_bytes())
    damaged[len(damaged) // 2] ^= 16
    newest.write_bytes(damaged)
    with Crew(CASE, 2, tmp_path / "b", args=args) as crew:
        outcomes = crew.wait()
    assert [outcome.value["first"] for outcome in outcomes] == [checkpoint_file.step_of(before)] * 2
    assert [outcome.value["tally"] for outcome in outcomes] == [ONCE, ONCE]
    assert newest.name in outcomes[0].err
    assert newest.name not in outcomes[1].err


FULL = """
import sys, json
import torch, paceline
from torch import nn
from torch.utils.data import TensorDataset
folder = sys.argv[1]
with paceline.join(quiet=True, run_dir=sys.argv[2]) as fleet:
    model = fleet.model(nn.Linear(300, 300))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fleet.track(optimizer=optimizer)
    fleet.autosave(folder, every_steps=1, keep=2)
    for step in fleet.steps(TensorDataset(torch.randn(80, 300)), global_batch=8):
        for (x,) in step:
            step.backward(model(x).square().mean())
        step.commit(optimizer)
        fleet._saving._autosaver._finish()
    print(len(fleet.history))
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="needs to mount a small disk")
def test_a_disk_that_is_really_full_warns_once_and_the_training_ends_well(tmp_path: Path) -> None:
    """A disk of one megabyte takes two checkpoints of 360 kB and not a third."""
    disk = tmp_path / "disk"
    disk.mkdir()
    told = _on_a_small_disk(disk, [sys.executable, "-c", FULL, str(disk), str(tmp_path / "run")])
    if told is None:
        pytest.skip("no disk can be mounted here")
    assert told.returncode == 0, told.stderr
    assert told.stdout.split()[0] == "10"
    assert told.stderr.count("No space left on device") == 1
    assert told.stdout.split()[1:] == ["step-00000001.paceline", "step-00000002.paceline"]


def _on_a_small_disk(disk: Path, command: list[str]) -> Any:
    """Run with a small tmpfs on ``disk``, in a mount namespace of its own; prints the disk's files last."""
    script = f'mount -t tmpfs -o size=1000k tmpfs "{disk}" || exit 99; "$@" || exit 1; ls -A "{disk}"'
    unshare = ["unshare", "--mount", "sh", "-c", script, "sh", *command]
    told = subprocess.run(unshare, capture_output=True, text=True, timeout=60)
    return None if told.returncode in (99, 127) or "unshare" in told.stderr else told


def test_torch_alone_reads_what_was_saved(tmp_path: Path) -> None:
    run(CASE, 2, tmp_path, args=ARGS | {"folder": str(tmp_path / "kept"), "every": LAST})
    content = torch.load(checkpoint_file.path_of(tmp_path / "kept", LAST), weights_only=True)
    assert set(content["models"][0]) == {"weight", "bias"}
