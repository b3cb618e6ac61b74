"""Cables are cut and healed while a fleet trains: two fleets never both commit, and those cut off enter anew."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import netns
import pytest
from flock import TOKEN, Flock
from test_elastic import must_be_sound

from paceline.observe import read_log
from paceline.roster import RosterServer, wire

pytestmark = [pytest.mark.fleet, pytest.mark.skipif(bool(netns.missing()), reason=netns.missing())]

CASE = "network_cases.py:train"
EPOCHS = 20


class Scattered(Flock):
    """A flock with a computer for each worker, and one for the roster."""

    def __init__(self, size: int, folder: Path, *, epochs: int = EPOCHS, **settings: Any) -> None:
        self.network = self._make_network(["roster", *map(str, range(size))])
        self.network.__enter__()
        try:
            super().__init__(CASE, size, folder, args={"epochs": epochs, **settings.pop("args", {})}, **settings)
        except BaseException:
            self.network.__exit__()
            raise

    def _make_network(self, computers: list[str]) -> Any:
        return netns.Network(computers)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.network.__exit__()

    def _host(self, *, expect: int, port: int = 0) -> RosterServer:
        minimum, maximum = self._sizes
        with self.network.inside("roster"):
            server = RosterServer(
                minimum=minimum,
                maximum=maximum,
                token=TOKEN,
                host=self.network.address("roster"),
                port=port,
                expect=expect,
                state=self._state,
            )
            server.start()
        return server

    def start(self, slot: int, *, expected: bool = False, **env: str) -> None:
        cable = json.dumps(self.network.cutting(str(slot)))
        super().start(slot, expected=expected, COMPUTER=self.network.namespace(str(slot)), CABLE=cable, **env)

    def commits(self, slot: int) -> list[Commit]:
        path = self.folder / f"commits.{slot}"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [Commit(*json.loads(line)) for line in lines if line.endswith("\n")]

    def wait_for_commits(self, slot: int, step: int, *, within: float = 60.0) -> None:
        self.wait_until(lambda: any(one.step >= step for one in self.commits(slot)), within=within)

    def pause_after(self, slot: int, moment: float) -> float:
        """Seconds from ``moment`` to this worker's second commit after it: the first may have been under way."""
        self.wait_until(lambda: sum(one.t > moment for one in self.commits(slot)) > 1)
        return sorted(one.t for one in self.commits(slot) if one.t > moment)[1] - moment


class Commit(NamedTuple):
    """A worker's own word that it has committed a step, and what it held then."""

    step: int
    generation: int
    digest: str
    t: float


def must_be_one_fleet(flock: Scattered, *, cuts: dict[int, int]) -> None:
    """Nobody has committed anything that another did not, but for the one step whose round had ended for a worker
    when its cable was cut: that commit is provisional, and superseded. ``cuts``: how often each was cut off."""
    histories = {slot: flock.commits(slot) for slot in flock.workers}
    records = read_log(flock.folder / "run").records
    standing = {record.step: record.generation for record in records}
    truth: dict[int, str] = {}
    for history in histories.values():
        for one in history:
            if one.generation == standing[one.step]:
                assert truth.setdefault(one.step, one.digest) == one.digest, f"step {one.step} has two outcomes"
    applied = {record.step for record in records if record.applied}
    assert set(truth) == applied, "the log holds what somebody has committed, and steps that changed nothing"
    for slot, history in histories.items():
        astray = [one for one in history if one.digest != truth[one.step]]
        assert len(astray) <= cuts.get(slot, 0), f"worker {slot} went its own way: {astray}"
        for one in astray:  # ... and nothing was built on it
            after = history[history.index(one) + 1 :]
            assert not after or after[0].generation > one.generation, f"worker {slot} built on {one}"


@pytest.mark.parametrize(
    ("whom", "pace"),
    [
        pytest.param(1, "adaptive", marks=pytest.mark.long),
        (0, "adaptive"),
        (1, "joint"),
        pytest.param(0, "cutoff", marks=pytest.mark.long),
    ],
)
def test_one_whose_cable_is_cut_is_done_without_and_enters_anew_when_it_heals(
    tmp_path: Path, whom: int, pace: str
) -> None:
    with Scattered(3, tmp_path, args={"pace": pace}) as flock:
        flock.wait_for_commits(1, 8)
        flock.network.cut(str(whom))
        paused = goes_on_without(flock, {whom})
        flock.network.heal(str(whom))
        back = is_back(flock, {whom})
        outcomes = flock.hurry()
        must_be_one_fleet(flock, cuts={whom: 1})
    run = must_be_sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=EPOCHS)
    assert "network is cut" in run.changes[0].left[0].text
    print(f"the others went on after {paused:.2f} s; the one cut off was back after {back:.2f} s")


@pytest.mark.parametrize(
    "far", [pytest.param({2, 3}, marks=pytest.mark.long), {0, 3}], ids=["without the leader", "with the leader"]
)
def test_of_two_halves_only_the_one_with_the_roster_goes_on(tmp_path: Path, far: set[int]) -> None:
    """Both halves are whole in themselves: those far from the roster reach one another as before."""
    with Scattered(4, tmp_path) as flock:
        flock.wait_for_commits(1, 8)
        flock.network.split(*map(str, far))
        paused = goes_on_without(flock, far)
        for slot in far:
            flock.network.heal(str(slot))
        back = is_back(flock, far)
        outcomes = flock.hurry()
        must_be_one_fleet(flock, cuts=dict.fromkeys(far, 1))
    must_be_sound(tmp_path, outcomes, ended={0, 1, 2, 3}, epochs=EPOCHS)
    print(f"the near half went on after {paused:.2f} s; the far one was back after {back:.2f} s")


