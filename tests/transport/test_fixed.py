"""The fixed transport's parts that need no second process: meeting, slots, backends, one worker over the network."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import paceline
from lone import flat, linear, numbers, plain, sgd, training
from paceline import concurrency
from paceline.errors import FLEET_FAILED, WorkerLost
from paceline.gradients import Gradients
from paceline.gradients.header import SUMS
from paceline.observe import read_log
from paceline.transport import group as groups
from paceline.transport.distributed import Slots
from paceline.transport.engines import choose
from paceline.transport.fixed import FixedTransport, launched
from paceline.transport.group import Group
from ports import own_port


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables a launcher sets for a fleet of one."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(own_port())}
    for name, value in place.items():
        monkeypatch.setenv(name, value)


def test_only_a_launcher_makes_a_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not launched()
    monkeypatch.setenv("RANK", "0")
    assert not launched()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launched()


def test_a_launcher_that_does_not_say_where_to_meet_is_told_so(
    launcher: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("MASTER_ADDR")
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(ValueError, match="MASTER_ADDR, MASTER_PORT not set; start with `paceline run` or torchrun"):
        paceline.join(quiet=True, run_dir=tmp_path)


def test_a_launcher_that_gives_words_for_numbers_is_told_so(
    launcher: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MASTER_PORT", "any")
    with pytest.raises(ValueError, match="MASTER_PORT is 'any', not a number; start with `paceline run` or torchrun"):
        paceline.join(quiet=True, run_dir=tmp_path)


def test_a_script_may_remove_the_launchers_variables_once_it_has_joined(
    launcher: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fleet = paceline.join(quiet=True, run_dir=tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name)
    fleet.leave(OSError("the script's own"))
    assert read_log(tmp_path).end["text"] == "the script's own"


def test_joins_one_after_another_in_one_process_train_alike(launcher: None, tmp_path: Path) -> None:
    for number in range(3):
        with paceline.join(quiet=True, run_dir=tmp_path / str(number)) as fleet:
            assert (fleet.rank, fleet.world_size, fleet.is_leader) == (0, 1, True)
            model = fleet.model(linear())
            list(training(fleet, model, sgd(model), numbers(), global_batch=8, micro_batch=4, shuffle=False))
        assert torch.allclose(flat(model), plain(linear(), numbers(), batch=8), atol=1e-12)


def test_one_worker_under_a_launcher_copies_no_gradients(launcher: None) -> None:
    """Nobody can join it, so it does what a worker does that no launcher started."""
    transport, model = FixedTransport(torch.device("cpu")), linear()
    try:
        gradients = Gradients(transport, [model])
        assert transport.solitary
        assert not gradients.buckets.buckets
    finally:
        transport.close()


def test_a_join_works_again_after_one_that_failed(launcher: None, tmp_path: Path) -> None:
    with pytest.raises(KeyError), paceline.join(quiet=True, run_dir=tmp_path):
        raise KeyError("a bug in the script")
    with pytest.raises(ValueError, match="2 ratios for 1 workers"):
        paceline.join("fixed:1,2", quiet=True, run_dir=tmp_path)
    with paceline.join(quiet=True, run_dir=tmp_path) as fleet:
        assert fleet.any(True)


def test_a_fleet_leaves_no_threads_behind(launcher: None, tmp_path: Path) -> None:
    before = {thread.name for thread in threading.enumerate()}
    with paceline.join(quiet=True, run_dir=tmp_path):
        assert any(thread.name == "paceline-heartbeat" for thread in threading.enumerate())
    assert {thread.name for thread in threading.enumerate()} <= before


class Waiting:
    """A heartbeat whose worker has threads that wait in these calls."""

    def __init__(self, *waiting: str) -> None:
        self.failure, self.waiting = WorkerLost("worker 2 was killed"), set(waiting)

    def waits(self) -> set[str]:
        return set(self.waiting)


@pytest.mark.parametrize("both_leave", [False, True])
def test_a_thread_that_stays_stuck_ends_a_worker_of_which_another_thread_has_heard_of_the_loss(
    both_leave: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, transport = threading.Event(), FixedTransport.__new__(FixedTransport)
    monkeypatch.setattr(concurrency, "end_process", lambda code: ended.set() if code == FLEET_FAILED else None)
    monkeypatch.setattr(groups, "LEAVE_S", 0.3)
    monkeypatch.setattr(groups, "SLICE_S", 0.02)
    transport._heartbeat = heartbeat = Waiting("the round of step 3", "fleet.evaluate()")  # type: ignore[assignment]
    transport._formed = Group(0, 2)
    transport._groups = [transport._formed]
    transport._unblock()
    assert transport.failed(RuntimeError("closed by peer")) is heartbeat.failure, "the proxy's thread"
    heartbeat.waiting.remove("the round of step 3")
    if both_leave:
        heartbeat.waiting.remove("fleet.evaluate()")
    assert ended.wait(1.0 if both_leave else 10.0) is not both_leave
    assert transport.group.is_over
    assert ("worker 2 was killed" in capsys.readouterr().err) is not both_leave


class Simultaneous:
    """A store in which a number is given to every worker before any of them can use it: the worst race."""

    def __init__(self, store: Any, workers: int) -> None:
        self._store, self._barrier = store, threading.Barrier(workers)

    def add(self, key: str, amount: int) -> int:
        number = int(self._store.add(key, amount))
        with suppress(threading.BrokenBarrierError):  # where not all workers ask for a number, nobody waits for long
            self._barrier.wait(timeout=0.2)
        return number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_figures_named_by_many_workers_at_once_do_not_use_up_the_slots() -> None:
    """Every worker adds the same few figures in its first step: they must fit, whatever the size of the fleet."""
    workers, names = 30, ["correct", "tokens", "entropy", "seen"]
    store, found = Simultaneous(dist.HashStore(), workers), []

    def work() -> None:
        mine = Slots(lambda: store, lambda request: request())
        found.append([mine.number(name) for name in names])

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert len(found) == workers
    assert all(slots == found[0] for slots in found), "workers disagree on what a slot means"
    assert len(set(found[0])) == len(names)
    assert max(found[0]) < SUMS, f"{workers} workers with {len(names)} figures used up {max(found[0])} slots"


def facts(*devices: str, host: str = "a") -> list[dict[str, str]]:
    return [{"host": host, "device": device} for device in devices]


@pytest.mark.parametrize(
    ("fleet", "backend"),
    [
        (facts("cpu", "cpu"), "gloo"),
        (facts("cuda:0", "cpu"), "gloo"),
        (facts("cuda:0", "cuda:0"), "gloo"),
        (facts("cuda:0", "cuda:1"), "nccl"),
        ([*facts("cuda:0"), *facts("cuda:0", host="b")], "nccl"),
    ],
)
def test_nccl_is_for_fleets_in_which_everybody_has_a_gpu_of_its_own(
    fleet: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PACELINE_BACKEND", raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert choose(fleet).name == backend


def test_the_variable_for_the_backend_decides_and_must_make_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_BACKEND", "gloo")
    assert choose(facts("cuda:0", "cuda:1")).name == "gloo"
    monkeypatch.setenv("PACELINE_BACKEND", "pigeon")
    with pytest.raises(ValueError, match="PACELINE_BACKEND is 'pigeon'; it can be gloo or nccl"):
        choose(facts("cpu"))
