"""Batch samplers as people write them: each batch they give is one micro-batch, and every draw counts once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from programs import BEFORE, apart, elastic, outcomes, refusals, results

from paceline.observe import read_log
from paceline.observe.analysis.audit import audit

pytestmark = pytest.mark.fleet

# The ledger: a parameter for each sample, whose gradient says how often the sample was in the step's mean, on whichever
# worker. From it every step is made again by plain torch, with all its samples at once.
BUCKETS = """
import random
from deadline_cases import Deadline, Stalls
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler
N = 60
lengths = [1 + (7 * number) % 20 for number in range(N)]
torch.manual_seed(11)
texts = [torch.randn(length, 4, dtype=torch.float64) for length in lengths]
labels = torch.randint(0, 3, (N,))

class Texts(Dataset):
    def __len__(self):
        return N
    def __getitem__(self, number):
        return number, texts[number], float(torch.rand(()))

def collate(samples):
    numbers, found, noise = zip(*samples)
    return torch.tensor(numbers), pad_sequence(found, batch_first=True), torch.tensor(noise)

class Buckets(Sampler):
    '''Batches of like lengths, of at most so many rows with their padding.'''
    def __init__(self, rows=60):
        self.rows, self.epochs = rows, []
    def set_epoch(self, epoch):
        self.epochs.append(epoch)
    def __iter__(self):
        batches, batch = [], []
        for number in sorted(torch.randperm(N).tolist(), key=lambda number: lengths[number] // 5):
            most = max(lengths[one] for one in [*batch, number])
            if (len(batch) + 1) * most > self.rows:
                batches.append(list(batch))
                batch.clear()
            batch.append(number)
        batches.append(batch)
        random.shuffle(batches)
        yield from batches

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = network()
        self.counted = nn.Parameter(torch.zeros(N, dtype=torch.float64))
    def forward(self, numbers, padded):
        there = torch.tensor([lengths[number] for number in numbers.tolist()], dtype=torch.float64)
        return self.body(padded.sum(1) / there[:, None])

def loader(rows=60, **more):
    return DataLoader(Texts(), batch_sampler=Buckets(rows), collate_fn=collate, **more)

def again(steps):
    '''The weights after these steps in plain torch: the mean loss over each step's samples.'''
    body = network()
    optimizer = torch.optim.SGD(body.parameters(), lr=0.1, momentum=0.9)
    for counts in filter(any, steps):
        which = torch.arange(N).repeat_interleave(torch.tensor(counts))
        means = torch.stack([texts[number].mean(0) for number in which.tolist()])
        optimizer.zero_grad()
        loss_fn(body(means), labels[which]).backward()
        optimizer.step()
    return flat(body)

def nothing(step, fleet):
    pass

def train(data, *, epochs=2, global_batch=4, stop=None, path=None, before=nothing, pace=(), stalls=(), **more):
    with paceline.join(*pace) as fleet:
        model = fleet.model(Reader())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        fleet.track(optimizer=optimizer)
        saved = fleet.load(path) if path is not None and stop is None else None
        ledger = {int(index): counts for index, counts in (saved or {}).items()}
        met, sizes, records = [], [], []
        steps = fleet.steps(data, global_batch=global_batch, epochs=epochs, **more)._loop
        stuck = Stalls(fleet.rank, {"stalls": stalls}, steps) if stalls else None
        for step in steps:
            before(step, fleet)
            if stuck is not None:
                stuck.begin(step.index)
            for numbers, padded, noise in step:
                if stuck is not None:
                    stuck.wait()
                met += [[step.epoch, number, value] for number, value in zip(numbers.tolist(), noise.tolist())]
                sizes.append([step.epoch, sorted(numbers.tolist())])
                loss = loss_fn(model(numbers, padded), labels[numbers])
                step.backward(loss + model.counted[numbers].mean())
            step.reduce()
            ledger[step.index], known = [0] * N, [sum(step.record.samples), step.record.weight]
            if step.applied:  # else a deadline came before anybody had finished anything
                ledger[step.index] = (model.counted.grad * step.record.weight).round().long().tolist()
                model.counted.grad = None
                optimizer.step()
            step.commit()
            records.append([step.epoch, *known, sum(step.record.samples), sum(ledger[step.index])])
            if step.index == stop:
                fleet.save(path, extra={str(index): counts for index, counts in ledger.items()})
                break
        weights = flat(model.body)
        return dict(met=met, batches=sizes, weights=weights, again=again(ledger.values()), records=records,
                    ledger=[ledger[index] for index in sorted(ledger)], epochs=data.batch_sampler.epochs)
"""


REFUSED = [
    "leave micro_batch= out",
    "leave micro_batch= out",
    "the DataLoader's batch_sampler gives the order",
    "the DataLoader's batch_sampler gives the order",
    "global_batch=64 counts batches where a batch_sampler gives them",
    "gives its batches only once",
    "list gave an empty batch",
    "gave the index 99",
    "must give lists of dataset indices",
    "gives one worker's part (DistributedSampler divides)",
    "workers disagree in order(0)",
]


def trained(found: list[Any]) -> None:
    """All are where plain torch comes to with the same samples in every step."""
    for one in found:
        assert one["weights"] == found[0]["weights"]
        assert one["ledger"] == found[0]["ledger"]
        assert apart(one["weights"], one["again"]) < 1e-12


def once(ledger: list[list[int]], epochs: int, number: int = 60) -> None:
    """Every sample was in as many gradients as there were epochs."""
    assert [sum(counts) for counts in zip(*ledger, strict=True)] == [epochs] * number


def told_in_samples(folder: Path, records: list[list[float]]) -> None:
    for _, before_commit, weight, after_commit, counted in records:
        assert before_commit == weight == after_commit == counted
    seen = audit(read_log(folder / "run"))
    assert [(entry.counted, entry.sound, entry.whole) for entry in seen] == [(60, True, True)] * len(seen)


@pytest.mark.parametrize("pace", ["fixed:1,3", "adaptive", "joint"])
def test_buckets_are_dealt_whole_and_a_step_is_the_mean_over_its_samples(tmp_path: Path, pace: str) -> None:
    script = "result = train(loader())"
    two = results(tmp_path / "two", script, before=BEFORE + BUCKETS, PACELINE_PACE=pace)
    alone = results(tmp_path / "one", script, workers=1, before=BEFORE + BUCKETS)
    trained(two)
    once(two[0]["ledger"], 2)
    told_in_samples(tmp_path / "two", two[0]["records"])
    for name in ("batches", "met"):  # each draw in its batch, and with its own noise
        both = sorted(two[0][name] + two[1][name])
        if pace == "joint":  # what a deadline cut off was met twice
            both = [one for one, before in zip(both, [None, *both], strict=False) if one != before]
        assert both == sorted(alone[0][name])
    assert len({len(numbers) for _, numbers in alone[0]["batches"]}) > 2
    assert [one["epochs"] for one in two] == [[0, 1], [0, 1]]
    if pace != "joint":
        assert apart(two[0]["weights"], alone[0]["weights"]) < 1e-12
    if pace == "fixed:1,3":
        assert 0 < len(two[0]["batches"]) < len(two[1]["batches"])


@pytest.mark.parametrize("loaders", [0, 1])
def test_batches_that_a_deadline_cuts_off_count_once_in_a_later_step(tmp_path: Path, loaders: int) -> None:
    script = f"""
    stalls = [(1, 1, 0, 2), (0, 5, 1, 1), (1, 9, 1, 2)]
    pace = [Deadline(0.2, over=1.5)]
    result = train(loader(rows=20, num_workers={loaders}), global_batch=6, pace=pace, stalls=stalls)
    """
    two = results(tmp_path, script, before=BEFORE + BUCKETS, PACELINE_PACE="")
    trained(two)
    once(two[0]["ledger"], 2)
    told_in_samples(tmp_path, two[0]["records"])
    assert any(record.deadline_s for record in read_log(tmp_path / "run").records)
    assert sum(entry.undone for entry in audit(read_log(tmp_path / "run"))) > 0


def test_loader_processes_load_the_given_batches(tmp_path: Path) -> None:
    script = "result = train(loader(num_workers=2))"
    two = results(tmp_path / "two", script, before=BEFORE + BUCKETS, PACELINE_PACE="fixed:3,1")
    alone = results(tmp_path / "one", "result = train(loader())", workers=1, before=BEFORE + BUCKETS)
    trained(two)
    once(two[0]["ledger"], 2)
    assert sorted(two[0]["batches"] + two[1]["batches"]) == sorted(alone[0]["batches"])
    assert sorted(two[0]["met"] + two[1]["met"]) == sorted(alone[0]["met"])


def test_an_epoch_of_batches_goes_on_after_a_resume_on_another_number_of_workers(tmp_path: Path) -> None:
    path = repr(str(tmp_path / "state.pt"))
    first = f"result = train(loader(num_workers=1), stop=1, path={path})"
    results(tmp_path / "three", first, workers=3, before=BEFORE + BUCKETS)
    two = results(tmp_path / "two", f"result = train(loader(), path={path})", before=BEFORE + BUCKETS)
    trained(two)
    once(two[0]["ledger"], 2)
    others = f"""
    class Others(Buckets):
        def __iter__(self):
            yield from reversed(list(super().__iter__()))
    data = DataLoader(Texts(), batch_sampler=Others(), collate_fn=collate)
    result = train(data, path={path})
    """
    said = refusals(tmp_path / "others", others, before=BEFORE + BUCKETS)
    assert "now gives another order than when the state was saved" in said


def test_batches_of_a_worker_that_is_killed_are_dealt_again_and_it_comes_back_in_mid_epoch(tmp_path: Path) -> None:
    script = """
    import signal, time
    from pathlib import Path
    folder = Path(os.environ["PACELINE_RUN_DIR"]).parent
    died, back = folder / "died", folder / "back"

    def before(step, fleet):
        if step.index == 1 and os.environ["PACELINE_WORKER"] == "1" and not died.exists():
            died.touch()
            for batch in step:
                os.kill(os.getpid(), signal.SIGKILL)
        if step.epoch == 1 and not step.ends_epoch and not back.exists():  # it is started again, and waited for
            (folder / "waiting").touch()
            until = time.monotonic() + 60
            while fleet.world_size < 3 and not fleet._context.transport.reform.may_change and time.monotonic() < until:
                time.sleep(0.01)
            back.touch()

    result = train(loader(rows=30), before=before, epochs=3)
    """
    with elastic(tmp_path, script, workers=3, before=BEFORE + BUCKETS) as flock:
        flock.wait_for("waiting")
        flock.start(1)
        ended = flock.wait()
    assert [ended[slot].code for slot in range(3)] == [0, 0, 0], flock.complaints()
    left = [ended[0].value, ended[2].value]
    trained(left)
    once(left[0]["ledger"], 3)
    told_in_samples(tmp_path, left[0]["records"])
    assert ended[1].value["weights"] == left[0]["weights"]
    assert ended[1].value["batches"]


def test_draws_with_replacement_count_once_each_and_evaluation_meets_every_sample_once(tmp_path: Path) -> None:
    script = """
    twice = DataLoader(Texts(), batch_sampler=[[0, 1, 1], [2], [1, 5], [0, 7, 8, 9]], collate_fn=collate)
    found = []
    with paceline.join() as fleet:
        model = fleet.model(Reader())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in fleet.steps(twice, global_batch=2, epochs=1):
            for numbers, padded, noise in step:
                step.backward(model.counted[numbers].mean())
            step.reduce()
            found.append((model.counted.grad * step.record.weight).round().long().tolist()[:10])
            step.commit(optimizer)
        sums = fleet.evaluate(lambda numbers, padded, noise: {"sum": numbers.sum()}, loader(), sums="sum")
        rows = fleet.predict(lambda numbers, padded, noise: numbers, loader()).tolist()
        drawn = fleet.predict(lambda numbers, padded, noise: numbers, twice).tolist()
        result = [found, sums, rows, drawn]
    """
    for found, sums, rows, drawn in results(tmp_path, script, before=BEFORE + BUCKETS):
        assert found == [[1, 2, 1, 0, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 1, 0, 1, 1, 1]]
        assert sums == {"sum": sum(range(60)), "count": 60}
        assert rows == list(range(60))
        assert drawn == [0, 1, 1, 2, 1, 5, 0, 7, 8, 9]


def test_what_a_batch_sampler_cannot_mean_is_refused(tmp_path: Path) -> None:
    script = """
    class Part(Sampler):
        def __init__(self):
            self.sampler = torch.utils.data.DistributedSampler(Texts(), num_replicas=2, rank=int(os.environ["RANK"]))
        def __iter__(self):
            return iter([list(self.sampler)])

    class Own(Sampler):
        def __iter__(self):
            first = 30 * int(os.environ["RANK"])
            return iter([[first], [first + 1, first + 2]])

    def given(batches, **more):
        return DataLoader(Texts(), batch_sampler=batches), {"global_batch": 1, **more}

    result = []
    with paceline.join() as fleet:
        model = fleet.model(Reader())
        for data, options in [
            given(Buckets(), micro_batch=4),
            given(Buckets(), micro_batch="auto"),
            given(Buckets(), shuffle=True),
            given(Buckets(), order=lambda epoch: range(60)),
            given(Buckets(), global_batch=64),
            given(iter([[0, 1]])),
            given([[0, 1], []]),
            given([[0, 1], [99]]),
            given([["a"], ["b"]]),
            given(Part()),
            given(Own()),
        ]:
            try:
                for step in fleet.steps(data, **options):
                    break
                result.append("nothing")
            except ValueError as error:
                result.append(str(error))
    """
    for said in results(tmp_path, script, before=BEFORE + BUCKETS):
        for heard, wanted in zip(said, REFUSED, strict=True):
            assert wanted in heard


def test_averages_of_parameters_refuse_batches(tmp_path: Path) -> None:
    script = "result = train(loader())"
    said = refusals(tmp_path, script, before=BEFORE + BUCKETS, PACELINE_COMBINE="average")
    assert 'use combine="gradients"' in said


def test_what_global_batch_counts_is_said(tmp_path: Path) -> None:
    script = """
    singles = DataLoader(Texts(), batch_sampler=[[number, number + 1] for number in range(0, 60, 2)],
                         collate_fn=collate)
    class Growing(Sampler):
        def set_epoch(self, epoch):
            self.epoch = epoch
        def __iter__(self):
            return iter([[number] for number in range(4 + 2 * self.epoch)])

    with paceline.join() as fleet:
        model = fleet.model(Reader())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fleet.steps(singles, global_batch=16)
        steps = fleet.steps(DataLoader(Texts(), batch_sampler=Growing(), collate_fn=collate), global_batch=2, epochs=2)
        assert len(steps) == 4
        for step in steps:
            for numbers, padded, noise in step:
                step.backward(model.counted[numbers].mean())
            step.commit(optimizer)
        result = step.index
    """
    ended = outcomes(tmp_path, script, before=BEFORE + BUCKETS)
    assert [one.value for one in ended] == [4, 4]
    said = "\n".join(one.err for one in ended)
    assert "epoch 1 has 3 steps, and len(steps) was asked when an epoch had 2" in said
    assert "global_batch=16 counts the batches of list: a step is 16 of the 30 it gives now, about 32 samples" in said
    assert "if you mean 16 samples per step, write global_batch=8" in said
