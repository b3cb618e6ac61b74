"""Emulated machines: jitter, memory, sleeping just as long as it should, and how fleets of them are written."""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clocks import give_clock
from paceline.machines import Machine, from_env, parse_fleet
from paceline.machines import machine as module


def test_jitter_is_exact_again_and_differs_by_seed_rank_and_step() -> None:
    def times(seed: int) -> list[tuple[float, ...]]:
        fleet = parse_fleet("1~0.3,1~0.3", sample_ms=1.0, seed=seed)
        return [tuple(machine.seconds(step, 1) for step in range(50)) for machine in fleet]

    first, second = times(1)
    assert times(1) == [first, second]
    assert len({*first, *second, *times(2)[0]}) == 150


def test_jitter_has_mean_one_and_the_spread_asked_for() -> None:
    (machine,) = parse_fleet("1~0.4", sample_ms=1.0)
    times = [machine.seconds(step, 1000) for step in range(20_000)]
    assert statistics.fmean(times) == pytest.approx(1.0, abs=0.015)
    assert statistics.stdev(map(math.log, times)) == pytest.approx(0.4, rel=0.03)


def test_the_jitter_of_a_seed_never_changes_between_versions() -> None:
    (machine,) = parse_fleet("1~0.5", sample_ms=1.0, seed=3)
    assert [machine.seconds(step, 1000) for step in range(3)] == pytest.approx(PINNED, rel=1e-12)


PINNED = [0.5900058807399879, 1.081531528966827, 1.1313375306430635]


def test_emulated_memory_raises_torchs_own_error_beyond_its_size() -> None:
    roomy, small = parse_fleet("1,1!16", sample_ms=1.0)
    roomy.check_memory(10**9)
    small.check_memory(16)
    with pytest.raises(torch.OutOfMemoryError, match="17 samples on a machine that holds 16"):
        small.check_memory(17)


class Clock:
    """A clock whose sleeps last too long by a known time, for exact sums."""

    def __init__(self, over: float) -> None:
        self.now, self.over = 100.0, over

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self.over


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(over=0.001)
    give_clock(monkeypatch, module, clock)
    return clock


def test_what_one_pad_oversleeps_the_next_makes_up_for(clock: Clock) -> None:
    (machine,) = parse_fleet("1", sample_ms=10.0)
    for _ in range(20):
        started = clock.now
        clock.now += 0.002  # the real work
        assert machine.pad(0, 1, started) == 0.0
    assert clock.now - 100.0 == pytest.approx(20 * 0.010 + 0.001)


def test_the_first_pad_of_a_step_pays_its_constant_cost(clock: Clock) -> None:
    (machine,) = parse_fleet("1+50ms", sample_ms=10.0)
    clock.over = 0.0
    machine.pad(0, 2, clock.now)
    machine.pad(0, 2, clock.now, begins=False)
    assert clock.now - 100.0 == pytest.approx(0.050 + 4 * 0.010)


def test_a_host_that_is_too_slow_is_reported_by_how_much_and_does_not_sleep(clock: Clock) -> None:
    (machine,) = parse_fleet("1", sample_ms=10.0)
    started = clock.now
    clock.now += 0.013
    assert machine.pad(0, 1, started) == pytest.approx(0.003)
    assert clock.now == pytest.approx(started + 0.013)


def test_oversleeping_that_a_busy_step_cannot_make_up_for_is_still_owed_not_a_shortfall(clock: Clock) -> None:
    (machine,) = parse_fleet("1", sample_ms=10.0)
    assert machine.pad(0, 1, clock.now) == 0.0  # oversleeps by 1 ms
    started = clock.now
    clock.now += 0.0096
    assert machine.pad(0, 1, started) == 0.0  # on time without the debt; 0.4 ms of it are made up for
    started = clock.now
    machine.pad(0, 1, started)
    assert clock.now - started == pytest.approx(0.010 - 0.0006 + 0.001)


def test_a_process_that_was_stopped_reports_it_and_does_not_race_afterwards(clock: Clock) -> None:
    (machine,) = parse_fleet("1", sample_ms=10.0)
    clock.over = 3.0
    assert machine.pad(0, 1, clock.now) == pytest.approx(3.0 - module.CARRY_S)
    clock.over = 0.0
    started = clock.now
    assert machine.pad(0, 100, started) == 0.0
    assert clock.now - started == pytest.approx(1.0 - module.CARRY_S)


