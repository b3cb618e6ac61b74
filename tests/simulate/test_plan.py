"""``paceline plan``: the file, what each way to train comes to, what machines bring, and one-line errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from paceline.cli import app
from paceline.machines.link import Link, parse_link
from paceline.observe import RunLog, read_log
from paceline.pace import DEFAULT
from paceline.records import StepRecord
from paceline.simulate.goodput import reform_s
from paceline.simulate.planning import advice
from paceline.simulate.planning.choices import Choice, Player, choices, paces, steps_for
from paceline.simulate.planning.fleet_file import read_fleet
from paceline.simulate.planning.fleet_spec import FleetSpec, MachineKind, TrainedModel, churn
from paceline.simulate.planning.measured import compare_with_run, measure
from paceline.simulate.sites import Sites

FILE = """
[model]
parameters = "250k"
batch = 64
sample_ms = 5

[[sites]]
name = "office"
bandwidth = "1gbit"
latency_ms = 0.2

[[sites]]
name = "cloud"

[[links]]
between = ["office", "cloud"]
bandwidth = "100mbit"
latency_ms = 10

[[machines]]
name = "new"
site = "office"
count = 2
speed = 1.0
cost_per_hour = 0.5

[[machines]]
name = "old"
site = "office"
count = 2
speed = 0.05
cost_per_hour = 0.5

[[machines]]
name = "spot"
site = "cloud"
speed = 2
memory_gb = 8
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(FILE)
    return path


def plan(*args: object, columns: int = 100) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, args)], env={"COLUMNS": str(columns)})


def alike(many: int, *, link: Link | None = None, **kind: Any) -> FleetSpec:
    """Machines without jitter in one site, 10 samples a second each."""
    sites = Sites({"here": link or Link(1e15, 0.0)})
    kinds = (MachineKind("m", "here", many, **{"jitter": 0.0, **kind}),)
    return FleetSpec(kinds, sites, TrainedModel(4_000_000, 32 * many, 0.1))


# -- what it comes to --------------------------------------------------------------------------------------------------


def test_like_machines_without_a_network_reach_the_sum_of_their_speeds_under_every_pace() -> None:
    player = Player(alike(4), steps=20)
    assert player.limit_per_s == pytest.approx(40)
    for pace in ("equal", "epoch", "adaptive", "joint", "auto"):
        assert player.gradients(pace, "float32", "ring").over_limit == pytest.approx(1, abs=0.06), pace
    assert player.average(2.0, "float32", "ring").over_limit == pytest.approx(1, abs=0.01)


def test_a_round_comes_on_top_of_every_step_and_half_the_bytes_take_half_of_it() -> None:
    player = Player(alike(4, link=Link(8e6, 0.0)), steps=20)
    whole, half = (player.gradients("equal", wire, "ring") for wire in ("float32", "bf16"))
    assert whole.round_s == pytest.approx(6, rel=0.01)  # 1.5 times 4 MB at 1 MB/s
    assert half.round_s == pytest.approx(3, rel=0.01)
    assert whole.samples_per_s == pytest.approx(128 / (3.2 + whole.round_s))
    assert whole.in_rounds == pytest.approx(whole.round_s / (3.2 + whole.round_s))
    assert whole.hours(3600 * whole.samples_per_s) == pytest.approx(1)


def test_unlike_machines_gain_by_shares_and_stalls_by_deadlines() -> None:
    sites = Sites({"here": Link(1e15, 0.0)})
    kinds = (MachineKind("fast", "here", 2, 1.0, jitter=0.02), MachineKind("slow", "here", 2, 0.25, jitter=0.02))
    unlike = Player(FleetSpec(kinds, sites, TrainedModel(4_000, 256, 0.01)), steps=40)
    assert unlike.gradients("equal", "float32", "ring").over_limit < 0.5
    assert unlike.gradients("adaptive", "float32", "ring").over_limit > 0.9
    stalling = Player(alike(8, jitter=0.02, stalls_per_hour=60, stall_s=10), steps=80)
    waits, closes = (stalling.gradients(pace, "float32", "ring") for pace in ("adaptive", "joint"))
    assert closes.samples_per_s > 1.3 * waits.samples_per_s


def test_every_pace_combine_wire_and_topology_has_its_row_and_one_site_has_no_topology(file: Path) -> None:
    found = choices(Player(read_fleet(file), steps=8))
    assert {one.pace for one in found if one.combine == "gradients"} == set(paces())
    assert {"equal", "epoch", "adaptive", "cutoff", "joint", "auto"} <= set(paces())
    assert {one.combine for one in found} == {"gradients", "average", "elastic-average"}
    assert {(one.comm_dtype, one.topology) for one in found if one.pace == "adaptive"} == {
        (wire, topology) for wire in ("float32", "bf16") for topology in ("ring", "two levels")
    }
    assert {one.comm_dtype for one in found if one.combine == "average"} == {"float32", "int8"}
    assert {one.topology for one in found if one.found} == {"two levels"}
    assert {one.topology for one in choices(Player(alike(2), steps=8))} == {"ring"}


