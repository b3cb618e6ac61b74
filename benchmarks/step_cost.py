"""What a step costs above its compute, against plain DDP in the same processes at the same time.

Compute is played by sleeping, ``COMPUTE_MS`` a step in four micro-batches (the large model: in one), with a real
forward and backward of a few rows after each, so what is left of a step is what DDP or Paceline do themselves. Every
worker is in a DDP group and in a fleet at once, and makes blocks of steps of either in turn; both index tensors in
memory. The figures are medians over the leader's steps, the first of each block left out: milliseconds above the slept
time (*ddp_ms_N*, *ours_ms_N* for N workers), their difference *extra_ms_N*, their ratio *over_ddp_N*; *large_* is the
same with 25M parameters in place of 0.1M, *adaptive_* with that pace, and *mixed_* with the leader on a GPU and the
others on CPUs, where CUDA is there. *cpu_ms_N* and *switches_N* are processor milliseconds and times that a thread
began to wait, a worker and step: [ours, DDP]; they say more than the clock where other programs run beside it, which
makes either side wait for the processor. Sizes that the cores cannot carry are left out, unless they are asked for.

    python benchmarks/step_cost.py
    python benchmarks/step_cost.py --only mixed --sizes 64
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from _smoke import forked, smoke, smoking
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline

COMPUTE_MS = 20.0
MICRO_BATCHES, ROWS = {"small": 4, "large": 1}, 4
CORES = os.cpu_count() or 1
SIZES = [workers for workers in (1, 2, 4, 8, 16, 64) if workers <= max(16, CORES)]
LARGE_SIZES = [workers for workers in (2, 4) if workers <= CORES]
MIXED_SIZES = [workers for workers in (4, 16, 64) if workers <= CORES]
BLOCK = 6
BLOCKS = {1: 14, 2: 14, 4: 12, 8: 8, 16: 6, 64: 6} if CORES >= 16 else {1: 10, 2: 10, 4: 8, 8: 5, 16: 3}
LARGE_BLOCKS = 4 if CORES >= 16 else 2
WIDTHS = {"small": (64, 512, 128, 10), "large": (1024, 4096, 4096, 1024, 10)}
globals().update(
    smoke(
        SIZES=[1, 2],
        LARGE_SIZES=[2],
        MIXED_SIZES=[],
        BLOCKS={1: 1, 2: 1},
        LARGE_BLOCKS=1,
        BLOCK=2,
        WIDTHS={"small": (64, 8, 10), "large": (64, 16, 10)},
    )
)


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    widths = WIDTHS[kind]
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def dataset(kind: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    features, classes = WIDTHS[kind][0], WIDTHS[kind][-1]
    return TensorDataset(
        torch.randn(4096, features, generator=generator), torch.randint(classes, (4096,), generator=generator)
    )


def compute(kind: str) -> None:
    time.sleep(1e-3 * COMPUTE_MS / MICRO_BATCHES[kind])


def ddp_steps(kind: str, device: torch.device) -> Iterator[None]:
    """Plain DDP; each ``next`` is one step."""
    net = network(kind).to(device)
    model = DistributedDataParallel(net) if dist.is_initialized() else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x, y = dataset(kind).tensors
    while True:
        for number in range(MICRO_BATCHES[kind]):
            index = torch.randint(len(x), (ROWS,))
            features, labels = x[index].to(device), y[index].to(device)
            compute(kind)
            if number < MICRO_BATCHES[kind] - 1 and model is not net:
                with model.no_sync():
                    nn.functional.cross_entropy(model(features), labels).backward()
            else:
                nn.functional.cross_entropy(model(features), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def our_steps(fleet: paceline.Fleet, kind: str) -> Iterator[None]:
    """The same in Paceline."""
    model = fleet.model(network(kind))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fleet.track(optimizer=optimizer)
    share = MICRO_BATCHES[kind] * ROWS
    for step in fleet.steps(dataset(kind), global_batch=share * fleet.world_size, micro_batch=ROWS, epochs=10_000):
        for features, labels in step:
            compute(kind)
            step.backward(nn.functional.cross_entropy(model(features), labels))
        step.commit(optimizer)
        yield


def used() -> np.ndarray:
    """Processor seconds of this process, and times that one of its threads began to wait."""
    now = resource.getrusage(resource.RUSAGE_SELF)
    return np.array([now.ru_utime + now.ru_stime, now.ru_nvcsw])


def block(steps: Iterator[None]) -> tuple[list[float], np.ndarray]:
    """Seconds of a block's steps but the first, and what the block used a step."""
    if dist.is_initialized():
        dist.barrier()
    next(steps)
    before, stamps = used(), [time.perf_counter()]
    for _ in range(BLOCK - 1):
        next(steps)
        stamps.append(time.perf_counter())
    return [after - begun for begun, after in pairwise(stamps)], (used() - before) / (BLOCK - 1)


