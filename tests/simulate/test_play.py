"""Playing rules by hand-checked steps, and what must hold between rules on any matrix."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from paceline.pace import Adaptive, Ask, Epoch, Equal, Fixed
from paceline.pace.forecast import Seen
from paceline.records import Plan, StepRecord
from paceline.research.cutoff import Cutoff
from paceline.research.forecasts import LastValue
from paceline.simulate import compare, make, matrix, play
from paceline.simulate.play import Outcome
from quick import examples

TIMES = arrays(np.float64, st.tuples(st.integers(1, 12), st.integers(1, 6)), elements=st.floats(0.05, 20))
STEPS = np.array([[1.0, 2.0, 3.0, 8.0], [4.0, 4.0, 4.0, 4.0]])


def by_name(outcomes: list[Outcome]) -> dict[str, Outcome]:
    return {outcome.name: outcome for outcome in outcomes}


def test_a_cut_off_step_by_hand() -> None:
    outcome = play.counts("hand", STEPS, np.array([3, 4]), overhead_s=0.5)
    assert outcome.shares.tolist() == [3, 4]
    assert outcome.seconds.tolist() == [3.5, 4.5]
    assert outcome.waiting_s.tolist() == [2 + 1 + 0, 0]
    assert outcome.wasted_s.tolist() == [3.0, 0]
    assert outcome.throughput == pytest.approx(7 / 8)
    assert outcome.waiting == pytest.approx(3 / (4 * 8))


def test_the_limit_by_hand() -> None:
    outcome = play.limit(STEPS)
    assert outcome.seconds == pytest.approx([4 / (1 + 1 / 2 + 1 / 3 + 1 / 8), 4.0])


def test_the_limit_with_constant_costs_by_hand() -> None:
    """Two shares by workers of 1 s a share and costs of 0 and 1 s take 1.5 s; one whose cost is 9 s stays out."""
    outcome = play.limit(np.ones((2, 2)), cost_s=[[0.0, 1.0], [0.0, 9.0]])
    assert outcome.seconds == pytest.approx([1.5, 2.0])


def test_shares_pay_a_constant_cost_once_a_step_and_only_those_who_work() -> None:
    outcome = play.shares(np.ones((3, 2)), Fixed([2, 0]), cost_s=[0.25, 5.0], share=64)
    assert outcome.seconds == pytest.approx([2.25] * 3)


def test_epoch_reaches_p0s_fixed_point_in_the_simulator() -> None:
    """64 samples at 1 ms each, and 0.10 and 0.12 s a step: 0.142 s is the best there is; equal shares take 0.152."""
    seconds, cost_s = np.full((600, 2), 0.032), [0.10, 0.12]
    equal = play.shares(seconds, Equal(), cost_s=cost_s, share=32).after(500)
    epoch = play.shares(seconds, Epoch(), cost_s=cost_s, share=32).after(500)
    assert equal.seconds == pytest.approx(np.full(100, 0.152))
    assert epoch.seconds == pytest.approx(play.limit(seconds, cost_s=cost_s).seconds[500:])
    assert epoch.seconds == pytest.approx(np.full(100, 0.142))


def test_a_constant_cost_is_in_every_rule() -> None:
    own = make("calm", steps=40, workers=6)
    plain, costly = by_name(compare(own, warm_up=20)), by_name(compare(own, cost_s=0.5, warm_up=20))
    for name, outcome in costly.items():
        assert outcome.throughput < 0.75 * plain[name].throughput, name
        assert outcome.throughput < 1.01 * costly["limit"].throughput, name
    assert costly["naive"].seconds == pytest.approx(plain["naive"].seconds + 0.5)


@pytest.mark.parametrize("cost_s", [-1.0, math.nan, math.inf, [1.0, 2.0], "x"])
def test_a_constant_cost_that_makes_no_sense_is_refused(cost_s: object) -> None:
    with pytest.raises(ValueError, match="a constant cost a step is"):
        compare(np.ones((4, 3)), cost_s=cost_s)  # type: ignore[arg-type]


def test_drop_compute_counts_a_constant_cost_in_its_limit() -> None:
    calm, stalled = [1.0, 1.0], [1.0, 16.0]
    outcome = play.drop_compute(np.array([calm] * 3 + [stalled] * 9), cost_s=0.5)
    assert outcome.seconds == pytest.approx(np.full(12, 1.5))
    assert outcome.shares == pytest.approx([2.0] * 3 + [1 + 1 / 16] * 9)


def test_drop_compute_stops_after_the_micro_batch_that_passes_the_limit() -> None:
    calm, stalled = [1.0, 1.0], [1.0, 16.0]
    outcome = play.drop_compute(np.array([calm] * 3 + [stalled] * 9))
    # The first three steps are watched; one second is the limit they set. The stalled worker then does one of 16.
    assert outcome.seconds == pytest.approx(np.ones(12))
    assert outcome.shares == pytest.approx([2.0] * 3 + [1 + 1 / 16] * 9)


def test_a_cut_off_sees_the_past_alone_and_late_workers_censored() -> None:
    class Spy(LastValue):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Seen] = []

        def observe(self, seen: Seen) -> None:
            self.seen.append(seen)
            super().observe(seen)

    spy = Spy()
    own = np.array([[1.0, 1.0, 1.0, 9.0], [1.1, 1.2, 1.0, 7.0], [1.0, 1.0, 1.0, 5.0]])
    outcome = play.arrivals(own, Cutoff(spy))
    assert outcome.shares.tolist() == [4, 3, 3]
    assert [seen.late.tolist() for seen in spy.seen] == [[False] * 4, [False] * 3 + [True], [False] * 3 + [True]]
    assert spy.seen[1].seconds == pytest.approx([1.1, 1.2, 1.0, 1.2])


def test_a_pacer_of_real_runs_gets_records_one_step_late() -> None:
    class Spy(Equal):
        def __init__(self) -> None:
            super().__init__()
            self.log: list[str] = []

        def observe(self, record: StepRecord) -> None:
            self.log.append(f"saw {record.step}")
            super().observe(record)

        def plan(self, ask: Ask) -> Plan:
            self.log.append(f"plan {ask.step}")
            return super().plan(ask)

    spy = Spy()
    play.shares(np.ones((4, 2)), spy)
    # The second plan waits for the first record; from then on a plan is made while the step before it computes.
    assert spy.log == ["plan 0", "saw 0", "plan 1", "plan 2", "saw 1", "plan 3", "saw 2"]


def test_equal_shares_are_naive() -> None:
    seconds = make("stalls", steps=20, workers=9)
    equal, naive = play.shares(seconds, Equal()), play.counts("naive", seconds, 9)
    assert equal.seconds == pytest.approx(naive.seconds)
    assert equal.waiting_s == pytest.approx(naive.waiting_s)


def test_adaptive_reaches_the_limit_on_steady_unlike_machines() -> None:
    seconds = np.tile([1.0, 1.0, 2.0, 4.0], (60, 1))
    outcome = play.shares(seconds, Adaptive()).after(10)
    assert outcome.throughput / play.limit(seconds).throughput > 0.99


def scatters(name: str) -> bool:
    """Whether this pace is played by micro-batches, which scatter by 5 % within a step."""
    return name == "auto" or "joint" in name


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(TIMES, st.sampled_from([0.0, 0.4]))
def test_in_no_step_anybody_beats_the_sum_of_speeds_and_time_is_accounted_for(
    own: np.ndarray, overhead_s: float
) -> None:
    outcomes = by_name(compare(own, overhead_s=overhead_s))
    speeds = (1 / own).sum(axis=1)
    for outcome in outcomes.values():
        lucky = 1.3 if scatters(outcome.name) else 1 + 1e-6
        assert np.all(outcome.shares / (outcome.seconds - overhead_s) <= speeds * lucky), outcome.name
        assert outcome.waiting >= -1e-9
        assert outcome.wasted >= 0
        assert outcome.waiting + outcome.wasted < 1
        assert len(outcome.shares) == len(own)
    assert outcomes["best static"].throughput >= max(outcomes[n].throughput for n in ("naive", "static 0.9")) - 1e-9


@pytest.mark.slow
@given(TIMES)
@settings(max_examples=examples(40), deadline=None)
def test_the_clairvoyant_beats_any_count_in_every_step(own: np.ndarray) -> None:
    outcomes = by_name(compare(own))
    best = outcomes["clairvoyant cut-off"]
    for name in ("naive", "static 0.9", "best static", "Elfving", "last value", "smoothed", "window"):
        other = outcomes[name]
        assert np.all(best.shares / best.seconds >= other.shares / other.seconds * (1 - 1e-9))


@pytest.mark.slow
def test_censored_forecasts_take_most_of_the_gain_where_one_machine_is_slow_for_good() -> None:
    noise = np.random.default_rng(0)
    seconds = np.array([1.0] * 15 + [3.0]) * np.exp(0.03 * noise.standard_normal((80, 16)))
    outcomes = by_name(compare(seconds, warm_up=5))
    best = outcomes["clairvoyant cut-off"].throughput
    assert best / outcomes["naive"].throughput > 2.5
    for name in ("last value", "smoothed", "window"):
        assert outcomes[name].throughput / best > 0.97, name
    for name in ("adaptive", "proportional"):
        assert outcomes[name].throughput > best, name


@pytest.mark.slow
def test_a_cut_off_in_place_of_a_late_time_loses_what_truncation_keeps() -> None:
    """Three quarters of the workers at 1 s, the others at 3.5 s: the figures of docs/research.md."""
    noise = np.random.default_rng(1)
    seconds = np.where(np.arange(40) < 30, 1.0, 3.5) * np.exp(0.05 * noise.standard_normal((300, 40)))

    class Imputing(LastValue):
        def observe(self, seen: Seen) -> None:
            super().observe(Seen.whole(seen.seconds))

    class AllSeeing(LastValue):
        def observe(self, seen: Seen) -> None:
            step = next(steps)
            assert seconds[step][~seen.late] == pytest.approx(seen.seconds[~seen.late])
            super().observe(Seen.whole(seconds[step]))

    steps = iter(range(len(seconds)))
    rules = Cutoff(LastValue()), Cutoff(AllSeeing()), Cutoff(Imputing())
    truncated, uncensored, imputed = (play.arrivals(seconds, rule).after(20).throughput for rule in rules)
    assert truncated / uncensored > 0.97
    assert imputed / truncated < 0.6


@pytest.mark.slow
def test_bursts_at_158_workers_keep_the_order_the_paper_tells() -> None:
    outcomes = by_name(compare(make("bursts", steps=200, workers=158), warm_up=20))
    naive, best = outcomes["naive"].throughput, outcomes["clairvoyant cut-off"].throughput
    assert best / naive == pytest.approx(1.2, abs=0.1)
    assert outcomes["limit"].throughput / naive == pytest.approx(1.75, abs=0.1)
    assert outcomes["last value"].throughput / best > 0.9


@pytest.mark.slow
def test_a_static_cut_off_loses_on_a_calm_fleet() -> None:
    outcomes = by_name(compare(make("calm", steps=100, workers=158)))
    assert 0.9 < outcomes["static 0.9"].throughput / outcomes["naive"].throughput < 0.97
    assert outcomes["smoothed"].throughput / outcomes["naive"].throughput > 0.99


def test_the_warm_up_is_played_but_not_scored() -> None:
    seconds = make("skewed", steps=30, workers=8)
    whole, late = by_name(compare(seconds)), by_name(compare(seconds, warm_up=10))
    for name in ("last value", "adaptive", "limit"):
        assert late[name].seconds == pytest.approx(whole[name].seconds[10:])


def test_one_worker_and_one_step_are_all_alike() -> None:
    for outcome in compare([[2.0]]):
        assert outcome.throughput == pytest.approx(0.5, rel=0.1 if scatters(outcome.name) else 1e-9)
        assert outcome.waiting == pytest.approx(0.0, abs=1e-9)
        assert outcome.count_cv == 0


def test_progress_counts_up_to_its_total() -> None:
    calls: list[tuple[int, int]] = []
    compare(np.ones((3, 2)), progress=lambda done, total: calls.append((done, total)))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1][0] == calls[-1][1]


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        ([[1.0, 2.0], [1.0]], "the same number of workers"),
        ([[1.0, math.nan]], "step 0, worker 1"),
        ([[1.0], [-2.0]], "step 1, worker 0"),
        ([[0.0]], "above 0, not 0"),
        ([[math.inf]], "finite"),
        ([1.0, 2.0], "one row per step"),
        ([], "at least one of each"),
        ([["fast"]], "numbers"),
    ],
)
def test_seconds_that_are_none_are_refused(bad: list[object], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        matrix(bad)


@pytest.mark.parametrize("wrong", [{"overhead_s": -1.0}, {"overhead_s": math.nan}, {"warm_up": 2}, {"warm_up": -1}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"not|nothing"):
        compare(np.ones((2, 2)), **wrong)


@pytest.mark.parametrize(("workers", "least"), [(16, 0.7), (64, 0.6), (158, 0.55)])
def test_adaptive_stays_near_the_limit_while_speeds_drift(workers: int, least: float) -> None:
    """A drifting speed must not be taken for fixed cost: one worker would be dealt far too much."""
    own = make("drifting", steps=200, workers=workers, seed=1)
    adaptive, limit = play.shares(own, Adaptive()).after(20), play.limit(own).after(20)
    assert adaptive.throughput > least * limit.throughput


def test_a_worker_that_is_cut_off_ends_its_micro_batch_before_it_begins_the_next_step() -> None:
    own = np.array([[1.0, 1.0, 8.0]] * 3)
    at_once = play.arrivals(own, Cutoff(static=0.66), overhead_s=0.0)
    assert at_once.seconds.tolist() == [1.0, 1.0, 1.0]
    # Micro-batches of 4 s: cut off at 1 s it is busy until 4 s, through the next three steps.
    in_a_run = play.arrivals(own, Cutoff(static=0.66), overhead_s=0.0, micro_batches=2)
    assert in_a_run.seconds.tolist() == [1.0, 1.0, 1.0]
    assert in_a_run.wasted_s.tolist() == [1.0, 0.0, 0.0]
    everybody = np.array([[1.0, 1.0, 8.0], [1.0, 1.0, 1.0]])

    class FirstTwo(Cutoff):
        """Waits for two in the first step and for all in the second."""

        def count(self, ask: Ask, share: int) -> int | None:
            return 2 if ask.step == 0 else None

    waits = play.arrivals(everybody, FirstTwo(), overhead_s=0.5, micro_batches=4)
    assert waits.seconds.tolist() == [1.5, 0.5 + 1.0 + 0.5], "its micro-batch ended half a second after the round"
    assert waits.waiting_s.tolist() == [0.0, 1.0]
