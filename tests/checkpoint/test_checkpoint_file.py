"""Checkpoint files: what torch wrote, with a checksum that no damage survives; and the folder of automatic ones.

In that folder only exact names count, the newest stay, and other files are never touched.
"""

from __future__ import annotations

import fcntl
import io
import os
import re
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint import file as checkpoint_file
from paceline.checkpoint.load import look_up

CONTENT = {"weights": torch.arange(3000.0), "nested": [{"a": (1, "b", None)}, torch.zeros(0)], "text": "x" * 100}
HERE = Path("c.paceline")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "c.paceline"
    checkpoint_file.write(path, CONTENT)
    return path.read_bytes()


def test_the_file_is_a_zip_archive_that_torch_reads_without_paceline(whole: bytes) -> None:
    content = torch.load(io.BytesIO(whole), weights_only=True)
    assert torch.equal(content["weights"], CONTENT["weights"])
    assert content["nested"][0] == {"a": (1, "b", None)}
    assert content["paceline_checkpoint"] == checkpoint_file.VERSION
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        assert archive.testzip() is None
        assert archive.comment.startswith(b"paceline checkpoint 2 blake2b ")


def test_torch_maps_the_file_into_memory(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(whole)
    assert torch.equal(torch.load(tmp_path / "c", weights_only=True, mmap=True)["weights"], CONTENT["weights"])


def test_the_checksum_line_tells_the_version(whole: bytes) -> None:
    assert checkpoint_file.checked_version(memoryview(whole), HERE) == 2
    assert checkpoint_file.checked_version(memoryview(b"anything else"), HERE) is None
    assert checkpoint_file.checked_version(memoryview(b""), HERE) is None


@given(data=st.data())
def test_a_flipped_bit_breaks_the_checksum(whole: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, len(whole) * 8 - 1))
    damaged = bytearray(whole)
    damaged[bit // 8] ^= 1 << bit % 8
    assert not passes(bytes(damaged))


@given(data=st.data())
def test_a_file_that_was_cut_off_has_no_checksum(whole: bytes, data: st.DataObject) -> None:
    assert not passes(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(tail=st.binary(min_size=1, max_size=50))
def test_a_file_with_something_behind_it_has_no_checksum(whole: bytes, tail: bytes) -> None:
    assert not passes(whole + tail)


def passes(data: bytes) -> bool:
    try:
        return checkpoint_file.checked_version(memoryview(data), HERE) == 2
    except ValueError:
        return False


@given(chunks=st.lists(st.binary(max_size=60), min_size=1, max_size=20))
def test_the_checksum_does_not_depend_on_how_the_bytes_come(chunks: list[bytes]) -> None:
    end = b"PK\x05\x06" + bytes(18)
    files = []
    for parts in ([*chunks, end], [b"".join(chunks) + end], [bytes([byte]) for byte in b"".join(chunks) + end]):
        file = io.BytesIO()
        writer = checkpoint_file.ChecksumWriter(file)
        assert sum(writer.write(part) for part in parts) == len(b"".join(chunks)) + len(end)
        writer.close()
        files.append(file.getvalue())
    assert files[0] == files[1] == files[2]
    assert passes(files[0])


def test_a_newer_versions_checksum_line_is_told_from_damage(whole: bytes) -> None:
    for newer in (b"paceline checkpoint 3 blake2b ", b"paceline checkpoint 12 something else entirely "):
        with pytest.raises(checkpoint_file.NewerVersion, match=r"c\.paceline was written by a newer version"):
            checkpoint_file.checked_version(memoryview(whole.replace(b"paceline checkpoint 2 blake2b ", newer)), HERE)


def test_what_is_read_is_what_was_written(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(whole)
    assert bytes(checkpoint_file.view(checkpoint_file.read(tmp_path / "c"))) == whole
    (tmp_path / "empty").write_bytes(b"")
    assert len(checkpoint_file.read(tmp_path / "empty")) == 0


def test_file_and_folder_reach_the_disk_before_the_writer_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(handle: int) -> None:
        done.append(f"fsync {os.path.basename(os.readlink(f'/proc/self/fd/{handle}'))}")
        fsync(handle)

    def noted_replace(old: Path, new: Path) -> None:
        done.append("replace")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    checkpoint_file.write(tmp_path / "kept" / "c", CONTENT)
    assert done == [f"fsync {temporary('c', os.getpid())}", "replace", "fsync kept"]


def test_a_writer_that_another_has_overtaken_leaves_the_newer_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader is frozen while it saves; the next one saves, and saves again later. Then the first one wakes."""
    path, fsync = tmp_path / "saved.pt", os.fsync
    checkpoint_file.write(tmp_path / "newer", {"step": 9})

    def frozen(handle: int) -> None:
        fsync(handle)
        if (tmp_path / "newer").exists():
            os.replace(tmp_path / "newer", path)
            later = time.time() + 5
            os.utime(path, (later, later))

    checkpoint_file.write(path, {"step": 1})
    monkeypatch.setattr(os, "fsync", frozen)
    checkpoint_file.write(path, {"step": 5})
    assert torch.load(path)["step"] == 9
    assert os.listdir(tmp_path) == ["saved.pt"]
    checkpoint_file.write(path, {"step": 10})
    assert torch.load(path)["step"] == 10


@pytest.mark.slow
def test_writing_holds_no_copy_of_the_whole(tmp_path: Path) -> None:
    """64 MB in one tensor: while it is written, the process grows by much less than that."""
    script = """
import resource, sys, torch
from pathlib import Path
from paceline.checkpoint import file as checkpoint_file
from paceline.checkpoint.load import look_up
content = {"weights": torch.zeros(1 << 24)}
content["weights"][:] = 1
checkpoint_file.write(Path(sys.argv[1]) / "small", {"weights": torch.ones(10)})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
checkpoint_file.write(Path(sys.argv[1]) / "large", content)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    told = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(told.stdout) < 16_000, "kilobytes"


def temporary(name: str, pid: int, host: str | None = None) -> str:
    return f".{name}.{pid}@{host or socket.gethostname()}.tmp"


def dead_pid() -> int:
    """Return the id of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid


def test_sweeping_removes_what_a_dead_writer_left_and_spares_a_living_ones(tmp_path: Path) -> None:
    dead = dead_pid()
    living, elsewhere = temporary("c", os.getppid()), temporary("c", dead, "elsewhere")
    kept = [".other.tmp", f".c.{dead}.tmp", living, elsewhere, "step-1.paceline"]
    for name in [
        *kept,
        temporary("c", dead),
        temporary("a@b.c", dead),
        temporary("of.an.earlier.container", os.getpid()),
    ]:
        (tmp_path / name).write_text("half")
    seen: list[Any] = []

    class Watched:
        """Swept in mid-write."""

        def __reduce__(self) -> Any:
            checkpoint_file.remove_abandoned(tmp_path)
            seen.extend(sorted(file.name for file in tmp_path.iterdir()))
            return (list, ())

    checkpoint_file.write(tmp_path / "step-2.paceline", {"extra": Watched()})
    assert seen == sorted([*kept, temporary("step-2.paceline", os.getpid())])
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([*kept, "step-2.paceline"])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_writer_that_its_parent_has_not_waited_for_yet_is_dead(tmp_path: Path) -> None:
    """A worker that takes over a save is quicker than the launcher."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    (tmp_path / temporary("c", child.pid)).write_text("half")
    checkpoint_file.write(tmp_path / "c", CONTENT)
    child.wait()
    assert [file.name for file in tmp_path.iterdir()] == ["c"]


def test_a_temporary_file_that_is_swept_before_it_is_locked_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, swept = fcntl.flock, []

    def sweep_first(file: Any, how: int) -> None:
        if not swept:
            swept.extend(tmp_path.iterdir())
            swept[0].unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    checkpoint_file.write(tmp_path / "c", CONTENT)
    assert [file.name for file in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("then", ["save", "load"])
def test_what_a_kill_in_mid_save_left_goes_with_the_next_save_or_load(tmp_path: Path, then: str) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from paceline.checkpoint import file as checkpoint_file
from paceline.checkpoint.load import look_up
class Killed:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)
checkpoint_file.write(Path(sys.argv[1]), {"extra": Killed()})
"""
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path / "saved.pt")], check=False)
    assert killed.returncode == -9
    (left,) = tmp_path.iterdir()
    assert re.fullmatch(r"\.saved\.pt\.\d+@.+\.tmp", left.name)
    if then == "save":
        checkpoint_file.write(tmp_path / "another.pt", CONTENT)
    else:
        look_up(tmp_path / "saved.pt", device=torch.device("cpu"), missing_ok=True)
    assert not left.exists()


# -- the folder of automatic checkpoints ----------------------------------------------------------------------------

FOREIGN = (
    "step-120.paceline",
    "step-00000120.paceline.bak",
    "xstep-00000120.paceline",
    "last.pt",
    "step-00000120.PACELINE",
)


def fill(folder: Path, *steps: int) -> None:
    for step in steps:
        checkpoint_file.path_of(folder, step).write_text(f"{step}")


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@given(step=st.integers(0, 10**17))
def test_a_name_gives_its_step_back(step: int) -> None:
    assert checkpoint_file.step_of(checkpoint_file.path_of(Path("kept"), step)) == step


def test_other_names_are_nobody_elses_business() -> None:
    assert [checkpoint_file.step_of(Path(name)) for name in (*FOREIGN, "step-000000120.paceline")] == [None] * 6


def test_the_newest_is_that_of_the_latest_step_however_many_digits(tmp_path: Path) -> None:
    fill(tmp_path, 99_999_999, 100_000_000, 7)
    assert [checkpoint_file.step_of(file) for file in checkpoint_file.newest_first(tmp_path)] == [
        100_000_000,
        99_999_999,
        7,
    ]
    assert checkpoint_file.newest_first(tmp_path / "missing") == []


def test_pruning_keeps_the_newest_and_every_file_of_another_name(tmp_path: Path) -> None:
    fill(tmp_path, 10, 20, 30, 40)
    for name in FOREIGN:
        (tmp_path / name).write_text("")
    checkpoint_file.prune(tmp_path, keep=2)
    assert names(tmp_path) == sorted([*FOREIGN, "step-00000030.paceline", "step-00000040.paceline"])
    checkpoint_file.prune(tmp_path, keep=5)
    assert len(names(tmp_path)) == len(FOREIGN) + 2


def test_checkpoints_beyond_a_step_are_set_aside_and_none_is_lost(tmp_path: Path) -> None:
    fill(tmp_path, 10, 20, 500)
    assert [file.name for file in checkpoint_file.set_aside(tmp_path, beyond=20)] == ["step-00000500.paceline.aside1"]
    fill(tmp_path, 500)
    assert [file.name for file in checkpoint_file.set_aside(tmp_path, beyond=20)] == ["step-00000500.paceline.aside2"]
    assert checkpoint_file.set_aside(tmp_path, beyond=20) == []
    checkpoint_file.prune(tmp_path, keep=1)
    assert names(tmp_path) == [
        "step-00000020.paceline",
        "step-00000500.paceline.aside1",
        "step-00000500.paceline.aside2",
    ]
