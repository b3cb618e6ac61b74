"""Updates in a few numbers."""

import numpy as np
import pytest
import torch

from paceline.averaging.weights import LocalWork
from paceline.research.wp_weights import SIZE, sketch, spread


def update(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((100, 33), (7,), (1,), (0,))]


def test_a_sketch_is_linear_and_the_same_for_the_same_seed() -> None:
    one, other = update(0), update(1)
    both = [2 * a - b for a, b in zip(one, other, strict=True)]
    assert sketch(both, seed=5) == pytest.approx(2 * sketch(one, seed=5) - sketch(other, seed=5), abs=1e-3)
    assert sketch(one, seed=5).tolist() == sketch(one, seed=5).tolist()
    assert sketch(one, seed=5).tolist() != sketch(one, seed=6).tolist()
    assert sketch(one, seed=5).shape == (SIZE,)


def test_on_average_over_seeds_lengths_and_inner_products_survive() -> None:
    one = update(0)
    other = [a + 0.5 * b for a, b in zip(one, update(1), strict=True)]
    exact = float(sum((a * b).sum() for a, b in zip(one, other, strict=True)))
    found = [float(sketch(one, seed=seed) @ sketch(other, seed=seed)) for seed in range(300)]
    assert np.mean(found) == pytest.approx(exact, rel=0.05)
    assert np.std(found) < 2 * np.sqrt(2 / SIZE) * exact


def test_spread_from_sketches_is_close_to_spread_from_the_updates_themselves() -> None:
    goal = [5 * part for part in update(9)]
    updates = [[g + n for g, n in zip(goal, update(seed), strict=True)] for seed in range(3)]
    work = LocalWork(steps=[50, 50, 50], log_contraction=[-1.0, -1.0, -1.0])
    exact = spread([torch.cat([part.flatten() for part in parts]).numpy() for parts in updates], work)
    found = np.mean([spread([sketch(parts, seed=s) for parts in updates], work) for s in range(20)], axis=0)
    assert found == pytest.approx(exact, rel=0.15)
