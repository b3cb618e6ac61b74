"""The way to another computer: reached or not, how fast, over what; one line for each thing typed wrongly."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest
import switch as switches
from switch import Switch
from typer.testing import CliRunner

from paceline.cli import app, doctor
from paceline.transport.link_speed import PORT, Answering

needs_switch = pytest.mark.skipif(bool(switches.missing()), reason=switches.missing())


@pytest.fixture
def doctor_there() -> Iterator[int]:
    with closing(Answering(0)) as answering:
        yield answering.port


def examined(text: str) -> dict[str, doctor.Check]:
    return {found.name: found for found in doctor.examine_target(doctor.parse_target(text))}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no computer's address; write HOST or HOST:PORT"),
        (":80", "no computer's address; write HOST or HOST:PORT"),
        ("10.0.0.5:", "no computer's address; write HOST or HOST:PORT"),
        ("10.0.0.5:http", "the port in '10.0.0.5:http' is not a number from 1 to 65535"),
        ("10.0.0.5:70000", "the port in '10.0.0.5:70000' is not a number from 1 to 65535"),
        ("no.such.host.invalid", "no computer is known as 'no.such.host.invalid' here"),
    ],
)
def test_what_is_no_computer_is_refused_in_one_line(text: str, told: str) -> None:
    ended = CliRunner().invoke(app, ["doctor", "--to", text])
    assert ended.exit_code == 2
    assert told in ended.stderr
    assert ended.stderr.startswith("paceline: doctor: --to: ")
    assert ended.stderr.count("\n") == 1


def test_asking_and_answering_are_two_computers() -> None:
    ended = CliRunner().invoke(app, ["doctor", "--answer", "--to", "127.0.0.1"])
    assert (ended.exit_code, ended.stderr.count("\n")) == (2, 1)
    assert "give --to or --answer" in ended.stderr


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("", 0)) as taken:
        ended = CliRunner().invoke(app, ["doctor", "--answer", "--port", str(taken.getsockname()[1])])
    assert ended.exit_code == 2
    assert "give another with --port" in ended.stderr


@pytest.mark.parametrize(
    ("text", "address", "port"),
    [("[::1]:80", "::1", 80), ("::1", "::1", PORT), ("127.0.0.1", "127.0.0.1", 7071)],
)
def test_an_address_is_read_with_and_without_its_port(text: str, address: str, port: int) -> None:
    assert doctor.parse_target(text)[1:3] == (address, port)


def test_the_doctor_there_is_timed(doctor_there: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MOST_BYTES", 1 << 20)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    found = examined(f"127.0.0.1:{doctor_there}")
    assert [one.state for one in found.values()] == ["ok"] * 4
    assert found["way"].text.endswith("(127.0.0.1), and Gloo would use it")
    assert 0 < (found["latency"].value or 0) < 1
    assert (found["bandwidth"].value or 0) > 1e6


@pytest.mark.parametrize("told", [True, False])
def test_a_computer_where_nothing_listens_is_reached_all_the_same(told: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    *_, found = doctor.examine_target(doctor.Target("127.0.0.1", "127.0.0.1", port, told))
    assert found.state == ("failed" if told else "note")
    assert f"nothing listens at port {port}" in found.text
    assert "paceline doctor --answer" in found.advice


def test_something_else_that_listens_is_no_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        *_, found = doctor.examine_target(doctor.Target("127.0.0.1", "127.0.0.1", other.getsockname()[1], True))
    assert (found.state, "it is not a doctor" in found.text) == ("ok", True)


def test_an_interface_that_does_not_exist_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonsuch0")
    found = doctor.way_out(doctor.parse_target("127.0.0.1"))
    assert (found.state, found.text) == ("failed", "GLOO_SOCKET_IFNAME is nonsuch0, which has no address here")
    assert "(127.0.0.1)" in found.advice


@needs_switch
def test_a_slow_network_is_measured_and_a_cut_one_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PATIENCE_S", 0.3)
    with Switch("ab", networks={"dead0": "ab", "eth0": "ab"}) as switch:
        switch.every(delay_s=0.02, bits_s=50e6)
        with switch.inside("b"):
            answering = Answering(0)
        with closing(answering), switch.inside("a"):
            there = switch.address("b", "eth0")
            found = examined(f"{there}:{answering.port}")
            assert f"packets leave by eth0 ({switch.address('a', 'eth0')})" in found["way"].text
            assert 0.04 <= (found["latency"].value or 0) < 0.1
            assert 5e6 < (found["bandwidth"].value or 0) < 55e6
            switch.dead.add("eth0")
            *_, last = doctor.examine_target(doctor.parse_target(there))
            assert (last.state, "is not reached: no answer within" in last.text) == ("failed", True)
            far = doctor.Target("far", "203.0.113.9", 80, True)
            assert next(doctor.examine_target(far)).text.startswith("no route to")


@pytest.mark.slow
def test_the_command_prints_it(doctor_there: int) -> None:
    command = [sys.executable, "-m", "paceline.cli", "doctor", "--json", "--to", f"127.0.0.1:{doctor_there}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert [one["name"] for one in json.loads(ended.stdout)["checks"]] == ["way", "reach", "latency", "bandwidth"]
