"""The cost of a round: how exact a run over a wire was, and what fewer bytes would bring on its link."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.averaging.weighted_average import Averaging
from paceline.gradients.fleet_sums import bytes_on_wire
from paceline.observe import RunLog, verdict
from paceline.observe.analysis import round_cost as analysis
from paceline.observe.analysis.round_cost import (
    MeasuredRound,
    faster_with_average,
    faster_with_wire,
    rounds_of,
)
from paceline.transport.formats import FORMATS, part_of


def judged(make_record, run_event, *, round_s, data=10_000_000, latency_s=0.0, **run):
    """Return a run of two workers whose step is 0.5 s of work and a round of ``round_s``."""
    records = [make_record(k, (64.0, 64.0), (32, 32), other_s=round_s, round_s=round_s) for k in range(20)]
    loop = {"round_bytes": data, "latency_s": latency_s}
    log = RunLog(path=Path(), run=run_event | run, loops=(loop,), records=tuple(records))
    return verdict(log).text


def test_a_long_round_is_told_its_bandwidth_and_what_fewer_bytes_would_bring(make_record, run_event) -> None:
    text = judged(make_record, run_event, round_s=0.5, combine="gradients")
    assert "The round took 50 % of the time (500 ms per step)" in text
    assert (
        "It moved 10 MB over each worker's link, at about 160 Mbit/s. There "
        'comm_dtype="bf16" about 1.33 times, combine="average" (a round every 2 s) about 1.6 times and '
        'that with comm_dtype="int8" about 1.9 times the speed would be in reach.' in text
    )


def test_a_round_below_a_fifth_of_the_time_is_not_worth_a_word_of_the_wire(make_record, run_event) -> None:
    assert "over each worker's link" not in judged(make_record, run_event, round_s=0.1, combine="gradients")


def test_latency_is_no_bandwidth(make_record, run_event) -> None:
    text = judged(make_record, run_event, round_s=0.5, latency_s=0.1, combine="gradients")
    assert "about 267 Mbit/s" in text
    assert 'comm_dtype="bf16" about 1.18 times' in text


def test_a_run_that_has_the_wire_is_told_how_exact_it_was_and_not_to_take_it(make_record, run_event) -> None:
    text = judged(make_record, run_event, round_s=0.5, combine="gradients", comm_dtype="bf16")
    assert "Gradients crossed the network as bf16, each number to 0.4 % of itself" in text
    assert "steps are exact to the wire's precision. All workers got the same bits." in text
    assert 'comm_dtype="' not in text
    assert 'combine="average"' in text


def test_averages_are_told_of_int8_and_springs_of_nothing(make_record, run_event) -> None:
    assert 'There comm_dtype="int8" about 1.6 times' in judged(make_record, run_event, round_s=0.5, combine="average")
    assert "comm_dtype=" not in judged(make_record, run_event, round_s=0.5, combine="elastic-average")
    over = judged(make_record, run_event, round_s=0.5, combine="average", comm_dtype="int8")
    assert "Updates crossed the network as int8, each number to 0.4 % of its block's largest. All workers" in over


def test_a_model_too_small_for_a_wire_is_told_of_averages_alone(make_record, run_event) -> None:
    text = judged(make_record, run_event, round_s=0.5, data=40_000, combine="gradients")
    assert "comm_dtype=" not in text
    assert 'combine="average"' in text


def test_an_old_log_says_nothing_of_its_bytes(make_record, run_event) -> None:
    assert rounds_of(run_event, [{"length": 5}]) is None
    assert rounds_of(run_event, [{"round_bytes": "x"}]) is None
    odd = rounds_of({}, [{"round_bytes": 7, "latency_s": "soon"}])
    assert odd is not None
    assert (odd.data, odd.comm_dtype, odd.combine, odd.latency_s) == (7, "float32", "gradients", 0.0)


def test_what_fewer_bytes_save_is_what_the_link_takes_for_them() -> None:
    cost = MeasuredRound(seconds=1.04, data=10_000_000, workers=4, latency_s=0.02)
    assert cost.moved == 15_000_000
    assert cost.bits_per_s == pytest.approx(120e6)
    assert cost.with_bytes(0.5).seconds == pytest.approx(0.04 + 0.5)
    assert cost.with_bytes(0.5).bits_per_s == pytest.approx(120e6)
    assert faster_with_wire(cost, 1.04 / 2.08, "bf16") == pytest.approx(2.08 / (1.04 + 0.54))
    assert faster_with_average(cost, 1.04 / 2.08) == pytest.approx(2 / 3.04 * 2)


def test_the_words_know_the_wires_as_they_are() -> None:
    assert Averaging().period_s == analysis.AVERAGE_S
    for name, wire_format in FORMATS.items():
        assert wire_format.error
        sent = bytes_on_wire([torch.empty(1 << 20, device="meta")], wire_format)
        assert sent == part_of(name) * 4 * (1 << 20)
