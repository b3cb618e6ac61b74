"""Steps with a deadline, micro-batch by micro-batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from paceline.pace import Adaptive, Ask, Equal, Joint
from paceline.records import Plan, StepRecord
from paceline.simulate import compare_stuck, deadline_play, make, matrices, play
from paceline.simulate.deadline_play import Noise
from quick import examples

SHARE = play.SHARE
MICRO = SHARE // play.MICRO_BATCHES


def exact(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.ones(shape)


class Set(Equal):
    """Deals two equal shares to everybody and closes every round after so many seconds; keeps its records."""

    def __init__(self, deadline_s: float, *, over: int = 2, least_count: float = 0.0) -> None:
        super().__init__()
        self.deadline_s, self.over, self.least_count = deadline_s, over, least_count
        self.records: list[StepRecord] = []

    def plan(self, ask: Ask) -> Plan:
        samples = (self.over * SHARE,) * len(ask.workers)
        return Plan(0, ask.step, samples, deadline_s=self.deadline_s, least_count=self.least_count)

    def observe(self, record: StepRecord) -> None:
        self.records.append(record)


def run(seconds: list[list[float]], deadline_s: float, *, fit: bool, noise: Noise = exact, over: int = 2) -> Set:
    pacer = Set(deadline_s, over=over)
    deadline_play.play(np.array([*seconds, seconds[-1]]), pacer, cut_to_fit=fit, noise=noise)
    return pacer


def test_all_work_until_the_deadline_and_stop_when_nothing_fits() -> None:
    # A worker of 1 s for 256 samples, micro-batches of 16: 14 whole ones leave 0.025 s, and one more would need
    # 0.069 s, the margin of a tenth included. Cut to fit, 4 samples still have room, and then 2.
    whole, cut = (run([[1.0, 2.0]] * 3, 0.9, fit=fit).records[1] for fit in (False, True))
    assert whole.samples == (14 * MICRO, 7 * MICRO)
    assert whole.unfinished_s == (0.0, 0.0)
    assert cut.samples[0] == 14 * MICRO + 4 + 2
    assert cut.seconds == pytest.approx([n * x / SHARE for n, x in zip(cut.samples, (1.0, 2.0))])


def test_a_constant_cost_comes_before_the_first_micro_batch_and_is_busy_time() -> None:
    pacer = Set(0.9)
    deadline_play.play(np.array([[1.0, 2.0]] * 3), pacer, cut_to_fit=False, noise=exact, cost_s=[0.3, 0.0])
    assert pacer.records[1].samples == (9 * MICRO, 7 * MICRO)
    assert pacer.records[1].seconds == pytest.approx([0.3 + 9 / 16, 7 / 8])


def test_a_constant_cost_beyond_the_deadline_leaves_nothing_done() -> None:
    pacer = Set(0.9)
    outcome = deadline_play.play(np.array([[1.0, 1.0]] * 2), pacer, cut_to_fit=False, noise=exact, cost_s=[2.0, 0.0])
    assert pacer.records[0].samples[0] == 0
    assert pacer.records[0].unfinished_s == pytest.approx([0.9, 0.0])
    assert outcome.wasted_s[0] == pytest.approx(0.9)


def test_joint_is_near_the_limit_with_constant_costs_too() -> None:
    own, cost_s = make("bursts", steps=120, workers=40, seed=5), 0.2
    limit = play.limit(own, cost_s=cost_s).after(20).throughput
    assert 0.9 < deadline_play.play(own, Joint(), cost_s=cost_s).after(20).throughput / limit < 1.01


def test_a_lost_micro_batch_delays_its_worker_until_it_ends() -> None:
    # The speed drops 48-fold: the first micro-batch of the second step was begun on the word of the first.
    records = run([[1.0], [48.0], [1.0], [1.0]], 1.0, fit=False).records
    assert records[1].samples == (0,)
    assert records[1].unfinished_s == (1.0,)
    # 48 / 16 = 3 s, so it is stuck through the third step as well, which is longer to make up for the second, and
    # through half of the fourth.
    assert records[2].samples == (0,)
    assert records[2].unfinished_s == (1.5,) == (records[2].deadline_s,)
    assert records[3].samples[0] == pytest.approx(SHARE / 2, abs=MICRO)


def test_a_thin_round_goes_on_and_a_micro_batch_that_ends_meanwhile_counts() -> None:
    # The second worker is suddenly 48 times slower. At 1 s the first has done 240 of 512, and the floor is 461: it
    # needs 221 samples more, and a tenth of that time for the margin.
    pacer = Set(1.0, over=1, least_count=0.9)
    deadline_play.play(np.array([[1.0, 1.0], [1.0, 48.0], [1.0, 1.0]]), pacer, cut_to_fit=False, noise=exact)
    thin = pacer.records[1]
    assert sum(thin.samples) >= 461
    assert thin.planned[0] >= thin.samples[0] > SHARE == thin.planned[1]
    assert thin.deadline_s == pytest.approx(1 + 1.1 * 220 / 240, rel=0.01)
    assert thin.samples[1] == 0
    back = Set(1.0, over=1, least_count=0.9)
    deadline_play.play(np.array([[1.0, 1.0], [1.0, 24.0], [1.0, 1.0]]), back, cut_to_fit=False, noise=exact)
    assert back.records[1].samples[1] == MICRO, "it took 1.5 s, and the round closed at 1.9 s"
    assert back.records[1].seconds[1] == pytest.approx(1.5)


def test_no_step_with_a_deadline_counts_less_than_its_floor() -> None:
    own = matrices.stuck_machines(steps=150, workers=4, seed=3)
    played = {"micro_batches": matrices.STUCK_MICRO_BATCHES, "noise": matrices.STUCK_NOISE, "seed": 3}
    floor, none = (deadline_play.play(own, Joint(least_count=part), **played).after(10) for part in (0.7, 0.0))
    assert none.shares.min() < 0.6 * 4
    assert floor.shares.min() >= 0.7 * 4
    assert floor.throughput > 0.8 * none.throughput, "stalls come by chance, and at other times"


def test_a_round_closes_early_when_everybody_has_done_its_share() -> None:
    outcome = deadline_play.play(np.ones((3, 2)), Set(9.0, over=1), noise=exact)
    assert outcome.seconds == pytest.approx(np.ones(3))
    assert outcome.waiting_s == pytest.approx(np.zeros(3), abs=1e-9)


def test_without_deadlines_it_is_the_plain_simulation() -> None:
    own, cost_s = make("bursts", steps=40, workers=8), np.linspace(0, 0.7, 8)
    for make_one in (Equal, Adaptive):
        fine, plain = (
            deadline_play.play(own, make_one(), noise=exact, overhead_s=0.1, cost_s=cost_s),
            play.shares(own, make_one(), overhead_s=0.1, cost_s=cost_s),
        )
        assert fine.seconds == pytest.approx(plain.seconds)
        assert fine.shares == pytest.approx(plain.shares)


@pytest.mark.slow
def test_what_a_step_did_too_little_is_asked_of_later_ones() -> None:
    class Kept(Joint):
        records: list[StepRecord]

        def observe(self, record: StepRecord) -> None:
            self.__dict__.setdefault("records", []).append(record)
            super().observe(record)

    pacer, batch = Kept(), 16 * SHARE
    outcome = deadline_play.play(make("bursts", steps=300, workers=16, seed=2), pacer)
    assert outcome.shares.mean() == pytest.approx(16, rel=0.005)
    ahead = np.cumsum([record.total - batch for record in pacer.records])
    after_little = [record.total for record, before in zip(pacer.records[1:], ahead) if before < -0.1 * batch]
    assert len(after_little) > 10
    assert np.mean(after_little) > batch


TIMES = arrays(np.float64, st.tuples(st.integers(1, 15), st.integers(1, 5)), elements=st.floats(0.05, 20))


@settings(max_examples=examples(40), deadline=None)
@given(TIMES, st.booleans(), st.floats(0.05, 5.0), st.sampled_from([0.0, 0.7]))
def test_time_is_accounted_for_and_nobody_does_more_than_its_speed_allows(
    own: np.ndarray, fit: bool, deadline_s: float, least_count: float
) -> None:
    pacer = Set(deadline_s, least_count=least_count)
    outcome = deadline_play.play(own, pacer, cut_to_fit=fit, noise=exact)
    assert np.all(outcome.waiting_s >= -1e-9)
    assert np.all(outcome.wasted_s >= -1e-9)
    busy = outcome.workers * outcome.seconds - outcome.waiting_s - outcome.wasted_s
    assert np.all(busy >= -1e-9)
    for step, record in enumerate(pacer.records):
        done = np.array(record.samples)
        assert np.all(done <= record.planned)
        assert done.sum() >= least_count * SHARE * own.shape[1]
        assert record.deadline_s is not None
        assert np.all(done * own[step] / SHARE <= record.deadline_s * (1 + 1e-9))
        assert np.all(np.array(record.seconds) + record.unfinished_s <= record.deadline_s * (1 + 1e-9))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bursts", "long-sequences", "skewed"])
def test_joint_is_near_the_limit_cut_to_fit_and_a_little_less_with_whole_micro_batches(name: str) -> None:
    own = make(name, steps=120, workers=40, seed=5)
    limit = play.limit(own).after(20).throughput
    played = (deadline_play.play(own, Joint(), cut_to_fit=fit).after(20) for fit in (True, False))
    cut, whole = (outcome.throughput / limit for outcome in played)
    assert cut > 0.98
    assert 0.92 < whole < cut


def test_joint_loses_nothing_on_a_calm_fleet() -> None:
    own = make("calm", steps=150, workers=4, seed=1)
    naive = play.counts("naive", own, 4).after(20).throughput
    for fit in (True, False):
        assert deadline_play.play(own, Joint(), cut_to_fit=fit).after(20).throughput > 0.99 * naive


@pytest.mark.slow
def test_stalls_inside_micro_batches_hold_up_adaptive_and_not_joint() -> None:
    own = matrices.stuck_machines(steps=200, workers=4)
    told = {outcome.name: outcome.after(20).throughput for outcome in compare_stuck(own)}
    assert told["joint"] > 0.82 * told["limit"]
    assert told["joint"] > 1.5 * told["adaptive"]


def test_the_limit_under_stalls_is_each_worker_alone() -> None:
    own = np.ones((2000, 2))
    factors = matrices.STUCK_NOISE(np.random.default_rng(0), (2_000_000,))
    assert matrices.stuck_limit(own).throughput == pytest.approx(2 / factors.mean(), rel=0.02)


def test_the_same_seed_plays_the_same() -> None:
    own = make("stalls", steps=30, workers=6)
    one, two, three = (deadline_play.play(own, Joint(seed=seed), seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(one.shares, two.shares)
    assert not np.array_equal(one.seconds, three.seconds)
