"""What Paceline costs where it cannot help: equal machines, nothing emulated, step time over plain torch.

Two processes with one thread each train the same model in plain DDP and in Paceline, step by step in turn, on a
ConvNet of 1M parameters and an MLP of 25M. One process alone is compared with a plain loop likewise. Each figure is
the median over pairs of neighbouring steps, with a 95 % bootstrap interval. DDP and the plain loop index a tensor in
memory, the cheapest loading there is; Paceline loads through its own feed.

    python benchmarks/overhead.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from _smoke import forked, free_port, smoke, smoking
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline

KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "8000000000", "MALLOC_MMAP_THRESHOLD_": "2000000000"}
"""For both sides: the C library gives large blocks back after every step by default, and the page faults of getting
them again are larger than the difference that is measured."""
PAIRS = {"convnet": 45, "mlp": 30, "alone": 45}
BATCH = {"convnet": 16, "mlp": 64, "alone": 16}  # samples a worker
SIZES = (1024, 4096, 4096, 1024)
globals().update(smoke(PAIRS=dict.fromkeys(PAIRS, 2), BATCH=dict.fromkeys(BATCH, 2), SIZES=(1024, 64, 1024)))


def convnet() -> nn.Module:
    def block(inside: int, outside: int) -> list[nn.Module]:
        return [nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.ReLU()]

    return nn.Sequential(
        *block(3, 32),
        *block(32, 64),
        nn.MaxPool2d(2),
        *block(64, 128),
        nn.MaxPool2d(2),
        *block(128, 256),
        *block(256, 256),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def mlp() -> nn.Module:
    layers = [layer for a, b in pairwise(SIZES) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1], nn.ReLU(), nn.Linear(1024, 10))


def setting(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (1024,) if name == "mlp" else (3, 32, 32)
    x = torch.randn(2048, *shape, generator=generator)
    y = torch.randint(0, 10, (2048,), generator=generator)
    torch.manual_seed(0)
    return (mlp() if name == "mlp" else convnet()), x, y


def plain_steps(model: nn.Module, x: torch.Tensor, y: torch.Tensor, batch: int) -> Iterator[None]:
    """A plain training loop; each ``next`` is one step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    while True:
        index = torch.randint(0, len(x), (batch,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()
        yield


def paceline_steps(
    fleet: paceline.Fleet, model: nn.Module, x: torch.Tensor, y: torch.Tensor, batch: int
) -> Iterator[None]:
    """The same loop in Paceline."""
    model = fleet.model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = TensorDataset(x, y)
    for step in fleet.steps(data, global_batch=batch * fleet.world_size, micro_batch=batch, epochs=1000):
        for images, labels in step:
            step.backward(nn.functional.cross_entropy(model(images), labels))
        step.commit(optimizer)
        yield


def measure(ours: Iterator[None], plain: Iterator[None], pairs: int, align: Callable[[], object]) -> list[list[float]]:
    """Seconds of ``pairs`` pairs of steps, [ours, plain], the order within a pair changing."""
    seconds = []
    for number in range(pairs + 5):
        pair = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            align()
            began = time.perf_counter()
            next((ours, plain)[which])
            pair[which] = time.perf_counter() - began
        seconds.append(pair)
    return seconds[5:]


def work(name: str) -> list[list[float]]:
    """One worker's part: the pairs' seconds."""
    torch.set_num_threads(1)
    model, x, y = setting(name)
    copy, _, _ = setting(name)
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if not alone:
        dist.init_process_group("gloo")
        copy = DistributedDataParallel(copy)
    with paceline.join("equal", quiet=True, run_dir=tempfile.mkdtemp()) as fleet:
        ours = paceline_steps(fleet, model, x, y, BATCH[name])
        plain = plain_steps(copy, x, y, BATCH[name])
        seconds = measure(ours, plain, PAIRS[name], (lambda: None) if alone else dist.barrier)
        ours.close()
    if not alone:
        dist.destroy_process_group()
    return seconds


def start(name: str, workers: int) -> np.ndarray:
    """Run a setting in processes of its own; worker 0's pairs."""
    if smoking():
        return np.array(forked(lambda: work(name), workers)[0])
    port = free_port()
    base = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **KEEP_MEMORY}
    processes = []
    for rank in range(workers):
        place = {"RANK": rank, "WORLD_SIZE": workers, "LOCAL_RANK": rank} if workers > 1 else {}
        env = base | {key: str(value) for key, value in place.items()}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes.append(subprocess.Popen([sys.executable, __file__, name], env=env, stdout=subprocess.PIPE))
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{name}: a worker failed")
    return np.array(json.loads(outputs[0].splitlines()[-1]))


def ratio(seconds: np.ndarray) -> tuple[float, float, float]:
    """Median of ours / plain over the pairs, and its 95 % bootstrap interval."""
    ratios = seconds[:, 0] / seconds[:, 1]
    dice = np.random.default_rng(0)
    medians = np.median(dice.choice(ratios, size=(2000, len(ratios))), axis=1)
    return float(np.median(ratios)), *(float(q) for q in np.quantile(medians, [0.025, 0.975]))


def main() -> None:
    figures = {}
    for name, workers, key in (
        ("convnet", 2, "convnet_over_ddp"),
        ("mlp", 2, "mlp_over_ddp"),
        ("alone", 1, "alone_over_plain"),
    ):
        parameters = sum(p.numel() for p in setting(name)[0].parameters())
        print(f"{name}: {parameters / 1e6:.1f}M parameters, {workers} process(es) ...", flush=True)
        seconds = start(name, workers)
        middle, low, high = ratio(seconds)
        ours, plain = np.median(seconds, axis=0) * 1e3
        print(f"  {middle:.3f} [{low:.3f}, {high:.3f}] over {len(seconds)} pairs: {ours:.1f} ms against {plain:.1f} ms")
        figures |= {key: round(middle, 4), f"{key}_interval": [round(low, 4), round(high, 4)]}
    print(json.dumps(figures))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(work(sys.argv[1])))
    else:
        main()
