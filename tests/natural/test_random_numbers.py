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
    two, alone = results(tmp_path / "two", script), results(tmp_path / "one", script, workers=1)[0]
    assert two[0] == two[1]
    assert two[0]["own"] == alone["own"]
    assert len(set(alone["own"])) == 16, "numbers that the script draws once per step"
    assert apart(two[0]["weights"], alone["weights"]) < 1e-12


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
    result = {"weights": flat(model), "drawn": drawn, "own": own}
    """
    two, alone = results(tmp_path / "two", script), results(tmp_path / "one", script, workers=1)[0]
    drawn = [tuple(pair) for one in two for pair in one["drawn"]]
    assert len(set(drawn)) == 32
    assert {value for value, _ in drawn}.isdisjoint(value for _, value in drawn)
    assert set(drawn) == {tuple(pair) for pair in alone["drawn"]}
    assert two[0]["own"] == two[1]["own"] == alone["own"], "though the script has no seed"
    assert len({value for pair in alone["own"] for value in pair}) == 16
    assert two[0]["weights"] == two[1]["weights"]
    assert apart(two[0]["weights"], alone["weights"]) < 1e-12


def test_behind_a_loop_the_scripts_own_random_numbers_go_on(tmp_path: Path) -> None:
    script = """
    import random
    import numpy as np

    def drawn():
        return [random.random(), np.random.rand(), torch.rand(()).item(), torch.initial_seed()]

    def seed():
        random.seed(7), np.random.seed(7), torch.manual_seed(7)

    with paceline.join() as fleet:
        model = fleet.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seed()
        for step in fleet.steps(data, global_batch=12, micro_batch=3):
            random.random(), np.random.rand(), torch.rand(())
            for a, b in step:
                step.backward(loss_fn(model(a), b))
            step.commit(optimizer)
        found = drawn()
    seed()
    result = [found, drawn()]
    """
    for found, expected in results(tmp_path, script):
        assert found == expected


UNLIKE_DRAWS = """
import random
import numpy as np

scales = []
with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fleet.track(optimizer=optimizer)
    for epoch in range(2):
        for step in fleet.steps(data, global_batch=12, micro_batch=3, epochs=1, shuffle=False):
            scale = 0.5 + DRAW
            if fleet.is_leader:
                print("a sample", DRAW)  # one number more on the leader alone
            for a, b in step:
                step.backward(loss_fn(scale * model(a), b))
            step.commit(optimizer)
            scales.append(scale)
            fleet.evaluate(lambda a, b: {"loss": nn.functional.dropout(a).sum(1)}, data)
result = {"weights": flat(model), "scales": scales}
"""


@pytest.mark.parametrize("draw", ["random.random()", "np.random.rand()", "torch.rand(()).item()"])
def test_a_number_drawn_once_per_step_without_a_seed_is_the_same_on_every_worker(tmp_path: Path, draw: str) -> None:
    script = UNLIKE_DRAWS.replace("DRAW", draw).replace("if fleet.is_leader:", "if fleet.rank == 1:")
    two, alone = results(tmp_path / "two", script), results(tmp_path / "one", script, workers=1)[0]
    for one in two:
        assert one["scales"] == alone["scales"]
        assert apart(one["weights"], alone["weights"]) < 1e-12


def test_noise_in_an_evaluation_belongs_to_the_batch_and_differs_from_call_to_call(tmp_path: Path) -> None:
    script = """
    found = []
    noisy = nn.Dropout(0.5).train()
    with paceline.join() as fleet:
        model = fleet.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in fleet.steps(data, global_batch=12, micro_batch=3, shuffle=False):
            for a, b in step:
                step.backward(loss_fn(model(a), b))
            step.commit(optimizer)
            for _ in range(2):
                score = lambda a, b: {"kept": nn.functional.dropout(a).sum(1)}
                found.append(fleet.evaluate(score, data, batch_size=12)["kept"])
                rows = fleet.predict(lambda a, b: nn.functional.dropout(a).sum(1), data, batch_size=12)
                found.append(rows.sum().item())
            found.append(torch.rand(()).item())
    result = found
    """
    two, alone = results(tmp_path / "two", script), results(tmp_path / "one", script, workers=1)[0]
    assert two[0] == two[1]
    assert apart(two[0], alone) < 1e-12
    assert len(set(alone)) == len(alone)
