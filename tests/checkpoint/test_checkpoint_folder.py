"""The folder of automatic checkpoints: exact names, the newest kept, nobody else's files touched."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint import folder as checkpoint_folder

FOREIGN = (
    "step-120.paceline",
    "step-00000120.paceline.bak",
    "xstep-00000120.paceline",
    "last.pt",
    "step-00000120.PACELINE",
)


def fill(folder: Path, *steps: int) -> None:
    for step in steps:
        checkpoint_folder.path_of(folder, step).write_text(f"{step}")


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@given(step=st.integers(0, 10**17))
def test_a_name_gives_its_step_back(step: int) -> None:
    assert checkpoint_folder.step_of(checkpoint_folder.path_of(Path("kept"), step)) == step


def test_other_names_are_nobody_elses_business() -> None:
    assert [checkpoint_folder.step_of(Path(name)) for name in (*FOREIGN, "step-000000120.paceline")] == [None] * 6


def test_the_newest_is_that_of_the_latest_step_however_many_digits(tmp_path: Path) -> None:
    fill(tmp_path, 99_999_999, 100_000_000, 7)
    assert [checkpoint_folder.step_of(file) for file in checkpoint_folder.newest_first(tmp_path)] == [
        100_000_000,
        99_999_999,
        7,
    ]
    assert checkpoint_folder.newest_first(tmp_path / "missing") == []


def test_pruning_keeps_the_newest_and_every_file_of_another_name(tmp_path: Path) -> None:
    fill(tmp_path, 10, 20, 30, 40)
    for name in FOREIGN:
        (tmp_path / name).write_text("")
    checkpoint_folder.prune(tmp_path, keep=2)
    assert names(tmp_path) == sorted([*FOREIGN, "step-00000030.paceline", "step-00000040.paceline"])
    checkpoint_folder.prune(tmp_path, keep=5)
    assert len(names(tmp_path)) == len(FOREIGN) + 2


def test_checkpoints_beyond_a_step_are_set_aside_and_none_is_lost(tmp_path: Path) -> None:
    fill(tmp_path, 10, 20, 500)
    assert [file.name for file in checkpoint_folder.set_aside(tmp_path, beyond=20)] == ["step-00000500.paceline.aside1"]
    fill(tmp_path, 500)
    assert [file.name for file in checkpoint_folder.set_aside(tmp_path, beyond=20)] == ["step-00000500.paceline.aside2"]
    assert checkpoint_folder.set_aside(tmp_path, beyond=20) == []
    checkpoint_folder.prune(tmp_path, keep=1)
    assert names(tmp_path) == [
        "step-00000020.paceline",
        "step-00000500.paceline.aside1",
        "step-00000500.paceline.aside2",
    ]
