"""``paceline simulate``: the table, the JSON line, and one-line errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.cli import app
from paceline.records import StepRecord


def simulate(*args: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *args], env={"COLUMNS": "120"})


def test_a_scenario_becomes_a_table_from_naive_to_the_limit() -> None:
    done = simulate("--scenario", "skewed", "--workers", "8", "--steps", "30")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "scenario skewed, seed 0: 30 steps, 8 workers"
    names = [line[:20].strip() for line in lines[4:]]
    assert names[0] == "naive"
    assert names[-1] == "limit"
    assert {"adaptive", "auto", "epoch", "DropCompute", "Elfving", "last value", "smoothed", "static 0.9"} <= set(names)
    assert {"joint", "joint, whole", "clairvoyant cut-off"} <= set(names)


def test_the_same_seed_gives_the_same_line_of_json() -> None:
    args = ("--workers", "12", "--steps", "25", "--seed", "4", "--warm-up", "5", "--overhead-ms", "20", "--json")
    first, second = simulate(*args), simulate(*args)
    assert first.stdout == second.stdout
    told = json.loads(first.stdout)
    assert (told["steps"], told["workers"], told["overhead_ms"]) == (25, 12, 20.0)
    rules = {row["rule"]: row for row in told["rules"]}
    assert rules["naive"]["over_naive"] == 1
    assert rules["limit"]["over_limit"] == 1
    assert all(0 < row["over_limit"] <= 1.01 for row in rules.values())


def test_a_trace_is_read(tmp_path: Path) -> None:
    file = tmp_path / "two.csv"
    file.write_text("step,a,b\n1,1.0,2.0\n7,1.0,2.0\n")
    told = json.loads(simulate("--trace", str(file), "--json").stdout)
    rules = {row["rule"]: row for row in told["rules"]}
    assert rules["naive"]["shares_per_s"] == pytest.approx(1.0)
    assert rules["limit"]["over_naive"] == pytest.approx(1.5)


def test_the_machines_of_an_experiment_are_played_with_their_constant_costs() -> None:
    args = ("--emulate", "1+10ms,1+12ms", "--sample-ms", "1", "--batch", "64", "--steps", "110", "--warm-up", "100")
    told = json.loads(simulate(*args, "--json").stdout)
    rules = {row["rule"]: row for row in told["rules"]}
    assert told["source"] == "machines 1+10ms,1+12ms, seed 0"
    assert rules["naive"]["shares_per_s"] == pytest.approx(2 / 0.044)
    assert rules["limit"]["shares_per_s"] == pytest.approx(2 / 0.043)
    assert rules["epoch"]["over_limit"] == pytest.approx(1, abs=0.002)


@pytest.mark.parametrize(("cost", "naive"), [("500", 2 / 2.5), ("1500,0", 2 / 2.5)])
def test_a_trace_has_a_constant_cost_on_top(tmp_path: Path, cost: str, naive: float) -> None:
    file = tmp_path / "two.csv"
    file.write_text("step,a,b\n1,1.0,2.0\n7,1.0,2.0\n")
    told = json.loads(simulate("--trace", str(file), "--step-cost-ms", cost, "--json").stdout)
    assert told["rules"][0]["shares_per_s"] == pytest.approx(naive)


def test_a_runs_own_log_is_read(tmp_path: Path) -> None:
    steps = [
        StepRecord(step, 0, 0, workers=(0, 1), planned=(6, 2), samples=(6, 2), seconds=(3.0, 2.0)) for step in range(4)
    ]
    lines = [json.dumps({"event": "step", **record.to_json()}) for record in steps]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    told = json.loads(simulate("--run", str(tmp_path), "--json").stdout)
    naive = told["rules"][0]
    assert (told["steps"], told["workers"]) == (4, 2)
    assert naive["shares_per_s"] == pytest.approx(2 / 4)


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--scenario", "stormy"], "unknown scenario 'stormy'"),
        (["--workers", "0"], "at least one step and one worker"),
        (["--steps", "-3"], "at least one step"),
        (["--seed", "-1"], "--seed"),
        (["--overhead-ms", "-1"], "at least 0 seconds"),
        (["--overhead-ms", "nan"], "finite"),
        (["--warm-up", "300"], "leaves nothing to score"),
        (["--trace", "none.csv"], "cannot read the trace none.csv"),
        (["--run", "nowhere"], "no event log"),
        (["--run", "nowhere", "--scenario", "calm"], "exclude each other"),
        (["--trace", "none.csv", "--steps", "3"], "are for scenarios"),
        (["--scenario", "stuck", "--steps", "0"], "at least one step"),
        (["--emulate", "1,2", "--scenario", "calm"], "exclude each other"),
        (["--emulate", "1,2+50"], "should read +COST with its unit, such as +50ms"),
        (["--emulate", "1,2", "--steps", "0"], "at least one step"),
        (["--emulate", "1,2", "--batch", "1"], "at least one sample for each of 2 workers"),
        (["--sample-ms", "2"], "--sample-ms goes with --emulate"),
        (["--step-cost-ms", "fast"], "write milliseconds, such as 50"),
        (["--step-cost-ms", "1,2", "--workers", "3"], "2 costs for 3 workers"),
        (["--step-cost-ms", "-1"], "at least 0 seconds"),
        (["--network", "1gbit,5ms", "--parameters", "1M", "--step-cost-ms", "9"], "knows no constant cost a step"),
        (["--scenario", "stuck", "--model", "m.pt"], "--model is for cut-offs"),
        (["--workers", "2", "--steps", "2", "--html", "no/such/folder/page.html"], "cannot write"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(args: list[str], part: str) -> None:
    done = simulate(*args)
    assert done.exit_code == 2
    assert part in done.stderr
    assert done.stderr.startswith("paceline: simulate: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("1,1.0,nan\n", "line 1, column 3"),
        ("1,1.0,-2.0\n", "above 0"),
        ("1,1.0,2.0\n2,1.0\n", "line 2"),
        ("", "holds no steps"),
    ],
)
def test_a_broken_trace_is_one_line_that_says_where(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "broken.csv"
    file.write_text(text)
    done = simulate("--trace", str(file))
    assert done.exit_code == 2
    assert part in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_stalls_inside_micro_batches_are_a_scenario_of_their_own() -> None:
    told = json.loads(simulate("--scenario", "stuck", "--steps", "60", "--json").stdout)
    rules = {row["rule"]: row for row in told["rules"]}
    assert (told["workers"], next(iter(rules)), list(rules)[-1]) == (4, "naive", "limit")
    assert rules["joint"]["over_naive"] > 1.3


def test_a_page_stands_alone(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    file = tmp_path / "page.html"
    done = simulate("--scenario", "calm", "--workers", "3", "--steps", "9", "--html", str(file))
    assert done.exit_code == 0
    text = file.read_text()
    assert "<title>paceline simulate: scenario calm, seed 0</title>" in text
    assert "clairvoyant cut-off" in text
    assert "<script src=" not in text


def test_a_page_without_plotly_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("plotly", "plotly.graph_objects", "plotly.io"):
        monkeypatch.setitem(sys.modules, module, None)
    done = simulate("--workers", "2", "--steps", "2", "--html", str(tmp_path / "page.html"))
    assert done.exit_code == 2
    assert "pip install 'paceline[view]'" in done.stderr


def test_the_simulator_needs_no_torch() -> None:
    probe = "import sys, paceline.simulate.comparison, paceline.simulate; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
