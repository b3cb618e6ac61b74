"""One emulated machine: its jitter, its memory, and sleeping just as long as it should."""

import math
import statistics
import time

import pytest
import torch

from clocks import give_clock
from paceline.machines import machine as module
from paceline.machines import parse_fleet


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
