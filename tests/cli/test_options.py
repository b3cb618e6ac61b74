"""What a request of the command line comes down to, without starting anything."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from paceline.cli.options import Size, read_faults, read_size
from paceline.launcher.failures import WorkerFailure
from paceline.launcher.output import OutputStream
from paceline.launcher.processes import WorkerProcess
from paceline.launcher.restarts import WorkerSlot, give_up_reason, pause_s
from paceline.launcher.tokens import invitation, own_token, their_token, written


@pytest.mark.parametrize(
    ("n", "emulate", "devices", "joining", "wanted"),
    [
        (None, None, [], False, Size(1)),
        ("3", None, [], False, Size(3)),
        ("2:8", None, [], False, Size(8, (2, 8))),
        ("2:6", "1,1,2,4", [], False, Size(4, (2, 6))),
        ("1:2", "1,1,2,4", [], False, Size(2, (1, 2))),
        ("3:6", "1,2", [], False, Size(2, (3, 6))),
        ("1:4", None, ["cuda:0", "cuda:1"], False, Size(2, (1, 4))),
        (None, None, [], True, Size(1)),
        ("2", None, [], True, Size(2)),
        (None, "1,2,4", [], True, Size(3)),
        ("2", "1,2,4", [], True, Size(2)),
        ("5", "1,2", [], True, Size(5)),
    ],
)
def test_lists_say_how_many_to_start(
    n: str | None, emulate: str | None, devices: list[str], joining: bool, wanted: Size
) -> None:
    assert read_size(n, devices=devices, emulate=emulate, sample_ms=2.0, joining=joining) == wanted


@pytest.mark.parametrize(
    ("n", "part"),
    [
        ("8:2", "write 2:8"),
        ("0:3", "write 1:3"),
        ("0:0", "write 1:1"),
        ("2:", "such as 2:8"),
        (":8", "such as 2:8"),
        ("2:8:9", "such as 2:8"),
        ("a:b", "such as 2:8"),
        ("-1:3", "such as 2:8"),
        ("0", "a whole number from 1"),
        ("two", "or MIN:MAX"),
    ],
)
def test_wrong_bounds_say_what_to_write(n: str, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        read_size(n, devices=[], emulate=None, sample_ms=2.0)


def test_a_joining_launcher_takes_one_number() -> None:
    with pytest.raises(ValueError, match="with --join give one number"):
        read_size("2:4", devices=[], emulate=None, sample_ms=2.0, joining=True)


def test_the_engine_plays_chances_and_the_launcher_events() -> None:
    def ask(text: str | None) -> tuple[str | None, bool]:
        chances, faults = read_faults(text, size=Size(2, (1, 4)), seed=None, spot=None, speed_up=None, notice=None)
        return chances, faults.watches_steps

    assert ask(None) == (None, False)
    assert ask("lost:0.1") == ("lost:0.1", False)
    assert ask("kill:1@20") == (None, True)
    assert ask("kill:1@20,lost:0.1, join@60") == ("lost:0.1", True)
    with pytest.raises(ValueError, match=r"--failures: failure 'broken:0.1'"):
        ask("broken:0.1,kill:1@20")
    with pytest.raises(ValueError, match="--failures: event 'kil:1@20'"):
        ask("kil:1@20")


def test_events_and_traces_need_a_fleet_that_comes_and_goes(tmp_path: Path) -> None:
    fixed = {"size": Size(4), "seed": None, "speed_up": None, "notice": None}
    with pytest.raises(ValueError, match="--failures kill:1@20: only a fleet of -n MIN:MAX"):
        read_faults("kill:1@20", spot=None, **fixed)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="--spot: only a fleet of -n MIN:MAX"):
        read_faults(None, spot=tmp_path / "spot.csv", **fixed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("speed_up", "notice", "part"),
    [
        (0.0, None, "--spot: the speed-up is 0"),
        (300.0, "2", "--spot-notice: a duration"),
        (None, None, "--spot: cannot read the spot trace"),
    ],
)
def test_a_trace_is_checked_before_it_is_played(
    tmp_path: Path, speed_up: float | None, notice: str | None, part: str
) -> None:
    file = tmp_path / "spot.csv"
    if speed_up is not None:
        file.write_text("0,add,a\n")
    with pytest.raises(ValueError, match=part):
        read_faults(None, size=Size(2, (1, 2)), seed=None, spot=file, speed_up=speed_up, notice=notice)
    with pytest.raises(ValueError, match="--speed-up belongs to a trace"):
        read_faults(None, size=Size(2, (1, 2)), seed=None, spot=None, speed_up=3.0, notice=None)


def test_a_token_is_made_kept_in_a_private_file_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    file = tmp_path / "token"
    made = own_token(None, file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert own_token(None, file) == their_token(None, file) == made
    assert len(own_token(None, None)) >= 24
    assert own_token(None, None) != own_token(None, None)
    monkeypatch.setenv("PACELINE_TOKEN", "from-the-environment")
    assert own_token(None, None) == their_token(None, None) == "from-the-environment"
    assert own_token("given-by-hand", None) == "given-by-hand"


@pytest.mark.parametrize("token", ["", "short", "with a space in it", "ü" * 12, "x" * 2000, "new\nline12345"])
def test_a_token_that_is_no_token_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match="--token: a token is 8 to 1024 plain characters"):
        own_token(token, None)


def test_joining_without_a_token_says_where_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    with pytest.raises(ValueError, match="set PACELINE_TOKEN, or give --token-file"):
        their_token(None, None)
    with pytest.raises(ValueError, match="cannot be read from"):
        their_token(None, tmp_path / "none")
    with pytest.raises(ValueError, match="not both"):
        their_token("12345678", tmp_path / "none")


def test_the_invitation_keeps_the_token_out_of_the_options_and_says_who_can_join() -> None:
    line = invitation("10.0.0.7:29400", "s3cret-token", ["train.py", "--lr", "0.1", "a b"], loopback=False)
    assert line == (
        "to join from another machine: PACELINE_TOKEN=s3cret-token "
        "paceline run --join 10.0.0.7:29400 train.py --lr 0.1 'a b'"
    )
    assert "to join from this computer (--host" in invitation("127.0.0.1:1", "s3cret-token", ["t.py"], loopback=True)
    assert written("::1", 80) == "[::1]:80"


def test_the_pause_before_a_restart_doubles_except_after_a_fault_that_was_asked_for() -> None:
    slot = WorkerSlot(0)
    assert [slot.retry(100.0) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert slot.due == 130.0
    slot.faulted = True
    assert slot.retry(0.0) == 0.5
    assert pause_s(10**6) == 30


def test_a_minute_of_life_forgives_what_lies_behind() -> None:
    slot = failed(WorkerSlot(0), 1, "ValueError: no")
    slot.retry(0.0)
    slot.begin(cast(WorkerProcess, SimpleNamespace(running=True)), 100.0)
    slot.update(159.0, entered=False)
    assert (slot.deaths, slot.failure is None, slot.entered) == (1, False, False)
    slot.update(161.0, entered=False)
    assert (slot.deaths, slot.failure is None, slot.entered) == (0, True, True)


def failed(slot: WorkerSlot, code: int, *lines: str) -> WorkerSlot:
    """The slot, about to start again after a failure with these last words."""
    stderr = OutputStream(slot.number, lambda text: None, holds=True)
    stderr.held = [*lines]
    ended = {"number": slot.number, "code": code, "ended": f"ended with exit code {code}", "stderr": stderr}
    slot.failure, slot.due = WorkerFailure(cast(WorkerProcess, SimpleNamespace(**ended)), 0.0), 1.0
    return slot


def test_the_run_is_hopeless_when_all_fail_alike_and_nobody_elsewhere_trains_on() -> None:
    slots = [failed(WorkerSlot(number), 1, "ValueError: no") for number in range(3)]
    assert give_up_reason(slots[0], slots) == "every worker failed the same way"
    assert give_up_reason(slots[0], slots, outsiders=1) == ""
    assert give_up_reason(slots[0], [*slots[:2], failed(WorkerSlot(2), 1, "KeyError: 3")]) == ""
    assert give_up_reason(slots[0], [*slots[:2], WorkerSlot(2, due=5.0)]) == ""
    assert give_up_reason(slots[0], [*slots[:2], WorkerSlot(2)]) == "every worker failed the same way"  # gone for good
    assert give_up_reason(slots[0], slots[:1]) == "its only worker failed"


def test_workers_that_the_fleets_failure_ended_are_alike_in_whatever_words() -> None:
    slots = [failed(WorkerSlot(number), 75, f"paceline: worker {number} waits in vain") for number in range(2)]
    assert give_up_reason(slots[0], slots) == "every worker failed the same way"


def test_three_crashes_are_hopeless_only_for_a_worker_that_was_never_in_the_fleet() -> None:
    slot, well = failed(WorkerSlot(0), 1, "ValueError: no"), WorkerSlot(1, due=0.0)
    slot.crashes = 2
    assert give_up_reason(slot, [slot, well]) == ""
    slot.crashes = 3
    assert "worker 0 failed 3 times" in give_up_reason(slot, [slot, well])
    slot.entered = True
    assert give_up_reason(slot, [slot, well]) == ""


def test_a_number_is_held_by_one_launcher_of_a_computer() -> None:
    from paceline.launcher.roster import WorkerNumbers

    one, other, elsewhere = WorkerNumbers(70001), WorkerNumbers(70001), WorkerNumbers(70002)
    try:
        assert [one.acquire(), one.acquire()] == [0, 1]
        assert [other.acquire(), other.acquire()] == [2, 3]
        assert one.acquire(2) == 4
        assert elsewhere.acquire() == 0
        one.close()
        assert other.acquire() == 0
    finally:
        for numbers in (one, other, elsewhere):
            numbers.close()
