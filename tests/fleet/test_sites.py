"""Sums that know where workers are: exact, the same bits everywhere, and done without whoever crosses between sites."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import exact_cases
import pytest
import switch as switches
import torch
from crew import Crew, run
from flock import Flock
from switch import Switch
from test_elastic import must_be_sound
from test_exactness import random_cases
from test_failures import FLEET_FAILED, tells

from paceline.observe import read_log

pytestmark = pytest.mark.fleet


@pytest.mark.skipif(bool(switches.missing()), reason=switches.missing())
def test_two_computers_of_two_workers_each_train_as_one_machine_does(tmp_path: Path) -> None:
    case = random_cases(1, "float64", seed=5)[0]
    with Switch("ab") as switch:
        switch.every(delay_s=0.003, bits_s=100e6)
        args = {"places": [switch.place(one) for one in "abab"], "case": case}
        told = run("site_cases.py:train_on_computers", 4, tmp_path, args=args, env={"MASTER_ADDR": switch.address("a")})
    found = read_log(tmp_path / "run").run["places"]
    assert found["sites"] == [[[0, 2]], [[1, 3]]], "interleaved ranks are put in order"
    assert found["tree"]
    assert 0.005 <= found["round_trip_s"] < 0.1
    assert 5e6 < found["bits_s"] < 120e6
    assert all(one == told[0] for one in told), "workers disagree on parameters, losses or records"
    parameters, losses = exact_cases.one_machine(case, list(exact_cases.batches_of(case, told[0]["batches"])))
    assert (torch.tensor(told[0]["parameters"], dtype=torch.float64) - parameters).abs().max() < 1e-12
    assert max(abs(a - b) for a, b in zip(told[0]["losses"], losses, strict=True)) < 1e-12


def places(flock: Flock) -> list[Any]:
    """What the log says of where its workers are, at first and after every change; None: on one computer."""
    lines = (flock.folder / "run" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return [event.get("places") for event in events if event["event"] in ("run", "generation")]


def slot_of(flock: Flock, worker: int) -> int:
    """The slot of a worker of the start, by its process."""
    first = json.loads((flock.folder / "run" / "events.jsonl").read_text().splitlines()[0])
    pids = {one["id"]: one["pid"] for one in first["workers"]}
    return next(slot for slot, process in flock.workers.items() if process.pid == pids[worker])


@pytest.mark.long
def test_the_death_of_one_that_crosses_is_survived_as_any_death_is(tmp_path: Path) -> None:
    sites = {slot: {"PACELINE_SITE": "far" if slot == 3 else "near"} for slot in range(4)}
    args = {"epochs": 20, "pause_s": 0.02, "die": {"3": [["in round", 6]]}}
    with Flock("elastic_cases.py:train", 4, tmp_path, own=sites, args=args) as flock:
        flock.wait_for_end(3)
        assert len(places(flock)[0]["sites"]) == 2
        flock.tell_death(3)
        flock.wait_for_workers(3)
        assert places(flock)[-1] is None, "those who are left are on one computer"
        flock.start(3)
        flock.wait_for_workers(4)
        found = places(flock)[-1]
        assert found["tree"]
        near = next(site for site in found["sites"] if len(site[0]) == 3)
        crosses = slot_of(flock, near[0][0])
        flock.kill(crosses)
        flock.wait_for_workers(3)
        assert places(flock)[-1]["tree"], "another one crosses"
        outcomes = flock.hurry()
    must_be_sound(tmp_path, outcomes, ended={0, 1, 2, 3} - {crosses}, epochs=20)


@pytest.mark.long
@pytest.mark.parametrize("victim", [2, 3])
def test_a_fixed_fleet_names_whom_it_lost_in_another_site(victim: int, tmp_path: Path) -> None:
    with Crew("site_cases.py:train_forever", 4, tmp_path, args={"folder": str(tmp_path)}) as crew:
        crew.wait_for("begun")
        os.kill(crew.workers[victim].pid, signal.SIGKILL)
        outcomes = crew.wait(within=60)
    for rank in {0, 1, 2, 3} - {victim}:
        assert outcomes[rank].code == FLEET_FAILED, outcomes[rank].err
        assert tells(outcomes[rank], rank, f"worker {victim} (cpu) went silent")
