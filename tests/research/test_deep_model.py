"""The deep Markov model's parts: the censored likelihood, the bound, and that workers have no order."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence

from paceline.research.deep.inference import Series, StepBatch, all_of, elbo, run_guide
from paceline.research.deep.model import DeepModel, Shape, levels, log_likelihood

TINY = Shape(lag=5, memory=9, state=3, context=8, hidden=12, summary=8)


def model(seed: int = 0) -> DeepModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DeepModel(TINY)


def series(steps: int = 30, workers: int = 7, late: float = 0.2, seed: int = 1) -> Series:
    rng = np.random.default_rng(seed)
    logs = 0.2 * rng.standard_normal((steps, workers))
    cut = rng.random((steps, workers)) < late
    return Series.of(logs, cut, read=logs + 0.1 * cut, hidden=cut, memory=TINY.memory)


@pytest.mark.parametrize("z", [-3.0, -0.5, 0.0, 1.0, 4.0])
def test_a_time_that_was_seen_counts_by_its_density_and_one_cut_off_by_the_tail_beyond_the_cut_off(z: float) -> None:
    mean, sigma = 0.3, 0.7
    belief = Normal(torch.tensor([mean, mean], dtype=torch.float64), torch.tensor([sigma, sigma], dtype=torch.float64))
    u = torch.full((2,), mean + z * sigma, dtype=torch.float64)
    seen, beyond = log_likelihood(belief, u, torch.tensor([False, True])).tolist()
    assert seen == pytest.approx(-z * z / 2 - math.log(sigma * math.sqrt(2 * math.pi)))
    assert beyond == pytest.approx(math.log(0.5 * math.erfc(z / math.sqrt(2))))


def test_a_bound_far_beyond_belief_still_has_a_finite_likelihood_and_pulls_the_mean_upwards() -> None:
    mean = torch.zeros(1, requires_grad=True)
    fit = log_likelihood(Normal(mean, torch.tensor([0.05])), torch.tensor([3.0]), torch.tensor([True]))
    fit.sum().backward()
    assert math.isfinite(float(fit.detach()))
    assert mean.grad is not None
    assert float(mean.grad) > 0


def test_a_bound_that_says_nothing_leaves_the_belief_alone() -> None:
    mean = torch.zeros(1, requires_grad=True)
    log_likelihood(Normal(mean, torch.tensor([0.05])), torch.tensor([-13.8]), torch.tensor([True])).sum().backward()
    assert mean.grad is not None
    assert float(mean.grad) == 0


def test_the_order_of_the_workers_means_nothing() -> None:
    net, order = model(), torch.tensor([3, 0, 6, 2, 5, 1, 4])
    one = series()
    other = Series(*(getattr(one, part)[:, order] for part in ("logs", "late", "read", "hidden", "levels")))
    straight, shuffled = (run_guide(net, all_of(each, 10, 20, TINY.lag), noise=None) for each in (one, other))
    torch.testing.assert_close(straight.belief.mean[..., order], shuffled.belief.mean)
    torch.testing.assert_close(straight.belief.stddev[..., order], shuffled.belief.stddev)
    torch.testing.assert_close(straight.states, shuffled.states)


def test_workers_depend_on_each_other_through_the_shared_state_alone() -> None:
    net, contexts = model(), torch.randn(4, TINY.context)
    changed = contexts.clone()
    changed[0] += 1
    state = torch.randn(TINY.state)
    before, after = net.emission(state, contexts), net.emission(state, changed)
    torch.testing.assert_close(before.mean[1:], after.mean[1:])
    assert not torch.allclose(before.mean[:1], after.mean[:1])
    assert not torch.allclose(net.emission(state + 1, contexts).mean, before.mean)


def test_the_same_weights_serve_any_number_of_workers() -> None:
    net = model()
    for workers in (1, 2, 31):
        known = run_guide(net, all_of(series(workers=workers), 10, 20, TINY.lag), noise=None)
        assert known.belief.mean.shape == (1, 20, workers)


def test_the_bound_is_the_likelihood_less_the_divergence() -> None:
    net, stretch = model(), all_of(series(), 10, 20, TINY.lag)
    known = run_guide(net, stretch, noise=None)
    fit = log_likelihood(known.belief, stretch.explained[:, TINY.lag :], stretch.late[:, TINY.lag :])
    for beta in (0.0, 0.5, 1.0):
        expected = (fit.sum(dim=-1) - beta * known.divergence).mean() / 7
        torch.testing.assert_close(elbo(net, stretch, beta=beta, noise=None), expected)
    assert bool((known.divergence >= 0).all())


def test_over_all_subsets_of_the_workers_the_scaled_bound_is_on_average_that_of_the_whole_fleet() -> None:
    net, whole, workers = _blind_to_the_fleet(model()), series(), 7
    expected = elbo(net, all_of(whole, 10, 20, TINY.lag), noise=None)
    assert bool((run_guide(net, all_of(whole, 10, 20, TINY.lag), noise=None).divergence > 0.01).all())
    for size in (1, 3, 7):
        subsets = [torch.tensor(chosen) for chosen in combinations(range(workers), size)]
        stretches = [_of(whole, subset) for subset in subsets]
        estimates = torch.stack([elbo(net, stretch, fleet=workers, noise=None) for stretch in stretches])
        torch.testing.assert_close(estimates.mean(), expected)
        if size < workers:  # a subset taken for the whole pays the divergence workers / size times
            alone = torch.stack([elbo(net, stretch, noise=None) for stretch in stretches]).mean()
            assert bool(alone < expected - 1e-3)


def test_a_stretch_of_more_workers_than_the_fleet_has_is_refused() -> None:
    with pytest.raises(ValueError, match="7 workers is no part of a fleet of 6"):
        elbo(model(), all_of(series(), 10, 20, TINY.lag), fleet=6, noise=None)


def _blind_to_the_fleet(net: DeepModel) -> DeepModel:
    """A guide that reads the same of any workers, so that z and its divergence are those of the whole fleet."""
    torch.nn.init.zeros_(net.member[2].weight)
    return net


def _of(whole: Series, workers: torch.Tensor) -> StepBatch:
    first = torch.tensor([10 - TINY.lag])
    return StepBatch.cut(whole, first, steps=20 + TINY.lag, workers=workers[None], lag=TINY.lag)


def test_the_divergence_of_a_stretch_is_that_of_guide_and_transition_step_by_step() -> None:
    net, stretch = model(), all_of(series(), 10, 20, TINY.lag)
    known = run_guide(net, stretch, noise=None)
    past = net.remember(known.summaries.unfold(1, TINY.lag, 1).transpose(-1, -2))
    step = 7
    before = known.states[:, step - 1]
    by_hand = kl_divergence(net.guide(before, past[:, step + 1]), net.transition(before)).sum(dim=-1)
    torch.testing.assert_close(known.divergence[:, step], by_hand)


def test_what_comes_later_does_not_change_what_was_understood() -> None:
    net, whole = model(), series()
    part = Series(*(getattr(whole, name)[:20] for name in ("logs", "late", "read", "hidden", "levels")))
    long, short = (run_guide(net, all_of(each, 5, 15, TINY.lag), noise=None) for each in (whole, part))
    torch.testing.assert_close(long.belief.mean, short.belief.mean)


def test_a_level_is_the_median_of_the_steps_so_far_the_first_one_repeated_before_it() -> None:
    rows = np.random.default_rng(0).standard_normal((12, 3))
    found = levels(rows, 5)
    for step in range(12):
        past = rows[np.maximum(np.arange(step - 4, step + 1), 0)]
        assert found[step] == pytest.approx(np.median(past, axis=0))


@pytest.mark.parametrize(("sizes", "part"), [({"lag": 0}, "lag"), ({"state": 2.5}, "state"), ({"memory": 4}, "memory")])
def test_sizes_that_make_no_sense_are_refused(sizes: dict[str, int], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        Shape(**sizes)
