"""Accelerate's own loops, as scripts have them: run by real workers on a fleet, and by one process without it."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.machinery
import importlib.util
import inspect
import io
import logging
import math
import os
import pickle
import runpy
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import accelerate
import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState, PartialState
from accelerate.test_utils import RegressionDataset
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedType,
    broadcast,
    broadcast_object_list,
    copy_tensor_to_devices,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    set_seed,
    synchronize_rng_states,
    wait_for_everyone,
)
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

from paceline.adapters.accelerate import Accelerator
from paceline.errors import MisuseError
from paceline.training.join import as_if_alone

SAMPLES, FEATURES = 44, 6


class Plain:
    """The part of an Accelerator that the loops below use, for one process with the whole batch."""

    sync_gradients, num_processes, is_main_process = True, 1, True

    def __init__(self, **_: Any) -> None:
        self.device = torch.device("cpu")

    def prepare(self, *things: Any) -> Any:
        return things

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def clip_grad_norm_(self, parameters: Any, norm: float) -> Any:
        return torch.nn.utils.clip_grad_norm_(parameters, norm)

    def clip_grad_value_(self, parameters: Any, value: float) -> None:
        torch.nn.utils.clip_grad_value_(parameters, value)

    def gather_for_metrics(self, data: Any) -> Any:
        return data

    def end_training(self) -> None:
        pass


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def points(count: int = SAMPLES, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x[:, :3].argmax(1), torch.arange(count))


class Texts(Dataset):
    """Rows of unlike length: the loss is a mean over label tokens."""

    def __init__(self, count: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(count, 7, FEATURES, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, 3, (count, 7), generator=generator)
        lengths = torch.randint(1, 8, (count,), generator=generator)
        self.y[torch.arange(7)[None] >= lengths[:, None]] = -100

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


def flat(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def made(args: dict[str, Any], **more: Any) -> Any:
    if args.get("plain"):
        return Plain()
    return Accelerator(cpu=True, quiet=True, pace=args.get("pace"), **more)


def trained(args: dict[str, Any]) -> dict[str, Any]:
    """AdamW, a cosine schedule by the loader's length, and clipping, in Accelerate's order."""
    accumulate, epochs = args.get("accumulate", 1), 3
    accelerator = made(args, gradient_accumulation_steps=accumulate)
    model = net(int(os.environ.get("RANK", "0")) if not args.get("plain") else 0)
    loader = DataLoader(points(args.get("samples", SAMPLES)), batch_size=args["batch"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if args.get("before"):  # as in Accelerate's examples: everything is prepared at once, in any order
        schedule = cosine(optimizer, epochs * (len(loader) // accumulate))
        loader, model, schedule, optimizer = accelerator.prepare(loader, model, schedule, optimizer)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        updates = epochs * math.ceil(len(loader) / accumulate)
        (schedule,) = [accelerator.prepare(cosine(optimizer, updates * accelerator.num_processes))]
        schedule = schedule[0] if args.get("plain") else schedule
    updates, rows, norms = 0, 0, []
    for _ in range(epochs):
        model.train()
        for x, y, _ in loader:
            rows += len(x)
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if args.get("clip") and accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), args["clip"])))
            if args.get("clip_value"):
                accelerator.clip_grad_value_(model.parameters(), args["clip_value"])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            updates += accelerator.sync_gradients
    result = {"weights": flat(model), "updates": updates, "rows": rows, "norms": norms, "length": len(loader)}
    result["rate"] = optimizer.param_groups[0]["lr"]
    accelerator.end_training()
    return result


def cosine(optimizer: Any, steps: int) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)


def tokens(args: dict[str, Any]) -> list[float]:
    """Mean losses over tokens, `accumulate` as a context, SGD with momentum."""
    accelerator = made(args, gradient_accumulation_steps=args.get("accumulate", 1))
    model = net()
    loader = DataLoader(Texts(), batch_size=args.get("batch", 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model) if not args.get("plain") else torch.enable_grad():
                model.zero_grad()
                logits = model(batch["x"])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
                accelerator.backward(loss)
                optimizer.step()
    accelerator.end_training()
    return flat(model)


class Rows(Dataset):
    """Rows as dictionaries."""

    def __init__(self, count: int) -> None:
        self.points = points(count)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.points[index][0], "more": {"labels": self.points[index][1]}}


def averaged(args: dict[str, Any]) -> dict[str, Any]:
    """An average of the weights by hand, which runs once per update or once per micro-batch."""
    accelerator = made(args)
    model = net()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(points(), batch_size=args["batch"]))
    for _ in range(2):
        for x, y, _ in loader:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if args["how"] != "guarded" or accelerator.sync_gradients:
                for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                    mean, now = (mean.data, now.data) if args["how"] == "data" else (mean, now.detach())
                    mean.lerp_(now, 0.1)
    accelerator.end_training()
    return {"average": flat(average)}


def popped(args: dict[str, Any]) -> dict[str, Any]:
    """A script that takes its batches apart, and counts right answers in its training loop."""
    accelerator = made(args, micro_batch=8)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Rows(41), batch_size=4))
    seen: list[int] = []
    for _ in range(2):
        for batch in loader:
            y = batch.pop("more").pop("labels")
            out = model(batch["x"])
            accelerator.backward(nn.functional.cross_entropy(out, y))
            optimizer.step()
            seen.append(len(accelerator.gather_for_metrics(out.detach().argmax(1))))
            assert len(accelerator.gather_for_metrics([str(one) for one in y])) == seen[-1]
    accelerator.end_training()
    return {"weights": flat(model), "seen": seen}


def evaluated(args: dict[str, Any]) -> dict[str, Any]:
    """Metrics of a test set, gathered in the loop, between the epochs of a training."""
    more = {"dataloader_config": DataLoaderConfiguration(even_batches=False)} if args.get("by_speed") else {}
    accelerator = made(args, **more)
    model = net()
    train, test = DataLoader(points(), batch_size=4, shuffle=True), DataLoader(points(args["test"], 7), batch_size=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    result: dict[str, Any] = {"seen": [], "own": [], "sizes": []}
    for _ in range(2):
        model.train()
        for x, y, _ in train:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        seen, right, losses = [], 0, []
        for x, y, index in test:
            with torch.no_grad():
                logits = model(x)
            ones, targets, where = accelerator.gather_for_metrics((logits.argmax(1), y, index))
            right += int((ones == targets).sum())
            seen += where.tolist()
            result["sizes"].append(len(x))
            losses.append(accelerator.gather_for_metrics(nn.functional.cross_entropy(logits, y).repeat(5)))
            if not args.get("plain"):
                total = accelerator.reduce(torch.tensor([len(x)]), "sum")
                assert int(total) >= len(where), (total, where)
                assert accelerator.gather_for_metrics([str(int(i)) for i in index]) == [str(i) for i in where.tolist()]
                longest = accelerator.pad_across_processes(index, dim=0, pad_index=-1)
                assert len(longest) >= len(index)
        result["seen"].append(seen)
        result["right"], result["loss"] = right, float(torch.cat(losses).mean())
        with torch.no_grad():
            whole = nn.functional.cross_entropy(
                model(points(args["test"], 7).tensors[0]), points(args["test"], 7).tensors[1]
            )
        result["whole"] = float(whole)
    result["length"] = len(test)
    result["weights"] = flat(model)
    accelerator.end_training()
    return result


class Counter:
    """An object of the script's own, saved with the rest."""

    def __init__(self) -> None:
        self.updates = 0

    def state_dict(self) -> dict[str, int]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.updates = state["updates"]