def test_fewer_steps_are_played_the_larger_the_fleet() -> None:
    assert [steps_for(workers) for workers in (2, 4_000, 10_000)] == [200, 100, 40]


# -- coming and going --------------------------------------------------------------------------------------------------


def test_machines_that_are_reclaimed_are_missed_and_stop_the_others() -> None:
    calm = churn(alike(4))
    assert (calm.present, calm.changes_per_s, calm.left) == (1, 0, 1)
    often = churn(alike(4, reclaimed_per_hour=12, away_s=300))
    assert often.present == pytest.approx(0.5)
    assert often.changes_per_s == pytest.approx(2 * 4 * 0.5 * 12 / 3600)
    assert often.left < 0.5
    assert Player(alike(4, reclaimed_per_hour=12, away_s=300), steps=8).limit_per_s == pytest.approx(20)


def test_a_newcomer_takes_the_state_over_the_slowest_way_it_may_come() -> None:
    two = Sites({"a": Link(1e9, 0.0), "b": Link(1e9, 0.0)}, {frozenset("ab"): parse_link("8mbit,0ms")})
    kinds = (MachineKind("m", "a", 3), MachineKind("alone", "b", 1, reclaimed_per_hour=1))
    spec = FleetSpec(kinds, two, TrainedModel(1_000_000, 64, 0.1, optimiser="sgd"))
    assert churn(spec).coming_s == pytest.approx(reform_s(4) + 1)
    together = replace(spec, kinds=(kinds[0], replace(kinds[1], count=2)))
    assert churn(together).coming_s == pytest.approx(reform_s(5) + 0.008)


# -- advice ------------------------------------------------------------------------------------------------------------


def choice(pace: str, samples_per_s: float, *, comm_dtype: str = "float32", period_s: float | None = None) -> Choice:
    combine = "gradients" if pace else "average"
    return Choice(pace, combine, comm_dtype, "ring", samples_per_s, 100.0, 0.1, 0.1, period_s)


def test_the_simplest_of_the_fastest_is_taken_and_an_average_only_where_it_is_twice_as_fast() -> None:
    found = [choice("equal", 40), choice("adaptive", 79.5), choice("joint", 80)]
    found += [choice("adaptive", 80, comm_dtype="bf16")]
    found[1:2] = [choice(DEFAULT, 79.5)]
    assert advice.best(found) == found[1]
    assert advice.best([*found, replace(choice("joint", 99), found=False)]) == found[1]
    assert advice.best([*found, choice("joint", 90)]).pace == "joint"
    assert advice.best_average([*found, choice("", 85, period_s=2)]) is None
    pays, wins = choice("", 95, period_s=2), [choice("", 190, period_s=30), choice("", 200, period_s=200)]
    assert advice.best_average([*found, pays]) == pays
    assert advice.advised([*found, pays]) == found[1]
    assert advice.advised([*found, pays, *wins]) == wins[0]


def test_what_each_kind_brings_is_told_in_a_sentence() -> None:
    sites = Sites({"here": Link(1e15, 0.0)})
    kinds = (
        MachineKind("new", "here", 4, 1.0, cost_per_hour=1.0, jitter=0.0),
        MachineKind("old", "here", 2, 0.08, cost_per_hour=1.0, jitter=0.0),
    )
    spec = FleetSpec(kinds, sites, TrainedModel(4_000, 8192, 0.01))
    chosen = Player(spec, steps=30).gradients("adaptive", "float32", "ring")
    new, old = advice.worth(spec, chosen, steps=30)
    assert old.brings == pytest.approx(0.04, abs=0.01)
    assert advice.sentence(old).startswith("The 2 old bring 4 %, and a sample would cost 3")
    assert "less without" in advice.sentence(old)
    assert new.brings == pytest.approx(0.96, abs=0.01)
    assert new.one_more == pytest.approx(0.24, abs=0.02)
    assert advice.sentence(replace(old, brings=-0.1)) == "The 2 old hold the others up: leave them out, and gain 10 %."
    assert advice.sentence(replace(old, brings=0.001, cheaper=None)) == "The 2 old bring 0.1 %: leave them out."


