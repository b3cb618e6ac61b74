"""A pace that nobody has heard of: one class and one line, and all that takes a pace by name takes it."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from programs import BEFORE, results

from paceline.observe import read_log
from paceline.pace import Ask
from paceline.pace.shares import proportional
from paceline.records import Plan, StepRecord

pytestmark = pytest.mark.fleet


class TopHeavy:
    """The first worker does three times what each other does, and nothing is learned."""

    name = "topheavy"

    def check(self, workers: int) -> None:
        if workers < 2:
            raise ValueError("topheavy needs somebody to be lighter than the first")

    def observe(self, record: StepRecord) -> None:
        pass

    def plan(self, ask: Ask) -> Plan:
        weights = [3.0] + [1.0] * (len(ask.workers) - 1)
        shares = proportional(weights, ask.total, unit=ask.unit)
        return Plan(generation=ask.generation, step=ask.step, samples=tuple(shares.tolist()))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


TOY = f"""from __future__ import annotations
from paceline.pace import register
from paceline.pace.shares import proportional
from paceline.records import Plan

{inspect.getsource(TopHeavy)}
register(TopHeavy)
"""
"""The class in a script of its own, and the one line."""

TRAIN = """
import time

with paceline.join(pace="topheavy") as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in fleet.steps(data, global_batch=12, micro_batch=1, epochs=8):
        for x, y in step:
            time.sleep(0.003)
            step.backward(loss_fn(model(x), y))
        step.commit(optimizer)
    result = [fleet.pacer.name, flat(model)]
"""


def paceline(folder: Path, *words: str | Path) -> str:
    """What the command prints, in a process that has imported the toy."""
    script = folder / "command.py"
    script.write_text(f"{TOY}\nfrom paceline.cli import main\nmain()\n")
    command = [sys.executable, str(script), *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two workers."""
    folder = tmp_path_factory.mktemp("toy")
    two = results(folder, TRAIN, before=TOY + BEFORE, PACELINE_PACE="")
    assert two[0] == two[1]
    assert two[0][0] == "topheavy"
    return folder / "run"


def test_the_toy_is_short() -> None:
    assert len(inspect.getsource(TopHeavy).splitlines()) < 40


def test_a_fleet_of_two_deals_as_it_says(run: Path) -> None:
    log = read_log(run)
    assert log.run["pace"] == "topheavy"
    assert [record.samples for record in log.records] == [(9, 3)] * 32


def test_the_simulator_plays_it_among_the_others(tmp_path: Path) -> None:
    said = paceline(tmp_path, "simulate", "--scenario", "calm", "--workers", "4", "--steps", "30", "--json")
    rules = {row["rule"]: row for row in json.loads(said)["rules"]}
    assert {"naive", "adaptive", "joint", "limit"} <= set(rules)
    # Four like workers in one second of naive's; with it the first does half of the work, twice a naive share.
    assert rules["topheavy"]["over_naive"] == pytest.approx(0.5, abs=0.06)


def test_the_simulator_plays_it_micro_batch_by_micro_batch(tmp_path: Path) -> None:
    said = paceline(tmp_path, "simulate", "--scenario", "stuck", "--steps", "20", "--json")
    assert "topheavy" in [row["rule"] for row in json.loads(said)["rules"]]


def test_the_verdict_judges_its_run(run: Path, tmp_path: Path) -> None:
    said = json.loads(paceline(tmp_path, "report", run, "--json"))
    assert (said["pace"], said["held_back_by"]) == ("topheavy", 0)
    assert 'pace="auto" would follow its speed step by step' in said["text"]


def test_the_page_of_its_run_replays_it(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="the page is drawn by Plotly (extra view)")
    paceline(tmp_path, "report", run, "--html", "-o", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "2 workers, pace topheavy" in page
    assert "Replayed under its own pace it takes" in page
    assert "this run (topheavy)" in page
