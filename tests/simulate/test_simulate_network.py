"""When averaging pays: rounds at every step against rounds now and then, and ``paceline simulate --network``."""

import json
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from paceline.cli import app
from paceline.machines.link import Link, parse_link
from paceline.records import StepRecord
from paceline.simulate import make, network
from paceline.simulate.network import LoopedTrace, Network, Traffic, compare_network, enough, usual_periods
from quick import examples

LINK = parse_link("100mbit,30ms")


def alike(workers: int, *, steps: int = 8, seconds: float = 1.0) -> np.ndarray:
    return np.full((steps, workers), seconds)


def played(seconds: np.ndarray, link: Link = LINK, **settings: object) -> dict[str, Traffic]:
    found = compare_network(seconds, link, **{"model_bytes": 10_000_000, **settings})  # type: ignore[arg-type]
    return {outcome.name: outcome for outcome in found}


def simulate(*args: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *args], env={"COLUMNS": "80"})


# -- what rounds cost --------------------------------------------------------------------------------------------------


def test_a_round_costs_what_the_link_says_and_averages_two_more_crossings() -> None:
    four = Network(LINK, workers=4, model_bytes=10_000_000)
    assert four.gradients_s == pytest.approx(2 * 0.03 + 1.5 * 8e7 / 1e8)
    assert four.average_s == pytest.approx(four.gradients_s + 2 * 0.03)
    assert four.sent_bytes == 15_000_000


def test_on_like_machines_every_rule_has_its_closed_form() -> None:
    rules = played(alike(4), share=32, periods_s=[5.0])
    gradients_s, average_s = 0.06 + 1.2, 0.12 + 1.2
    assert rules["gradients"].samples_per_s == pytest.approx(128 / (1 + gradients_s))
    assert rules["gradients"].in_rounds == pytest.approx(gradients_s / (1 + gradients_s))
    assert rules["gradients"].bytes_per_sample == pytest.approx(4 * 15e6 / 128)
    for name, steps in [("average, 1 step", 1), ("average, 16 steps", 16), ("elastic, tau 2", 2), ("average, 5 s", 5)]:
        rule = rules[name]
        assert rule.samples_per_s == pytest.approx(steps * 128 / (steps + average_s)), name
        assert rule.bytes_per_sample == pytest.approx(4 * 15e6 / (128 * steps)), name
        assert rule.round_every_s == pytest.approx(steps + average_s), name
        assert rule.sent_per_s == pytest.approx(15e6 / (steps + average_s)), name
        assert rule.waiting == pytest.approx(0), name
    assert rules["limit"].samples_per_s == pytest.approx(128)


def test_an_elastic_average_takes_the_time_and_bytes_of_an_average() -> None:
    rules = played(make("bursts", steps=40, workers=6), every_steps=[2], taus=[2])
    average, elastic = rules["average, 2 steps"], rules["elastic, tau 2"]
    assert (average.seconds, average.samples, average.sent_bytes) == (
        elastic.seconds,
        elastic.samples,
        elastic.sent_bytes,
    )


def test_one_worker_has_no_rounds_and_sends_nothing() -> None:
    rules = played(alike(1))
    for rule in rules.values():
        assert (rule.rounds, rule.rounds_s, rule.sent_bytes) == (0, 0, 0)
        assert math.isinf(rule.round_every_s)
        assert rule.samples_per_s == pytest.approx(32)


@pytest.mark.slow
@settings(max_examples=examples(15), deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(2, 9),
    st.sampled_from([1e6, 1e8, 1e10]),
    st.sampled_from([0.0, 0.03]),
)
def test_nobody_beats_the_limit_and_time_splits_into_work_and_rounds(
    seed: int, workers: int, bits_per_s: float, delay_s: float
) -> None:
    # The numbers of steps divide the trace's length, so that rules by steps score whole turns of it.
    own = np.random.default_rng(seed).uniform(0.5, 2.0, (32, workers))
    rules = played(own, Link(bits_per_s, delay_s), every_steps=[1, 8], periods_s=[10.0], taus=[2])
    limit = rules["limit"].samples_per_s
    for rule in rules.values():
        assert rule.samples_per_s <= limit * 1.05, rule.name
        assert 0 <= rule.in_rounds < 1
        assert 0 <= rule.waiting < 1 - rule.in_rounds + 1e-12


