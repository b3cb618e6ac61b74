"""Training: a small model learns what the simple forecasts cannot, with and without cut-offs."""

import numpy as np
import pytest
import torch

from paceline.research.deep.fit import CensoredRecording, Training, cutoffs, fit, held_out_scores, split
from paceline.research.deep.inference import StepBatch, elbo
from paceline.research.deep.model import DeepModel, Shape
from paceline.research.deep.recordings import Recording, recording

SMALL = Shape(lag=8, memory=16, state=3, context=12, hidden=24, summary=8)
QUICK = Training(updates=80, batch=4, steps=16, workers=8, renew=40, rate=8e-3)


def periodic(steps: int = 160, workers: int = 8, *, seed: int = 0) -> np.ndarray:
    """Two groups, each twice as slow for 2 of every 6 steps, one after the other."""
    rng = np.random.default_rng(seed)
    phase = np.where(np.arange(workers) < workers // 2, 0, 3)
    slow = (np.arange(steps)[:, None] + phase) % 6 < 2
    return np.exp(0.05 * rng.standard_normal((steps, workers))) * np.where(slow, 2.0, 1.0)


@pytest.fixture(scope="module")
def recorded() -> Recording:
    return recording("periodic", periodic())


@pytest.mark.slow
def test_a_small_model_learns_a_rhythm_that_the_simple_forecasts_cannot(recorded: Recording) -> None:
    model = fit([recorded.until(split(recorded))], shape=SMALL, training=QUICK)
    scores = held_out_scores(model, [recorded])
    assert scores["deep"] < 0.5 * scores["smoothed"]
    assert scores["deep"] < 0.5 * scores["last value"]


@pytest.mark.slow
def test_it_learns_from_a_run_in_which_the_slow_were_cut_off() -> None:
    own = periodic(steps=200)
    cut = np.full((200, 1), 1.4)
    cut[::4] = np.inf
    seen = recording("run", np.minimum(own, cut), own > cut)
    assert seen.late.mean() > 0.2
    model = fit([seen.until(split(seen))], shape=SMALL, training=QUICK)
    scores = held_out_scores(model, [seen])
    assert scores["deep"] < 0.7 * min(scores["smoothed"], scores["last value"])


def test_the_same_seed_gives_the_same_model_and_leaves_the_callers_random_numbers_alone(recorded: Recording) -> None:
    few = Training(updates=3, batch=2, steps=10, workers=4, seed=5)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    one, other = (fit([recorded], shape=SMALL, training=few).state_dict() for _ in range(2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_recordings_of_unlike_fleets_are_learned_together() -> None:
    fleets = [recording(str(workers), periodic(40, workers)) for workers in (2, 9)]
    ticks: list[tuple[int, int]] = []
    training = Training(updates=4, batch=2, steps=64, workers=8, renew=2)
    model = fit(fleets, shape=SMALL, training=training, progress=lambda done, total: ticks.append((done, total)))
    assert ticks == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in model.state_dict().values())
    assert set(held_out_scores(model, fleets)) == {"deep", "general", "smoothed", "last value"}


def test_the_workers_of_an_update_stand_for_the_whole_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def bound(model: DeepModel, stretch: StepBatch, *, fleet: int, beta: float, noise: torch.Generator) -> torch.Tensor:
        seen.append((stretch.read.shape[-1], fleet))
        return elbo(model, stretch, fleet=fleet, beta=beta, noise=noise)

    monkeypatch.setattr("paceline.research.deep.fit.elbo", bound)
    monkeypatch.setattr("paceline.research.deep.fit.MOST_WORKERS", 6)
    few = Training(updates=12, batch=1, steps=8, workers=4)
    fit([recording(str(size), periodic(40, size)) for size in (3, 9)], shape=SMALL, training=few)
    assert set(seen) == {(3, 3), (4, 9)}


def test_what_is_hidden_is_read_as_a_draw_beyond_the_cut_off_and_still_explained() -> None:
    own, rng, model = periodic(120), np.random.default_rng(0), DeepModel(SMALL)
    late = np.zeros(own.shape, dtype=bool)
    late[60, 3] = True
    hidden = CensoredRecording(Recording("x", own, late), model, rng)
    for _ in range(2):
        series = hidden.series
        assert bool(series.hidden[60, 3])
        assert 0.02 < float(series.hidden.float().mean()) < 0.6
        np.testing.assert_allclose(series.logs.numpy(), np.log(own), rtol=1e-5)
        seen = ~series.hidden
        assert torch.equal(series.read[seen], series.logs[seen])
        assert float(series.read[60, 3]) >= np.log(own[60, 3]) - 1e-6
        hidden.renew(model, torch.Generator().manual_seed(0))


def test_pretended_cut_offs_leave_some_stretches_whole() -> None:
    logs = np.log(periodic(2000))
    cut = cutoffs(logs, np.random.default_rng(1))
    assert 0.1 < np.isinf(cut).mean() < 0.6
    assert 0.05 < (logs > cut[:, None]).mean() < 0.6


def test_nothing_to_learn_from_and_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to learn from"):
        fit([])
    with pytest.raises(ValueError, match="updates"):
        Training(updates=0)
