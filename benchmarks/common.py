"""What the benchmarks on emulated machines share: a fleet's processes, two ways to train, and the clock.

One set of processes runs many trainings, one after another, because starting processes takes longer than measuring.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _smoke import forked, smoking
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import paceline
from paceline.errors import describe_exit
from paceline.machines import from_env, parse_fleet

RESULT = "BENCHMARK_RESULT"
"""Variable with the path where worker 0 leaves its figures; who has it is a worker."""
FEATURES, CLASSES = 64, 10
CPUS = {"PACELINE_DEVICE": os.environ.get("PACELINE_DEVICE", "cpu")}
"""Machines are played by sleeping: a worker that found a GPU would be unlike the others, and unlike DDP beside it."""
LAST_LINES = 60
"""Lines of failed workers that the benchmark's error repeats."""


def run_workers(script: str, workers: int, *args: str) -> Any:
    """Start ``script`` on so many workers and return what worker 0 gave to `leave_result`."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        if smoking():
            sys.argv[1:] = args
            own = {RESULT: str(result), "PACELINE_RUN_DIR": f"{folder}/run"}
            forked(sys.modules["__main__"].main, workers, **CPUS, **own)
            return json.loads(result.read_text())
        launch = [sys.executable, str(Path(__file__).with_name("_launch.py")), str(workers), folder, script, *args]
        code, words = _run_aloud(launch, {**os.environ, **CPUS, RESULT: str(result)})
        if code or not result.exists():
            left = "had left its figures" if result.exists() else "had left no figures"
            what = f"{Path(script).name}: the {workers} workers {describe_exit(code)}; worker 0 {left}"
            raise SystemExit("\n".join([what, "their last lines:" * bool(words), *words]))
        return json.loads(result.read_text())


def _run_aloud(command: list[str], env: dict[str, str]) -> tuple[int, list[str]]:
    """Run a command, and return its exit code and the last lines that it wrote to stderr, which are shown meanwhile."""
    last = deque[str](maxlen=LAST_LINES)
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            last.append(line.rstrip("\n"))
    return process.returncode, list(last)


def is_worker() -> bool:
    return RESULT in os.environ


def leave_result(figures: Any) -> None:
    """A worker's last act: but for a smoke run, whose workers are forks, its process ends here.

    It leaves as `paceline run` itself does: an interpreter that ends while threads of groups still close down is
    sometimes aborted, which would be the benchmark's only word.
    """
    if os.environ["RANK"] == "0":
        Path(os.environ[RESULT]).write_text(json.dumps(figures))
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(0.2)
    if not smoking():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def emulate(machines: str, sample_ms: float) -> None:
    """From here on this worker plays its machine of ``machines``."""
    os.environ["PACELINE_EMULATE"], os.environ["PACELINE_SAMPLE_MS"] = machines, f"{sample_ms:g}"


def limit(machines: str, sample_ms: float, *, step: int = 0) -> float:
    """Samples a second that no schedule can beat: ``sum_i 1 / (factor_i * sample_ms)``."""
    return sum(1 / machine.seconds(step, 1) for machine in parse_fleet(machines, sample_ms=sample_ms))


def paceline_commits(pace: str, *, global_batch: int, steps: int, epochs: int = 1) -> list[float]:
    """Seconds on the clock after each commit of ``epochs`` epochs of ``steps`` steps."""
    stamps = []
    with paceline.join(pace, quiet=True) as fleet:
        model = fleet.model(_network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for step in fleet.steps(
            _dataset(global_batch * steps), global_batch=global_batch, micro_batch=16, epochs=epochs
        ):
            for x, y in step:
                step.backward(nn.functional.cross_entropy(model(x), y))
            step.commit(optimizer)
            stamps.append(time.perf_counter())
    return stamps


def ddp_commits(*, global_batch: int, steps: int) -> list[float]:
    """The same for plain torch DDP over Gloo, which hides its sums in the padded time: DDP at its best."""
    if not dist.is_initialized():  # once a process: torch cannot form a second group on the launcher's store
        dist.init_process_group("gloo")
    machine = from_env(dist.get_rank())
    model = DistributedDataParallel(_network(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = _dataset(global_batch * steps)
    loader = DataLoader(data, batch_size=global_batch // dist.get_world_size(), sampler=DistributedSampler(data))
    stamps: list[float] = []
    for x, y in loader:
        started = time.perf_counter()
        nn.functional.cross_entropy(model(x), y).backward()
        if machine:
            machine.pad(len(stamps), len(y), started)
        optimizer.step()
        optimizer.zero_grad()
        stamps.append(time.perf_counter())
    return stamps


def speed(stamps: list[float], *, global_batch: int, skip: int) -> float:
    """Samples a second by the wall clock, everything included, after the first ``skip`` steps."""
    return (len(stamps) - skip) * global_batch / (stamps[-1] - stamps[skip - 1])


def _network() -> nn.Module:
    """About 85,000 parameters: small beside the padding, so that two cores can play four machines."""
    hidden = 256
    return nn.Sequential(
        nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)
    )


def _dataset(length: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(length, FEATURES, generator=generator)
    return TensorDataset(features, torch.randint(CLASSES, (length,), generator=generator))
