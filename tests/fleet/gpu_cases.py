"""What only a GPU can show: no hidden synchronisation, mixed fleets, real half precision, real memory."""

from __future__ import annotations

import os
from typing import Any

import exact_cases
import failure_cases
import group_cases
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.step import ahead
from paceline.step.checks.sameness import is_examined


def data(length: int = 512, width: int = 32) -> TensorDataset:
    x = torch.randn(length, width, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def no_synchronisation(args: Any) -> int:
    """Every micro-batch of a training, with token weights and figures added, under a guard against synchronisation."""
    with paceline.join(quiet=True) as fleet:
        model = fleet.model(nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.Linear(64, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        count = 0
        for step in fleet.steps(data(), global_batch=128, micro_batch=16):
            torch.cuda.set_sync_debug_mode("error")
            for x, y in step:
                loss = nn.functional.mse_loss(model(x), y)
                step.add(error=loss)
                step.backward(loss, weight=(y > 0).sum() if count % 2 else None)
                count += 1
            torch.cuda.set_sync_debug_mode("default")
            step.commit(optimizer)
        for step in fleet.steps(
            data(), global_batch=128, micro_batch=16
        ):  # the weight is read, and stays on the device
            torch.cuda.set_sync_debug_mode("error")
            for x, y in step:
                kept = y > 0
                step.backward(((model(x) - y).square() * kept).sum() / kept.sum())
            torch.cuda.set_sync_debug_mode("default")
            step.commit(optimizer)
        return count


def no_host_wait(args: Any) -> dict[str, Any]:
    """A training alone: whole steps under a guard against synchronisation, and the same with a wait in every step."""
    found: dict[str, Any] = {"parameters": [], "losses": [], "guarded": 0}
    for devices in (("cuda",), ()):
        ahead.DEVICES = devices
        with paceline.join(quiet=True) as fleet:
            torch.manual_seed(0)
            model = fleet.model(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
            fleet.track(optimizer=optimizer)
            steps, kept = [], []
            for step in fleet.steps(data(), global_batch=64, micro_batch=16, epochs=3):
                guarded = bool(devices) and not is_examined(step.index) and not is_examined(step.index - 1)
                torch.cuda.set_sync_debug_mode("error" if guarded else "default")
                for x, y in step:
                    loss = nn.functional.mse_loss(model(x), y)
                    step.add(error=loss)
                    step.backward(loss)
                step.commit(optimizer, clip_norm=0.5)
                torch.cuda.set_sync_debug_mode("default")
                found["guarded"] += guarded
                steps.append(step)
                kept.append(step._ahead is not None)
            found["losses"].append([step.loss for step in steps])
            found["parameters"].append([float(v) for p in model.parameters() for v in p.detach().flatten()])
            found["ahead"] = found.get("ahead", 0) + sum(kept)
    return found


def mixed_precision(args: Any) -> dict[str, Any]:
    """fp16 with a GradScaler on the GPU, float32 on the CPU beside it, one step made to overflow."""
    with paceline.join("fixed:1,1" if args["workers"] > 1 else "equal", quiet=True) as fleet:
        torch.manual_seed(0)
        model = fleet.model(nn.Linear(32, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        on_gpu = fleet.device.type == "cuda"
        scaler = torch.amp.GradScaler(fleet.device.type, init_scale=1024.0, enabled=on_gpu)
        fleet.track(optimizer=optimizer, scaler=scaler)
        applied, losses = [], []
        for step in fleet.steps(data(), global_batch=64, micro_batch=16):
            for x, y in step:
                with torch.autocast(fleet.device.type, dtype=torch.float16, enabled=on_gpu):
                    out = model(x)
                loss = nn.functional.mse_loss(out.float(), y)
                step.backward(loss * (1e30 if step.index == 3 and on_gpu else 1.0))
            step.commit(optimizer)
            applied.append(step.applied)
            losses.append(step.loss)
        return {"applied": applied, "losses": losses, "scale": scaler.get_scale() if on_gpu else None}


def real_memory(args: dict[str, Any]) -> dict[str, Any]:
    """A share that does not fit this GPU's (restricted) memory at once: halved with ``whole``, else searched for."""
    torch.cuda.set_per_process_memory_fraction(2 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    with paceline.join(quiet=True) as fleet:
        layers = [layer for _ in range(24) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
        model = fleet.model(nn.Sequential(*layers, nn.Linear(1024, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        x = torch.randn(32768, 1024)
        data = TensorDataset(x, x.sum(1, keepdim=True))
        steps = fleet.steps(data, global_batch=32768, micro_batch="auto", **args)._loop
        for step in steps:
            for inputs, targets in step:
                step.backward(nn.functional.mse_loss(model(inputs), targets))
            step.commit(optimizer)
        return {
            "micro_batch": steps.dealing.micro_batch,
            "found": [record.micro_size for record in fleet.history],
            "samples": [record.total for record in fleet.history],
            "finite": bool(torch.isfinite(next(model.parameters())).all()),
        }


def exact(args: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return exact_cases.train_all(args)


def share_one_gpu(slot: str) -> dict[str, str]:
    """NCCL takes workers of unlike hosts for owners of unlike GPUs, though it is one here that they share."""
    host = {"NCCL_HOSTID": f"host{slot}", "NCCL_SOCKET_IFNAME": "lo"}
    return {"PACELINE_DEVICE": "cuda:0", "PACELINE_BACKEND": "nccl", "QUICK_EXIT": "", **host}


def exact_over_nccl(args: list[dict[str, Any]]) -> list[dict[str, Any]]:
    os.environ.update(share_one_gpu(os.environ["RANK"]))
    return exact(args)


def divided(args: dict[str, Any]) -> dict[str, Any]:
    """A model that the processes of a worker divide, those on the one GPU over NCCL."""
    if os.environ["PACELINE_DEVICE"].startswith("cuda"):
        os.environ.update(share_one_gpu(os.environ["PACELINE_SHARD"]))
    return group_cases.train(args)


def forever_over_nccl(args: dict[str, Any]) -> None:
    os.environ.update(share_one_gpu(os.environ["RANK"]))
    failure_cases.train_forever(args)
