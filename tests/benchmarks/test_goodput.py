"""What the benchmarks with faults count: who was alive for how long, what has grown, and which faults are drawn."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.machines.spot import read_spot
from paceline.observe.log.reader import RunLog
from paceline.records import StepRecord
from quick import examples

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import _flock
import _goodput_audit
import goodput
import spot


def life(folder: Path, notes: list[dict[str, Any]], **facts: Any) -> _flock.Life:
    diary = folder / "diary"
    diary.write_text("".join(json.dumps(note) + "\n" for note in notes) + '{"what": "cut of')
    worker = _flock.Worker(None, pid=1)  # type: ignore[arg-type]
    return _flock.Life(0, worker, diary, folder / "err", folder / "replica", **facts)


@pytest.mark.parametrize(
    ("within", "seconds"), [((0.0, 100.0), 17.0), ((15.0, 100.0), 12.0), ((0.0, 22.0), 10.0), ((50.0, 60.0), 0.0)]
)
def test_a_worker_is_alive_from_ready_to_its_end_but_for_its_stops(
    tmp_path: Path, within: tuple[float, float], seconds: float
) -> None:
    one = life(tmp_path, [{"what": "ready", "t": 10.0}], ended=30.0, stops=[(5.0, 8.0), (20.0, 23.0)])
    assert _goodput_audit.alive_s(one, within) == pytest.approx(seconds)


def test_a_worker_that_never_said_ready_was_never_alive(tmp_path: Path) -> None:
    assert _goodput_audit.alive_s(life(tmp_path, [], ended=30.0), (0.0, 100.0)) == 0.0


def epochs(*rows: tuple[int, int, int], leads: bool = False) -> list[dict[str, Any]]:
    keys = ("size", "generation", "files")
    return [{"what": "epoch", "t": 0.0, "leads": leads, **dict(zip(keys, row))} for row in rows]


def test_growth_compares_generations_of_one_size_and_the_least_of_each(tmp_path: Path) -> None:
    notes = epochs((4, 1, 20), (3, 2, 30), (3, 2, 18), (4, 3, 23), (4, 3, 21))
    assert _goodput_audit.growth([life(tmp_path, notes, code=0)], "files") == 1


def test_who_has_come_to_lead_holds_the_log_too_which_is_no_growth(tmp_path: Path) -> None:
    notes = epochs((4, 1, 20), (4, 2, 20)) + epochs((4, 3, 21), leads=True)
    assert _goodput_audit.growth([life(tmp_path, notes, code=0)], "files") == 0


def test_growth_is_not_known_when_no_size_came_twice_or_nobody_lived_to_the_end(tmp_path: Path) -> None:
    assert _goodput_audit.growth([life(tmp_path, epochs((4, 1, 20), (3, 2, 99)), code=0)], "files") is None
    assert _goodput_audit.growth([life(tmp_path, epochs((4, 1, 20), (4, 2, 99)), code=-9)], "files") is None


@given(seed=st.integers(0, 1000))
def test_faults_keep_the_fleet_between_its_bounds_and_all_kinds_come(seed: int) -> None:
    injector, drawn = goodput.Injector(str(seed)), []
    living = injector.size
    for _ in range(60):
        drawn.append(injector.draw(living))
        living += {"kill": -1, "join": 1, "freeze": 0}[drawn[-1]]
        assert goodput.LEAST <= living <= goodput.MOST
    assert set(drawn) == {"kill", "join", "freeze"}
    assert drawn.count("freeze") == 20


@settings(max_examples=examples(20), deadline=None)
@given(seed=st.integers(0, 200))
def test_a_made_up_trace_is_one_that_can_be_read_and_ends_in_time(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    rows = spot.made_up(seed, hours=2.0)
    file = tmp_path_factory.mktemp("spot") / "trace.csv"
    file.write_text("".join(f"{row.at_s * 1000!r},{'add' if row.adds else 'remove'},{row.node}\n" for row in rows))
    assert [row.node for row in read_spot(file)] == [row.node for row in rows]
    assert rows[-1].at_s <= 2 * 3600
    assert rows == spot.made_up(seed, hours=2.0)
    assert rows != spot.made_up(seed + 1, hours=2.0)


def test_goodput_is_what_was_committed_over_what_the_living_could_do_after_the_first_steps(tmp_path: Path) -> None:
    speeds = _goodput_audit.speeds("1,4", 2.5)
    assert speeds == pytest.approx([400.0, 100.0])
    one = life(tmp_path, [{"what": "ready", "t": 0.0}], stops=[(8.0, 9.0)])
    one.slot = 3  # the list of machines begins again: this is the slow one
    records = tuple(StepRecord(step, 0, 1, (3,), (60,), (60,), (0.6,)) for step in range(11))
    log = RunLog(Path("log"), records=records, times=tuple(map(float, range(11))))
    skipped = _goodput_audit.SKIP
    assert _goodput_audit.goodput(log, [one], speeds) == pytest.approx(60 * (11 - skipped) / (100 * (10 - skipped)))
