"""The settings of a training loop and of a worker, checked once, with errors that tell the user what to do."""

from __future__ import annotations

import json
import operator
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from paceline.feed import Source
from paceline.pace import traits_of
from paceline.records import LoopSettings
from paceline.transport import Transport
from paceline.transport.network import dist


def whole_number(name: str, value: Any) -> int:
    """Return ``value`` as an int of at least 1; raise a ValueError with its name otherwise."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number


def own_micro_batch(
    micro_batch: int | str | Sequence[int] | None, *, global_batch: int, rank: int, size: int, loader_batch: int | None
) -> tuple[int, bool]:
    """Return this worker's micro-batch, and whether it is "auto": measured, and halved when memory runs out.

    Unless given, it is the DataLoader's batch size, or an equal share of the global batch. "auto" returns the equal
    share too, which bounds what is loaded ahead, and is the size where none is searched for.
    """
    equal_share = -(-global_batch // size)
    if micro_batch is None:
        return min(loader_batch or equal_share, global_batch), False
    if isinstance(micro_batch, str):
        if micro_batch != "auto":
            raise ValueError(f'micro_batch must be a number, one per worker, or "auto"; got {micro_batch!r}')
        return equal_share, True
    if isinstance(micro_batch, Sequence):
        if len(micro_batch) != size:
            raise ValueError(f"micro_batch has {len(micro_batch)} entries for {size} workers: give one per worker")
        sizes = [whole_number("micro_batch", entry) for entry in micro_batch]
    else:
        sizes = [whole_number("micro_batch", micro_batch)] * size
    if max(sizes) > global_batch:
        raise ValueError(
            f"micro_batch ({max(sizes)}) is larger than global_batch ({global_batch}): a micro-batch is the part of a "
            "worker's share that goes through the model at once"
        )
    return sizes[rank], False


def read_settings(
    source: Source,
    *,
    global_batch: int,
    micro_batch: int | str | Sequence[int] | None,
    epochs: int,
    shuffle: bool | None,
    drop_last: bool | None,
    rank: int,
    size: int,
    multiple_of: int | None = None,
) -> LoopSettings:
    """Return the settings that the user gave, completed by those of the DataLoader."""
    global_batch = whole_number("global_batch", global_batch)
    if source.batched:
        if micro_batch is not None:
            raise ValueError(
                "the DataLoader's batch_sampler gives the micro-batches, each dealt whole: leave micro_batch= out, and "
                "let global_batch say how many of its batches make a step, over the whole fleet"
            )
        micro_batch = 1
    own, auto = own_micro_batch(
        micro_batch, global_batch=global_batch, rank=rank, size=size, loader_batch=source.batch_size
    )
    return LoopSettings(
        global_batch=global_batch,
        micro_batch=own,
        auto=auto,
        epochs=whole_number("epochs", epochs),
        shuffle=source.shuffle is not False if shuffle is None else bool(shuffle),
        drop_last=source.drop_last if drop_last is None else bool(drop_last),
        multiple_of=multiple_of,
    )


def must_agree(
    transport: Transport,
    label: str,
    facts: Mapping[str, Any],
    *,
    also: Mapping[str, Any] | None = None,
    each: Any = None,
) -> list[dict[str, Any]]:
    """Raise ValueError on every worker when their facts differ, naming which and how; return every worker's facts.

    Where workers come and go, those that another launcher has started with other facts than worker 0's raise it
    alone, and the others go on without them.

    The result also holds what may differ: ``also`` between workers, and under `EACH` a list with the value of ``each``
    per process of a worker.
    """
    own = {**facts, **(also or {}), STARTER: starter()}
    several = transport.shards > 1
    everybody: list[dict[str, Any]] = transport.gather(
        label, (lambda: _agreed_inside(transport, label, own, each)) if several else {**own, EACH: [each]}
    )
    for name, expected in everybody[0].items():
        if name in (EACH, STARTER) or (also and name in also):
            continue
        others = {rank: theirs.get(name) for rank, theirs in enumerate(everybody) if theirs.get(name) != expected}
        apart = are_strangers(transport, everybody, others)
        agrees = json.loads(json.dumps(own.get(name))) == expected  # ranks may have changed since
        if others and not (apart and agrees):
            rank, theirs = next(iter(others.items()))
            more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
            more += "; this worker came by another launcher, and the others go on without it" if apart else ""
            raise ValueError(
                f"workers disagree in {label}: {name} is {expected!r} on worker 0 and {theirs!r} on worker {rank}{more}"
            )
    return everybody


EACH = "each process"
"""Key of the list with the values of a worker's processes, by shard."""
STARTER = "the launcher that started it"
"""Key of the launcher's name."""


