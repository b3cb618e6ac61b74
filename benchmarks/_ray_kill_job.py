"""The training of ray_kill.py, twice: in Paceline, and in Ray Train with a checkpoint from which Ray starts all again.

Both train the model of `_kill_job.py` on 16 samples a worker and step, padded to 48 ms; after each commit a worker
appends a line to a file of its own, which has its node's name. The clock is the computer's (CLOCK_MONOTONIC).

    python _ray_kill_job.py              # started by `paceline run --ray`
    python _ray_kill_job.py ray_train    # started by ray_kill.py: the driver of a TorchTrainer
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _kill_job import BATCH, MICRO_BATCH, SAVE_EVERY, STAMPS, batches, network, samples
from torch import nn

import paceline

WORKERS = "RAY_KILL_WORKERS"


def stamper() -> Callable[[int, int], None]:
    """A function that notes a commit: its time, its step, and how many workers took part."""
    path = Path(os.environ[STAMPS]) / f"{socket.gethostname()}.{os.getpid()}"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def stamp(step: int, workers: int) -> None:
        os.write(file, f"{time.monotonic():.6f} {step} {workers}\n".encode())

    return stamp


def train_paceline() -> None:
    stamp, data = stamper(), samples(1 << 12)
    batch = BATCH * int(os.environ[WORKERS])
    with paceline.join(quiet=True) as fleet:
        model = fleet.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        fleet.track(optimizer=optimizer)
        for step in fleet.steps(data, global_batch=batch, micro_batch=MICRO_BATCH, epochs=1000):
            for x, y in step:
                step.backward(nn.functional.cross_entropy(model(x), y))
            step.commit(optimizer)
            assert step.record is not None
            stamp(step.index, len(step.record.workers))


def work() -> None:
    """A worker of Ray Train."""
    from ray import train
    from ray.train.torch import prepare_model

    torch.set_num_threads(1)
    context, stamp, plain = train.get_context(), stamper(), network()
    optimizer, step = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9), 0
    if kept := train.get_checkpoint():
        with kept.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        plain.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    model = prepare_model(plain)
    for x, y, pad in batches(context.get_world_rank()):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        pad()
        optimizer.step()
        step += 1
        stamp(step, context.get_world_size())
        if step % SAVE_EVERY == 0:
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = None
                if context.get_world_rank() == 0:
                    state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, Path(folder) / "state.pt")
                    checkpoint = train.Checkpoint.from_directory(folder)
                train.report({"step": step}, checkpoint=checkpoint)


def train_ray() -> None:
    """As Ray's own guide to fault tolerance has it: failures are allowed, and checkpoints kept on a disk of all."""
    import ray
    from ray import train
    from ray.train.torch import TorchTrainer

    names = (
        STAMPS,
        WORKERS,
        "PACELINE_EMULATE",
        "PACELINE_SAMPLE_MS",
        "OMP_NUM_THREADS",
        "PYTHONPATH",
        "GLOO_SOCKET_IFNAME",
    )
    ray.init(address="auto", runtime_env={"env_vars": {name: os.environ[name] for name in names if name in os.environ}})
    TorchTrainer(
        work,
        scaling_config=train.ScalingConfig(num_workers=int(os.environ[WORKERS])),
        run_config=train.RunConfig(
            storage_path=str(Path(os.environ[STAMPS]).parent / "kept"),
            failure_config=train.FailureConfig(max_failures=-1),
            checkpoint_config=train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train_ray() if sys.argv[1:] == ["ray_train"] else train_paceline()
