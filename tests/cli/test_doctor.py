"""The checklist: every check can fail, and says what to do."""

import json
import socket
from pathlib import Path

import pytest
from shells import Shell

from paceline.cli import doctor
from paceline.cli.doctor import check_network, check_python, check_runs, check_topology, judge_torch


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("2.8.1+cpu", "failed"),
        ("2.9.0", "ok"),
        ("2.10.0", "ok"),
        ("2.14.1+cu130", "ok"),
        ("2.15.0+cpu", "ok"),
        ("2.16.0a0", "note"),
        ("3.0.0", "note"),
    ],
)
def test_torch_is_judged_by_its_range(version: str, state: str) -> None:
    check = judge_torch(version)
    assert check.state == state
    assert bool(check.advice) == (state != "ok")


def test_an_old_python_fails() -> None:
    assert (check_python((3, 10)).state, check_python((3, 11)).state) == ("failed", "ok")


def test_the_run_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    assert check_runs(tmp_path / "runs").state == "ok"
    assert not (tmp_path / "runs").exists()
    (tmp_path / "file").write_text("")
    check = check_runs(tmp_path / "file" / "runs")
    assert (check.state, check.advice) == ("failed", "choose another with --output-dir")


def test_no_way_outwards_is_worth_a_note_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "interface_outwards", lambda host: None)
    assert check_network().state == "note"


def test_the_way_to_this_computer_is_its_loopback() -> None:
    assert doctor.interface_outwards("127.0.0.1") in {f"{name} (127.0.0.1)" for _, name in socket.if_nameindex()}


def test_a_roster_is_tried_with_a_worker() -> None:
    check = doctor.check_roster()
    assert check.state == "ok"
    assert check.value is not None
    assert 0 < check.value < 10


def test_a_check_that_breaks_fails_and_the_others_still_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> doctor.Check:
        raise OSError("no such device")

    monkeypatch.setattr(doctor, "check_port", breaks)
    monkeypatch.setattr(doctor, "check_all_reduce", lambda: doctor.Check("all-reduce", "ok", ""))
    checks = {check.name: check for check in doctor.examine(tmp_path / "runs", 0)}
    assert checks["port"].state == "failed"
    assert "no such device" in checks["port"].text
    assert checks["backends"].state == "ok"


def test_the_topology_is_that_of_the_latest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "in the latest run" not in check_topology(tmp_path / "runs").text
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    said = {"event": "run", "t": 1.0, "name": "digits", "places": {"sites": [[[0]], [[1]]], "tree": True}}
    (tmp_path / "runs" / "digits" / "events.jsonl").write_text(json.dumps(said) + "\n")
    text = check_topology(tmp_path / "runs").text
    assert "in the latest run, digits: 2 sites: workers 0 | 1; sums cross once, by workers 0 1" in text
    monkeypatch.setenv("PACELINE_SITES", "off")
    assert "PACELINE_SITES=off" in check_topology(tmp_path / "runs").text


def test_a_switch_that_is_neither_on_nor_off_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SITES", "no")
    with pytest.raises(ValueError, match="PACELINE_SITES is 'no'; it can be on or off"):
        check_topology(tmp_path)


def test_the_probe_measures_for_about_the_time_it_was_given() -> None:
    assert doctor.probe("cpu", 0.2) > 1


@pytest.mark.fleet
def test_two_real_processes_reduce_and_the_whole_list_is_printed_as_json(shell: Shell) -> None:
    done = shell.run("doctor", "--json", "--probe-seconds", "0.3")
    report = json.loads(done.stdout)
    found = {check["name"]: check for check in report["checks"]}
    assert (done.returncode, report["ok"]) == (0, True)
    assert 0 < found["all-reduce"]["value"] < 1000
    assert found["cpu"]["value"] > 1


@pytest.mark.fleet
def test_something_needed_that_fails_is_the_exit_code_and_comes_with_advice(shell: Shell) -> None:
    (shell.folder / "file").write_text("")
    interface = "no-such-interface"
    done = shell.run("doctor", "--output-dir", "file/runs", "--probe-seconds", "0", GLOO_SOCKET_IFNAME=interface)
    assert done.returncode == 1
    assert "FAIL  run folder" in done.stdout
    assert "FAIL  all-reduce" in done.stdout
    assert "-> a firewall or a wrong GLOO_SOCKET_IFNAME" in done.stdout
    assert "2 of " in done.stdout