def work(kind: str, blocks: int, pace: str, mixed: bool) -> list[list[list[float]]]:
    """One worker's part: for ours and DDP, each step's seconds, and the processor seconds and waits of each block."""
    torch.set_num_threads(1)
    device = torch.device("cuda:0" if mixed and os.environ["RANK"] == "0" else "cpu")
    if os.environ["WORLD_SIZE"] != "1":
        dist.init_process_group("gloo")
    with paceline.join(pace, quiet=True, run_dir=tempfile.mkdtemp(), device=device) as fleet:
        ours, plain = our_steps(fleet, kind), ddp_steps(kind, device)
        sides: list[list[tuple[list[float], np.ndarray]]] = [[], []]
        for number in range(blocks + 1):
            for which in (0, 1) if number % 2 else (1, 0):
                sides[which].append(block((ours, plain)[which]))
        ours.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return [
        [[second for seconds, _ in side[1:] for second in seconds], np.mean([use for _, use in side[1:]], 0).tolist()]
        for side in sides
    ]


def measure(kind: str, workers: int, blocks: int, *, pace: str = "equal", mixed: bool = False) -> dict[str, object]:
    """The figures of one size."""
    every = forked(lambda: work(kind, blocks, pace, mixed), workers, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    ours, ddp = (1e3 * float(np.median(side[0])) - COMPUTE_MS for side in every[0])
    uses = np.mean([[side[1] for side in worker] for worker in every], 0)
    cpu, switches = (1e3 * uses[:, 0]).round(2).tolist(), uses[:, 1].round(1).tolist()
    said = f"{'mixed' if mixed else kind:>5} {workers:>3} {pace:>8}: {ours:8.2f} ms, DDP {ddp:8.2f} ms"
    print(f"{said}; CPU {cpu[0]:.2f} and {cpu[1]:.2f} ms, waits {switches[0]:.0f} and {switches[1]:.0f}", flush=True)
    return {
        "ours_ms": round(ours, 2),
        "ddp_ms": round(ddp, 2),
        "extra_ms": round(ours - ddp, 2),
        "over_ddp": round(ours / ddp, 3),
        "cpu_ms": cpu,
        "switches": switches,
    }


def read_options() -> argparse.Namespace:
    """Return what was asked for on the command line."""
    smoking()
    options = argparse.ArgumentParser(description="what a step costs above its compute, against plain DDP")
    options.add_argument("--only", choices=("small", "adaptive", "large", "mixed"), help="this kind of fleet alone")
    options.add_argument("--sizes", metavar="N,N", help="numbers of workers, in place of those that the cores carry")
    asked = options.parse_args()
    try:
        asked.sizes = [int(size) for size in asked.sizes.split(",")] if asked.sizes else []
    except ValueError:
        options.error(f"--sizes is numbers of workers such as 4,64, not {asked.sizes}")
    if asked.only == "mixed" and not torch.cuda.is_available():
        options.error("the leader of a mixed fleet has a GPU, and torch finds none here")
    return asked


def main() -> None:
    asked = read_options()
    figures: dict[str, object] = {"compute_ms": COMPUTE_MS, "cores": CORES, "sizes": asked.sizes or SIZES}
    print(
        f"a step's cost above {COMPUTE_MS:g} ms of compute, medians; {CORES} cores, so {figures['sizes']} workers",
        flush=True,
    )
    sizes = {"small": SIZES, "adaptive": [4] if 4 in SIZES else [], "large": LARGE_SIZES}
    if torch.cuda.is_available():
        sizes["mixed"] = MIXED_SIZES
    for name in [name for name in sizes if asked.only in (None, name)]:
        kind, pace = "large" if name == "large" else "small", "adaptive" if name == "adaptive" else "equal"
        for workers in asked.sizes or sizes[name]:
            blocks = LARGE_BLOCKS if name == "large" else BLOCKS.get(workers, min(BLOCKS.values()))
            found = measure(kind, workers, blocks, pace=pace, mixed=name == "mixed")
            prefix = "" if name == "small" else f"{name}_"
            figures |= {f"{prefix}{figure}_{workers}": value for figure, value in found.items()}
    print(json.dumps(figures))


if __name__ == "__main__":
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # CUDA is begun after the fork
    main()
