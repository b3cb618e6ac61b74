"""The digits examples as a user starts them: alone, under torchrun, under ``paceline run``, and in plain DDP."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

pytestmark = pytest.mark.fleet

EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS, PLAIN = str(EXAMPLES / "digits.py"), str(EXAMPLES / "plain_ddp.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PACELINE = ("-m", "paceline.cli", "run", "-n", "2")
EPOCH = re.compile(r"^epoch (\d+): loss ([\d.]+), test accuracy ([\d.]+)%$", re.MULTILINE)


def start(folder: Path, *command: str, **more: str) -> tuple[list[tuple[float, float]], str]:
    """Loss and test accuracy (0 to 100) of each epoch, and what was said on stderr."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "TORCHELASTIC"))}
    clean.update({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=clean | more, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [(float(loss), float(accuracy)) for _, loss, accuracy in EPOCH.findall(done.stdout)], done.stderr


def test_digits_trains_the_same_alone_under_torchrun_and_under_paceline_run(tmp_path: Path) -> None:
    wanted = ("--epochs", "4")
    alone, _ = start(tmp_path, DIGITS, *wanted)
    exact = {"PACELINE_PACE": "adaptive"}  # a deadline would let the batch vary
    torchrun, said = start(tmp_path, *TORCHRUN, DIGITS, *wanted, **exact)
    launched, _ = start(tmp_path, *PACELINE, "--pace", "adaptive", DIGITS, *wanted)
    assert "of what these 2 machines" in said
    for epochs in (alone, torchrun, launched):
        assert len(epochs) == 4
        assert epochs[-1][1] > 85
        for (loss, _), (expected, _) in zip(epochs[:2], alone[:2]):
            assert loss == pytest.approx(expected, abs=0.01), "the fleet's step is one machine's step"


@pytest.mark.long
def test_plain_ddp_learns_and_takes_as_long_as_the_slowest_machine(tmp_path: Path) -> None:
    emulated = {"PACELINE_EMULATE": "1,2", "PACELINE_SAMPLE_MS": "0.4", "PACELINE_RUN_DIR": str(tmp_path / "run")}
    epochs, _ = start(tmp_path, *TORCHRUN, PLAIN, "--epochs", "4", **emulated)
    assert len(epochs) == 4
    assert epochs[-1][1] > 85
    kept = json.loads((tmp_path / "run" / "ddp.json").read_text())
    assert 100 * kept["accuracy"] == pytest.approx(epochs[-1][1], abs=0.06)
    assert kept["epochs"] == [epoch for epoch in range(4) for _ in range(12)]
    assert kept["samples"] == 4 * [*[128] * 11, 1438 - 11 * 128], (
        "DistributedSampler repeats one sample to split evenly"
    )
    full = [seconds for seconds, samples in zip(kept["seconds"][12:], kept["samples"][12:]) if samples == 128]
    slowest_s = 2 * 0.4e-3 * 128 / 2
    assert slowest_s * 0.8 < mean(full) < slowest_s * 4  # of single steps one clock sees now more, now less


def test_plain_ddp_without_a_launcher_says_how_to_start_it(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, PLAIN], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("plain_ddp.py needs a launcher: torchrun")