def test_a_commit_that_nobody_else_came_to_know_of_is_superseded(tmp_path: Path) -> None:
    """The leader has every sum and commits; its answers to the others are lost with its cable."""
    with Scattered(3, tmp_path, args={"cut_in_round": 9}, env={"PACELINE_SITES": "off"}) as flock:
        flock.wait_for_commits(1, 14)
        assert flock.commits(0)[-1][:2] == (9, 1), "it has committed the step by itself"
        flock.network.heal("0")
        is_back(flock, {0})
        outcomes = flock.hurry()
        must_be_one_fleet(flock, cuts={0: 1})
        lone, shared = flock.commits(0)[9], flock.commits(1)[9]
        assert (lone.step, shared.step) == (9, 9)
        assert lone.generation < shared.generation
        assert lone.digest != shared.digest, "the others did the step again, with what they had"
        assert flock.commits(0)[10].step > shared.step, "what it builds on is the others'"
    must_be_sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=EPOCHS)


@pytest.mark.long
def test_a_half_that_is_too_small_waits_and_goes_on_once_the_cable_heals(tmp_path: Path) -> None:
    with Scattered(3, tmp_path, minimum=2) as flock:
        flock.wait_for_commits(1, 8)
        flock.network.split("1", "2")
        flock.wait_until(lambda: "1 of at least 2 is ready" in flock.server.snapshot()["waiting_for"])
        held = [len(flock.commits(slot)) for slot in range(3)]
        time.sleep(1.0)
        assert [len(flock.commits(slot)) for slot in range(3)] == held, "below the minimum nobody goes on"
        flock.network.heal("1")
        flock.network.heal("2")
        is_back(flock, {0, 1, 2})
        outcomes = flock.hurry()
        must_be_one_fleet(flock, cuts={1: 1, 2: 1})
    must_be_sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=EPOCHS)


@pytest.mark.long
def test_a_cut_that_outlasts_the_connections_is_healed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "DEAD_PATH_MS", 2000)  # 15 s in earnest
    with Scattered(3, tmp_path, env={"DEAD_PATH_MS": "2000"}) as flock:
        flock.wait_for_commits(1, 8)
        flock.network.cut("1")
        flock.wait_until(lambda: "the roster is away" in flock.said(1))
        goes_on_without(flock, {1})
        flock.network.heal("1")
        is_back(flock, {1})
        outcomes = flock.hurry()
        must_be_one_fleet(flock, cuts={1: 1})
    must_be_sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=EPOCHS)


def test_while_the_roster_is_cut_off_the_fleet_trains_on_as_it_is(tmp_path: Path) -> None:
    with Scattered(3, tmp_path) as flock:
        flock.wait_for_commits(1, 8)
        flock.network.cut("roster")
        before = len(flock.commits(1))
        time.sleep(2.5)  # longer than anybody may be silent
        flock.wait_until(lambda: len(flock.commits(1)) > before + 5)
        flock.network.heal("roster")
        flock.wait_until(lambda: len(flock.server.snapshot()["members"]) == 3)  # else the end comes without one of them
        is_back(flock, {0, 1})
        outcomes = flock.hurry()
        must_be_one_fleet(flock, cuts={0: 1, 1: 1, 2: 1})
    must_be_sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=EPOCHS)


@pytest.mark.long
def test_a_death_while_the_roster_is_cut_off_pauses_the_fleet_until_it_is_back(tmp_path: Path) -> None:
    with Scattered(3, tmp_path) as flock:
        flock.wait_for_commits(1, 8)
        flock.network.cut("roster")
        flock.workers[2].kill_group()
        flock.workers[2].wait()
        time.sleep(0.5)
        held = [len(flock.commits(slot)) for slot in range(2)]
        time.sleep(1.5)
        assert [len(flock.commits(slot)) for slot in range(2)] == held
        flock.network.heal("roster")
        is_back(flock, {0, 1})
        outcomes = flock.hurry()
        must_be_one_fleet(flock, cuts={0: 1, 1: 1, 2: 1})
    must_be_sound(tmp_path, outcomes, ended={0, 1}, epochs=EPOCHS)


@pytest.mark.long
def test_workers_that_do_not_reach_one_another_wait_for_the_network_and_say_so(tmp_path: Path) -> None:
    """Both reach the roster, so both are alive: nobody is given up over a wall between two computers."""
    with Scattered(3, tmp_path, epochs=8) as flock:
        flock.wait_for_commits(1, 8)
        flock.network.estrange("0", "2")
        flock.wait_until(lambda: "waiting for the network" in flock.said(0))
        flock.network.reconcile("0", "2")
        outcomes = flock.hurry()
        must_be_one_fleet(flock, cuts={})
    must_be_sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=8)


def goes_on_without(flock: Scattered, far: set[int]) -> float:
    """The others commit again, and those who are cut off nothing. Returns the others' pause in seconds."""
    moment = time.time()
    near = [slot for slot in flock.workers if slot not in far]
    paused = max(flock.pause_after(slot, moment) for slot in near)
    held = {slot: len(flock.commits(slot)) for slot in far}
    time.sleep(1.0)
    assert {slot: len(flock.commits(slot)) for slot in far} == held, "those who are cut off commit nothing"
    return paused


def is_back(flock: Scattered, far: set[int]) -> float:
    """Those who were cut off commit again. Returns after how many seconds."""
    moment = time.time()
    for slot in far:
        flock.pause_after(slot, moment)
    return time.time() - moment
