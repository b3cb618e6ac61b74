"""What chaos.py draws and how it judges; and that nothing of it, or of hunted.py, runs on once it is broken off."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from crew import nursery
from hypothesis import given
from hypothesis import strategies as st
from nursery import end_all

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import _chaos_fleet
import _chaos_program
import _chaos_sockets
import _chaos_verdict

BENCHMARKS = Path(_chaos_program.__file__).parent


@given(seed=st.integers(0, 10_000))
def test_a_seed_gives_one_program_that_paceline_allows(seed: int) -> None:
    program = _chaos_program.draw_program(seed)
    assert program == _chaos_program.draw_program(seed)
    waits = program.pace in _chaos_program.WAITING
    assert waits or not (program.averages or program.shards > 1)
    assert program.shards == 1 or not program.averages
    assert 2 <= program.workers <= 4
    assert program.wire == "float32" or program.combine["name"] != "elastic-average"
    assert [fault.at_s for fault in program.faults] == sorted(fault.at_s for fault in program.faults)
    assert all(fault.at_s < program.seconds for fault in program.faults)


def test_all_paces_combines_and_faults_are_drawn() -> None:
    programs = [_chaos_program.draw_program(seed) for seed in range(300)]
    assert {program.pace for program in programs} == {*_chaos_program.WAITING, *_chaos_program.HASTY}
    assert {program.combine["name"] for program in programs} == {"gradients", "average", "elastic-average"}
    assert {program.wire for program in programs} == {"float32", "bf16", "fp16", "int8"}
    assert {fault.kind for program in programs for fault in program.faults} == {*_chaos_program.KINDS}
    assert {program.shards for program in programs} == {1, 2}


def life(folder: Path, code: int | None, *struck: str, words: str = "") -> _chaos_fleet.Life:
    (folder / "worker.err").write_text(words)
    return _chaos_fleet.Life(0, [], [str(folder / "worker")], True, struck={*struck}, code=code)


@pytest.mark.parametrize(
    ("code", "struck", "crash"),
    [
        (0, "", False),
        (75, "", False),
        (1, "", True),
        (1, "kill", True),
        (-9, "kill", False),
        (-9, "freeze", True),
        (143, "leave", False),
        (143, "", True),
        (-6, "cut peer", False),
        (-6, "cut store", True),
        (-11, "cut peer", True),
    ],
)
def test_an_exit_code_must_be_explained_by_a_fault(tmp_path: Path, code: int, struck: str, crash: bool) -> None:
    assert bool(_chaos_verdict._crash(life(tmp_path, code, struck))) == crash


def test_a_python_error_is_a_crash_whatever_the_exit_code(tmp_path: Path) -> None:
    words = "[rank0]: Traceback (most recent call last):\n[rank0]:   File x\n[rank0]: KeyError: 3\n"
    assert "KeyError: 3" in _chaos_verdict._crash(life(tmp_path, 75, words=words)).splitlines()[0]


def test_who_is_hit_leaves_one_that_holds_the_state(tmp_path: Path) -> None:
    fleet = object.__new__(_chaos_fleet.Fleet)
    fleet.lives = [
        _chaos_fleet.Life(slot, [SimpleNamespace(pid=-1)], [str(tmp_path / str(slot))], True)  # type: ignore[list-item]
        for slot in range(3)
    ]
    assert fleet.holders() == fleet.lives, "before the first step"
    fleet.lives[0].strike("kill", time.time())
    assert fleet.holders() == fleet.lives[1:]
    now = time.time()
    for slot, at in ((0, now), (1, now), (2, now - 5)):
        file = tmp_path / f"{slot}.progress"
        file.touch()
        os.utime(file, (at, at))
    assert fleet.holders() == [fleet.lives[1]], "one was hit a moment ago, one makes no steps"
    fleet.lives[0].calm_from = now - 2
    assert fleet.holders() == fleet.lives[:2]


def test_connections_of_a_process_are_found_with_both_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        found = [end for end in _chaos_sockets.connections_of(os.getpid()) if client.getsockname()[1] in end.ports]
        ports = {client.getsockname()[1], server.getsockname()[1]}
    address = socket.inet_aton("127.0.0.1")
    assert {end.local[0] for end in found} == {end.remote[0] for end in found} == {address}
    assert all(end.ports == ports for end in found)
    assert len(found) == 1, "the other end has not been accepted"


@pytest.mark.fleet
@pytest.mark.parametrize("name", ["chaos", "hunted"])
def test_nothing_runs_on_when_it_is_broken_off(tmp_path: Path, name: str) -> None:
    options = ["--smoke", "--out", str(tmp_path / "runs")]
    out, err = tmp_path / "out", tmp_path / "err"
    started = nursery().start(
        "crew:program", str(BENCHMARKS / f"{name}.py"), str(tmp_path), *options, env={}, out=out, err=err, quick=True
    )
    try:
        until = time.monotonic() + 60
        while not (found := list(tmp_path.glob("runs/*/*.progress"))) and time.monotonic() < until:
            time.sleep(0.02)
        assert found, err.read_text()
        os.kill(started.pid, signal.SIGINT)
        assert started.wait(30) == 1, err.read_text()
    finally:
        end_all([started])
    assert not [line for line in error_files() if str(tmp_path) in line]
    assert "broken off" in err.read_text()


def error_files() -> list[str]:
    """Return the files to which processes write their errors: those of a run are in its folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.append(os.readlink(entry / "fd" / "2"))
            except OSError:
                continue
    return found
