"""Every worker makes its dataset itself: one that differs is refused before a gradient of it counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import BEFORE, elastic, outcomes, results

pytestmark = pytest.mark.fleet

DATASETS = """
import random, time
from torch.utils.data import IterableDataset, random_split

class Files(Dataset):
    def __init__(self, files): self.files = files
    def __len__(self): return len(self.files)
    def __getitem__(self, index): return x[self.files[index]], y[self.files[index]]

class Noisy(Files):
    def __getitem__(self, index):
        noise = random.random() + torch.rand(4)
        return x[index] + noise, y[index]

class Unstable(Files):
    def __getitem__(self, index):
        return x[index] + int.from_bytes(os.urandom(2), "big"), y[index]

class Slow(Files):
    def __getitem__(self, index):
        reads.append(index)
        time.sleep(0.11)
        return super().__getitem__(index)

class Strange(Files):
    def __getitem__(self, index): return {"x": x[index], "y": y[index], "more": {index}}

def collated(rows):
    return torch.stack([row["x"] for row in rows]), torch.stack([row["y"] for row in rows])

class Stream(IterableDataset):
    def __iter__(self): return iter(data)

def shuffled():
    files = list(range(48))
    random.shuffle(files)
    return files

def one_step(fleet, model, optimizer, dataset):
    for step in fleet.steps(dataset, global_batch=12, micro_batch=3):
        for a, b in step:
            step.backward(loss_fn(model(a), b))
        step.commit(optimizer)
        break

def said(call):
    try:
        call()
        return ""
    except ValueError as error:
        return str(error)

reads = []
each = nn.CrossEntropyLoss(reduction="none")
RANK = int(os.environ["RANK"])
random.seed(RANK)
torch.manual_seed(RANK)  # as it is without a seed: another on every worker
"""

CASES = """
with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(RANK)
    parts = random_split(data, [40, 8])
    scored = lambda a, b: {"loss": each(model(a), b)}
    train = lambda dataset: said(lambda: one_step(fleet, model, optimizer, dataset))
    before = flat(model)
    refused = [
        train(parts[0]),
        train(Files(shuffled())),
        train(DataLoader(Files(shuffled()), batch_size=3, num_workers=1)),
        said(lambda: fleet.evaluate(scored, parts[1])),
        said(lambda: fleet.predict(lambda a, b: model(a), Files(shuffled()))),
    ]
    untouched = flat(model) == before
    drawn = [random.random(), torch.rand(()).item()]
    random.seed(RANK)
    fine = [
        train(DataLoader(Noisy(range(48)), batch_size=3, num_workers=1)),
        train(Noisy(range(48))),
        said(lambda: fleet.evaluate(scored, Noisy(range(48)))),
        train(Unstable(range(48))),
        train(DataLoader(Strange(range(48)), collate_fn=collated)),
        said(lambda: one_step(fleet, model, optimizer, Stream())),
    ]
    slow = Slow(range(4))
    fine += [said(lambda: fleet.evaluate(scored, slow)) for _ in range(2)]
    result = {"refused": refused, "fine": fine, "untouched": untouched, "log": str(fleet.run_dir), "reads": len(reads)}
"""


def test_data_that_differ_are_refused_and_what_cannot_be_compared_is_noted(tmp_path: Path) -> None:
    found = results(tmp_path, CASES, before=BEFORE + DATASETS)
    for result in found:
        assert result["fine"] == [""] * 8
        assert result["untouched"], "a step counted before the data were compared"
        for text, label, name in zip(
            result["refused"],
            ["fleet.steps()"] * 3 + ["fleet.evaluate()", "fleet.predict()"],
            ["Subset", "Files", "Files", "Subset", "Files"],
            strict=True,
        ):
            assert text.startswith(f"{label}: the workers' data differ: sample "), text
            assert f" of {name} is another on worker 1 than on worker 0." in text
            assert "random_split without generator=" in text
        assert result["reads"] <= 1 + 2 * 4, "a slow dataset is looked at once"
    assert found[0]["refused"] == found[1]["refused"]
    events = [json.loads(line) for line in (Path(found[0]["log"]) / "events.jsonl").read_text().splitlines()]
    notes = [event["text"] for event in events if event["event"] == "note"]
    for text in (
        "Unstable is not compared between workers: it gives another sample each time the same is read",
        "Strange is not compared between workers: a sample holds a set, which has no stable bytes",
        "Stream is not compared between workers: it is an IterableDataset",
        "Slow is compared between workers by 1 samples, once",
    ):
        assert any(text in note for note in notes), (text, notes)


NEWCOMER = """
import time
torch.manual_seed(int((FOLDER / "restarted").exists()) if os.environ["PACELINE_WORKER"] == "1" else 0)
order = torch.randperm(48)
with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fleet.track(optimizer=optimizer)
    for step in fleet.steps(TensorDataset(x[order], y[order]), global_batch=12, micro_batch=3, epochs=2000):
        for a, b in step:
            step.backward(loss_fn(model(a), b))
        step.commit(optimizer)
        time.sleep(0.002)
        if (FOLDER / "hurry").exists():
            break
    result = step.index
"""


def test_a_newcomer_with_other_data_than_the_fleets_is_refused(tmp_path: Path) -> None:
    before = BEFORE + f"\nfrom pathlib import Path\nFOLDER = Path({str(tmp_path)!r})\n"
    with elastic(tmp_path, NEWCOMER, before=before) as fleet:
        fleet.wait_for_step(3)
        fleet.kill(1)
        fleet.wait_for_workers(1)
        (tmp_path / "restarted").touch()
        fleet.start(1)
        fleet.wait_for_end(1)
        ended = fleet.hurry()
    assert ended[0].code == 0, ended[0].err[-2000:]
    assert ended[1].code != 0
    assert "this worker's data are not the fleet's: sample " in ended[1].err
    assert "of TensorDataset is another here than in the fleet" in ended[1].err


OWN_NUMBERS = """
import logging
import numpy as np

class Drawn(Dataset):
    def __init__(self): self.own = np.random.default_rng(0)
    def __len__(self): return 48
    def __getitem__(self, index): return x[index] + self.own.normal(0, 0.5), y[index]

order = torch.arange(4) if int(os.environ["RANK"]) == 0 else torch.arange(3, -1, -1)  # as a set of names has it

def coded(rows):
    return torch.stack([row[0][order] for row in rows]), torch.stack([row[1] for row in rows])

with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in fleet.steps(DATA, global_batch=12, micro_batch=3):
            for a, b in step:
                step.backward(loss_fn(model(a), b))
            step.commit(optimizer)
        result = "trained"
    except ValueError as error:
        result = str(error)
"""


def test_a_dataset_with_a_generator_of_its_own_is_warned_of(tmp_path: Path) -> None:
    for made, warned in (("Drawn()", 1), ("[(x[i], y[i]) for i in range(48)]", 0)):
        ended = outcomes(tmp_path / str(warned), OWN_NUMBERS.replace("DATA", made))
        assert [one.value for one in ended] == ["trained"] * 2, [one.err[-2000:] for one in ended]
        assert ended[0].err.count("Drawn gives another sample each time the same one is read") == warned


@pytest.mark.parametrize("processes", [0, 1])
def test_what_collate_fn_makes_is_compared_too(tmp_path: Path, processes: int) -> None:
    loader = f"DataLoader([(x[i], y[i]) for i in range(48)], 3, collate_fn=coded, num_workers={processes})"
    for said in results(tmp_path, OWN_NUMBERS.replace("DATA", loader)):
        assert "the workers' data differ: sample " in said
        assert "a vocabulary in collate_fn" in said