def test_the_command_line_says_what_is_not_the_default_and_the_script_what_has_no_option() -> None:
    assert advice.commands(alike(4), choice(DEFAULT, 1)) == [
        "paceline host --host 0.0.0.0 --min 2 --max 4",
        "paceline run --join HOST:PORT train.py",
    ]
    assert advice.commands(alike(4), choice("joint", 1, comm_dtype="bf16"))[1] == (
        "paceline run --join HOST:PORT --pace joint --comm-dtype bf16 train.py"
    )
    assert advice.commands(alike(4), choice("", 1, comm_dtype="int8", period_s=2))[1:] == [
        "paceline run --join HOST:PORT --combine average --comm-dtype int8 train.py"
    ]
    assert advice.commands(alike(4), choice("", 1, period_s=30))[1:] == [
        "paceline run --join HOST:PORT train.py",
        "paceline.join(combine=paceline.Averaging(period_s=30))  # in train.py",
    ]


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_file_becomes_machines_sites_and_links(file: Path) -> None:
    spec = read_fleet(file)
    assert spec.workers == 5
    assert spec.order == ("office",) * 4 + ("cloud",)
    assert spec.column("speed").tolist() == [1, 1, 0.05, 0.05, 2]
    assert spec.training.model_bytes == 1_000_000
    assert spec.sites.link(("cloud", "office")) == parse_link("100mbit,10ms")
    assert spec.training.needed_bytes == 4_000_000


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("speed = 0.05", "sped = 0.05", "line 31: sped is not known in [[machines]]: did you mean speed?"),
        ("[model]", "[modle]", "line 2: modle is not known: did you mean model?"),
        ("speed = 0.05", "speed = 0", "line 31: speed of 'old' is 0: it is times the reference machine's, above 0"),
        (
            '"office", "cloud"]',
            '"office", "clod"]',
            "line 16: between names 'clod', which is no site; there are office, cloud",
        ),
        ('between = ["office", "cloud"]\n', "", "line 15: between names no two sites: write between"),
        ('site = "cloud"', 'site = "cellar"', "line 36: site is 'cellar', which is no site"),
        (
            "memory_gb = 8",
            "memory_gb = 0.003",
            "line 38: memory_gb of 'spot' is 0.003, too small for the model: parameters, gradients and the state of "
            "adam need 4 MB",
        ),
        ('bandwidth = "100mbit"', 'bandwidth = "fast"', "line 17: bandwidth is 'fast': write 100mbit"),
        ("batch = 64", "batch = 4", "line 4: batch is 4, less than a sample for each of 5 machines"),
        ("batch = 64", "batch = true", "line 4: batch is True, and should be a whole number"),
        ("sample_ms = 5\n", "", "line 2: [model] does not say sample_ms"),
        ('parameters = "250k"', 'parameters = "many"', "line 3: parameters gives no size"),
        ("count = 2\nspeed = 1.0", "count = 0\nspeed = 1.0", "line 23: count is 0"),
        ('name = "old"', 'name = "new"', "line 28: name 'new' is taken"),
        ("speed = 2\n", "", "line 34: [[machines]] does not say speed"),
        ("latency_ms = 10", "latency_ms = -1", "line 18: latency_ms is -1, and must be at least 0"),
        ("latency_ms = 10", "", "line 15: [[links]] does not say latency_ms"),
        ("[[links]]", "[links]", "links are tables, one for each: write [[links]]"),
        ("[model]", "[model", "is not TOML: "),
    ],
)
def test_bad_input_is_one_line_with_its_place(file: Path, old: str, new: str, said: str) -> None:
    assert old in FILE
    file.write_text(FILE.replace(old, new))
    done = plan(file)
    assert done.exit_code == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"paceline: plan: {file}")
    assert said in line


def test_sites_that_no_link_joins_are_refused_and_so_is_a_file_that_is_not_there(file: Path) -> None:
    at = FILE.index("[[links]]")
    file.write_text(FILE[:at] + FILE[FILE.index("[[machines]]") :])
    assert "no link leads from office to cloud: describe one in [[links]]" in plan(file).stderr
    assert "cannot read" in plan(file.with_name("other.toml")).stderr
    assert "--samples is a count such as 50M" in _with_good_file(file, "--samples", "many").stderr


def _with_good_file(file: Path, *args: str) -> Result:
    file.write_text(FILE)
    return plan(file, *args)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_table_fits_a_terminal_of_100_columns_and_the_verdict_says_what_to_do(file: Path) -> None:
    done = plan(file, "--steps", "10", "--samples", "1M")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert "…" not in done.stdout
    assert lines[0].startswith("5 machines in 2 sites, 1 MB of parameters, batch 64: together at most ")
    words = " ".join(done.stdout.split())
    assert "The 2 old bring" in words or "The 2 old hold" in words
    assert "1,000,000 samples take" in words
    assert "The model fits: 1 MB of parameters, as much of gradients and 2 MB of adam's state leave 8 GB" in words
    assert any(line.startswith("paceline run --join HOST:PORT ") for line in lines)


