"""A run's folder is locked by its writer: held against other processes, and never longer than the writer lives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.observe.log.run_folder import LOCK_NAME, FolderInUse, lock_folder

HOLD = """
import sys
from pathlib import Path
from paceline.observe.log.run_folder import lock_folder
held = lock_folder(Path(sys.argv[1]), fleet=sys.argv[2] or None)
print("held", flush=True)
sys.stdin.read()
held.release()
"""


@contextmanager
def another(folder: Path, fleet: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock until its input ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder), fleet], **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_folder_that_another_process_writes_into_is_refused_and_the_process_is_named(tmp_path: Path) -> None:
    with another(tmp_path) as process, pytest.raises(FolderInUse) as refused:
        lock_folder(tmp_path, patience_s=0.0)
    assert f"another run (process {process.pid} on " in str(refused.value)
    assert "give another run_dir" in str(refused.value)


def test_it_is_free_again_when_its_holder_releases_it_or_dies(tmp_path: Path) -> None:
    with another(tmp_path) as process:
        process.communicate()
        assert not (tmp_path / LOCK_NAME).exists()
        lock_folder(tmp_path, patience_s=0.0).release()
    with another(tmp_path) as process:
        process.kill()
        process.wait()
        lock_folder(tmp_path, patience_s=0.0).release()


def test_a_holder_that_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    with another(tmp_path) as process:
        assert process.stdin is not None
        process.stdin.close()
        lock_folder(tmp_path, patience_s=60.0).release()


def test_a_worker_of_the_same_fleet_keeps_nobody_out(tmp_path: Path) -> None:
    with another(tmp_path, fleet="127.0.0.1:7070"):
        lock_folder(tmp_path, fleet="127.0.0.1:7070", patience_s=0.0).release()
        assert (tmp_path / LOCK_NAME).exists(), "it is still the other's"
        with pytest.raises(FolderInUse):
            lock_folder(tmp_path, fleet="127.0.0.1:7071", patience_s=0.0)


def test_a_child_that_was_forked_holds_nothing_when_its_parent_is_gone(tmp_path: Path) -> None:
    forks = HOLD.replace("print(", "import os\nif os.fork() == 0:\n    sys.stdin.read()\n    os._exit(0)\nprint(")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", forks, str(tmp_path), ""], **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        process.kill()
        process.wait()  # the child lives on, until its input ends below
        lock_folder(tmp_path, patience_s=0.0).release()


def test_where_there_are_no_locks_nothing_is_kept_out(tmp_path: Path) -> None:
    lock_folder(tmp_path / "nowhere", patience_s=0.0).release()
