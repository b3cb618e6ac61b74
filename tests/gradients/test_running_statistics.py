"""Batch norm's running statistics: the fleet's mean by samples, and exact where nothing moved."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.gradients.buffers import RunningStatistics
from quick import examples


def round_of(workers: list[RunningStatistics], samples: list[int]) -> None:
    """What the round does, in one process."""
    for worker in workers:
        worker.note()
    total = torch.stack([w.payload(count) for w, count in zip(workers, samples, strict=True)]).sum(0)
    moved = [sum(column) for column in zip(*(w.moved for w in workers), strict=True)]
    for worker in workers:
        worker.merge(total, float(sum(samples)), moved)


def fleet_of(size: int) -> tuple[list[nn.Sequential], list[RunningStatistics]]:
    models = [
        nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)).double() for _ in range(size)
    ]
    return models, [RunningStatistics([model]) for model in models]


@settings(deadline=None, max_examples=examples(40))
@given(shares=st.lists(st.lists(st.integers(2, 6), max_size=3), min_size=1, max_size=4))
def test_the_fleets_statistics_are_the_mean_weighted_by_samples(shares: list[list[int]]) -> None:
    models, statistics = fleet_of(len(shares))
    generator = torch.Generator().manual_seed(0)
    for model, sizes in zip(models, shares, strict=True):
        for size in sizes:
            model(torch.randn(size, 3, generator=generator, dtype=torch.float64) * 5 + 1)
    counts = [sum(sizes) for sizes in shares]
    means = torch.stack([model[0].running_mean for model in models])
    variances = torch.stack([model[0].running_var for model in models])
    weights = torch.tensor(counts, dtype=torch.float64).unsqueeze(1)
    round_of(statistics, counts)
    for model in models:
        if sum(counts):
            torch.testing.assert_close(model[0].running_mean, (weights * means).sum(0) / weights.sum())
            torch.testing.assert_close(model[0].running_var, (weights * variances).sum(0) / weights.sum())
        assert int(model[0].num_batches_tracked) == sum(len(sizes) for sizes in shares)
        assert torch.equal(model[0].running_mean, models[0][0].running_mean)


def test_a_layer_that_nobody_moved_keeps_its_exact_values() -> None:
    models, statistics = fleet_of(2)
    for model in models:
        model[0].running_mean.fill_(1 / 3)
    for model, one in zip(models, statistics, strict=True):
        one.begin()
        model.eval()
        model(torch.randn(4, 3, dtype=torch.float64))
    round_of(statistics, [5, 2])
    assert all(torch.equal(model[0].running_mean, torch.full((3,), 1 / 3, dtype=torch.float64)) for model in models)


def test_a_micro_batch_that_did_not_count_leaves_no_trace() -> None:
    models, statistics = fleet_of(2)
    x = torch.randn(4, 3, dtype=torch.float64)
    for model, one in zip(models, statistics, strict=True):
        one.begin()
        model(x)
        one.note()
    expected = models[0][0].running_mean.clone()
    models[1](x * 100)  # stuck in it when the round closed
    total = sum(one.payload(4) for one in statistics)
    for one in statistics:
        one.merge(total, 8.0, [2])
    for model in models:
        torch.testing.assert_close(model[0].running_mean, expected)
        assert int(model[0].num_batches_tracked) == 2


def test_statistics_set_from_outside_are_not_counted_as_moved() -> None:
    models, statistics = fleet_of(2)
    for model, one in zip(models, statistics, strict=True):
        model[0].num_batches_tracked.fill_(17)
        one.rebase()
        one.note()
        assert one.moved == [0]
    models[1](torch.randn(4, 3, dtype=torch.float64))
    round_of(statistics, [0, 4])
    assert [int(model[0].num_batches_tracked) for model in models] == [18, 18]


def test_a_model_without_batch_norm_has_nothing_to_merge() -> None:
    assert len(RunningStatistics([nn.Linear(2, 2), nn.LayerNorm(2)])) == 0