def test_the_same_seed_gives_the_same_line_of_json(file: Path) -> None:
    first, second = (plan(file, "--steps", "6", "--samples", "1M", "--json").stdout for _ in range(2))
    assert first == second
    told = json.loads(first)
    assert told["workers"] == 5
    assert {one["machines"] for one in told["worth"]} == {"new", "old", "spot"}
    row = told["choices"][0]
    assert row["hours"] == pytest.approx(1e6 / row["samples_per_s"] / 3600)
    assert row["cost"] == pytest.approx(row["hours"] * 2.0)
    assert told["run"] is None


# -- from a run --------------------------------------------------------------------------------------------------------


def run_log(folder: Path, *, steps: int = 40, stall: int | None = None, round_s: float = 0.05) -> RunLog:
    """Two workers, the second half as fast, with shares that follow: 96 samples a step in 0.32 s and the round."""
    draws = np.random.default_rng(0)
    lines: list[dict[str, Any]] = [{"event": "run", "version": 1, "pace": "adaptive", "combine": "gradients"}]
    lines.append({"event": "steps", "global_batch": 96, "round_bytes": 2_000_000})
    for step in range(steps):
        own = [64 * 0.005, 32 * 0.01 + (5.0 if step == stall else 0.0)]
        own = [one * float(np.exp(0.02 * draws.standard_normal())) for one in own]
        record = StepRecord(
            step, 0, 0, (0, 1), (64, 32), (64, 32), tuple(own), wall_s=max(own) + round_s, round_s=round_s
        )
        lines.append({"event": "step", **record.to_json()})
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").write_text("".join(json.dumps({"t": 1.0, **line}) + "\n" for line in lines))
    return read_log(folder)


def test_a_run_says_how_fast_its_workers_are_how_they_scatter_stall_and_what_a_round_takes(tmp_path: Path) -> None:
    found = measure(run_log(tmp_path / "run", stall=20))
    assert found.batch == 96
    assert found.sample_s == pytest.approx((0.005, 0.01), rel=0.03)
    assert found.jitter == pytest.approx((0.02, 0.02), abs=0.01)
    assert found.stalls_per_hour[0] == 0
    assert found.stalls_per_hour[1] == pytest.approx(3600 / (33 * 0.38 + 5), rel=0.1)
    assert found.stall_s[1] == pytest.approx(5, rel=0.1)
    assert found.round_s == pytest.approx(0.05)


def test_what_the_file_leaves_out_is_filled_in_and_the_plan_meets_the_run(tmp_path: Path) -> None:
    log, path = run_log(tmp_path / "run"), tmp_path / "fleet.toml"
    path.write_text("[model]\noptimizer = 'sgd'\n")
    spec = read_fleet(path, measure(log))
    assert [kind.name for kind in spec.kinds] == ["worker 0", "worker 1"]
    assert spec.column("speed").tolist() == pytest.approx([1, 0.5], rel=0.05)
    assert (spec.training.batch, spec.training.model_bytes) == (96, 2_000_000)
    found = choices(Player(spec, steps=40))
    against = compare_with_run(found, log)
    assert against["pace"] == "adaptive"
    assert against["real_samples_per_s"] == pytest.approx(96 / 0.375, rel=0.03)
    assert against["plan_error"] < 0.05
    told = json.loads(plan(path, "--from", tmp_path / "run", "--steps", "20", "--json").stdout)
    assert told["run"]["plan_error"] < 0.1


def test_the_file_goes_before_the_run_and_machines_that_cannot_be_matched_are_refused(tmp_path: Path) -> None:
    log, path = run_log(tmp_path / "run"), tmp_path / "fleet.toml"
    path.write_text('[model]\nparameters = "1M"\nbatch = 200\n[[machines]]\nname = "both"\ncount = 2\njitter = 0.3\n')
    (kind,) = read_fleet(path, measure(log)).kinds
    assert kind.speed == pytest.approx(0.75, rel=0.05)
    assert kind.jitter == 0.3
    path.write_text('[model]\nparameters = "1M"\n[[machines]]\nname = "more"\ncount = 3\n')
    with pytest.raises(ValueError, match="--from has 2 workers and this file 3 machines"):
        read_fleet(path, measure(log))
    with pytest.raises(ValueError, match="no row for the run's combine 'gradients', pace 'adaptive'"):
        compare_with_run([], log)
    with pytest.raises(ValueError, match="too few steps"):
        measure(run_log(tmp_path / "short", steps=6))
