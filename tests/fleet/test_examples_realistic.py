"""The realistic script and its port: the same training, resumed where it stopped, stopped on all workers at once."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import EMULATED, EXAMPLES, FORKED, FORKED_ALONE, Script, run
from torch.optim.swa_utils import AveragedModel

pytestmark = pytest.mark.fleet

DDP, PORT = "realistic_ddp.py", "realistic_paceline.py"
SMALL = ("--epochs", 4, "--global-batch", 256, "--patience", 9)


def epochs(script: Script) -> list[tuple[int, float]]:
    """Number and accuracy of each epoch that the leader, and nobody else, printed."""
    found = (re.match(r"epoch (\d+): loss \S+, test accuracy (\S+)%", line) for line in script.out)
    return [(int(match[1]), float(match[2]) / 100) for match in found if match]


def content(folder: Path, name: str = "last.pt") -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / name, weights_only=True)


def accuracy_by_hand(ema: dict[str, torch.Tensor]) -> float:
    """Of the averaged weights in a checkpoint, on the whole test set, without any fleet."""
    sys.path.insert(0, str(EXAMPLES))
    import realistic_paceline

    model = AveragedModel(realistic_paceline.network()).eval()
    model.load_state_dict(ema)
    test = realistic_paceline.Digits(train=False)
    images, labels = (torch.stack(parts) for parts in zip(*(test[i] for i in range(len(test)))))
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).sum()) / len(test)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Script:
    return run(PORT, *SMALL, folder=tmp_path_factory.mktemp("whole"), launcher=FORKED, PACELINE_PACE="equal")


@pytest.fixture(scope="module")
def last_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of a run whose workers all got SIGKILL after the second of four epochs, two seconds each."""
    folder = tmp_path_factory.mktemp("killed")
    slow = {"PACELINE_EMULATE": "1,1", "PACELINE_SAMPLE_MS": "3"}
    with Script(PORT, *SMALL, folder=folder, launcher=FORKED, PACELINE_PACE="equal", **slow) as killed:
        killed.wait_for("epoch 2:")
    return folder / "checkpoints" / "last.pt"


@pytest.mark.long
def test_the_port_learns_as_well_as_the_ddp_script(tmp_path: Path) -> None:
    # Shares that follow measured speed would give batch norm other batches, and another accuracy, each time.
    options = ("--epochs", 8, "--patience", 9, "--amp")
    ddp = run(DDP, *options, folder=tmp_path / "ddp", launcher=FORKED)
    port = run(PORT, *options, folder=tmp_path / "port", launcher=FORKED, PACELINE_PACE="equal")
    assert [number for number, _ in epochs(ddp)] == [number for number, _ in epochs(port)] == [*range(1, 9)]
    best = [max(accuracy for _, accuracy in epochs(script)) for script in (ddp, port)]
    assert min(best) > 0.9
    assert abs(best[0] - best[1]) < 0.05, best


def test_the_best_checkpoint_loads_without_a_fleet_and_is_as_good_as_it_says(uninterrupted: Script) -> None:
    saved = content(uninterrupted.folder, "best.pt")
    best, bad_epochs = saved["state"]["best"], saved["state"]["bad_epochs"]
    assert bad_epochs == 0
    assert best == pytest.approx(max(accuracy for _, accuracy in epochs(uninterrupted)), abs=1e-4)
    one_digit = 1 / 360
    assert abs(accuracy_by_hand(saved["tracked"]["ema"]) - best) <= one_digit


def test_after_kill_9_the_port_resumes_to_the_very_weights_of_an_uninterrupted_run(
    uninterrupted: Script, last_words: Path, tmp_path: Path
) -> None:
    resumed = run(PORT, *SMALL, "--resume", last_words, folder=tmp_path, launcher=FORKED, PACELINE_PACE="equal")
    assert 1 <= len(epochs(resumed)) < 4
    assert epochs(resumed) == epochs(uninterrupted)[-len(epochs(resumed)) :]
    ours, whole = content(resumed.folder), content(uninterrupted.folder)
    for mine, other in ((ours["models"][0], whole["models"][0]), (ours["tracked"]["ema"], whole["tracked"]["ema"])):
        assert all(torch.equal(mine[name], other[name]) for name in other)
    assert ours["tracked"]["scheduler"] == whole["tracked"]["scheduler"]


def test_a_checkpoint_of_two_workers_resumes_on_one(last_words: Path, tmp_path: Path) -> None:
    alone = run(PORT, *SMALL, "--resume", last_words, folder=tmp_path, launcher=FORKED_ALONE)
    done = torch.load(last_words, weights_only=True)["steps"]["epoch"]
    assert [number for number, _ in epochs(alone)] == list(range(done + 1, 5))
    assert content(tmp_path)["steps"]["step"] == 4 * 6


@pytest.mark.long
def test_after_kill_9_the_ddp_script_resumes_at_the_next_epoch(tmp_path: Path) -> None:
    with Script(DDP, *SMALL, folder=tmp_path / "killed", launcher=FORKED) as killed:
        killed.wait_for("epoch 2:")
    last = killed.folder / "checkpoints" / "last.pt"
    done = torch.load(last, weights_only=True)["epoch"]
    resumed = run(DDP, *SMALL, "--resume", last, folder=tmp_path / "resumed", launcher=FORKED)
    assert [number for number, _ in epochs(resumed)] == list(range(done + 1, 5))


@pytest.mark.long
def test_an_early_stop_ends_all_workers_of_unlike_machines(tmp_path: Path) -> None:
    still = ("--epochs", 40, "--global-batch", 512, "--lr", 1e-9, "--patience", 1)
    stopped = run(PORT, *still, folder=tmp_path, launcher=EMULATED)
    accuracies = [accuracy for _, accuracy in epochs(stopped)]
    assert 2 <= len(accuracies) < 40
    assert accuracies[-1] <= max(accuracies[:-1])
    assert accuracies[:-1] == sorted(set(accuracies[:-1])), "only the last epoch was no better"
    assert content(tmp_path)["state"]["bad_epochs"] == 1


@pytest.mark.long
def test_a_worker_that_is_killed_and_returns_decides_about_saving_and_stopping_as_the_others_do(tmp_path: Path) -> None:
    elastic = ("-m", "paceline.cli", "run", "-n", "2:3", "--emulate", "1,1", "--sample-ms", "2")
    options = ("--epochs", 6, "--global-batch", 256, "--patience", 9)
    run(PORT, *options, folder=tmp_path, launcher=(*elastic, "--failures", "kill:1@9"))
    saved = content(tmp_path)
    assert saved["steps"]["epoch"] == 6
    assert 0.0 < saved["state"]["best"] <= 1.0
