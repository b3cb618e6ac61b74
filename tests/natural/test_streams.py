"""Iterable datasets as people write them: divided, each sample once; else a warning says that they are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import BEFORE, elastic, outcomes, refusals, results

pytestmark = pytest.mark.fleet

# The ledger: a parameter for each sample, whose gradient counts how often the sample was trained on.
LEDGER = """
import random
from torch.utils.data import IterableDataset, get_worker_info
from torch import nn
N = 45

class Ledger(nn.Module):
    def __init__(self):
        super().__init__()
        self.counted = nn.Parameter(torch.zeros(N, dtype=torch.float64))
    def forward(self, which):
        return self.counted[which]

class Numbers(IterableDataset):
    epoch = -1
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __iter__(self):
        yield from range(N)

class Shuffled(Numbers):
    '''Draws its order on the way, and divides itself among loader processes as torch's documentation says.'''
    def __iter__(self):
        numbers = list(range(N))
        info = get_worker_info()
        if info is not None:
            numbers = numbers[info.id::info.num_workers]
        buffer = []
        for number in numbers:
            buffer.append(number)
            if len(buffer) > 8:
                yield buffer.pop(random.randrange(len(buffer)))
        while buffer:
            yield buffer.pop(int(torch.randint(len(buffer), ())))

def noisy(samples):
    torch.rand(len(samples))
    return torch.tensor(samples)

kept = {}

def counts(fleet, data, epochs=1, before=lambda step: None, **more):
    '''How often each sample was in a gradient that was applied, epoch by epoch.'''
    if not kept:
        kept["model"] = fleet.model(Ledger())
        kept["optimizer"] = torch.optim.SGD(kept["model"].parameters(), lr=1.0)
        fleet.track(optimizer=kept["optimizer"])
    model, optimizer, found = kept["model"], kept["optimizer"], {}
    for step in fleet.steps(data, global_batch=8, micro_batch=3, epochs=epochs, **more):
        before(step)
        was = model.counted.detach().clone()
        for which in step:
            step.backward(model(which).mean())
        step.commit(optimizer)
        times = (was - model.counted.detach()) * sum(step.record.samples)  # a step's gradient is a mean
        found[step.epoch] = found.get(step.epoch, 0) + times
    return [found[epoch].round().int().tolist() for epoch in sorted(found)]
"""


@pytest.mark.parametrize("kind", ["Numbers", "Shuffled"])
def test_a_stream_that_is_divided_gives_each_sample_to_one_worker(tmp_path: Path, kind: str) -> None:
    script = f"""
    with paceline.join() as fleet:
        result = {{}}
        for processes in [(0, 0, 0), (2, 2, 2), (0, 1, 3)]:
            data = DataLoader({kind}(), batch_size=2, num_workers=processes[fleet.rank], collate_fn=noisy)
            result[str(processes)] = counts(fleet, data, epochs=2, split=True)
        stream = DataLoader({kind}(), num_workers=2, persistent_workers=True)
        result["persistent"] = counts(fleet, stream, epochs=2, split=True)
    """
    three = results(tmp_path, script, workers=3, before=BEFORE + LEDGER, PACELINE_PACE="fixed:5,0,2")
    assert three[0] == three[1] == three[2]
    for kept in three[0].values():
        assert kept == [[1] * 45, [1] * 45]


def test_a_stream_that_says_nothing_is_warned_of_by_name_and_once(tmp_path: Path) -> None:
    script = """
    with paceline.join() as fleet:
        result = [counts(fleet, Numbers(), **more) for more in ({}, {}, {"split": False}, {"split": True})]
    """
    for workers in (1, 2):
        ended = outcomes(tmp_path / str(workers), script, workers=workers, before=BEFORE + LEDGER)
        assert [outcome.value for outcome in ended] == [[[[workers] * 45]] * 3 + [[[1] * 45]]] * workers
        said = "".join(outcome.err for outcome in ended)
        assert said.count("Numbers is an IterableDataset and every worker draws all that it gives") == workers - 1


def test_a_stream_that_would_be_divided_twice_is_refused(tmp_path: Path) -> None:
    script = """
    def divide(worker):
        get_worker_info().dataset.part = worker

    with paceline.join() as fleet:
        data = DataLoader(Numbers(), num_workers=2, worker_init_fn=divide)
        result = counts(fleet, data, split=True)
    """
    assert "worker_init_fn sets Numbers.part, as if to divide the stream" in refusals(
        tmp_path, script, before=BEFORE + LEDGER
    )
    script = """
    with paceline.join() as fleet:
        result = counts(fleet, data, split=True)
    """
    assert "a dataset with a length is dealt anyway, leave it out" in refusals(
        tmp_path / "length", script, before=BEFORE + LEDGER
    )


def test_where_workers_come_and_go_a_divided_stream_never_gives_a_sample_twice(tmp_path: Path) -> None:
    script = """
    import signal, time
    from pathlib import Path
    folder = Path(os.environ["PACELINE_RUN_DIR"]).parent
    died, back = folder / "died", folder / "back"

    def before(step):
        if step.epoch == 1 and os.environ["PACELINE_WORKER"] == "1" and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if step.epoch == 3 and not back.exists():  # the worker is started again and enters in mid-pass
            (folder / "waiting").touch()
            until = time.monotonic() + 60
            while fleet.world_size < 3 and not fleet._context.transport.reform.may_change and time.monotonic() < until:
                time.sleep(0.01)
            back.touch()

    with paceline.join() as fleet:
        result = counts(fleet, Numbers(), epochs=6, before=before, split=True)
    """
    with elastic(tmp_path, script, workers=3, before=BEFORE + LEDGER) as flock:
        flock.wait_for("waiting")
        flock.start(1)
        ended = flock.wait()
    passes = ended[0].value
    assert passes == ended[2].value
    assert [set(kept) for kept in passes] == [{1}, {0, 1}, {1}, {1}, {1}, {1}]
    assert ended[1].value[-2:] == passes[-2:]