def resumed(args: dict[str, Any]) -> dict[str, Any]:
    """A training that saves at an update, ends at another, and goes on from the first, as scripts do."""
    accelerator = made(args, global_batch=8)
    set_seed(3)
    model = net()
    loader = DataLoader(points(), batch_size=4, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    per_epoch, first, skip = len(loader), 0, 0
    if args.get("load"):
        accelerator.load_state(args["load"])
        first, skip = divmod(counter.updates, per_epoch)
    seen: list[int] = []
    for epoch in range(first, 3):
        model.train()
        batches = accelerator.skip_first_batches(loader, skip) if skip and epoch == first else loader
        for x, y, index in batches:
            if accelerator.updates._kept is None:
                seen += index.tolist()
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                counter.updates += 1
                asked = accelerator.is_main_process or not args.get("on_main_process")
                if counter.updates == args.get("save_at") and asked:
                    accelerator.save_state(args["state"])
            if counter.updates == args.get("end_at"):
                break
        if counter.updates == args.get("end_at"):
            break
    result = {"weights": flat(model), "updates": counter.updates, "seen": seen, "rate": optimizer.param_groups[0]["lr"]}
    accelerator.end_training()
    return result


def together(args: dict[str, Any]) -> dict[str, Any]:
    """Everything that workers do together outside of a training."""
    accelerator = made(args)
    rank, size = accelerator.process_index, accelerator.num_processes
    found: dict[str, Any] = {"rank": rank, "size": size, "kind": str(accelerator.distributed_type)}
    found["gather"] = accelerator.gather({"a": torch.full((rank + 1,), rank), "b": torch.tensor(rank)})["a"].tolist()
    found["mean"] = accelerator.reduce(torch.tensor([1.0 + rank]), "mean").tolist()
    found["max"] = accelerator.reduce(torch.tensor([rank, 5]), "max").tolist()
    found["padded"] = accelerator.pad_across_processes(torch.arange(rank + 1), pad_index=-1).tolist()
    order = Path(args["folder"]) / "order"
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            time.sleep(0.2)
        with order.open("a") as file:
            file.write(f"{rank}\n")
    accelerator.wait_for_everyone()
    found["order"] = order.read_text().split()
    found["before"] = accelerator.check_trigger()
    if accelerator.is_last_process:
        accelerator.set_trigger()
    found["trigger"], found["after"] = accelerator.check_trigger(), accelerator.check_trigger()
    with accelerator.split_between_processes(list(range(5))) as mine:
        found["mine"] = mine
    accelerator.on_main_process(lambda: found.update(main=True))()
    accelerator.print("only once")
    accelerator.end_training()
    return found


def free(args: dict[str, Any]) -> dict[str, Any]:
    """Accelerate's free functions and states, which know of no Accelerator."""
    before = PartialState(cpu=True) if args.get("before") else None
    first = None if before is None else [before.process_index, before.num_processes]
    accelerator = made(args)
    rank, size = accelerator.process_index, accelerator.num_processes
    mine = torch.full((rank + 1, 2), float(rank))
    found: dict[str, Any] = {"first": first, "rank": rank, "size": size}
    found["gather"] = gather({"a": mine, "b": [torch.tensor(rank)]})["a"][:, 0].tolist()
    found["gather one"] = gather(torch.tensor(rank)).tolist()
    found["sum"], found["mean"], found["max"] = (
        reduce(torch.tensor([1.0, rank]), reduction=rule).tolist() for rule in ("sum", "mean", "max")
    )
    found["broadcast"] = broadcast((torch.tensor([rank + 0.5]), torch.tensor(rank)), from_process=1)[0].tolist()
    found["objects"] = gather_object([(rank, {"text": "ab", rank: None})])
    found["list"] = broadcast_object_list([rank, f"run{rank}", (rank,)] if rank == 1 else [None] * 3, from_process=1)
    found["padded"] = pad_across_processes(mine, dim=0, pad_index=-1)[:, 1].tolist()
    found["copied"] = copy_tensor_to_devices(torch.arange(3) + 1 if rank == 0 else None).tolist()
    wait_for_everyone()
    PartialState().wait_for_everyone()
    AcceleratorState().wait_for_everyone()
    order = Path(args["folder"]) / f"order{size}"
    with PartialState().main_process_first(), order.open("a") as file:
        file.write(f"{rank}\n")
    wait_for_everyone()
    found["order"] = order.read_text().split()[0]
    found["states"] = [
        [state.num_processes, state.process_index, state.is_main_process, state.is_last_process, state.use_distributed]
        for state in (PartialState(), AcceleratorState(), accelerator.state)
    ]
    found["kind"] = AcceleratorState().distributed_type == DistributedType.MULTI_CPU
    with PartialState().split_between_processes(torch.arange(2 * size + 1), apply_padding=True) as part:
        found["part"] = part.tolist()
    set_seed(5, device_specific=True)
    found["seed"] = torch.initial_seed()
    synchronize_rng_states(["torch"])
    found["drawn"] = torch.rand(1).item()
    logged = io.StringIO()
    logging.getLogger("free").addHandler(logging.StreamHandler(logged))
    logger = get_logger("free", log_level="INFO")
    logger.info("once")
    logger.info("each", main_process_only=False, in_order=True)
    found["logged"] = [line.split()[-1] for line in logged.getvalue().splitlines()]
    found["refused"] = []
    for call in (lambda: gather_object([object()]), lambda: broadcast(torch.zeros(1), from_process=size)):
        try:
            call()
        except (MisuseError, ValueError) as error:
            found["refused"].append(str(error))
    os.environ["ACCELERATE_DEBUG_MODE"] = "1"
    PartialState._shared_state["debug"] = True
    found["checked"] = gather(torch.ones(2)).tolist()
    PartialState._shared_state["debug"] = False
    accelerator.end_training()
    try:
        gather(torch.ones(2))
    except MisuseError as error:
        found["refused"].append(str(error))
    return found


def free_elastic(args: dict[str, Any]) -> dict[str, Any]:
    """Free functions where workers come and go: some are refused."""
    accelerator = made(args, global_batch=8)
    found: dict[str, Any] = {"list": broadcast_object_list(["a" if accelerator.is_main_process else "b"])}
    found["gather"] = len(gather(torch.ones(1)))
    found["refused"] = []
    for call in (
        lambda: reduce(torch.ones(1)),
        lambda: broadcast(torch.ones(1), from_process=1),
        lambda: PartialState().split_between_processes([1, 2]),
    ):
        try:
            call()
        except MisuseError as error:
            found["refused"].append(str(error))
    accelerator.end_training()
    return found


def early_state(args: dict[str, Any]) -> str:
    """Accelerate's state before the Accelerator, which has taken this worker for the only one."""
    PartialState()
    try:
        made(args)
    except MisuseError as error:
        return str(error)
    return ""


def calls(accelerator: Any, model: Any, optimizer: Any, loader: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """A call of each public method of Accelerate's own class, between two trainings."""

    def within(block: Any) -> None:
        with block:
            pass

    def nothing(*_: Any) -> None:
        pass

    one = torch.ones(2)
    return {
        "accumulate": lambda: within(accelerator.accumulate(model)),
        "autocast": lambda: within(accelerator.autocast()),
        "backward": lambda: accelerator.backward(torch.ones((), requires_grad=True)),
        "check_trigger": accelerator.check_trigger,
        "clear": accelerator.clear,
        "clip_grad_norm_": lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0),
        "clip_grad_value_": lambda: accelerator.clip_grad_value_(model.parameters(), 1.0),
        "deepspeed_ulysses_dl_adapter": lambda: accelerator.deepspeed_ulysses_dl_adapter(loader, model),
        "end_training": accelerator.end_training,
        "free_memory": accelerator.free_memory,
        "gather": lambda: accelerator.gather(one),
        "gather_for_metrics": lambda: accelerator.gather_for_metrics(one),
        "get_state_dict": lambda: accelerator.get_state_dict(model),
        "get_tracker": lambda: accelerator.is_main_process or accelerator.get_tracker("none"),
        "init_trackers": lambda: accelerator.init_trackers("project", {"lr": 0.1}),
        "join_uneven_inputs": lambda: within(accelerator.join_uneven_inputs([model], even_batches=False)),
        "load_state": lambda: accelerator.load_state(folder / "state"),
        "local_main_process_first": lambda: within(accelerator.local_main_process_first()),
        "log": lambda: accelerator.log({"loss": 1.0}, step=0),
        "lomo_backward": lambda: accelerator.lomo_backward(one.sum(), 0.1),
        "main_process_first": lambda: within(accelerator.main_process_first()),
        "maybe_context_parallel": lambda: within(accelerator.maybe_context_parallel()),
        "no_sync": lambda: within(accelerator.no_sync(model)),
        "on_last_process": lambda: accelerator.on_last_process(nothing)(),
        "on_local_main_process": lambda: accelerator.on_local_main_process(nothing)(),
        "on_local_process": lambda: accelerator.on_local_process(nothing, local_process_index=0)(),
        "on_main_process": lambda: accelerator.on_main_process(nothing)(),
        "on_process": lambda: accelerator.on_process(nothing, process_index=1)(),
        "pad_across_processes": lambda: accelerator.pad_across_processes(one),
        "prepare": lambda: accelerator.prepare(model, optimizer, loader),
        "prepare_data_loader": lambda: accelerator.prepare_data_loader(loader),
        "prepare_model": lambda: accelerator.prepare_model(model),
        "prepare_optimizer": lambda: accelerator.prepare_optimizer(optimizer),
        "prepare_scheduler": lambda: accelerator.prepare_scheduler(cosine(optimizer, 4)),
        "print": lambda: accelerator.print("walked"),
        "profile": lambda: within(accelerator.profile()),
        "reduce": lambda: accelerator.reduce(one),
        "register_for_checkpointing": lambda: accelerator.register_for_checkpointing(Counter()),
        "register_load_state_pre_hook": lambda: accelerator.register_load_state_pre_hook(nothing),
        "register_save_state_pre_hook": lambda: accelerator.register_save_state_pre_hook(nothing),
        "save": lambda: accelerator.save(one, folder / "one.pt"),
        "save_model": lambda: accelerator.save_model(model, folder / "model"),
        "save_state": lambda: accelerator.save_state(folder / "state"),
        "set_trigger": accelerator.set_trigger,
        "skip_first_batches": lambda: accelerator.skip_first_batches(loader, 1),
        "split_between_processes": lambda: within(accelerator.split_between_processes([1, 2, 3])),
        "trigger_sync_in_backward": lambda: within(accelerator.trigger_sync_in_backward(model)),
        "unscale_gradients": accelerator.unscale_gradients,
        "unwrap_model": lambda: accelerator.unwrap_model(model),
        "verify_device_map": lambda: accelerator.verify_device_map(model),
        "wait_for_everyone": accelerator.wait_for_everyone,
    }


LAST_CALLS = ("save_state", "load_state", "clear", "free_memory", "end_training")


def walked(args: dict[str, Any]) -> dict[str, str]:
    """What each public attribute of Accelerate's own class, and of what it prepares, gives: ok, or the refusal."""
    accelerator = made(args)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(points(), batch_size=4))
    schedule = accelerator.prepare(cosine(optimizer, 4))
    methods = calls(accelerator, model, optimizer, loader, Path(args["folder"]))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    names = [name for name in dir(accelerate.Accelerator) if not name.startswith("_") and name not in LAST_CALLS]
    found: dict[str, str] = {}

    def look(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            found[name] = "ok"
        except (MisuseError, ValueError, AttributeError) as refusal:
            found[name] = f"{type(refusal).__name__}: {refusal}"

    for name in [*names, *LAST_CALLS]:
        if name == "set_trigger":
            accelerator.check_trigger()
        read = isinstance(getattr(accelerate.Accelerator, name), property)
        look(name, (lambda name=name: getattr(accelerator, name)) if read else methods[name])
        if name == "no_sync":
            for thing in (accelerator, optimizer, schedule, loader):
                look(f"pickle {type(thing).__name__}", lambda thing=thing: pickle.dumps(thing))
            assert isinstance(loader, DataLoader)
            own = DataLoaderShard(points(), batch_sampler=BatchSampler(range(4), 2, False), device="cpu")
            for name in {*dir(DataLoaderShard), *vars(own)} - ITS_LOOPS:
                if not name.startswith("_"):
                    look(f"loader {name}", lambda name=name: used(loader, name))
            shard = BatchSamplerShard(BatchSampler(range(4), 2, False))
            for name in (*vars(shard), "total_length", "__len__", "__iter__"):
                look(f"sampler {name}", lambda name=name: used(loader.batch_sampler, name))
    return found


ITS_LOOPS = {"begin", "end", "reset", "adjust_state_dict_for_prefetch", "skip_batches", "iteration"}
"""Names of a prepared loader that only Accelerate's own loop uses."""


def used(thing: Any, name: str) -> None:
    value = getattr(thing, name)
    if name in ("__len__", "__iter__", "state_dict", "get_sampler"):
        value()
    if name in ("set_sampler", "load_state_dict"):
        value(None)


def stopped(args: dict[str, Any]) -> dict[str, Any]:
    """Early stopping as in Accelerate's example, which asks before the update; then another model is trained."""
    accelerator = made(args)
    counts = []
    for stop in (3, 100):
        model = net()
        loader = DataLoader(points(48), batch_size=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        updates = 0
        for x, y, _ in loader:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            if updates == stop and accelerator.is_last_process:
                accelerator.set_trigger()
            if accelerator.check_trigger():
                break
            optimizer.step()
            optimizer.zero_grad()
            updates += accelerator.sync_gradients
        counts.append(updates)
        model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    accelerator.end_training()
    return {"updates": counts}


def elastic(args: dict[str, Any]) -> dict[str, Any]:
    """A training in which workers die and return; it takes time until there is a file *hurry*."""
    accelerator = made(args, global_batch=8)
    model = net(int(os.environ["PACELINE_WORKER"]))
    loader, test = DataLoader(points(), batch_size=4, shuffle=True), DataLoader(points(10, 7), batch_size=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.9)
    model, optimizer, loader, test, schedule = accelerator.prepare(model, optimizer, loader, test, schedule)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    for _ in range(args["epochs"]):
        model.train()
        for x, y, _ in loader:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            counter.updates += accelerator.sync_gradients
            if not Path(os.environ["PACELINE_RUN_DIR"]).with_name("hurry").exists():
                time.sleep(0.03)
        model.eval()
        seen = []
        for _, _, index in test:
            seen += accelerator.gather_for_metrics(index).tolist()
        assert seen == list(range(10))
    result = {"weights": flat(model), "updates": counter.updates, "rate": optimizer.param_groups[0]["lr"]}
    result["counted"] = accelerator.last_step.index + 1
    accelerator.end_training()
    return result


def by_feature(args: dict[str, Any]) -> Any:
    """A script for Accelerate: as it is, or with the import changed and nothing else."""
    folder = Path(__file__).parent / "by_feature"
    sys.path.insert(0, str(folder))
    script = folder / f"{args['script']}.py"
    text = script.read_text()
    alone = as_if_alone(ACCELERATE_USE_CPU="1") if args.get("plain") else contextlib.nullcontext()
    if not args.get("plain"):
        (before,) = [line for line in text.splitlines() if line == "from accelerate import Accelerator"]
        text = text.replace(before, "from paceline.adapters.accelerate import Accelerator")
    if "elastic" in args:
        text = text.replace("Accelerator(", f"Accelerator(global_batch={args['elastic']}, ")
    names: dict[str, Any] = {"__name__": args["script"]}
    exec(compile(text, str(script), "exec"), names)
    if "elastic" in args:
        names["Accelerator"] = mortal(names["Accelerator"], args)
    if "batches" in args:
        loaders = names["dataloaders"]
        names["dataloaders"] = lambda batch_size: replayed(*loaders(batch_size), args["batches"])
    with alone:
        return names["training_function"](**args["given"])


class Replayed(BatchSampler):
    """The batches of one epoch after the other; their number, by which schedules are made, is that of whole ones."""

    def __init__(self, epochs: list[list[list[int]]], count: int) -> None:
        self._epochs, self._count = iter(epochs), count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Any:
        return iter(next(self._epochs))


def replayed(train: Any, test: Any, epochs: list[list[list[int]]]) -> Any:
    return DataLoader(train.dataset, batch_sampler=Replayed(epochs, len(train))), test


def mortal(kind: Any, args: dict[str, Any]) -> Any:
    """Return an Accelerator whose worker is killed once, before or behind one of its calls of backward."""
    run = Path(os.environ["PACELINE_RUN_DIR"])
    slot, at, when = args.get("victim"), args.get("at"), args.get("when")

    class Mortal(kind):
        calls = 0

        def backward(self, loss: torch.Tensor, **more: Any) -> None:
            died = run.with_name("died")
            ends = os.environ["PACELINE_WORKER"] == str(slot) and self.calls == at and not died.exists()
            if ends and when == "before":
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            super().backward(loss, **more)
            if ends:
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            self.calls += 1
            if not run.with_name("hurry").exists():
                time.sleep(0.02)

    return Mortal


def example(args: dict[str, Any]) -> str:
    """The example, and what it prints."""
    folder = Path(__file__).parents[2] / "examples"
    sys.path.insert(0, str(folder))
    sys.argv = ["accelerate_digits.py", *args["args"]]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(folder / "accelerate_digits.py"), run_name="__main__")
    return "".join(line for line in printed.getvalue().splitlines(keepends=True) if line.startswith("epoch"))


SCRIPTS = "accelerate.test_utils.scripts"


def own_checks(args: dict[str, Any]) -> dict[str, str]:
    """Checks of Accelerate's own scripts, one after the other, with its class replaced by this one."""
    os.environ["ACCELERATE_USE_CPU"] = "1"
    for missing in ("datasets", "evaluate"):  # imported by two scripts for checks that download
        if importlib.util.find_spec(missing) is None:
            sys.modules[missing] = Mock(__spec__=importlib.machinery.ModuleSpec(missing, None))
    found = {}
    for module, function, given in args["checks"]:
        script = importlib.import_module(f"{SCRIPTS}.{module}")
        script.Accelerator = partial(Accelerator, quiet=True, pace=args.get("pace"))
        if hasattr(script, "RegressionDataset"):  # by default each process has other data, which a fleet refuses
            script.RegressionDataset = partial(RegressionDataset, seed=7)
        accelerator = script.Accelerator()
        there = {"accelerator": accelerator, "state": PartialState()}
        if "loader" in given:
            data = script.DummyDataset()
            settings: dict[str, dict[str, Any]] = {
                "in order": {"batch_size": 4, "num_workers": 1},
                "shuffled": {"batch_size": 4, "shuffle": True},
                "batch sampler": {"batch_sampler": BatchSampler(RandomSampler(data), 4, False)},
            }
            there["data_loader"] = DataLoader(data, **settings[given["loader"]])
        options = {name: value for name, value in given.items() if name != "loader"}
        wanted = [name for name in inspect.signature(getattr(script, function)).parameters if name in there]
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                getattr(script, function)(**options, **{name: there[name] for name in wanted})
            found[f"{function} {given}"] = "passes"
        except Exception as error:
            found[f"{function} {given}"] = f"{type(error).__name__}: {error}"
            if not args.get("survey"):
                raise
        accelerator.free_memory()
    accelerator.end_training()
    return found
