"""The plainest training, as every page shows it: the rig itself, and what the other tests compare with."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import apart, results

pytestmark = pytest.mark.fleet

PLAIN = """
with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fleet.track(optimizer=optimizer)
    for step in fleet.steps(data, global_batch=12, micro_batch=3, epochs=2):
        for x, y in step:
            step.backward(loss_fn(model(x), y))
        step.commit(optimizer)
    result = flat(model)
"""


def test_two_workers_train_as_one_does(tmp_path: Path) -> None:
    two, alone = results(tmp_path / "two", PLAIN), results(tmp_path / "one", PLAIN, workers=1)
    assert two[0] == two[1]
    assert apart(two[0], alone[0]) < 1e-12


def test_loader_processes_change_no_step_where_shares_are_steady(tmp_path: Path) -> None:
    script = """
    class Rows(Dataset):
        def __len__(self):
            return 96

        def __getitem__(self, number):
            generator = torch.Generator().manual_seed(number)
            row = torch.randn(4, dtype=torch.float64, generator=generator)
            return row, int(row[0] > 0)

    with paceline.join(paceline.Fixed([1, 3] if os.environ.get("WORLD_SIZE") == "2" else [1])) as fleet:
        model = fleet.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(Rows(), batch_size=4, shuffle=True, num_workers=LOADERS)
        for step in fleet.steps(loader, global_batch=16, epochs=2):
            for a, b in step:
                step.backward(loss_fn(model(a), b))
            step.commit(optimizer)
    result = flat(model)
    """
    alone = results(tmp_path / "one", script.replace("LOADERS", "0"), workers=1, PACELINE_PACE="")[0]
    two = results(tmp_path / "two", script.replace("LOADERS", "2"), PACELINE_PACE="")
    assert two[0] == two[1]
    assert apart(two[0], alone) < 1e-12
