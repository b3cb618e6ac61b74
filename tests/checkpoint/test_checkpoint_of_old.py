"""A checkpoint that was written before the library was divided into rooms is read, and the run goes on from it.

The file in ``data`` was written by that version, with ``train(fleet, save=...)`` below.
"""

from __future__ import annotations

from pathlib import Path

import torch

import paceline
from lone import flat, join, linear, mse, numbers

OLD = Path(__file__).parent / "data" / "second_loop.paceline"


def train(fleet: paceline.Fleet, *, load: Path | None = None, save: Path | None = None) -> list[torch.Tensor]:
    """Three loops with a figure of each; ``save`` is written in the middle of the second."""
    model = fleet.model(linear())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    fleet.track(optimizer=optimizer)
    fleet.state.best = float("inf")
    data = numbers(20)
    if load is not None:
        assert fleet.load(load, loops="all") == {"name": "second loop"}
    for loop in range(3):
        for step in fleet.steps(data, global_batch=8):
            for x, y in step:
                step.backward(mse(model, x, y))
            step.commit(optimizer)
            if save is not None and (loop, step.index) == (1, 4):
                fleet.save(save, extra={"name": "second loop"})
        figures = fleet.evaluate(lambda x, y: {"loss": float(mse(model, x, y)) * len(x)}, data, sums="loss")
        fleet.state.best = min(fleet.state.best, figures["loss"])
    return [flat(model), torch.tensor(fleet.state.best)]


def test_a_run_goes_on_from_a_checkpoint_of_an_older_library(tmp_path: Path) -> None:
    with join(tmp_path / "whole", seed=3) as fleet:
        whole = train(fleet)
    with join(tmp_path / "resumed") as fleet:
        resumed = train(fleet, load=OLD)
        assert fleet.seed == 3
        assert [record.step for record in fleet.history] == [5, 6, 7, 8]
    for one, other in zip(whole, resumed, strict=True):
        assert torch.allclose(one, other, rtol=1e-6)


def test_what_is_saved_today_has_the_parts_of_then(tmp_path: Path) -> None:
    with join(tmp_path, seed=3) as fleet:
        train(fleet, save=tmp_path / "new")
    old, new = (torch.load(path, weights_only=True) for path in (OLD, tmp_path / "new"))
    assert list(old) == list(new)
    assert list(old["steps"]) == list(new["steps"])
    for part in ("dealing", "passes", "gradients"):
        assert set(old["steps"][part]) <= set(new["steps"][part])
    assert old["steps"]["passes"]["told"][0][0] == new["steps"]["passes"]["told"][0][0] == "evaluate"
