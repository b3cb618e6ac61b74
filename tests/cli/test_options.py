"""What a request of the command line comes down to, without starting anything."""

from pathlib import Path

import pytest

from paceline.cli.options import Size, read_faults, read_groups, read_size


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


def test_a_group_is_a_number_of_processes_or_a_list_with_one_for_each_worker() -> None:
    assert (read_groups(None), read_groups("2"), read_groups("1, 2,4")) == ((), (2,), (1, 2, 4))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("0", "entry 1 is '0'; write how many processes"),
        ("x", "entry 1 is 'x'; write how many processes"),
        ("2,", "entry 2 is ''; write how many processes"),
        ("1,-2", "entry 2 is '-2'"),
        ("1.5", "entry 1 is '1.5'"),
        ("", "entry 1 is ''"),
    ],
)
def test_wrong_groups_say_what_to_write(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=f"--procs-per-worker {part}"):
        read_groups(text)


def test_groups_on_ray_are_refused_for_now() -> None:
    assert read_groups(None, on_ray=True) == ()
    with pytest.raises(ValueError, match="--procs-per-worker does not work with --ray yet"):
        read_groups("2", on_ray=True)


@pytest.mark.parametrize(
    ("n", "groups", "devices", "emulate", "joining", "wanted"),
    [
        (None, (2,), 0, None, False, Size(1)),
        (None, (1, 2), 0, None, False, Size(2)),
        ("3", (1, 2), 4, None, False, Size(3)),
        (None, (1, 2), 4, None, False, Size(3)),
        (None, (2,), 6, None, False, Size(3)),
        (None, (2,), 4, "1,2", False, Size(2)),
        (None, (2,), 0, "1,2,4", False, Size(3)),
        ("2:4", (2,), 0, None, False, Size(4, (2, 4))),
        ("2:4", (1, 2), 0, None, False, Size(4, (2, 4))),
        ("1:4", (2,), 4, None, False, Size(2, (1, 4))),
        ("1:2", (1, 2), 4, None, False, Size(2, (1, 2))),
        (None, (2,), 0, None, True, Size(1)),
        (None, (1, 2), 0, None, True, Size(2)),
        (None, (2,), 4, None, True, Size(2)),
        ("1", (1, 2), 0, None, True, Size(1)),
        ("3", (2,), 2, None, True, Size(3)),
    ],
)
def test_devices_are_for_the_processes_of_groups(
    n: str | None, groups: tuple[int, ...], devices: int, emulate: str | None, joining: bool, wanted: Size
) -> None:
    given = {"devices": ["cpu"] * devices, "emulate": emulate, "sample_ms": 2.0, "joining": joining}
    assert read_size(n, groups=groups, **given) == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("n", "groups", "devices", "part"),
    [
        ("2", (2,), 2, "-n asks for 2 workers of 4 processes, --devices names 2 devices: give one for each process"),
        ("2", (1, 2), 2, "-n asks for 2 workers of 3 processes, --devices names 2"),
        (None, (2,), 3, "--devices names 3 devices, and workers of --procs-per-worker 2 have 2 or 4 processes"),
        (None, (2,), 1, "--devices names 1 devices, and workers of --procs-per-worker 2 have 2 processes"),
        ("1:4", (1, 2), 2, "--devices names 2 devices, and workers of --procs-per-worker 1,2 have 1 or 3 processes"),
        ("2", (1, 2, 1), 0, "--procs-per-worker has 3 entries, for 2 workers"),
        (None, (1, 2), 1, "--procs-per-worker has 2 entries, for 1 workers"),
    ],
)
def test_groups_that_do_not_come_out_say_what_to_give(
    n: str | None, groups: tuple[int, ...], devices: int, part: str
) -> None:
    with pytest.raises(ValueError, match=part):
        read_size(n, devices=["cpu"] * devices, emulate=None, sample_ms=2.0, groups=groups)


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
