"""The example with a divided model: it learns, on like and unlike groups, and its checkpoint is a whole model's."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from crew import nursery
from scripts import EXAMPLES, FORKED_FOUR, Script, run
from torch.distributed import checkpoint

pytestmark = pytest.mark.fleet

SMALL = ("--samples", 300, "--epochs", 1, "--global-batch", 32, "--width", 32)


UNLIKE = ("-m", "paceline.cli", "run", "-n", "2", "--procs-per-worker", "1,2", "--pace", "equal")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Script:
    """Two workers of two processes."""
    nursery().load("torch.distributed.fsdp")
    how = {"launcher": FORKED_FOUR, "PACELINE_PROCS_PER_WORKER": "2", "PACELINE_PACE": "equal"}
    return run("sharded.py", *SMALL, folder=tmp_path_factory.mktemp("two"), **how)


def losses(script: Script) -> list[float]:
    return [float(line.split()[-1]) for line in script.out if line.startswith("step")]


def parts(script: Script) -> list[float]:
    """What each process of the leader holds of the whole."""
    (line,) = [line for line in script.out if line.startswith("bytes of parameters and optimiser state")]
    return [float(part) for part in re.findall(r"\((.*?)\)", line)]


def test_the_loss_falls_and_each_process_holds_half(two: Script) -> None:
    assert len(losses(two)) == 2, "of the first step and the last, by the leader alone"
    assert losses(two)[-1] < losses(two)[0] - 0.5
    assert parts(two) == pytest.approx([0.5, 0.5], abs=0.01)
    (held_out,) = [float(line.split()[2]) for line in two.out if line.startswith("held out")]
    assert held_out < losses(two)[0] - 0.5


def test_a_plain_model_takes_the_checkpoint(two: Script) -> None:
    sys.path.insert(0, str(EXAMPLES))
    import sharded

    model = sharded.CharacterGPT(width=32)
    checkpoint.load(
        {f"models.0.{n}": t for n, t in model.state_dict().items()},
        checkpoint_id=str(two.folder / "sharded"),
        no_dist=True,
    )
    held_out = sharded.windows(300)[::10]
    loss = torch.nn.functional.cross_entropy(model(held_out[:, :-1]), held_out[:, 1:].flatten())
    (said,) = [float(line.split()[2]) for line in two.out if line.startswith("held out")]
    assert loss.item() == pytest.approx(said, abs=1e-3)


def test_one_process_beside_two_comes_to_the_same(two: Script, tmp_path: Path) -> None:
    unlike = run("sharded.py", *SMALL, folder=tmp_path, launcher=UNLIKE)
    assert parts(unlike) == [1.0], "the leader holds it whole"
    assert losses(unlike) == pytest.approx(losses(two), abs=1e-3)
