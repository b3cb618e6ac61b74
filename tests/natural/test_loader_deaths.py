"""A loader process that dies is said to have died, and whose it was: not the connection between workers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from programs import BEFORE, refusals

pytestmark = pytest.mark.fleet

# Worker 1's loader process dies when it is asked for what comes after the first step.
DYING = """
import signal, time
from pathlib import Path
from torch.utils.data import IterableDataset
folder = Path(os.environ["PACELINE_RUN_DIR"]).parent

def wait_for(name):
    until = time.monotonic() + 60
    while not (folder / name).exists() and time.monotonic() < until:
        time.sleep(0.01)

class Dying(Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, index):
        if os.environ.get("RANK") == "1" and index >= 8:
            if {in_round}:
                wait_for("in the round")
                time.sleep(0.3)
            (folder / "died").touch()
            {how}
        return x[index], y[index]

class DyingStream(IterableDataset, Dying):
    def __iter__(self):
        yield from (self[index] for index in range(48))

with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fleet.track(optimizer=optimizer)
    loader = DataLoader({kind}(), num_workers=1, prefetch_factor=4)
    for step in fleet.steps(loader, global_batch=8, micro_batch=2{more}):
        for bx, by in step:
            step.backward(loss_fn(model(bx), by))
        if {in_round} and fleet.rank == 1:
            (folder / "in the round").touch()
        elif {in_round}:
            wait_for("died")
            time.sleep(0.3)
        step.commit(optimizer)
"""
KILLED, ENDED = "os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)"


@pytest.mark.parametrize(
    ("kind", "how", "in_round", "more"),
    [
        ("Dying", KILLED, True, ""),
        ("Dying", KILLED, False, ""),
        ("DyingStream", ENDED, False, ", split=True"),
    ],
)
def test_the_death_of_a_loader_process_is_named(tmp_path: Path, kind: str, how: str, in_round: bool, more: str) -> None:
    said = refusals(tmp_path, DYING.format(kind=kind, how=how, in_round=in_round, more=more), before=BEFORE)
    assert "the connection between workers broke" not in said
    found = re.search(r"worker 1 \(cpu\) ended with (\w+): (a loader process|DataLoader worker) \(pid \d+\) (.*)", said)
    assert found, said
    ours = "was killed by signal 9 (SIGKILL)" if how == KILLED else "ended with exit code 3"
    if found[1] != "RuntimeError":  # torch's signal handler raises wherever the script is: in its own code, as it is
        assert (found[1], found[3][: len(ours)]) == ("LoaderDied", ours)
