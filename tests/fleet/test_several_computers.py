"""Fleets on several computers, over a switch that delays, loses and cuts: exactly once, replicas equal, and nobody
waits without a name."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import switch as switches
from crew import Crew, Outcome, outcome, start
from elastic_cases import LENGTH
from flock import TOKEN, Flock, sound
from nursery import Worker, elastic_variables, end_all
from shells import Shell
from switch import Switch
from test_elastic import must_be_sound
from test_elastic_network import CASE, Scattered, goes_on_without, is_back, must_be_one_fleet

from paceline.observe import read_log
from paceline.observe.analysis.audit import audit

pytestmark = [pytest.mark.fleet, pytest.mark.skipif(bool(switches.missing()), reason=switches.missing())]

ROUGH = {"delay_s": 0.005, "jitter_s": 0.003, "loss": 0.005, "bits_s": 50e6}
EPOCHS = 14
HERE = Path(__file__).parent
PATH = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "harness")]
"""Where the cases find what they import."""


class Computers(Scattered):
    """A flock over a switch: a computer for each worker, and one for the roster."""

    network: Switch

    def __init__(
        self, size: int, folder: Path, *, networks: dict[str, list[str]] | None = None, **settings: Any
    ) -> None:
        self._networks = networks
        super().__init__(size, folder, epochs=EPOCHS, args={"pause_s": 0.1, **settings.pop("args", {})}, **settings)

    def _make_network(self, computers: list[str]) -> Switch:
        return Switch(computers, networks=self._networks)

    def start(self, slot: int, *, expected: bool = False, **env: str) -> None:
        Flock.start(self, slot, expected=expected, COMPUTER=self.network.place(str(slot)), **env)

    def hurry(self) -> dict[int, Outcome]:
        """Nothing more is to happen, on the network neither."""
        self.network.every(delay_s=0.0, jitter_s=0.0, loss=0.0, bits_s=0.0)
        return super().hurry()


class FixedComputers(Crew):
    """A fleet of fixed size, a computer for each worker, told by torchrun's variables where to meet."""

    def __init__(self, switch: Switch, folder: Path, *, silent_s: float = 10.0, **settings: Any) -> None:
        self._switch = switch
        super().__init__(
            CASE, len(switch.computers), folder, env={"QUICK_EXIT": "1", "SILENT_S": str(silent_s)}, **settings
        )

    def _start(self, case: str, rank: int, port: int, args: Any, env: dict[str, str]) -> Worker:
        name = self._switch.computers[rank]
        meeting = {"MASTER_ADDR": self._switch.address(self._switch.computers[0], "eth0"), "LOCAL_RANK": "0"}
        own = {"COMPUTER": self._switch.place(name), "PACELINE_WORKER": str(rank)}
        return super()._start(case, rank, port, args, {**env, **meeting, **own})

    def commits(self, rank: int) -> int:
        file = self.folder / f"commits.{rank}"
        return file.read_text().count("\n") if file.exists() else 0

    def wait_for_commits(self, more: int) -> None:
        """So many more, by everybody."""
        until, wanted = time.monotonic() + 60, [self.commits(rank) + more for rank in range(self.size)]
        while any(self.commits(rank) < wanted[rank] for rank in range(self.size)):
            assert time.monotonic() < until, [one.err[-1500:] for one in self._read()]
            time.sleep(0.02)


@pytest.mark.long
def test_a_fleet_on_a_rough_network_loses_nothing_to_a_cut_and_a_split(tmp_path: Path) -> None:
    """Delay, jitter, loss and 50 Mbit/s all along; one cable is cut for 4 s, then the network falls into halves."""
    with Computers(4, tmp_path) as flock:
        flock.network.every(**ROUGH)
        flock.wait_for_commits(1, 6)
        cut_at = time.monotonic()
        flock.network.cut("2")
        goes_on_without(flock, {2})
        time.sleep(max(0.0, cut_at + 4.0 - time.monotonic()))
        flock.network.heal()
        is_back(flock, {2})
        flock.network.split("0", "3")
        goes_on_without(flock, {0, 3})
        flock.network.heal()
        is_back(flock, {0, 3})
        outcomes = flock.hurry()
        must_be_one_fleet(flock, cuts={0: 1, 2: 1, 3: 1})
    must_be_sound(tmp_path, outcomes, ended={0, 1, 2, 3}, epochs=EPOCHS)


def test_one_that_is_heard_and_hears_nothing_is_named_and_waited_for_or_done_without(tmp_path: Path) -> None:
    """The way from worker 0 to worker 2 is cut: both reach the roster, so nobody is given up. Then the way from the
    roster to worker 1: the fleet goes on without it."""
    with Computers(3, tmp_path) as flock:
        flock.network.every(delay_s=0.005)
        flock.wait_for_commits(1, 6)
        flock.network.between["0", "2"].cut = True
        for slot, other in ((0, 2), (2, 0)):
            text = f"waiting for the network to worker {other} ({other}, cpu) at {flock.network.address(str(other))}"
            flock.wait_until(lambda slot=slot, text=text: text in flock.said(slot), within=20)
        flock.network.heal()
        is_back(flock, {0, 1, 2})
        flock.network.between["roster", "1"].cut = True
        flock.wait_for_workers(2)
        goes_on_without(flock, {1})
        flock.wait_until(lambda: "waiting for the roster, which has not answered" in flock.said(1), within=20)
        flock.network.heal()
        is_back(flock, {1})
        outcomes = flock.hurry()
        must_be_one_fleet(flock, cuts={1: 1})
    must_be_sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=EPOCHS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("whom", "call"), [(1, "loading ahead"), pytest.param(0, "the plan of the first steps", marks=pytest.mark.long)]
)
def test_one_that_is_cut_off_while_it_starts_comes_back_by_itself(tmp_path: Path, whom: int, call: str) -> None:
    """Nobody starts it again: the fleet has gone on without it, and it enters as one who is new."""
    with Computers(3, tmp_path, args={"hold_before": {str(whom): call}}) as flock:
        flock.wait_for("held")
        flock.network.cut(str(whom))
        flock.wait_for_commits(2, 3)
        (tmp_path / "go").touch()
        flock.network.heal()
        is_back(flock, {whom})
        assert "it enters" in flock.said(whom)
        outcomes = flock.hurry()
        must_be_one_fleet(flock, cuts={})
    must_be_sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=EPOCHS)


