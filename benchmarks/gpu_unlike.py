"""Unlike GPUs: how near does a fleet come to the sum of their speeds, and what does plain DDP make of them?

One GPU is divided by CUDA MPS into workers with 60, 25 and 15 % of its processors, truly unlike GPUs to torch. They
train a convolutional network in bf16 on images (flipped and normalised by loader processes) and a small GPT on
sequences, in float32: under MPS some matrix products in half precision are NaN in plain torch. Gradients are summed
over Gloo: NCCL deadlocks when several of its ranks share an MPS GPU. The limit is
each worker by itself: the same loop in plain torch with the same loaders and no sums, all at once, their speeds added
up. All ways to train take turns in the same processes; speeds are samples over wall seconds after the first steps,
everything included. Needs a GPU, `nvidia-cuda-mps-control`, torch and NumPy, nothing more.

    PYTHONPATH=src python benchmarks/gpu_unlike.py               # both models, about two minutes
    PYTHONPATH=src python benchmarks/gpu_unlike.py conv adaptive  # one model, these ways alone
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _smoke import free_port, goes_without
from gpu_alone import GPT, Shape
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import paceline

PERCENT = (60, 25, 15)
WAYS = ("ddp", "adaptive", "joint", "auto")
MODELS = ("conv", "gpt")
BATCH, MICRO = {"conv": 1536, "gpt": 384}, {"conv": 64, "gpt": 16}
STEPS, SKIP = {"ddp": 16, "adaptive": 44, "joint": 44, "auto": 44}, {"ddp": 4, "adaptive": 14, "joint": 14, "auto": 14}
LIMIT_S = 5.0
GPT_SHAPE = Shape(width=384, heads=6, layers=6, words=8192, length=256)


class Images(Dataset):
    """Random pictures, flipped and normalised anew each time."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._images = torch.randint(256, (512, 3, 64, 64), dtype=torch.uint8, generator=_generator())

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self._images[index % 512].float().sub_(128.0).div_(64.0)
        return image.flip(2) if torch.rand(()) < 0.5 else image, index % 10


class Sequences(Dataset):
    """Random words."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._words = torch.randint(GPT_SHAPE.words, (512, GPT_SHAPE.length), generator=_generator())

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._words[index % 512], index


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _block(before: int, after: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride, 1, bias=False),
        nn.GroupNorm(8, after),
        nn.ReLU(),
        nn.Conv2d(after, after, 3, 1, 1, bias=False),
        nn.GroupNorm(8, after),
        nn.ReLU(),
    )


def network(model: str) -> nn.Module:
    torch.manual_seed(0)
    if model == "gpt":
        return GPT(GPT_SHAPE)
    blocks = [_block(128, 256, 2), _block(256, 256, 1), _block(256, 512, 2), _block(512, 512, 1)]
    return nn.Sequential(nn.Conv2d(3, 128, 3, 1, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def loss(model: str, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if model == "gpt":
        return functional.cross_entropy(net(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return functional.cross_entropy(net(x), y)


def loader(model: str, length: int, **more: Any) -> DataLoader:
    data = Images(length) if model == "conv" else Sequences(length)
    return DataLoader(data, batch_size=MICRO[model], num_workers=3, pin_memory=True, persistent_workers=True, **more)


def endless(batches: DataLoader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        for x, y in batches:
            yield x.cuda(non_blocking=True), y.cuda(non_blocking=True)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)


def alone(model: str) -> float:
    """Samples a second of this worker by itself, while the others do the same; an update after a third of a batch."""
    net = network(model).cuda()
    optimizer, counted, began = sgd(net), 0, 0.0
    pieces = BATCH[model] // MICRO[model] // len(PERCENT)
    batches = endless(loader(model, BATCH[model] * 8, shuffle=True))
    dist.barrier()
    step, stop = 0, None
    while stop is None or time.perf_counter() < stop:
        for _ in range(pieces):
            x, y = next(batches)
            (loss(model, net, x, y) / pieces).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        step, counted = step + 1, counted + pieces * MICRO[model]
        if step == 2:
            counted, began = 0, time.perf_counter()
            stop = began + LIMIT_S
    speed = torch.tensor([counted / (time.perf_counter() - began)], dtype=torch.float64)
    dist.all_reduce(speed)
    return float(speed)


def ddp(model: str) -> float:
    """Samples a second of plain DDP: equal shares, summed in the last micro-batch."""
    net = DistributedDataParallel(network(model).cuda(), gradient_as_bucket_view=True)
    optimizer, began = sgd(net), 0.0
    pieces = BATCH[model] // MICRO[model] // len(PERCENT)
    data = loader(model, BATCH[model] * STEPS["ddp"])
    data = loader(model, len(data.dataset), sampler=DistributedSampler(data.dataset))
    batches = endless(data)
    for step in range(STEPS["ddp"]):
        for piece in range(pieces):
            x, y = next(batches)
            with net.no_sync() if piece < pieces - 1 else contextlib.nullcontext():
                (loss(model, net, x, y) / pieces).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == SKIP["ddp"] - 1:
            torch.cuda.synchronize()
            began = time.perf_counter()
    torch.cuda.synchronize()
    dist.barrier()
    return (STEPS["ddp"] - SKIP["ddp"]) * BATCH[model] / (time.perf_counter() - began)


def paced(model: str, pace: str) -> dict[str, Any]:
    """Samples a second of Paceline, and what its steps were made of, in seconds a step."""
    with paceline.join(pace, quiet=True, run_dir=tempfile.mkdtemp()) as fleet:
        net = fleet.model(network(model))
        optimizer, began = sgd(net), 0.0
        for step in fleet.steps(
            loader(model, BATCH[model] * STEPS[pace], shuffle=True), global_batch=BATCH[model], micro_batch=MICRO[model]
        ):
            for x, y in step:
                step.backward(loss(model, net, x, y))
            step.commit(optimizer)
            if step.index == SKIP[pace] - 1:
                torch.cuda.synchronize()
                began = time.perf_counter()
        torch.cuda.synchronize()
        took, records = time.perf_counter() - began, list(fleet.history)[SKIP[pace] :]
    seconds = np.array([record.seconds for record in records])
    return {
        "speed": sum(record.total for record in records) / took,
        "shares": np.mean([record.samples for record in records], axis=0).round().astype(int).tolist(),
        "step_s": took / len(records),
        "slowest_s": float(seconds.max(axis=1).mean()),
        "spread_s": float((seconds.max(axis=1) - seconds.mean(axis=1)).mean()),
        "round_s": float(np.mean([record.round_s for record in records])),
        "counted_cv": float(np.std([r.total for r in records[:-1]]) / np.mean([r.total for r in records[:-1]])),
    }


def measure(model: str, ways: list[str]) -> dict[str, Any]:
    """One worker's part: all ways in turn."""
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"limit": alone(model)}
    for way in ways:
        found[way] = {"speed": ddp(model)} if way == "ddp" else paced(model, way)
        torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()
    return found


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str]]:
    """CUDA's Multi-Process Service while inside; its variables."""
    with tempfile.TemporaryDirectory() as folder:
        env = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in env.values():
            Path(path).mkdir()
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env={**os.environ, **env}, check=True)
        try:
            yield env
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", env={**os.environ, **env}, check=False)