def test_a_real_pad_is_right_on_average() -> None:
    (machine,) = parse_fleet("1", sample_ms=1.0)
    began, shortfall = time.perf_counter(), 0.0
    for step in range(100):
        shortfall += machine.pad(step, 1, time.perf_counter())
    took = time.perf_counter() - began
    assert took >= 0.1 - 1e-4
    assert took < 0.15 + shortfall


POSITIVE = st.floats(min_value=0.01, max_value=1000, allow_nan=False)


def test_a_list_gives_one_machine_a_worker_with_seconds_in_proportion_to_samples_and_factor() -> None:
    fleet = parse_fleet("1, 1,2,4.5", sample_ms=2.0)
    assert [machine.seconds(0, 10) for machine in fleet] == pytest.approx([0.02, 0.02, 0.04, 0.09])
    assert [machine.rank for machine in fleet] == [0, 1, 2, 3]
    assert fleet[0].seconds(5, 0) == 0.0


def test_a_change_holds_from_its_step_on() -> None:
    (machine,) = parse_fleet("2@40:8@100:1", sample_ms=1.0)
    assert [machine.seconds(step, 1000) for step in (0, 39, 40, 99, 100, 10**9)] == pytest.approx([2, 2, 8, 8, 1, 1])


@given(factor=POSITIVE, step=st.integers(1, 10**6), later=POSITIVE, samples=st.integers(0, 10**4))
def test_what_is_written_is_what_is_played(factor: float, step: int, later: float, samples: int) -> None:
    (machine,) = parse_fleet(f"{factor!r}@{step}:{later!r}", sample_ms=2.0)
    assert machine.seconds(step - 1, samples) == pytest.approx(samples * 0.002 * factor)
    assert machine.seconds(step, samples) == pytest.approx(samples * 0.002 * later)


@pytest.mark.parametrize("text", ["2+50ms", "2+0.05s", " 2 + 50 ms ", "2e+0+50ms", "2.0+5e1ms"])
def test_a_constant_cost_is_paid_once_a_step_whatever_the_share(text: str) -> None:
    (machine,) = parse_fleet(text, sample_ms=1.0)
    assert [machine.seconds(7, n) for n in (0, 1, 100)] == pytest.approx([0.0, 0.052, 0.25])
    assert machine.seconds(7, 100, begins=False) == pytest.approx(0.2)
    assert machine.describe() == "2x slower, 50 ms per step"


def test_a_constant_cost_stands_beside_every_other_part() -> None:
    (machine,) = parse_fleet("2+50ms@40:8@60:1+20ms@80:3+0ms~0.2!16", sample_ms=1.0)
    samples = [machine.seconds(step, 10, begins=False) for step in (0, 40, 60, 80)]
    costs = [machine.seconds(step, 10) - own for step, own in zip((0, 40, 60, 80), samples)]
    assert costs == pytest.approx([0.05, 0.05, 0.02, 0.0])
    (plain,) = parse_fleet("2@40:8@60:1@80:3~0.2", sample_ms=1.0)
    assert samples == [plain.seconds(step, 10) for step in (0, 40, 60, 80)]
    assert machine.memory_samples == 16
    assert machine.describe() == (
        "2x slower, 50 ms per step, 8x from step 40, 1x from step 60, 20 ms per step from step 60, 3x from step 80, "
        "0 ms per step from step 80, jitter 0.2, memory for 16 samples"
    )


def test_a_large_factor_may_still_be_written_with_a_sign() -> None:
    (machine,) = parse_fleet("1e+3", sample_ms=1.0)
    assert machine.seconds(0, 1) == pytest.approx(1.0)


def test_a_trace_may_have_a_constant_cost_on_top(tmp_path: Path) -> None:
    file = tmp_path / "two+ms.csv"
    file.write_text("0,1.0,3.0\n1,1.0,3.0\n")
    plain, costly = parse_fleet(str(file), sample_ms=1.0), parse_fleet(f"{file}+50ms", sample_ms=1.0)
    for before, after in zip(plain, costly):
        assert after.seconds(1, 10) == pytest.approx(before.seconds(1, 10) + 0.05)
        assert after.describe() == before.describe() + ", 50 ms per step"


