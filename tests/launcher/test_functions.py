"""`paceline.launch`: a function in several processes, from a script, a test, or where nothing can be imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from lone import deep, flat, numbers, plain, sgd, training
from paceline import WorkerFailed, launch
from paceline.launcher.functions import choose_method

pytestmark = pytest.mark.fleet

BATCH = 16


def train(folder: Path, pause: str = "") -> tuple[int, torch.Tensor]:
    with paceline.join("equal", quiet=True, run_dir=folder) as fleet:
        model = fleet.model(deep())
        for step in training(fleet, model, sgd(model), numbers(), global_batch=BATCH, micro_batch=4, shuffle=False):
            if step.index == 0 and pause == "fails" and fleet.rank == 1:
                raise KeyError("the second worker's own mistake")
            if step.index == 0 and pause == "dies" and fleet.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if step.index == 0 and pause == "waits":
                (folder / f"waiting.{fleet.rank}.{os.getpid()}").touch()
                time.sleep(600)
        return fleet.rank, flat(model)


def check_trained(told: list[Any]) -> None:
    assert [rank for rank, _ in told] == [0, 1]
    assert torch.equal(told[0][1], told[1][1])
    torch.testing.assert_close(told[0][1], plain(deep(), numbers(), batch=BATCH), rtol=0, atol=1e-12)


def test_a_function_of_a_module_runs_in_new_processes_and_trains_as_one_machine(tmp_path: Path) -> None:
    assert choose_method(train, (tmp_path,)) == "spawn"
    check_trained(launch(train, tmp_path, workers=2))
    assert not _children()


def test_a_function_within_a_function_runs_in_copies_though_this_process_has_used_its_threads(tmp_path: Path) -> None:
    a = torch.randn(800, 800)
    assert (a @ a).shape == (800, 800)  # a pool of OpenMP threads, if it is to have one, is there now

    def own() -> tuple[int, torch.Tensor]:
        assert (a @ a).shape == (800, 800)
        return train(tmp_path)

    assert choose_method(own, ()) == "fork"
    check_trained(launch(own, workers=2))
    assert not _children()


NOTEBOOK = """
import paceline, torch
from torch import nn
from torch.utils.data import TensorDataset

def train():
    with paceline.join(quiet=True) as fleet:
        model = fleet.model(nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fleet.track(optimizer=optimizer)
        for step in fleet.steps(TensorDataset(torch.ones(16, 3)), global_batch=8, micro_batch=2):
            for (x,) in step:
                step.backward(model(x).mean())
            step.commit(optimizer)
        return fleet.world_size, step.index

nn.Linear(500, 500)(torch.ones(500, 500)).sum().backward()
print(paceline.launch(train, workers=2, pace="equal"), paceline.launch(lambda: 7, workers=1))
"""


def test_where_there_is_no_file_to_import_as_in_a_notebook_it_works_too(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-"], input=NOTEBOOK, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *_, last = done.stdout.splitlines()  # the Gloo of torch 2.9 and 2.10 prints lines of its own before it
    assert last == "[(2, 1), (2, 1)] [7]"


def test_the_environment_and_the_options_reach_the_workers(tmp_path: Path) -> None:
    told = launch(
        partial(_seen, "OWN"),
        workers=2,
        method="fork",
        pace="equal",
        run_dir=tmp_path / "run",
        env={"OWN": "mine"},
        devices=["cpu"] * 2,
    )
    assert told == [["mine", "equal", str(tmp_path / "run"), "cpu", str(rank)] for rank in range(2)]


def _seen(own: str) -> list[str]:
    return [os.environ[name] for name in (own, "PACELINE_PACE", "PACELINE_RUN_DIR", "PACELINE_DEVICE", "RANK")]


def test_a_workers_error_is_raised_here_with_its_traceback_and_not_what_the_others_made_of_it(tmp_path: Path) -> None:
    with pytest.raises(
        WorkerFailed, match=r"(?s)worker 1 failed:.*in train.*the second worker's own mistake"
    ) as caught:
        launch(train, tmp_path, "fails", workers=2, method="fork")
    assert caught.value.rank == 1
    assert not _children()


def test_a_worker_that_is_killed_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=r"worker 1 was killed by signal 9 \(SIGKILL\)"):
        launch(train, tmp_path, "dies", workers=2, method="fork")
    assert not _children()


def test_what_cannot_be_handed_back_is_an_error_that_says_so() -> None:
    with pytest.raises(WorkerFailed, match=r"worker 0 returned a function that cannot be handed back.*state_dict"):
        launch(lambda: lambda: 1, workers=1)


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {tests!r}
from test_functions import train
import paceline

if __name__ == "__main__":
    paceline.launch(train, Path({folder!r}), "waits", workers=2, method="fork")
"""


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGKILL])
def test_when_it_is_interrupted_or_killed_nothing_is_left_running(tmp_path: Path, number: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=[str(folder) for folder in Path(__file__).parents[:2]], folder=str(tmp_path)))
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    try:
        waiting = _until(lambda: found if len(found := sorted(tmp_path.glob("waiting.*"))) == 2 else None)
        workers = [int(path.name.split(".")[-1]) for path in waiting]
        parent.send_signal(number)
        parent.communicate(timeout=60)
        _until(lambda: all(not _alive(pid) for pid in workers))
    finally:
        parent.kill()
        parent.wait()
    assert parent.returncode == (-signal.SIGKILL if number == signal.SIGKILL else -signal.SIGINT)


def _until(happened: Any) -> Any:
    until = time.monotonic() + 60
    while not (seen := happened()):
        assert time.monotonic() < until
        time.sleep(0.02)
    return seen


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _children() -> list[str]:
    """Workers of this process that still run (multiprocessing's own tracker stays by its design)."""
    listed = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in listed if _alive(int(pid))}
    return [line for line in commands.values() if "resource_tracker" not in line and "nursery" not in line]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 0}, "workers must be a whole number"),
        ({"workers": 2, "devices": ["cpu"]}, "one for each of the 2 workers"),
        ({"workers": 2, "method": "threads"}, 'must be "spawn" or "fork"'),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        launch(train, **options)


def test_a_worker_does_not_launch_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="a worker already"):
        launch(train, workers=2)


def test_a_process_that_uses_cuda_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="put the function into a file and import it from there"):
        launch(lambda: 1, workers=1)
