"""How many files of the library one step passes: a step of the adaptive pace, one in which a worker dies, and one with
a deadline.

Three fleets train for real, each of three processes started by ``paceline run``. In the leader every call of a Python
function is seen (`sys.setprofile`, and `threading.setprofile` for its other threads), from the moment at which its loop
asks for a step until it asks for the next. A file below src/paceline counts once one of its functions was called. The
figures are those of the median step, by the number of files, of the adaptive steps and of those with a deadline; the
first steps, in which files are imported, are left out. There is one step in which a worker dies, by SIGKILL.

*adaptive*, *death* and *deadline* are numbers of files; ``--files`` adds their names.

    python benchmarks/passed_files.py --files
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from _smoke import smoke
from torch import nn
from torch.utils.data import TensorDataset

import paceline

SOURCE = Path(paceline.__file__).parent
LENGTH, BATCH, MICRO = 4096, 64, 4
STEPS, SETTLED = 60, 20
"""Steps of a training, and those at its beginning that do not count."""
SAMPLE_S = 0.5e-3
"""Seconds that a sample takes."""
STALL_EVERY, STALL_S = 4, 0.25
"""Steps from one stall of a worker to the next in the fleet with deadlines, and its seconds."""
globals().update(smoke(STEPS=20, SETTLED=10))
KINDS: dict[str, dict[str, Any]] = {
    "adaptive": {"workers": "3", "pace": "adaptive"},
    "death": {"workers": "2:3", "pace": "adaptive"},
    "deadline": {"workers": "3", "pace": "joint"},
}


class PassedFiles:
    """The files of the library whose functions this process has called, step by step."""

    def __init__(self) -> None:
        self.now: set[CodeType] = set()

    def begin(self) -> None:
        """See the calls of this thread, and of all that are started from now on."""
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def take(self) -> list[str]:
        """Return the files since the last call, and begin anew."""
        seen, self.now = self.now, set()
        files = {Path(code.co_filename) for code in seen if code.co_flags & inspect.CO_OPTIMIZED}  # no import
        return sorted(str(file.relative_to(SOURCE)) for file in files if file.is_relative_to(SOURCE))

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self.now.add(frame.f_code)


def pacer(kind: str) -> Any:
    """Return the pace; that with deadlines plans one as soon as it would not lose by it."""
    return paceline.Joint(least_gain=0.0) if kind == "deadline" else KINDS[kind]["pace"]


def train(kind: str, folder: Path) -> None:
    """Train on this worker, and leave the files of its steps in the folder if it leads."""
    passed, steps = PassedFiles(), []
    passed.begin()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(LENGTH, 8, generator=generator), torch.randint(4, (LENGTH,), generator=generator))
    with paceline.join(pacer(kind), quiet=True) as fleet:
        model = fleet.model(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        fleet.track(optimizer=optimizer)
        for step in fleet.steps(data, global_batch=BATCH, micro_batch=MICRO, epochs=100):
            before, last = fleet.world_size, fleet.rank == 2
            for x, y in step:
                if kind == "death" and last and step.index == STEPS // 2:
                    (folder / "died").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                stalls = kind == "deadline" and last and step.index % STALL_EVERY == 0
                time.sleep(STALL_S if stalls else SAMPLE_S * len(x))
                step.backward(nn.functional.cross_entropy(model(x), y))
            step.commit(optimizer)
            assert step.record is not None
            died = len(step.record.workers) < before
            steps.append({"deadline": step.record.deadline_s is not None, "died": died, "index": step.index})
            steps[-1]["files"] = passed.take()
            if step.index + 1 >= STEPS:
                break
        leads = fleet.is_leader
    sys.setprofile(None)
    if leads:
        (folder / "steps.json").write_text(json.dumps(steps))


def files_of(kind: str) -> list[str]:
    """Return the files of the step that a fleet of this kind is asked for."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "paceline.cli", "run", "-q", "-n", KINDS[kind]["workers"]]
        order = [__file__, "worker", kind, name]
        subprocess.run([*command, "--output-dir", str(folder / "run"), *order], check=True, timeout=300)
        steps = json.loads((folder / "steps.json").read_text())
    asked = [step for step in steps if step["died"]] if kind == "death" else steps[SETTLED:]
    if kind == "deadline":
        asked = [step for step in asked if step["deadline"]]
    if not asked:
        raise SystemExit(f"the fleet made no step of the kind {kind!r}")
    ordered = sorted((step["files"] for step in asked), key=len)
    return list(ordered[len(ordered) // 2])


def main() -> None:
    """Count the files of the three steps, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="name the files too")
    asked = parser.parse_args()
    found = {kind: files_of(kind) for kind in KINDS}
    figures: dict[str, Any] = {kind: len(files) for kind, files in found.items()}
    print(json.dumps(figures | ({"files": found} if asked.files else {})))


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        if not (Path(sys.argv[3]) / "died").exists():  # started again: it does not come back
            train(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
