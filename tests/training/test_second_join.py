"""A script that joins twice: where workers come and go, the run has ended with the first training."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline
from paceline.errors import MisuseError
from paceline.roster import RosterServer


def test_a_second_join_where_workers_come_and_go_says_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roster = RosterServer(minimum=1, maximum=2, token="secret", expect=1)
    roster.start()
    try:
        monkeypatch.setenv("PACELINE_ROSTER", roster.address)
        monkeypatch.setenv("PACELINE_TOKEN", "secret")
        with pytest.raises(KeyError), paceline.join(device="cpu", quiet=True, run_dir=tmp_path / "failed"):
            raise KeyError("what ends in an error may be begun again")
        with paceline.join(device="cpu", quiet=True, run_dir=tmp_path / "run"):
            pass
        with pytest.raises(MisuseError, match=r"several loops \(fleet.steps\) in one paceline.join\(\)"):
            paceline.join(device="cpu", quiet=True, run_dir=tmp_path / "again")
    finally:
        roster.close()
