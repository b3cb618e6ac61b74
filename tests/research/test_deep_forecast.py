"""The deep forecast: who speaks, fleets that change, cut-offs, and going on from a saved state."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.pace import Ask
from paceline.pace.forecast import Forecast, Seen
from paceline.pace.forecast import make as make_forecast
from paceline.pace.joint import Joint
from paceline.records import StepRecord
from paceline.research.auto_forecast import AutoForecast as Auto
from paceline.research.cutoff import Cutoff
from paceline.research.deep.deep_forecast import BACKLOG, RECENT, TRIAL, Candidate, Deep, best, settled
from paceline.research.deep.model import DeepModel, Past, Shape
from quick import examples

TINY = Shape(lag=4, memory=8, state=2, context=6, hidden=8, summary=6)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model(seed: int = 0) -> DeepModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DeepModel(TINY)


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def steps(count: int, workers: int = 5, seed: int = 3) -> list[Seen]:
    own = np.exp(0.2 * np.random.default_rng(seed).standard_normal((count, workers)))
    return [Seen.until(row, float(np.sort(row)[-2])) for row in own]


def past(deep: Deep) -> Past:
    """What it reads, once it has taken in all it was shown."""
    assert deep.speaking
    assert deep._past is not None
    return deep._past


def candidate(*pairs: tuple[float, float]) -> Candidate:
    made = Candidate(model())
    for own, plain in pairs:
        made.scored(own, plain)
    return made


def test_without_a_model_it_answers_as_the_forecast_that_needs_none_does() -> None:
    deep, plain = Deep(), Auto()
    assert isinstance(deep, Forecast)
    for seen in steps(20):
        deep.observe(seen)
        plain.observe(seen)
    assert deep.speaking == plain.speaking == "general"
    assert deep.draw(16, rng()).tolist() == plain.draw(16, rng()).tolist()


def test_a_model_that_knows_nothing_never_gets_to_speak() -> None:
    deep = Deep(model())
    own = np.array([1.0, 2.0, 3.0])
    noise = rng()
    for _ in range(3 * TRIAL):
        deep.observe(Seen.whole(own * np.exp(0.01 * noise.standard_normal(3))))
        assert deep.speaking != "deep"
    assert deep.draw(64, rng()).mean(axis=0) == pytest.approx(own, rel=0.05)


def test_a_model_speaks_while_it_wins_and_is_silent_while_it_loses() -> None:
    winner = candidate(*[(1.0, 2.0)] * (TRIAL - 1))
    assert best([winner]) is None  # still on trial
    winner.scored(1.0, 2.0)
    assert best([winner]) is winner
    for _ in range(RECENT):
        winner.scored(3.0, 2.0)
    assert best([winner]) is None


def test_only_recent_steps_count() -> None:
    changed = candidate(*[(9.0, 1.0)] * RECENT)
    for _ in range(RECENT):
        changed.scored(0.9, 1.0)
    assert best([changed]) is changed


def test_a_new_model_replaces_the_one_that_speaks_only_when_it_did_better() -> None:
    older, newer = candidate(*[(1.0, 2.0)] * TRIAL), candidate(*[(0.8, 2.0)] * (TRIAL - 1))
    assert settled([older, newer]) == [older, newer]
    newer.scored(0.8, 2.0)
    assert settled([older, newer]) == [newer]
    assert settled([candidate(*[(1.9, 2.0)] * TRIAL), older]) == [older]


def test_adopting_a_model_in_mid_run_needs_no_restart() -> None:
    deep = Deep(always=True)
    for seen in steps(15):
        deep.observe(seen)
    deep.adopt(model())
    assert deep.speaking == "deep"
    for seen in steps(3, seed=4):
        deep.observe(seen)
    drawn = deep.draw(40, rng())
    assert drawn.shape == (40, 5)
    assert np.all(np.isfinite(drawn) & (drawn > 0))


def test_before_the_first_step_there_is_nothing_to_draw() -> None:
    for deep in (Deep(), Deep(model()), Deep(model(), always=True)):
        with pytest.raises(ValueError, match="nothing was observed"):
            deep.draw(4, rng())


def test_the_order_of_the_workers_is_the_order_of_the_draws() -> None:
    """Particles differ from worker order to worker order, so means over many draws are compared."""
    order = np.array([2, 0, 4, 1, 3])
    straight, turned = Deep(model(), always=True), Deep(model(), always=True)
    for own in np.exp(0.3 * rng().standard_normal((12, 5))):
        straight.observe(Seen.whole(own))
        turned.observe(Seen.whole(own[order]))
    one, other = straight.draw(6000, rng()).mean(axis=0), turned.draw(6000, rng()).mean(axis=0)
    assert other == pytest.approx(one[order], rel=0.1)


@pytest.mark.parametrize("always", [False, True])
def test_a_fleet_that_grows_and_shrinks_is_followed_all_the_way(always: bool) -> None:
    deep, noise = Deep(model(), always=always), rng()
    for workers in (4, 4, 6, 6, 6, 2, 1, 3):
        for _ in range(4):
            deep.observe(Seen.until(np.exp(0.1 * noise.standard_normal(workers)), 1.2))
        drawn = deep.draw(16, rng())
        assert drawn.shape == (16, workers)
        assert np.all(np.isfinite(drawn) & (drawn > 0))


def test_a_new_worker_starts_as_a_typical_one_and_is_known_after_its_first_step() -> None:
    deep = Deep()
    for _ in range(10):
        deep.observe(Seen.whole([1.0, 1.0, 1.0]))
    deep.rearrange([0, 1, 2, -1])
    assert deep.draw(400, rng())[:, 3].mean() == pytest.approx(1.0, rel=0.1)
    deep.observe(Seen.whole([1.0, 1.0, 1.0, 4.0]))
    assert np.exp(past(deep).level(8)) == pytest.approx([1.0, 1.0, 1.0, 4.0])


def test_workers_keep_their_past_when_columns_move() -> None:
    deep = Deep()
    for _ in range(10):
        deep.observe(Seen.whole([1.0, 2.0, 3.0]))
    deep.rearrange([2, 0])
    assert deep.draw(400, rng()).mean(axis=0) == pytest.approx([3.0, 1.0], rel=0.02)
    with pytest.raises(ValueError, match="among 2"):
        deep.rearrange([0, 5])


def test_a_worker_known_to_be_slow_stays_slow_while_it_is_cut_off() -> None:
    deep = Deep()
    for _ in range(5):
        deep.observe(Seen.whole([1.0, 1.0, 5.0]))
    for _ in range(60):
        deep.observe(Seen.until([1.0, 1.0, 5.0], 1.2))
    assert deep.draw(400, rng())[:, 2].mean() == pytest.approx(5.0, rel=0.05)
    assert np.exp(past(deep).level(8))[2] == pytest.approx(5.0, rel=0.2)


def test_what_the_model_reads_of_a_worker_cut_off_lies_beyond_the_cut_off() -> None:
    deep = Deep(model(), always=True)
    for seen in steps(30):
        deep.observe(seen)
        newest = past(deep).rows[-1]
        assert np.all(newest[seen.late] >= np.log(seen.seconds[seen.late]))
        assert np.all(newest[~seen.late] == np.log(seen.seconds[~seen.late]))


@pytest.mark.parametrize("saved_after", [0, 1, 9])
@pytest.mark.parametrize("always", [False, True])
def test_it_goes_on_from_a_saved_state_as_if_nothing_had_happened(saved_after: int, always: bool) -> None:
    seen = steps(20)
    whole, first, second = Deep(model(), always=always), Deep(model(), always=always), Deep(always=always, seed=9)
    for one in seen:
        whole.observe(one)
    for one in seen[:saved_after]:
        first.observe(one)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for one in seen[saved_after:]:
        second.observe(one)
    assert second.speaking == whole.speaking
    assert second.draw(8, rng()).tolist() == whole.draw(8, rng()).tolist()


def test_a_model_given_to_a_run_that_goes_on_is_kept_when_the_saved_part_had_none() -> None:
    before, after = Deep(), Deep(model(), always=True)
    for seen in steps(12):
        before.observe(seen)
    after.load_state_dict(before.state_dict())
    assert after.speaking == "deep"
    assert after.draw(8, rng()).shape == (8, 5)


def test_steps_that_nobody_asks_about_cost_no_model_and_are_not_forgotten() -> None:
    asked, ignored = Deep(model(), always=True), Deep(model(), always=True)
    for seen in steps(3 * BACKLOG):
        ignored.observe(seen)
        asked.observe(seen)
        asked.draw(1, rng())
    assert len(ignored._backlog) == BACKLOG
    one, other = asked.draw(4000, rng()).mean(axis=0), ignored.draw(4000, rng()).mean(axis=0)
    assert other == pytest.approx(one, rel=0.15)


def test_what_is_kept_to_learn_from_is_what_was_seen_a_series_for_each_set_of_workers() -> None:
    deep, seen = Deep(), [*steps(6), *steps(4, workers=7)]
    for one in seen:
        deep.observe(one)
    series = deep.series()
    assert [part[0].shape for part in series] == [(6, 5), (4, 7)]
    assert series[0][0].tolist() == [one.seconds.tolist() for one in seen[:6]]
    assert series[1][1].tolist() == [one.late.tolist() for one in seen[6:]]
    assert Deep(model()).series() == []
    assert not Deep(model()).learns


def test_it_is_made_by_name() -> None:
    assert isinstance(make_forecast("deep"), Deep)
    with pytest.raises(ValueError, match=r"cannot read the model none\.pt"):
        make_forecast("deep:none.pt")


def test_a_script_that_sets_torchs_defaults_does_not_disturb_it() -> None:
    seen, drawn = steps(12), []
    for device, dtype in (("cpu", torch.float32), ("meta", torch.float64)):
        made = model()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device), torch.autocast("cpu", dtype=torch.bfloat16):
                deep = Deep(always=True)
                for one in seen[:6]:
                    deep.observe(one)
                deep.adopt(made)
                for one in seen[6:]:
                    deep.observe(one)
                drawn.append(deep.draw(8, rng()).tolist())
                second = Deep()
                second.load_state_dict(deep.state_dict())
        finally:
            torch.set_default_dtype(torch.float32)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("pace", [Cutoff, Joint])
def test_the_pacers_follow_a_changing_fleet_with_it_and_go_on_from_a_saved_state(
    pace: type[Cutoff] | type[Joint],
) -> None:
    def play(pacer: Cutoff | Joint, first: int, last: int) -> list[object]:
        plans: list[object] = []
        for step in range(first, last):
            workers = (0, 1, 2, 3) if step < 12 else (0, 2, 3, 7, 8)
            noise = np.exp(0.1 * np.random.default_rng(step).standard_normal(len(workers)))
            plan = pacer.plan(Ask(step=step, total=40 * len(workers), workers=workers))
            plans.append((plan.samples, plan.deadline_s, plan.wait_for))
            done = plan.samples
            pacer.observe(
                StepRecord(
                    step=step,
                    epoch=0,
                    generation=0,
                    workers=workers,
                    planned=done,
                    samples=done,
                    seconds=tuple((0.01 * np.array(done) * noise).tolist()),
                )
            )
        return plans

    whole, first, second = (pace(Deep(model(), always=True)) for _ in range(3))
    before = play(first, 0, 15)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + play(second, 15, 20) == play(whole, 0, 20)


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=5),
    st.lists(st.floats(0.005, 200), min_size=1, max_size=6),
    st.booleans(),
)
def test_any_cut_offs_leave_finite_positive_draws(own: list[float], cuts: list[float], always: bool) -> None:
    deep = Deep(model(), always=always)
    for cut in cuts:
        deep.observe(Seen.until(own, cut))
    drawn = deep.draw(8, rng())
    assert np.all(np.isfinite(drawn) & (drawn > 0))
