"""A dataset that the script changes between epochs: what it changed is what is trained on, loader processes or not."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import BEFORE, refusals, results

pytestmark = pytest.mark.fleet

CURRICULUM = """
from torch.utils.data import IterableDataset, Subset

class Harder(Dataset):
    level = 0.0  # of how hard the samples are
    def __len__(self):
        return 24
    def __getitem__(self, index):
        return index, float(self.level)

class HarderStream(Harder, IterableDataset):
    def __iter__(self):
        yield from (self[index] for index in range(24))

def train(data, change, epochs=3, **more):
    '''What this worker met in each epoch: the samples, or their levels.'''
    met = [[] for _ in range(epochs)]
    with paceline.join(combine=os.environ.get("COMBINE", "gradients")) as fleet:
        model = fleet.model(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fleet.track(optimizer=optimizer)
        steps = fleet.steps(data, global_batch=8, micro_batch=2, epochs=epochs, **more)
        for step in steps:
            for which, level in step:
                met[step.epoch] += level.tolist() if level.is_floating_point() else which.tolist()
                step.backward(model(torch.zeros(1, 1)).mean())
            step.commit(optimizer)
            if step.ends_epoch:
                change(step.epoch + 1, steps)
    return [sorted(set(epoch)) for epoch in met]

def raised(level, steps):
    dataset.level = level

def handed_over(level, steps):
    dataset.level = level
    steps.renew_data()
"""


@pytest.mark.parametrize(
    ("kind", "combine"), [("Harder", "gradients"), ("Harder", "average"), ("HarderStream", "gradients")]
)
def test_an_attribute_changed_between_epochs_reaches_the_loader_processes(
    tmp_path: Path, kind: str, combine: str
) -> None:
    script = f"""
    result = {{}}
    for name, processes, persistent, change in [
        ("here", 0, False, raised), ("processes", 2, False, raised),
        ("handed over", 2, True, handed_over), ("kept", 1, True, raised),
    ]:
        dataset = {kind}()
        loader = DataLoader(dataset, batch_size=2, num_workers=processes, persistent_workers=persistent)
        result[name] = train(loader, change, **({{"split": True}} if "Stream" in "{kind}" else {{}}))
    """
    expected = [[0.0], [1.0], [2.0]]
    for result in results(tmp_path, script, before=BEFORE + CURRICULUM, COMBINE=combine):
        assert result.pop("kept") == [[0.0], [0.0], [0.0]], "as docs/data.md says of persistent processes"
        assert result == {"here": expected, "processes": expected, "handed over": expected}


def test_other_indices_of_a_subset_count_from_the_next_epoch_on(tmp_path: Path) -> None:
    script = """
    def later(epoch, steps):
        dataset.indices = range(8 * epoch, 8 * epoch + 16)

    result = []
    for processes in (0, 2):
        for base in (TensorDataset(torch.arange(48), torch.zeros(48, dtype=torch.int64)), [(n, 0) for n in range(48)]):
            dataset = Subset(base, range(16))
            result.append(train(DataLoader(dataset, num_workers=processes), later, epochs=2))
    """
    two = results(tmp_path, script, before=BEFORE + CURRICULUM)
    for one, other in zip(*two, strict=True):
        assert [sorted(a + b) for a, b in zip(one, other, strict=True)] == [list(range(16)), list(range(8, 24))]


def test_another_length_is_refused(tmp_path: Path) -> None:
    script = """
    def shrink(epoch, steps):
        dataset.indices = range(8)

    dataset = Subset(Harder(), range(16))
    result = train(dataset, shrink, epochs=2)
    """
    said = refusals(tmp_path, script, before=BEFORE + CURRICULUM)
    assert "the dataset had 16 samples when fleet.steps began and has 8 now" in said