@pytest.mark.parametrize("scenario", ["calm", "skewed", "stalls"])
def test_the_longer_the_period_the_less_time_and_traffic_in_rounds(scenario: str) -> None:
    rules = list(played(make(scenario, steps=64, workers=8)).values())
    by_steps = [rule for rule in rules if rule.name.startswith("average") and "step" in rule.name]
    assert len(by_steps) == 4
    for shorter, longer in pairwise(by_steps):
        assert longer.in_rounds < shorter.in_rounds
        assert longer.bytes_per_sample < shorter.bytes_per_sample


# -- by the clock ------------------------------------------------------------------------------------------------------


def test_by_the_clock_a_fast_worker_makes_more_steps_and_nobody_waits() -> None:
    own = np.tile([1.0, 1.0, 2.0, 4.0], (16, 1))
    rules = played(own, periods_s=[8.0], share=10)
    clock = rules["average, 8 s"]
    assert clock.samples / clock.rounds == (8 + 8 + 4 + 2) * 10
    assert clock.waiting == 0
    assert clock.samples_per_s == pytest.approx(220 / (8 + 0.12 + 1.2))


def test_a_step_longer_than_the_period_is_waited_for() -> None:
    own = np.tile([1.0, 10.0], (8, 1))
    clock = played(own, periods_s=[2.0], share=1)["average, 2 s"]
    assert clock.samples / clock.rounds == 2 + 1
    assert clock.round_every_s == pytest.approx(10 + 0.12 + 0.8)
    assert clock.waiting_s / clock.rounds == pytest.approx(8)


def test_the_round_comes_after_the_step_whose_end_is_nearest() -> None:
    clock = played(alike(2), periods_s=[4.4, 4.6], share=1)
    assert clock["average, 4.4 s"].samples / clock["average, 4.4 s"].rounds == 2 * 4
    assert clock["average, 4.6 s"].samples / clock["average, 4.6 s"].rounds == 2 * 5


def test_who_suddenly_is_much_faster_runs_out_of_what_it_was_dealt() -> None:
    # 8 steps of 1 s, then 0.1 s each: for a period of 4 s no more than ceil(1.4 * 4) = 6 steps were dealt.
    own = np.array([[1.0]] * 8 + [[0.1]] * 200)
    at, dealt = np.array([8]), np.array([6])
    steps, busy = network._period(LoopedTrace(own), at, dealt, 4.0)
    assert steps.tolist() == [6]
    assert busy == pytest.approx([0.6])


def test_periods_are_dealt_as_in_a_run() -> None:
    """Workers that each step alone, of an unknown and of two known speeds: by the functions of a run."""
    from paceline.pace.shares import by_the_clock, steps_dealt

    rates, alone = np.array([0.0, 3.0, 40.0]), [[0], [1], [2]]
    dealt, each = by_the_clock(alone, batch=5, speeds=np.zeros(3), rates=rates, period_s=2.5)
    assert (dealt // each).tolist() == steps_dealt(rates / 5, 1, 2.5).tolist() == [4, 3, 28]


def test_the_usual_periods_are_round_numbers_of_seconds() -> None:
    assert usual_periods(alike(3)) == (5.0, 20.0, 50.0)
    assert usual_periods(alike(3, seconds=0.013)) == (0.05, 0.2, 1.0)
    assert usual_periods(alike(3, seconds=19.0)) == (100.0, 200.0, 1000.0)


# -- the trace that begins again ---------------------------------------------------------------------------------------


def test_after_its_end_the_trace_goes_on_from_the_first_scored_step() -> None:
    reel = LoopedTrace(np.arange(1.0, 6.0)[:, None], warm_up=2)
    assert reel.rows(np.arange(9)).tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 2]
    assert reel.periods(2, 4).tolist() == [[1 + 2 + 3 + 4], [5 + 3 + 4 + 5]]