def start(model: str, ways: list[str], variables: dict[str, str]) -> dict[str, Any]:
    """Run the workers; what worker 0 found."""
    port = free_port()
    common = {**os.environ, **variables, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "LOCAL_RANK": "0"}
    common |= {"WORLD_SIZE": str(len(PERCENT)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = []
    for rank, percent in enumerate(PERCENT):
        env = common | {"RANK": str(rank), "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent)}
        command = [sys.executable, __file__, "--worker", model, *ways]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE))
    try:
        outputs = [process.communicate()[0] for process in processes]
    except KeyboardInterrupt:
        for process in processes:
            process.kill()
        raise
    if any(process.returncode for process in processes):
        raise SystemExit(f"{model}: a worker failed")
    return json.loads(outputs[0].splitlines()[-1])


def tell(model: str, found: dict[str, Any]) -> dict[str, float]:
    limit = found.pop("limit")
    print(f"{model}: the workers by themselves {limit:,.0f} samples/s")
    for way, figures in found.items():
        print(f"  {way:<9} {figures['speed']:>7,.0f} samples/s  {figures['speed'] / limit:6.1%}", end="")
        if way != "ddp":
            print(
                f"  shares {figures['shares']}, a step {figures['step_s'] * 1e3:.1f} ms: the slowest worker "
                f"{figures['slowest_s'] * 1e3:.1f} ({figures['spread_s'] * 1e3:.1f} above the mean), "
                f"its round {figures['round_s'] * 1e3:.1f}",
                end="",
            )
        print(flush=True)
    figures = {f"{model}_{way}_over_limit": one["speed"] / limit for way, one in found.items()}
    if "ddp" in found:
        figures |= {
            f"{model}_{way}_over_ddp": one["speed"] / found["ddp"]["speed"]
            for way, one in found.items()
            if way != "ddp"
        }
    return {name: round(value, 4) for name, value in figures.items()}


def main() -> None:
    if goes_without("a GPU", here=torch.cuda.is_available()):
        return
    if goes_without("nvidia-cuda-mps-control", here=shutil.which("nvidia-cuda-mps-control") is not None):
        return
    asked = sys.argv[1:]
    models, ways = [m for m in MODELS if m in asked] or MODELS, [w for w in WAYS if w in asked] or list(WAYS)
    figures: dict[str, float] = {}
    with mps() as variables:
        for model in models:
            figures |= tell(model, start(model, ways, variables))
    for key in ("over_limit", "over_ddp"):
        if each := [value for name, value in figures.items() if name.endswith(f"adaptive_{key}")]:
            figures[f"adaptive_{key}"] = min(each)
    print(json.dumps(figures))


if __name__ == "__main__":
    if "--worker" in sys.argv:
        print(json.dumps(measure(sys.argv[2], sys.argv[3:])))
    else:
        main()
