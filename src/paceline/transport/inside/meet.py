"""How the processes of a worker find each other, and the process group in which they shard a model.

``paceline run --procs-per-worker`` says in variables which process of which worker this is. Under torchrun,
PACELINE_PROCS_PER_WORKER alone says how many consecutive ranks make a worker.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch

from paceline import concurrency
from paceline.errors import FleetError
from paceline.transport.base import Transport
from paceline.transport.fixed import meeting_store
from paceline.transport.inside.head_and_follower import MEET_S, RETRY_S, Follower, Head, Links, accept, connect
from paceline.transport.network import dist, loopback_only

MESH, JOINING = "shard", "joining"
_JOINS, _RANKED = count(), count()
"""A script may join several times: each time the processes of a worker meet elsewhere."""


@dataclass(frozen=True)
class ShardPosition:
    """The position of one process: the ``shard``-th of ``shards`` that are a worker, which meet in ``folder``."""

    shard: int
    shards: int
    folder: Path
    ranked: tuple[int, int] | None = None
    """Under torchrun: the worker's rank, and how many workers there are."""


def position_from_env(at_the_end: ExitStack) -> ShardPosition | None:
    """Return this process's position in its worker; None: a worker is one process.

    What is made for the worker is undone ``at_the_end``.
    """
    if (text := os.environ.get("PACELINE_PROCS_PER_WORKER")) is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"PACELINE_PROCS_PER_WORKER is {text!r}; it is the number of processes of a worker, such as 2")
    shards = int(text)
    if "PACELINE_SHARD" in os.environ and "PACELINE_GROUP_DIR" in os.environ:
        return ShardPosition(int(os.environ["PACELINE_SHARD"]), shards, Path(os.environ["PACELINE_GROUP_DIR"]))
    return _by_rank(shards, at_the_end)


def _by_rank(shards: int, at_the_end: ExitStack) -> ShardPosition:
    """Make consecutive ranks of a launcher without groups one worker."""
    if "RANK" not in os.environ:
        raise ValueError(
            "PACELINE_PROCS_PER_WORKER is set by hand: start with `paceline run --procs-per-worker N`, or with torchrun"
        )
    rank, world = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % shards or here % shards:
        raise ValueError(
            f"PACELINE_PROCS_PER_WORKER={shards}: the {here} processes of this computer do not make whole groups of "
            f"{shards}; start a multiple of {shards} on each computer"
        )
    worker, shard = divmod(rank, shards)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store, key = meeting_store(), f"paceline/inside/{restart}/{next(_RANKED)}/{worker}"
    if shard == 0:
        folder = at_the_end.enter_context(tempfile.TemporaryDirectory(prefix="paceline-group-"))
        store.set(key, folder)
    else:
        folder = store.get(key).decode()
    return ShardPosition(shard, shards, Path(folder), (worker, world // shards))


def meet(position: ShardPosition, device: torch.device, *, elastic: bool, join: Callable[[], Transport]) -> Transport:
    """Return this process's transport: the head joins the fleet, followers follow it."""
    number = next(_JOINS)
    socket = position.folder / f"head{number}"
    if position.shard == 0:
        links = Links(accept(socket, position.shards - 1), shard=0)
    else:
        links = Links([connect(socket, position.shard, wait=_Patience())], shard=position.shard)
    _check_devices(_everybodys(links, str(device), first=position.shard == 0))
    _form(position, device, number)
    how: Any = {"shards": position.shards, "mesh": lambda: _mesh(device, position.shards)}
    if position.shard == 0:
        head = Head(join(), links, **how)
        head.once(JOINING, lambda: None)
        return cast(Transport, head)
    if concurrency.current_thread() is concurrency.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):  # the head decides, and its followers end with it
            signal.signal(number, signal.SIG_IGN)
    follower = Follower(links, shard=position.shard, elastic=elastic, **how)
    follower.once(JOINING, lambda: None)
    return follower


class _Patience:
    """Waits for the head to be there, but not for ever."""

    def __init__(self) -> None:
        self._until = concurrency.monotonic() + MEET_S

    def __call__(self) -> None:
        if concurrency.monotonic() > self._until:
            raise FleetError("the first process of this worker did not come to paceline.join()")
        concurrency.sleep(RETRY_S)


def _form(position: ShardPosition, device: torch.device, number: int) -> None:
    """Make torch.distributed's default group the worker: `fully_shard` uses it."""
    if dist.is_initialized():
        raise ValueError(
            "torch.distributed's default group is initialised already, and in a worker of several processes it is the "
            "worker's own: leave init_process_group out"
        )
    store = dist.FileStore(str(position.folder / f"store{number}"), position.shards)
    with loopback_only():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # Gloo cannot gather on GPUs
        dist.init_process_group(backend, store=store, rank=position.shard, world_size=position.shards)


def _everybodys(links: Links, own: str, *, first: bool) -> list[str]:
    """Return the devices of a worker's processes, on each of them."""
    if not first:
        links.send(JOINING, "device", own)
        return list(links.receive(JOINING)[0][1])
    found = [own, *(str(theirs) for _, theirs in links.receive(JOINING))]
    links.send(JOINING, "devices", found)
    return found


def _check_devices(devices: Sequence[str]) -> None:
    """Raise ValueError unless the processes of a worker have a GPU each, or none has one.

    PACELINE_BACKEND=nccl: NCCL is set up to share one.
    """
    gpus = [device for device in devices if device.startswith("cuda")]
    if gpus and len(gpus) < len(devices):
        raise ValueError(
            f"the processes of a worker go through the model together, and these have {', '.join(devices)}: give each "
            "a GPU, or all the CPU (--devices)"
        )
    if len(set(gpus)) < len(gpus) and os.environ.get("PACELINE_BACKEND", "").lower() != "nccl":
        raise ValueError(
            f"processes of a worker share a GPU ({', '.join(devices)}), where NCCL cannot join them: give each its own "
            "with --devices, or all the CPU, or start smaller groups"
        )


def _mesh(device: torch.device, shards: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh  # takes a while to import, and few need it

    return init_device_mesh(device.type, (shards,), mesh_dim_names=(MESH,))


def leave_group() -> None:
    """End the worker's process group with the worker."""
    if dist.is_initialized():
        dist.destroy_process_group()