def test_steps_of_the_warm_up_are_not_scored() -> None:
    own = alike(3, steps=20)
    own[:10] *= 50
    kept, dropped = played(own), played(own, warm_up=10)
    assert dropped["gradients"].samples_per_s == pytest.approx(96 / (1 + 0.06 + 8e7 / 1e8 * 4 / 3))
    assert dropped["limit"].samples_per_s == pytest.approx(96)
    assert kept["gradients"].samples_per_s < 0.2 * dropped["gradients"].samples_per_s


def test_a_trace_of_one_step_has_rounds_enough() -> None:
    rules = played(alike(2, steps=1))
    assert all(rule.rounds >= network.ROUNDS for rule in rules.values() if rule.name != "limit")


# -- from where on the network no longer matters -----------------------------------------------------------------------


@pytest.mark.parametrize("scenario", ["calm", "skewed", "long-sequences"])
def test_from_the_period_named_on_rounds_take_at_most_a_twentieth(scenario: str) -> None:
    own, size = make(scenario, steps=64, workers=6), 1_000_000
    period = enough(own, LINK, model_bytes=size)
    assert period is not None
    for times, few in ((1, True), (0.5, False)):
        by_steps, by_clock = compare_network(
            own,
            LINK,
            model_bytes=size,
            every_steps=[int(times * period.every_steps)],
            periods_s=[times * period.period_s],
            taus=[],
        )[1:-1]
        assert (by_steps.in_rounds <= period.part) == few
        assert (by_clock.in_rounds <= period.part) == few


def test_a_fast_network_does_not_matter() -> None:
    assert enough(alike(4), parse_link("10gbit,0ms"), model_bytes=1_000_000) is None
    assert enough(alike(1), LINK, model_bytes=10**12) is None


def test_the_verdict_names_the_period_and_what_a_gain_is_worth() -> None:
    outcomes = compare_network(alike(4), LINK, model_bytes=10_000_000)
    period = enough(alike(4), LINK, model_bytes=10_000_000)
    said = " ".join(network.verdict(outcomes, Network(LINK, 4, 10_000_000), period))
    assert "a round of 10 MB takes 1.26 s, a step's work 1 s" in said
    assert "56 % of the time goes into rounds" in said
    assert "From a round every 26 steps or 25 s on" in said  # 19 * 1.32 s = 25.08 s
    assert '"average, 64 steps" does 2.21 times the samples per second' in said
    assert "more than 2.21 times the samples for the same loss" in said


def test_a_gain_that_is_not_the_networks_is_called_less_waiting() -> None:
    own, link = make("bursts", steps=128, workers=16), parse_link("100gbit,0ms")
    outcomes = compare_network(own, link, model_bytes=1000)
    said = network.verdict(outcomes, Network(link, 16, 1000), enough(own, link, model_bytes=1000))
    assert "The network does not matter here" in said[-1]
    assert "is less waiting" in said[-1]


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({"model_bytes": 0}, "at least 1"),
        ({"share": 0}, "at least one sample"),
        ({"warm_up": 8}, "nothing to score"),
        ({"every_steps": [0]}, "whole numbers from 1"),
        ({"taus": [1.5]}, "whole numbers from 1"),
        ({"periods_s": [0.0]}, "above 0"),
        ({"link": Link(1e6, math.inf)}, "never end"),
    ],
)
def test_what_cannot_be_played_is_refused(wrong: dict[str, object], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        played(alike(2), **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "bytes_"), [("25M", 100_000_000), ("350k", 1_400_000), ("1.5B", 6 * 10**9), ("7", 28), ("2 g", 8 * 10**9)]
)
def test_parameters_are_counted_in_thousands(text: str, bytes_: int) -> None:
    assert network.model_bytes(text, None) == bytes_


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--network", "100,30", "--parameters", "1M"], "such as 100mbit,30ms, not '100,30'"),
        (["--network", "0mbit,3ms", "--parameters", "1M"], "bandwidth above 0"),
        (["--network", "1.2.3mbit,3ms", "--parameters", "1M"], "such as 100mbit,30ms"),
        (["--network", "1gbit,1ms"], "--parameters 25M or --megabytes 100"),
        (["--network", "1gbit,1ms", "--parameters", "1M", "--megabytes", "4"], "one of them"),
        (["--network", "1gbit,1ms", "--parameters", "many"], "such as 25M"),
        (["--network", "1gbit,1ms", "--parameters", "0"], "above 0"),
        (["--network", "1gbit,1ms", "--megabytes", "nan"], "above 0"),
        (["--network", "1gbit,1ms", "--megabytes", "-1"], "above 0"),
        (["--network", "1gbit,1ms", "--megabytes", "1", "--workers", "8", "--batch", "4"], "each of 8 workers"),
        (["--network", "1gbit,1ms", "--megabytes", "1", "--scenario", "stuck"], "by micro-batches"),
        (["--network", "1gbit,1ms", "--megabytes", "1", "--overhead-ms", "3"], "exclude each other"),
        (["--network", "1gbit,1ms", "--megabytes", "1", "--model", "m.pt"], "for cut-offs"),
        (["--network", "1gbit,1ms", "--megabytes", "1", "--warm-up", "300"], "nothing to score"),
        (["--parameters", "1M"], "goes with --network"),
        (["--batch", "64"], "goes with --network"),
    ],
)
def test_a_wrong_request_about_the_network_is_one_line(args: list[str], part: str) -> None:
    done = simulate(*args)
    assert done.exit_code == 2
    assert part in done.stderr
    assert len(done.stderr.splitlines()) == 1


