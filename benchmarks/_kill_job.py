"""The training of kill.py, three times: in Paceline, in torchft, and in plain DDP under torchrun with a checkpoint.

All train one model of 5 MB on 16 samples a worker and step, padded to 48 ms; after each commit a worker appends a line
to a file of its own. The clock is the computer's (CLOCK_MONOTONIC), so lines of all processes compare.

    python _kill_job.py paceline|torchft|torchrun     # started by kill.py
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _smoke import smoke
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline
from paceline.machines import from_env

STAMPS = "KILL_STAMPS"
"""Variable with the folder of the workers' files."""
LIGHTHOUSE = "KILL_LIGHTHOUSE"
SLOT = "KILL_SLOT"
FEATURES, HIDDEN, CLASSES = 64, 1080, 10
globals().update(smoke(HIDDEN=32))
BATCH, MICRO_BATCH = 16, 8  # samples a worker
SAMPLE_MS = 3.0
SAVE_EVERY = 5
"""Steps between checkpoints under torchrun: a quarter of a second."""
PEER_TIMEOUT = timedelta(seconds=10)
HEARTBEAT = timedelta(milliseconds=25)


def network() -> nn.Module:
    """1.25M parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    )


def samples(length: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(length, FEATURES, generator=generator)
    return TensorDataset(features, torch.randint(CLASSES, (length,), generator=generator))


def stamper(slot: int) -> Callable[[int, int, int], None]:
    """A function that notes a commit: its time, its step, how many workers took part, and the worker's rank."""
    path = Path(os.environ[STAMPS]) / f"{slot}.{os.getpid()}"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def stamp(step: int, workers: int, rank: int) -> None:
        os.write(file, f"{time.monotonic():.6f} {step} {workers} {rank}\n".encode())

    return stamp


def train_paceline() -> None:
    stamp = stamper(int(os.environ["PACELINE_WORKER"]))
    with paceline.join(quiet=True) as fleet:
        model = fleet.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        fleet.track(optimizer=optimizer)
        data = samples(1 << 16)
        for step in fleet.steps(data, global_batch=4 * BATCH, micro_batch=MICRO_BATCH, epochs=1000):
            for x, y in step:
                step.backward(nn.functional.cross_entropy(model(x), y))
            step.commit(optimizer)
            assert step.record is not None
            stamp(step.index, len(step.record.workers), fleet.rank)


def train_torchft() -> None:
    from torchft import DistributedDataParallel as FaultTolerant
    from torchft import Manager, ProcessGroupGloo
    from torchft.optim import OptimizerWrapper

    slot = int(os.environ[SLOT])
    stamp, model = stamper(slot), network()
    plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PEER_TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=1,
        timeout=PEER_TIMEOUT,
        quorum_timeout=PEER_TIMEOUT,
        connect_timeout=PEER_TIMEOUT,
        heartbeat_interval=HEARTBEAT,
        init_sync=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=os.environ[LIGHTHOUSE],
        hostname="127.0.0.1",
        replica_id=f"worker_{slot}",
    )
    wrapped, optimizer = FaultTolerant(manager, model), OptimizerWrapper(manager, plain)
    for x, y, pad in batches(slot):
        before = manager.current_step()
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y).backward()
        pad()
        optimizer.step()
        if manager.current_step() > before:
            stamp(manager.current_step() - 1, manager.num_participants(), manager.participating_rank() or 0)


def train_torchrun() -> None:
    rank = int(os.environ["RANK"])
    stamp, model = stamper(rank), network()
    dist.init_process_group("gloo")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    path, step = Path(os.environ[STAMPS]).with_name("checkpoint.pt"), 0
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    for x, y, pad in batches(rank):
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y).backward()
        pad()
        optimizer.step()
        step += 1
        stamp(step, dist.get_world_size(), rank)
        if rank == 0 and step % SAVE_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)


def batches(slot: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, Callable[[], object]]]:
    """For the peers: random batches without end, each with a function that sleeps what is left of its 48 ms."""
    machine = from_env(slot)
    assert machine is not None
    features, labels = samples(1 << 12).tensors
    for number in count():
        index = torch.randint(len(labels), (BATCH,))
        yield features[index], labels[index], partial(machine.pad, number, BATCH, time.perf_counter())


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"paceline": train_paceline, "torchft": train_torchft, "torchrun": train_torchrun}[sys.argv[1]]()