def test_memory_and_jitter_may_follow_in_this_order() -> None:
    machine = parse_fleet("1,2@40:8~0.2!16", sample_ms=2.0)[1]
    assert machine.memory_samples == 16
    assert machine.describe() == "2x slower, 8x from step 40, jitter 0.2, memory for 16 samples"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("1,,2", "machine 2 (''): a factor is missing"),
        ("1,x", "machine 2 ('x'): a factor is a number"),
        ("0", "machine 1 ('0'): a factor is how many times slower"),
        ("-1", "above 0, not -1"),
        ("1,nan", "must be finite"),
        ("inf", "must be finite"),
        ("1@40", "should read @STEP:FACTOR"),
        ("1@x:2", "a step is a whole number"),
        ("1@-4:2", "a step is a whole number"),
        ("1@0:2", "must come after step 0"),
        ("1@40:2@40:3", "must come after step 40"),
        ("1@40:", "a factor is missing"),
        ("1+50", "'+50' should read +COST with its unit, such as +50ms"),
        ("1+", "should read +COST with its unit"),
        ("1+ms", "should read +COST with its unit"),
        ("1+50min", "should read +COST with its unit"),
        ("1+nanms", "should read +COST with its unit"),
        ("1+-5ms", "a constant cost of a step is at least 0"),
        ("+50ms", "a factor is missing"),
        ("1+2ms+3ms", "a factor is a number"),
        ("1~0.2+50ms", "the jitter is a number"),
        ("1~0.1!4+50ms", "a whole number"),
        ("1~", "the jitter is a number"),
        ("1~-0.1", "between 0 and 3"),
        ("1~9", "between 0 and 3"),
        ("1!", "a whole number"),
        ("1!0", "at least 1 sample"),
        ("1!2.5", "a whole number"),
        ("1!16~0.2", "in this order"),
        ("1~0.1~0.2", "in this order"),
        ("", "one factor for each worker"),
    ],
)
def test_a_malformed_entry_is_named(text: str, part: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_fleet(text, sample_ms=2.0)
    assert part in str(caught.value)


@pytest.mark.parametrize("sample_ms", [0.0, -1.0, float("nan"), float("inf")])
def test_the_reference_takes_a_positive_time(sample_ms: float) -> None:
    with pytest.raises(ValueError, match="sample_ms"):
        parse_fleet("1", sample_ms=sample_ms)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_list_for_another_number_of_workers_is_refused(workers: int) -> None:
    with pytest.raises(ValueError, match=f"2 machines for {workers} workers"):
        parse_fleet("1,2", sample_ms=2.0, workers=workers)


def test_a_worker_finds_its_machine_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_EMULATE", raising=False)
    assert from_env(0) is None
    monkeypatch.setenv("PACELINE_EMULATE", "1,3~0.5")
    monkeypatch.setenv("PACELINE_SAMPLE_MS", "4")
    monkeypatch.setenv("PACELINE_SEED", "7")
    machine = from_env(1)
    assert isinstance(machine, Machine)
    assert (machine.sample_s, machine.seed, machine.rank) == (0.004, 7, 1)
    assert machine == parse_fleet("1,3~0.5", sample_ms=4, seed=7)[1]


def test_a_worker_beyond_the_list_plays_its_machines_again_with_jitter_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_EMULATE", "1,3~0.5")
    first, again = from_env(1, around=True), from_env(5, around=True)
    assert first is not None
    assert again is not None
    assert first == from_env(1)
    assert (again.slowness, again.rank) == (first.slowness, 5)
    assert again.seconds(0, 1) != first.seconds(0, 1)


def test_the_environment_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_EMULATE", "1,3")
    with pytest.raises(ValueError, match="describes 2 machines, but this is worker 2"):
        from_env(2)
    monkeypatch.setenv("PACELINE_SAMPLE_MS", "fast")
    with pytest.raises(ValueError, match="PACELINE_SAMPLE_MS is 'fast'"):
        from_env(0)