# -- the command -------------------------------------------------------------------------------------------------------

ASK = ("--network", "100mbit,30ms", "--scenario", "skewed", "--workers", "6", "--steps", "20")


def test_the_command_prints_a_table_and_says_what_is_not_modelled() -> None:
    done = simulate(*ASK, "--parameters", "25M")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "scenario skewed, seed 0: 20 steps, 6 workers, 32 samples an equal share"
    names = [line[:18].strip() for line in lines[4:16]]
    assert (names[0], names[-1]) == ("gradients", "limit")
    assert {"average, 64 steps", "average, 5 s", "elastic, tau 4"} <= set(names)
    said = " ".join(done.stdout.split())
    assert "from there on the network no longer matters" in said
    assert "Not modelled: convergence" in said
    assert "…" not in done.stdout


def test_the_line_of_json_holds_figures_and_sentences() -> None:
    told = json.loads(simulate(*ASK, "--megabytes", "100", "--batch", "96", "--json").stdout)
    assert (told["model_bytes"], told["equal_share"], told["workers"]) == (100_000_000, 16, 6)
    rules = {row["rule"]: row for row in told["rules"]}
    assert rules["gradients"]["over_gradients"] == rules["limit"]["over_limit"] == 1
    assert rules["average, 64 steps"]["over_gradients"] > 5
    assert rules["limit"]["round_every_s"] is None
    assert told["enough"]["part"] == 0.05
    assert "convergence" in told["not_modelled"]


def recorded(folder: Path, combine: str) -> Path:
    steps = [
        StepRecord(step, 0, 0, workers=(0, 1), planned=(6, 2), samples=(6, 2), seconds=(3.0, 2.0)) for step in range(4)
    ]
    lines = [{"event": "run", "version": 1, "combine": combine}]
    lines += [{"event": "step", **record.to_json()} for record in steps]
    (folder / "events.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return folder


def test_a_runs_own_batch_is_used(tmp_path: Path) -> None:
    run = str(recorded(tmp_path, "gradients"))
    told = json.loads(simulate("--network", "1gbit,1ms", "--megabytes", "1", "--run", run, "--json").stdout)
    assert told["equal_share"] == 4
    limit = told["rules"][-1]
    assert limit["samples_per_s"] == pytest.approx(6 / 3 + 2 / 2)


def test_a_run_that_averaged_is_refused(tmp_path: Path) -> None:
    run = str(recorded(tmp_path, "average"))
    done = simulate("--network", "1gbit,1ms", "--megabytes", "1", "--run", run)
    assert done.exit_code == 2
    assert "one line per round" in done.stderr


def test_the_page_holds_the_sentences_and_stands_alone(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    file = tmp_path / "page.html"
    assert simulate(*ASK, "--megabytes", "100", "--html", str(file)).exit_code == 0
    text = file.read_text()
    assert "the network no longer matters" in text
    assert "Where the time goes" in text
    assert "<script src=" not in text


def test_the_networks_simulator_needs_no_torch() -> None:
    probe = "import sys, paceline.simulate.network; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