def test_clocks_that_differ_by_minutes_do_not_matter(tmp_path: Path) -> None:
    """The leader's clock is five minutes ahead, its successor's seven behind: the log they write has one time."""
    began, clocks = time.time(), {0: "300", 1: "-420", 2: "60"}
    own = {slot: {"CLOCK_AHEAD_S": seconds} for slot, seconds in clocks.items()}
    with Flock(CASE, 3, tmp_path, args={"epochs": 8, "pause_s": 0.05}, own=own) as flock:
        flock.wait_for_step(6)
        flock.kill(0)
        flock.wait_for_workers(2)
        outcomes = flock.hurry()
    run = must_be_sound(tmp_path, {**outcomes, 0: outcomes[1]}, ended={1, 2}, epochs=8)
    times = [json.loads(line)["t"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert began - 2 < min(times)
    assert max(times) < time.time() + 2
    assert all(later > sooner - 1.0 for sooner, later in pairwise(times))
    assert began - 2 < run.run["started"] < time.time()


def test_a_fixed_fleet_outlasts_a_cut_of_4_s(tmp_path: Path) -> None:
    """Each computer has an interface that leads nowhere besides the one that works."""
    with Switch("abc", networks={"dead0": "abc", "eth0": "abc"}) as switch:
        switch.dead.add("dead0")
        switch.every(**ROUGH)
        with FixedComputers(switch, tmp_path, args={"epochs": 4, "pause_s": 0.1}) as crew:
            crew.wait_for_commits(4)
            switch.cut("b")
            time.sleep(4.0)
            switch.heal()
            (tmp_path / "hurry").touch()
            outcomes = dict(enumerate(crew.wait(within=40)))
    sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=4, length=LENGTH)


@pytest.mark.long
def test_in_a_fixed_fleet_who_is_cut_off_for_good_and_the_others_say_so(tmp_path: Path) -> None:
    settings = {"silent_s": 6.0, "args": {"epochs": 40, "pause_s": 0.1}}
    with Switch("abc") as switch, FixedComputers(switch, tmp_path, **settings) as crew:
        crew.wait_for_commits(2)
        switch.cut("c")
        outcomes = crew.wait(within=40)
    assert [one.code for one in outcomes] == [75, 75, 75]
    for near in (0, 1):
        assert "paceline: worker 2 (c, cpu) went silent" in outcomes[near].err
    assert "paceline: worker 0 (a, cpu)'s computer, where the fleet meets, has not answered for" in outcomes[2].err


def test_a_roster_by_itself_is_joined_over_loopback_a_launcher_and_variables(tmp_path: Path) -> None:
    """`paceline host` on computer r, whose own worker joins over loopback; `paceline run --join` on a; a worker with
    the variables on b. Each keeps its files to itself. An interface that leads nowhere comes first on all of them."""
    folders = {name: tmp_path / name for name in "rab"}
    for folder in folders.values():
        folder.mkdir()
    (folders["a"] / "train.py").write_text(JOINING.format(path=PATH))
    with Switch("rab", networks={"dead0": "rab", "eth0": "rab"}) as switch, ExitStack() as stack:
        switch.dead.add("dead0")
        switch.every(delay_s=0.005, bits_s=50e6)
        outside = f"{switch.address('r', 'eth0')}:7070"
        with switch.inside("r"):
            at = ("--host", "0.0.0.0", "--port", "7070")
            host = Shell(folders["r"]).start("host", *at, "--min", "3", PACELINE_TOKEN=TOKEN)
        with switch.inside("a"):
            launcher = Shell(folders["a"]).start("run", "--join", outside, "-n", "1", "train.py", PACELINE_TOKEN=TOKEN)
        stack.callback(end, host, launcher)
        workers = {}
        for name, address in (("r", "127.0.0.1:7070"), ("b", outside)):
            told = elastic_variables(0, run_dir=folders[name] / "run", address=address, token=TOKEN)
            own = {"COMPUTER": switch.place(name), "QUICK_EXIT": "1"}
            workers[name] = start(folders[name], 0, CASE, {"epochs": 3}, told | own)
        stack.callback(end_all, workers.values())
        said, told = launcher.communicate(timeout=90)
        for name, worker in workers.items():
            assert worker.wait(30) == 0, outcome(folders[name], 0, 1).err[-3000:]
        assert (launcher.returncode, host.wait(10)) == (0, 0), told
    weights = [outcome(folders[name], 0, 0).value["weights"] for name in "rb"]
    assert weights[0] == weights[1] == json.loads(said.splitlines()[-1])["weights"], (
        "replicas are not equal bit for bit"
    )
    logs = [file for folder in folders.values() for file in folder.rglob("events.jsonl")]
    assert len(logs) == 1, "one of them leads"
    seen = audit(read_log(logs[0].parent))
    assert [one.epoch for one in seen] == [0, 1, 2]
    assert all(one.sound and one.whole and one.counted == LENGTH for one in seen)


JOINING = """
import json, sys
sys.path[:0] = {path!r}
import network_cases
print(json.dumps(network_cases.train({{"epochs": 3}})))
"""


def end(*processes: Any) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=30)
