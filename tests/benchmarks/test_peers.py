"""How peers.py reads what its workers noted, and what it counts in the peers' scripts."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import _peers_notes as notes
from _peers_launch import LAUNCH, SCRIPTS, Run
from _peers_link import Place
from _peers_notes import Note
from _peers_settings import SETTINGS

DOCS = (Path(__file__).parents[2] / "docs" / "evidence.md").read_text()


def commit(at: float, step: int, *index: int, epoch: int = 0, slot: int = 0) -> Note:
    return Note(at, slot, 1, "commit", step=step, epoch=epoch, index=index)


def test_notes_are_read_in_the_order_of_time_and_an_unfinished_line_is_left_for_later(tmp_path: Path) -> None:
    line = json.dumps({"at": 2.0, "kind": "commit", "epoch": 0, "step": 0, "index": [3, 4]})
    (tmp_path / "0.10").write_text(f"{line}\n{line[:20]}")
    (tmp_path / "1.11").write_text(json.dumps({"at": 1.0, "kind": "begin"}) + "\n")
    (tmp_path / "ready").mkdir()
    assert notes.read(tmp_path) == [Note(1.0, 1, 11, "begin"), Note(2.0, 0, 10, "commit", 0, 0, (3, 4))]


def test_a_sample_in_no_update_is_lost_and_one_in_two_is_doubled() -> None:
    seen = [commit(1, 0, 0, 1), commit(1, 0, 1, slot=1), commit(2, 1, 0, 1, 2, epoch=1)]
    assert notes.audit(seen, samples=4, epochs=[0]) == (2, 1)
    assert notes.audit(seen, samples=4, epochs=[0, 1]) == (3, 1)
    assert notes.audit(seen, samples=4, epochs=[2]) == (4, 0)


def test_what_a_restored_checkpoint_undoes_is_not_counted() -> None:
    again = [commit(1, 0, 0), commit(2, 1, 1), Note(3, 0, 2, "restored", step=1), commit(4, 1, 1)]
    assert notes.audit(again, samples=2, epochs=[0]) == (0, 0)
    assert notes.audit([*again[:2], *again[3:]], samples=2, epochs=[0]) == (0, 1)


def test_speed_is_that_of_whole_steps_after_warm_up_and_before_the_kill() -> None:
    seen = [commit(at + slot / 10, at, *range(5), slot=slot) for at in range(12) for slot in (0, 1)]
    assert notes.samples_per_s(seen) == pytest.approx(10)
    assert notes.samples_per_s([*seen, commit(99, 12, *range(5))], before=50) == pytest.approx(10)
    assert notes.samples_per_s(seen[:10]) == pytest.approx(10)
    assert notes.samples_per_s(seen[:8]) is None


def test_the_time_to_an_accuracy_begins_when_the_last_worker_was_ready() -> None:
    ready = [Note(1, 0, 1, "begin"), Note(2, 1, 2, "begin"), Note(7, 1, 3, "begin")]
    tests = [Note(4, 0, 1, "accuracy", accuracy=0.8), Note(5, 0, 1, "accuracy", accuracy=0.91)]
    seen = sorted(ready + tests, key=lambda note: note.at)
    assert notes.seconds_to(0.9, seen) == 3
    assert notes.seconds_to(0.95, seen) is None


def test_work_done_again_is_lost_and_steps_as_usual_are_not() -> None:
    usual = [commit(float(at), at) for at in range(20)]
    on = [commit(20 + at, 20 + at) for at in range(3)]
    assert notes.seconds_lost(usual + on, killed_at=19.5) == pytest.approx(0)
    again = [Note(25, 0, 2, "restored", step=15), *(commit(26 + n, 15 + n) for n in range(8))]
    assert notes.seconds_lost(usual + again, killed_at=19.5) == pytest.approx(11)
    assert notes.seconds_lost(usual, killed_at=19.5) is None


def test_every_peer_has_a_script_and_its_settings_stand_in_the_docs() -> None:
    assert set(LAUNCH) == set(SETTINGS)
    for peer, settings in SETTINGS.items():
        assert (SCRIPTS / f"on_{peer}.py").exists()
        for setting in settings:
            assert setting in DOCS, f"{peer}: {setting}"


def test_a_line_that_is_only_further_in_is_no_change(tmp_path: Path) -> None:
    import peers

    assert peers.lines_changed(SCRIPTS / "plain.py") == 0
    further = (SCRIPTS / "plain.py").read_text().replace("    step = 0\n", "    if True:\n        step = 0  \n")
    (tmp_path / "other.py").write_text(further)
    assert peers.lines_changed(tmp_path / "other.py") == 1


def test_nothing_of_a_run_stays_not_even_what_its_processes_started(tmp_path: Path) -> None:
    grandchild = "import subprocess, sys; p = subprocess.Popen(['sleep', '60'], start_new_session=True); print(p.pid)"
    with Run(sys.executable, tmp_path / "run", [Place()], {}) as run:
        run.workers.append(run.start(Place(), "-c", grandchild))
        run.workers[0].wait()
        pid = int(run.said())
        os.kill(pid, signal.SIGCONT)
    states = subprocess.run(["ps", "-o", "stat=", str(pid)], capture_output=True, text=True, check=False).stdout
    assert states.strip()[:1] in ("", "Z")
