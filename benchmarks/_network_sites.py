"""Rounds between two sites, against plain DDP in the same processes: two computers of four workers each, on a switch.

Both train the same MLP on equal shares, a few steps of one and of the other in turn; a step computes a few rows, so it
is its round. *two_sites_over_ddp* is DDP's median step over Paceline's where ranks 0 to 3 are on one computer and 4 to
7 on the other; *two_sites_interleaved_over_ddp* where even and odd ranks are. *two_sites_ms* and
*two_sites_interleaved_ms*: the two medians themselves, [Paceline, DDP]; *two_sites_wire_ms*: what the link needs to
carry the gradients once. *small_ms* is a round of 340 kB among four computers of one worker each, and *small_wire_ms*
what the wire needs for it, ``2 (n - 1) / n`` times the gradients.

    python benchmarks/_network_sites.py
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _smoke import forked, goes_without, smoke
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

import switch as switches
from switch import Switch

BITS_S = 100e6
WIDTHS, SMALL_WIDTHS = (256, 896, 896, 16), (64, 260, 260, 10)
BLOCKS, BLOCK, ROWS = 3, 3, 2
SITES = (("two_sites", "aaaabbbb"), ("two_sites_interleaved", "abababab"))
globals().update(smoke(WIDTHS=(64, 64, 10), SMALL_WIDTHS=(64, 10), BLOCKS=1, BLOCK=1, SITES=(("two_sites", "aabb"),)))


def network(widths: Sequence[int]) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def gradient_bytes(widths: Sequence[int]) -> int:
    return 4 * sum(parameter.numel() for parameter in network(widths).parameters())


def dataset(widths: Sequence[int]) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(4096, widths[0], generator=generator), torch.randint(widths[-1], (4096,), generator=generator)
    )


def ddp_steps(widths: Sequence[int]) -> Iterator[None]:
    """Plain DDP; each ``next`` is one step."""
    model = DistributedDataParallel(network(widths))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = dataset(widths).tensors
    while True:
        index = torch.randint(len(x), (ROWS,))
        nn.functional.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def our_steps(fleet: paceline.Fleet, widths: Sequence[int]) -> Iterator[None]:
    """The same in Paceline."""
    model = fleet.model(network(widths))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fleet.track(optimizer=optimizer)
    for step in fleet.steps(dataset(widths), global_batch=ROWS * fleet.world_size, micro_batch=ROWS, epochs=10_000):
        for x, y in step:
            step.backward(nn.functional.cross_entropy(model(x), y))
        step.commit(optimizer)
        yield


def timed(steps: Iterator[None]) -> list[float]:
    """Seconds of each step of a block, which all begin together."""
    dist.barrier()
    stamps = [time.perf_counter()]
    for _ in range(BLOCK):
        next(steps)
        stamps.append(time.perf_counter())
    return [after - before for before, after in pairwise(stamps)]


def work(places: dict[str, str], where: str, widths: Sequence[int]) -> list[list[float]]:
    """One worker's part, on its computer: seconds of the steps of Paceline and of DDP, after one block of each."""
    switches.enter(places[where[int(os.environ["RANK"])]])
    dist.init_process_group("gloo")
    with paceline.join("equal", quiet=True, run_dir=tempfile.mkdtemp()) as fleet:
        ours, plain = our_steps(fleet, widths), ddp_steps(widths)
        sides: list[list[float]] = [[], []]
        for number in range(BLOCKS + 1):
            for which in (0, 1) if number % 2 else (1, 0):
                seconds = timed((ours, plain)[which])
                sides[which] += seconds if number else []
        ours.close()
    dist.destroy_process_group()
    return sides


def measure(where: str, widths: Sequence[int]) -> list[float]:
    """Median milliseconds of a step, [Paceline, DDP], with rank i on computer ``where[i]``."""
    with Switch(sorted(set(where))) as switch:
        switch.every(bits_s=BITS_S)
        places = {one: switch.place(one) for one in switch.computers}
        shared = {"MASTER_ADDR": switch.address("a"), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        every = forked(lambda: work(places, where, widths), len(where), **shared)
    return [round(1e3 * statistics.median(side), 1) for side in every[0]]


def figures() -> dict[str, Any]:
    found: dict[str, Any] = {"two_sites_wire_ms": round(8e3 * gradient_bytes(WIDTHS) / BITS_S, 1)}
    for name, where in SITES:
        ours, ddp = found[f"{name}_ms"] = measure(where, WIDTHS)
        found[f"{name}_over_ddp"] = round(ddp / ours, 2)
        print(f"{name}: {ours:.0f} ms, DDP {ddp:.0f} ms", flush=True)
    found["small_wire_ms"] = round(1.5 * 8e3 * gradient_bytes(SMALL_WIDTHS) / BITS_S, 1)
    found["small_ms"], found["small_ddp_ms"] = measure("abcd", SMALL_WIDTHS)
    return found


def main() -> None:
    if goes_without("root and /dev/net/tun", here=not switches.missing()):
        return
    print(json.dumps(figures()))


if __name__ == "__main__":
    main()
