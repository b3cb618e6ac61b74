"""Random numbers outside of micro-batches: the same on all workers where they enter the parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import LANGEVIN, apart, results

pytestmark = pytest.mark.fleet

NOISE = (
    LANGEVIN
    + """
rank = int(os.environ.get("RANK", 0))
torch.manual_seed(1000 + rank)  # as many DDP scripts do

own = []
with paceline.join() as fleet:
    model = fleet.model(network())
    torch.manual_seed(1000 + rank)
    optimizer = OPTIMIZER(model.parameters(), lr=0.1)
    fleet.track(optimizer=optimizer)
    for step in fleet.steps(data, global_batch=12, micro_batch=3, epochs=2, shuffle=False):
        own.append(torch.rand(1).item())
        for a, b in step:
            step.backward(loss_fn(nn.functional.dropout(model(a), 0.1), b))
        UPDATE
        own.append(torch.rand(1).item())
    result = {"weights": flat(model), "own": own}

torch.manual_seed(1000 + rank)
expected = [torch.rand(1).item() for _ in own]
assert own == expected, "the script's own random numbers do not go on"
"""
)

NOISY_GRADIENT = """step.reduce()
        for p in model.parameters():
            p.grad.add_(0.1 * torch.randn_like(p.grad))
        step.commit(optimizer)"""


@pytest.mark.parametrize(
    ("optimizer", "update"),
    [("torch.optim.SGD", NOISY_GRADIENT), ("Langevin", "step.commit(optimizer)")],
    ids=["noise on the mean gradient", "noise in the optimiser"],
)
def test_noise_of_the_update_is_the_same_on_every_worker(tmp_path: Path, optimizer: str, update: str) -> None:
    script = NOISE.replace("OPTIMIZER", optimizer).replace("UPDATE", update)
    two = [one["weights"] for one in results(tmp_path / "two", script)]
    alone = results(tmp_path / "one", script, workers=1)[0]["weights"]
    assert two[0] == two[1]
    assert apart(two[0], alone) < 1e-12


def test_steps_draw_unlike_noise(tmp_path: Path) -> None:
    script = """
    drawn = []
    with paceline.join() as fleet:
        model = fleet.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in fleet.steps(data, global_batch=12, micro_batch=3):
            for a, b in step:
                step.backward(loss_fn(model(a), b))
            before = torch.rand(1).item()
            step.reduce()
            drawn += [before, torch.rand(1).item()]
            step.commit(optimizer)
    result = drawn
    """
    two = results(tmp_path, script)
    assert two[0] == two[1]
    assert len(set(two[0])) == 8


def test_numpys_and_pythons_numbers_in_the_inner_loop_belong_to_the_micro_batch_as_torchs_do(tmp_path: Path) -> None:
    script = """
    import random
    import numpy as np
    random.seed(7), np.random.seed(7)
    drawn, own = [], []
    with paceline.join() as fleet:
        model = fleet.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in fleet.steps(data, global_batch=12, micro_batch=3, epochs=2, shuffle=False):
            own.append([random.random(), np.random.rand()])
            for a, b in step:
                drawn.append([random.random(), np.random.rand()])
                noise = torch.from_numpy(np.random.normal(0, 0.1, a.shape)) * random.random()
                step.backward(loss_fn(model(a + noise), b))
            step.commit(optimizer)
    random.seed(7), np.random.seed(7)
    assert own == [[random.random(), np.random.rand()] for _ in own], "the script's own numbers do not go on"
    result = {"weights": flat(model), "drawn": drawn}
    """
    two, alone = results(tmp_path / "two", script), results(tmp_path / "one", script, workers=1)[0]
    drawn = [tuple(pair) for one in two for pair in one["drawn"]]
    assert len(set(drawn)) == 32
    assert {value for value, _ in drawn}.isdisjoint(value for _, value in drawn)
    assert set(drawn) == {tuple(pair) for pair in alone["drawn"]}
    assert two[0]["weights"] == two[1]["weights"]
    assert apart(two[0]["weights"], alone["weights"]) < 1e-12
