"""Goodput under failures: limits, orders, closed forms, and where the machines' time goes."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from paceline.cli import app
from paceline.simulate.goodput import (
    RULES,
    Change,
    Checkpoints,
    ElasticRule,
    FailureCosts,
    RestartAnySizeRule,
    RestartRule,
    compare_goodput,
    failures,
    play,
    usual_costs,
    young_s,
)
from quick import examples

HOUR = 3600.0
COSTS = FailureCosts(
    kill_s=0.1, join_s=1.0, start_s=20.0, load_s=5.0, save_s=0.1, write_s=5.0, every_s=300.0, step_s=0.5
)
NOTHING = FailureCosts(kill_s=0, join_s=0, start_s=0, load_s=0, save_s=0, write_s=0, every_s=60.0)


def goodputs(machines: int, costs: FailureCosts, **settings: float) -> dict[str, float]:
    found = compare_goodput([1.0] * machines, costs, **{"replace_s": 300.0, **settings})  # type: ignore[arg-type]
    return {one.rule: one.goodput for one in found}


def test_without_failures_and_checkpoints_everything_is_useful() -> None:
    costs = usual_costs(8, state_bytes=1e9, fleet_mtbf_s=math.inf)
    assert costs.every_s == math.inf, "nobody who cannot fail saves"
    assert set(goodputs(8, costs, mtbf_s=math.inf).values()) == {1.0}


def test_without_failures_a_checkpoint_costs_its_part_of_the_time() -> None:
    found = goodputs(8, COSTS, mtbf_s=math.inf)
    assert found["restart"] == pytest.approx(300 / 305, rel=1e-3)
    assert found["Paceline"] == pytest.approx(300 / 300.1, rel=1e-3)


def test_what_costs_nothing_takes_nothing_but_the_machines_that_are_away() -> None:
    found = goodputs(16, NOTHING, mtbf_s=HOUR, replace_s=600.0)
    assert found["Paceline"] == pytest.approx(HOUR / (HOUR + 600), rel=0.02)


@settings(max_examples=examples(25), deadline=None)
@given(
    machines=st.integers(1, 40),
    speeds=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=12),
    mtbf_h=st.floats(0.05, 50.0),
    replace_s=st.floats(0.0, 3000.0),
    seed=st.integers(0, 99),
)
def test_the_parts_add_up_to_one_and_none_is_negative(
    machines: int, speeds: list[float], mtbf_h: float, replace_s: float, seed: int
) -> None:
    fleet = [speeds[number % len(speeds)] for number in range(machines)]
    until_s = 200 * mtbf_h * HOUR / machines
    timing = {"mtbf_s": mtbf_h * HOUR, "replace_s": replace_s, "until_s": until_s}
    for one in compare_goodput(fleet, COSTS, seed=seed, **timing):
        parts = (one.goodput, one.away, one.stopped, one.checkpoints, one.redone)
        assert sum(parts) == pytest.approx(1)
        assert min(parts) >= -1e-9


@pytest.mark.parametrize("rule", [kind.name for kind in RULES])
def test_goodput_falls_as_machines_fail_more_often(rule: str) -> None:
    found = [goodputs(16, COSTS, mtbf_s=hours * HOUR)[rule] for hours in (1, 3, 10, 100, 1000)]
    assert found == sorted(found)
    assert found[0] < 0.95 < found[-1]


@pytest.mark.parametrize("cost", ["kill_s", "join_s", "start_s"])
def test_a_dearer_failure_never_gains(cost: str) -> None:
    cheap = goodputs(16, COSTS, mtbf_s=5 * HOUR)
    dear = goodputs(16, replace(COSTS, **{cost: 60.0}), mtbf_s=5 * HOUR)
    assert all(dear[rule] <= cheap[rule] + 1e-9 for rule in cheap)
    assert dear["Paceline"] < cheap["Paceline"]


def test_the_same_seed_gives_the_same_goodput_and_another_one_another() -> None:
    first, second, other = (goodputs(4, COSTS, mtbf_s=HOUR, seed=seed) for seed in (1, 1, 2))
    assert first == second
    assert first != other


# -- failures ----------------------------------------------------------------------------------------------------------


def test_machines_fail_at_their_rate_and_nobody_fails_who_is_away() -> None:
    drawn = list(islice(failures(5, mtbf_s=1000.0, replace_s=400.0, seed=3), 4000))
    away: set[int] = set()
    for change in drawn:
        assert (change.machine in away) == change.comes
        (away.discard if change.comes else away.add)(change.machine)
    assert [change.at_s for change in drawn] == sorted(change.at_s for change in drawn)
    lost = [change for change in drawn if not change.comes]
    assert len(lost) / drawn[-1].at_s == pytest.approx(5 / 1400, rel=0.05)


# -- the rules by hand -------------------------------------------------------------------------------------------------

ONE = [Change(100.0, 1, comes=False), Change(130.0, 1, comes=True)]
"""Machine 1 of two is lost after 100 s, and another is there 30 s later."""


def test_paceline_by_hand() -> None:
    costs = replace(COSTS, every_s=math.inf)
    spent = play(ElasticRule([3.0, 1.0], costs), ONE, until_s=200.0)
    assert spent.away == pytest.approx(1.0 * (30 + 20))
    assert spent.stopped == pytest.approx(3.0 * 0.1 + 4.0 * 1.0)
    assert spent.redone == pytest.approx(1.0 * 0.25)
    assert spent.useful == pytest.approx(800 - spent.away - spent.stopped - spent.redone)


def test_a_restart_by_hand_repeats_what_came_after_the_checkpoint() -> None:
    costs = replace(COSTS, every_s=35.0)
    spent = play(RestartRule([3.0, 1.0], costs), ONE, until_s=200.0)
    assert spent.redone == pytest.approx(4.0 * 20), "saved at 40 and at 80 s"
    assert spent.away == pytest.approx(1.0 * 30)
    assert spent.stopped == pytest.approx(3.0 * 30 + 4.0 * 25), "trains on at 155 s"
    assert spent.saving == pytest.approx(4.0 * (5 + 5 + 5))
    assert spent.useful == pytest.approx(800 - spent.away - spent.stopped - spent.redone - spent.saving)


def test_a_restart_of_any_size_stops_twice() -> None:
    costs = replace(COSTS, every_s=math.inf)
    spent = play(RestartAnySizeRule([3.0, 1.0], costs), ONE, until_s=200.0)
    assert spent.redone == pytest.approx(4.0 * 100 + 3.0 * 5)
    assert spent.stopped == pytest.approx(3.0 * 25 + 4.0 * 25)


def test_when_all_are_gone_paceline_too_goes_back_to_its_checkpoint() -> None:
    costs = replace(COSTS, every_s=59.9)  # and 0.1 s to save
    gone = [Change(100.0, 0, comes=False), Change(100.0, 1, comes=False), Change(110.0, 0, comes=True)]
    spent = play(ElasticRule([1.0, 1.0], costs), gone, until_s=200.0)
    assert spent.redone == pytest.approx(2 * 40, abs=0.5), "since 60 s"
    assert spent.stopped == pytest.approx(1.0 * 5.0, abs=0.3), "one machine reads the checkpoint, from 130 s on"
    assert spent.useful + spent.saving == pytest.approx(2 * 60 + 65, abs=0.5)


def test_one_that_dies_before_it_has_entered_stops_nobody() -> None:
    changes = [*ONE, Change(140.0, 1, comes=False)]
    spent = play(ElasticRule([1.0, 1.0], COSTS), changes, until_s=200.0)
    assert spent.stopped == pytest.approx(0.1)


@given(st.lists(st.floats(0.0, 500.0), max_size=20))
def test_checkpoints_do_not_depend_on_how_time_is_cut(spans: list[float]) -> None:
    cut, whole = Checkpoints(90.0, 10.0), Checkpoints(90.0, 10.0)
    worked = sum(cut.run(span, 2.0)[0] for span in spans)
    expected, _ = whole.run(sum(spans), 2.0)
    assert worked == pytest.approx(expected, abs=1e-6)
    assert cut.unsaved == pytest.approx(whole.unsaved, abs=1e-6) or cut.position_s == pytest.approx(100, abs=1e-6)


# -- costs -------------------------------------------------------------------------------------------------------------


def test_costs_grow_with_the_state_and_single_ones_can_be_replaced() -> None:
    small, large = (usual_costs(8, state_bytes=size, fleet_mtbf_s=HOUR) for size in (1e6, 10e9))
    assert large.join_s == pytest.approx(16.7, rel=0.02)
    assert small.join_s == pytest.approx(0.08, rel=0.1)
    assert large.write_s > 100 * large.kill_s
    known = usual_costs(8, state_bytes=10e9, fleet_mtbf_s=HOUR, join_s=0.5, write_s=2.0, every_s=None)
    assert (known.join_s, known.every_s) == (0.5, young_s(2.0, HOUR))


@pytest.mark.parametrize(("name", "value"), [("kill_s", -1.0), ("start_s", math.inf), ("every_s", 0.0)])
def test_a_cost_that_cannot_be_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        replace(COSTS, **{name: value})


# -- the commands ------------------------------------------------------------------------------------------------------

FLEET = """
[model]
parameters = "100M"
batch = 64
sample_ms = 5
[[machines]]
name = "own"
count = 2
speed = 1
[[machines]]
name = "spot"
count = 6
speed = 2
{reclaimed}
"""


def command(*args: object) -> Result:
    return CliRunner().invoke(app, [*map(str, args)], env={"COLUMNS": "100"})


def test_simulate_prints_paceline_beside_restarts() -> None:
    asked = ("simulate", "--scenario", "skewed", "--workers", 16, "--steps", 20, "--mtbf-h", 8, "--replace-s", 300)
    done = command(*asked, "--parameters", "25M")
    assert done.exit_code == 0, done.output
    words = " ".join(done.stdout.split())
    assert "16 workers, each fails once in 8 h and is replaced after 5 min 00 s; 300 MB of state" in words
    assert "Somebody fails every 30 min 00 s: Paceline does " in words
    assert "Simulated, not run." in words
    assert max(map(len, done.stdout.splitlines())) <= 100
    told = json.loads(command(*asked, "--parameters", "25M", "--json").stdout)
    rules = {row["rule"]: row["goodput"] for row in told["rules"]}
    assert rules["Paceline"] > rules["restart"] > 0.3
    assert told["costs"]["start_s"] == 5.7
    dear = json.loads(command(*asked, "--parameters", "25M", "--costs", "start=900,every=600", "--json").stdout)
    assert (dear["costs"]["start_s"], dear["costs"]["every_s"]) == (900, 600)
    assert dear["rules"][1]["goodput"] < rules["restart"] - 0.2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--mtbf-h", 2), "--mtbf-h needs --replace-s"),
        (("--mtbf-h", 2, "--replace-s", 60), "--mtbf-h needs the model's size"),
        (("--replace-s", 60), "--replace-s goes with --mtbf-h"),
        (("--hours", 2), "--hours goes with --mtbf-h"),
        (("--mtbf-h", 0, "--replace-s", 60, "--megabytes", 1), "--mtbf-h is 0: hours, above 0"),
        (("--mtbf-h", 2, "--replace-s", -1, "--megabytes", 1), "--replace-s is -1: seconds, at least 0"),
        (("--mtbf-h", 2, "--replace-s", 1, "--megabytes", 1, "--costs", "king=3"), "there are kill, join, start"),
        (("--mtbf-h", 2, "--replace-s", 1, "--megabytes", 1, "--costs", "kill=a"), "kill is a number of seconds"),
        (("--mtbf-h", 2, "--replace-s", 1, "--megabytes", 1, "--network", "1gbit,5ms"), "exclude each other"),
        (("--parameters", "25M"), "--parameters goes with --network"),
    ],
)
def test_what_simulate_cannot_play_is_one_line(args: tuple[object, ...], said: str) -> None:
    done = command("simulate", "--workers", 4, "--steps", 5, *args)
    assert done.exit_code == 2
    (line,) = done.stderr.strip().splitlines()
    assert said in line


def test_plan_plays_the_files_reclaims_and_fills_in_others(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET.format(reclaimed=""))
    assert json.loads(command("plan", file, "--steps", 6, "--json").stdout)["goodput"] is None
    assert "--costs are those of failures" in command("plan", file, "--steps", 6, "--costs", "join=1").stderr
    assert "--replace-s goes with --mtbf-h" in command("plan", file, "--steps", 6, "--replace-s", 3).stderr
    asked = ("plan", file, "--steps", 6, "--mtbf-h", 10, "--replace-s", 300)
    everybody = json.loads(command(*asked, "--json").stdout)["goodput"]
    file.write_text(FLEET.format(reclaimed="reclaimed_per_hour = 1\naway_s = 300"))
    spot = json.loads(command(*asked, "--json").stdout)["goodput"]
    for rare, often in zip(everybody["rules"], spot["rules"], strict=True):
        assert often["goodput"] < rare["goodput"], rare["rule"]
    done = command(*asked)
    assert "Somebody fails every 9 min 41 s: Paceline does " in " ".join(done.stdout.split())


def test_machines_of_unlike_rates_fail_in_that_proportion() -> None:
    drawn = islice(failures(3, mtbf_s=[100.0, 400.0, math.inf], replace_s=[0.0, 1.0, 2.0], seed=1), 4000)
    lost = Counter(change.machine for change in drawn if not change.comes)
    assert lost[0] / lost[1] == pytest.approx(4, rel=0.15)
    assert 2 not in lost
