"""Two runs that were given one folder: one after the other is fine, at the same time is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from crew import Crew
from programs import written

from paceline.observe import read_log

pytestmark = pytest.mark.fleet

TRAIN = """
import sys, time
from pathlib import Path

here = Path(__file__).parent
with paceline.join(run_dir=here / "mine") as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in fleet.steps(data, global_batch=12, micro_batch=3):
        for x, y in step:
            step.backward(loss_fn(model(x), y))
        step.commit(optimizer)
        (here / "under-way").touch()
        while not (here / "go").exists():
            time.sleep(0.01)
    result = fleet.run_id
"""


def crew(folder: Path, name: str, *, workers: int = 1) -> Crew:
    """Workers of a run of their own; what they say lies apart, their run's folder is the script's."""
    env = {"QUICK_EXIT": "1", "PACELINE_PACE": "equal", "PACELINE_RUN_DIR": ""}
    return Crew(written(folder, TRAIN), workers, folder / name, env=env)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_run_in_a_folder_is_refused_while_the_first_goes_on_and_only_then(
    tmp_path: Path, workers: int
) -> None:
    with crew(tmp_path, "first", workers=workers) as first:
        first.wait_for("../under-way")
        with crew(tmp_path, "second", workers=workers) as second:
            for refused in second.wait():
                assert refused.code == 1
                assert f"ValueError: another run (process {first.workers[0].pid} on " in refused.err
                assert "give another run_dir, or none for a new folder each time" in refused.err
        (tmp_path / "go").touch()
        assert [ended.value for ended in first.wait()] == ["mine"] * workers
    log = read_log(tmp_path / "mine")
    assert [record.step for record in log.records] == [0, 1, 2, 3]
    assert log.end is not None
    text = (tmp_path / "mine" / "events.jsonl").read_text()
    assert text.count('"event": "run"') == 1, "the second has left no trace"
    with crew(tmp_path, "third", workers=workers) as third:
        assert [ended.value for ended in third.wait()] == ["mine"] * workers
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {"events.jsonl"}


def test_a_run_that_was_killed_blocks_nobody(tmp_path: Path) -> None:
    with crew(tmp_path, "first") as first:
        first.wait_for("../under-way")
        first.workers[0].kill_group()
        (tmp_path / "go").touch()
        with crew(tmp_path, "second") as second:
            assert [ended.value for ended in second.wait()] == ["mine"]
