"""The run's log on the driver's disk, from the logs of several nodes; and a script that a node has not got."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.adapters.ray.messages import MARK, LogCollector


def line(event: str, **fields: object) -> bytes:
    return json.dumps({"event": event, "t": 0.0, **fields}).encode() + b"\n"


def events(folder: Path) -> list[tuple[str, object]]:
    read = [json.loads(text) for text in (folder / "events.jsonl").read_text().splitlines()]
    return [(event["event"], event.get("step")) for event in read]


def test_lines_that_several_workers_of_a_node_send_count_once(tmp_path: Path) -> None:
    collector = LogCollector(tmp_path)
    first, second, third = line("run"), line("step", step=0), line("step", step=1)
    collector.add("a", 0, first)
    collector.add("a", 0, first + second)  # another worker of the node, which began later and read more at once
    collector.add("a", len(first), second)
    collector.add("a", len(first + second), third)
    assert events(tmp_path) == [("run", None), ("step", 0), ("step", 1)]


def test_the_next_leaders_node_goes_on_with_the_same_run(tmp_path: Path) -> None:
    collector = LogCollector(tmp_path)
    collector.add("a", 0, line("run") + line("step", step=0))
    collector.add("b", 0, line("run") + line("step", step=1))
    collector.add("a", len(line("run") + line("step", step=0)), line("note", text='"run"'))
    assert events(tmp_path) == [("run", None), ("step", 0), ("step", 1), ("note", None)]


def test_the_mark_by_which_a_shared_disk_is_known_goes_with_the_run(tmp_path: Path) -> None:
    collector = LogCollector(tmp_path)
    assert (tmp_path / MARK).read_text() == collector.mark != LogCollector(tmp_path).mark
    collector.close()
    collector.close()
    assert not [*tmp_path.iterdir()]


def test_a_node_reads_its_log_on_in_whole_lines_and_sees_a_missing_script(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    from paceline.adapters.ray.messages import Logged
    from paceline.adapters.ray.worker import NodeLog, not_there

    log, file = NodeLog(tmp_path / "events.jsonl"), tmp_path / "events.jsonl"
    assert log.news() == []
    file.write_bytes(b"one\ntw")
    assert log.news() == [Logged(0, b"one\n")]
    file.write_bytes(b"one\ntwo\nthree\n")
    assert log.news() == [Logged(4, b"two\nthree\n")]
    assert log.news() == []
    (tmp_path / "here.py").touch()
    assert not not_there(("here.py",), str(tmp_path))
    assert not not_there(("-m", "module"), str(tmp_path))
    assert "the script 'gone.py' is not on the node (looked in" in not_there(("gone.py",), str(tmp_path))
