"""Samplers as they stand in scripts: taken as an order, each draw once, the same on all workers and after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import BEFORE, apart, refusals, results

pytestmark = pytest.mark.fleet

WEIGHTED = """
from torch.utils.data import SubsetRandomSampler, WeightedRandomSampler
numbered = TensorDataset(torch.arange(48), x, y)

def train(data, epochs=3, stop=None, path=None, **more):
    '''The draws that this worker trained on, in each epoch.'''
    met = {}
    with paceline.join() as fleet:
        model = fleet.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fleet.track(optimizer=optimizer)
        if path is not None and stop is None:
            fleet.load(path)
        for step in fleet.steps(data, global_batch=8, micro_batch=2, epochs=epochs, **more):
            for number, bx, by in step:
                met.setdefault(step.epoch, []).extend(number.tolist())
                step.backward(loss_fn(model(bx), by))
            step.commit(optimizer)
            if step.index == stop:
                fleet.save(path)
                break
        return met, flat(model)
"""


def test_a_weighted_sampler_draws_as_it_does_in_one_process(tmp_path: Path) -> None:
    script = """
    weights = torch.where(torch.arange(48) < 8, 10.0, 0.1)
    loader = DataLoader(numbered, batch_size=4, sampler=WeightedRandomSampler(weights, 40), num_workers=1)
    result = train(loader)
    torch.manual_seed(os.getpid())
    """
    two = results(tmp_path / "two", script, before=BEFORE + WEIGHTED)
    (alone,) = results(tmp_path / "one", script, workers=1, before=BEFORE + WEIGHTED)
    drawn = [sorted(two[0][0][epoch] + two[1][0][epoch]) for epoch in "012"]
    assert drawn == [sorted(alone[0][epoch]) for epoch in "012"]
    assert [len(draws) for draws in drawn] == [40, 40, 40]
    assert drawn[0] != drawn[1] != drawn[2]
    assert sum(number < 8 for draws in drawn for number in draws) > 100, "as the weights say"
    assert two[0][1] == two[1][1]


def test_an_interrupted_epoch_goes_on_with_the_order_that_it_had(tmp_path: Path) -> None:
    script = f"""
    import sys
    torch.manual_seed(int(os.environ["RANK"]) + len(sys.argv))  # nobody's order may depend on it
    sampler = WeightedRandomSampler(torch.ones(48), 40)
    path, first = "{tmp_path}/saved", os.environ["PART"] == "first"
    result = train(DataLoader(numbered, sampler=sampler), path=path, stop=7 if first else None)
    """
    whole = results(tmp_path / "whole", WHOLE, before=BEFORE + WEIGHTED)
    first = results(tmp_path / "first", script, before=BEFORE + WEIGHTED, PART="first")
    second = results(tmp_path / "second", script, before=BEFORE + WEIGHTED, PART="second")
    for epoch in "012":
        drawn = sorted(number for rank in (0, 1) for number in whole[rank][0][epoch])
        parts = sorted(n for run in (first, second) for rank in (0, 1) for n in run[rank][0].get(epoch, []))
        assert parts == drawn
    assert second[0][1] == whole[0][1]


WHOLE = """
result = train(DataLoader(numbered, sampler=WeightedRandomSampler(torch.ones(48), 40)))
"""


def test_a_sampler_of_a_part_is_what_is_evaluated(tmp_path: Path) -> None:
    script = """
    loader = DataLoader(numbered, batch_size=5, sampler=SubsetRandomSampler(range(30, 47)))
    with paceline.join() as fleet:
        model = fleet.model(network())
        sums = fleet.evaluate(lambda number, x, y: {"sum": number.sum()}, loader, sums="sum")
        result = [sums, sorted(fleet.predict(lambda number, x, y: number, loader).tolist())]
    """
    for result in results(tmp_path, script, before=BEFORE + WEIGHTED):
        assert result == [{"sum": sum(range(30, 47)), "count": 17}, list(range(30, 47))]


def test_an_order_that_workers_do_not_share_is_refused(tmp_path: Path) -> None:
    script = """
    class Mine(torch.utils.data.Sampler):
        def __iter__(self):
            start = 24 * int(os.environ["RANK"])
            yield from range(start, start + 24)
    result = train(DataLoader(numbered, sampler=Mine()))
    """
    for combine in ("gradients", "average"):
        said = refusals(tmp_path / combine, script, before=BEFORE + WEIGHTED, PACELINE_COMBINE=combine)
        assert "workers disagree in order(0): position 0 is sample 0 on worker 0 and sample 24 on worker 1" in said
        assert "an unseeded shuffle" in said


def test_weights_that_change_between_epochs_are_refused(tmp_path: Path) -> None:
    script = """
    sampler = WeightedRandomSampler(torch.ones(48), 40)
    result = []
    with paceline.join() as fleet:
        model = fleet.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fleet.track(optimizer=optimizer)
        for step in fleet.steps(DataLoader(numbered, sampler=sampler), global_batch=8, micro_batch=2, epochs=2):
            for number, bx, by in step:
                step.backward(loss_fn(model(bx), by))
            step.commit(optimizer)
            if step.ends_epoch:
                sampler.weights = (torch.arange(48) < 5).double()
    """
    said = refusals(tmp_path, script, before=BEFORE + WEIGHTED)
    assert "WeightedRandomSampler was changed after it had drawn the order of epoch 1" in said
    assert "or call fleet.steps anew for every epoch" in said


def test_like_lengths_side_by_side_stay_together_in_whole_micro_batches(tmp_path: Path) -> None:
    script = """
    from random import Random
    from torch.nn.utils.rnn import pad_sequence
    lengths = [1 + (7 * number) % 40 for number in range(160)]

    class Texts(Dataset):
        def __len__(self):
            return 160
        def __getitem__(self, number):
            return torch.full((lengths[number],), float(number))

    def by_length(epoch):
        random = Random(epoch)
        drawn = random.sample(range(160), 160)
        groups = []
        for start in range(0, 160, 80):
            bucket = sorted(drawn[start : start + 80], key=lengths.__getitem__)
            groups += [bucket[first : first + 8] for first in range(0, 80, 8)]
        random.shuffle(groups)
        return [number for group in groups for number in group]

    result = []
    with paceline.join() as fleet:
        model = fleet.model(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(Texts(), collate_fn=lambda texts: pad_sequence(texts, batch_first=True), num_workers=1)
        options = dict(global_batch=40, micro_batch=8, fixed_micro_batch=True, epochs=2)
        for step in fleet.steps(loader, order=by_length, **options):
            for texts in step:
                groups = [by_length(step.epoch)[start : start + 8] for start in range(0, 160, 8)]
                assert texts[:, 0].int().tolist() in groups
                result += texts[:, 0].int().tolist()
                step.backward(model(texts[:, :1]).mean())
            step.commit(optimizer)
    """
    two = results(tmp_path, script, before=BEFORE, PACELINE_PACE="fixed:3,1")
    assert len(two[0]) > len(two[1]) > 0
    assert sorted(two[0] + two[1]) == sorted([*range(160), *range(160)])


def test_datasets_side_by_side_are_one_dataset(tmp_path: Path) -> None:
    script = """
    from torch.utils.data import StackDataset

    class Noisy(Dataset):
        def __len__(self):
            return 48
        def __getitem__(self, number):
            return x[number] + torch.randn(4, dtype=torch.float64)

    class Paired(Dataset):  # of another length: each sample meets one of the others, drawn by the sample's own noise
        def __len__(self):
            return 48
        def __getitem__(self, number):
            return number, x[number], y[int(torch.randint(30, ()))]

    result = [train(Paired(), epochs=1)[1], train(StackDataset(range(48), Noisy(), y), epochs=1)[1]]
    """
    two = results(tmp_path / "two", script, before=BEFORE + WEIGHTED, PACELINE_PACE="fixed:3,1")
    alone = results(tmp_path / "one", script, workers=1, before=BEFORE + WEIGHTED)
    assert two[0] == two[1]
    for ours, theirs in zip(two[0], alone[0], strict=True):
        assert apart(ours, theirs) < 1e-12
    loaders = "result = train((DataLoader(numbered), DataLoader(numbered)))"
    assert "fleet.steps, evaluate and predict take one dataset" in refusals(
        tmp_path / "tuple", loaders, before=BEFORE + WEIGHTED
    )