def are_strangers(transport: Transport, everybody: Sequence[Mapping[str, Any]], ranks: Iterable[int]) -> bool:
    """Return whether the workers of these ranks differ from worker 0 because they came by other launchers than it.

    Where workers come and go such workers are refused alone. ``everybody``: what `must_agree` returned.
    """
    return transport.elastic and all(everybody[rank][STARTER] != everybody[0][STARTER] for rank in ranks)


def starter() -> str:
    """Return which launcher has started this worker; empty for one that was started by other means."""
    pid = os.environ.get("PACELINE_LAUNCHER", "")
    return pid and f"{os.environ.get('PACELINE_STARTER') or socket.gethostname()}/{pid}"


def _agreed_inside(transport: Transport, label: str, facts: dict[str, Any], each: Any) -> dict[str, Any]:
    """Return a worker's facts; raise ValueError when its processes differ."""
    answers = transport.collect(label, [facts, each])
    for shard, (theirs, _) in enumerate(answers):
        if name := next((name for name in facts if theirs.get(name) != facts[name]), None):
            raise ValueError(
                f"the processes of a worker disagree in {label}: {name} is {facts[name]!r} in the first and "
                f"{theirs.get(name)!r} in process {shard}"
            )
    return {**facts, EACH: [one for _, one in answers]}


def is_compiled(model: torch.nn.Module) -> bool:
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


def has_batch_norm(model: torch.nn.Module) -> bool:
    return any(isinstance(layer, torch.nn.modules.batchnorm._BatchNorm) for layer in model.modules())


def check_sync_batch_norm(
    models: Sequence[torch.nn.Module], *, pace: str, settings: LoopSettings, sizes: Sequence[int], length: int | None
) -> None:
    """Raise ValueError where SyncBatchNorm, a collective in every forward, would hang: it needs equal numbers."""
    workers = len(sizes)
    if workers == 1 or not any(
        isinstance(layer, torch.nn.SyncBatchNorm) for model in models for layer in model.modules()
    ):
        return
    divides = len(set(sizes)) == 1 and settings.global_batch % (workers * settings.micro_batch) == 0
    no_tail = length is not None and (length - length % settings.dealt_in) % settings.global_batch == 0
    if traits_of(pace).equal_shares and divides and no_tail and not settings.auto and _default_group_of(workers):
        return
    raise ValueError(
        "SyncBatchNorm needs the same number of micro-batches on every worker, or it hangs: use GroupNorm or plain "
        'BatchNorm (its running statistics are merged by sample count), or pace="equal" with global_batch a multiple '
        f"of workers x micro_batch ({workers} x {settings.micro_batch}), drop_last, and torch.distributed's default "
        "group initialised by the script, which is what SyncBatchNorm speaks through"
    )


def _default_group_of(workers: int) -> bool:
    return bool(dist.is_initialized()) and dist.get_world_size() == workers


def choose_device(asked: str | torch.device | None) -> torch.device:
    """Return this worker's device: as asked, as the launcher has set it, a GPU of its own, or the CPU.

    ``cuda`` without a number is the GPU of this process's number on its computer.
    """
    chosen = asked or os.environ.get("PACELINE_DEVICE")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if chosen is None:
        chosen = f"cuda:{local}" if local < torch.cuda.device_count() else "cpu"
    try:
        device = torch.device(chosen)
    except RuntimeError:
        raise ValueError(f"device {chosen!r} is not one that torch knows, such as cpu or cuda:0") from None
    if device.type == "cuda":
        device = torch.device("cuda", local if device.index is None else device.index)
        if device.index >= torch.cuda.device_count():
            raise ValueError(f"device {device} is not there: this machine has {torch.cuda.device_count()} GPUs")
        torch.cuda.set_device(device)
    return device
