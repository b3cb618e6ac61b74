"""Where a worker computes."""

from __future__ import annotations

import os

import torch


def choose(asked: str | torch.device | None) -> torch.device:
    """This worker's device: as asked, as the launcher says, a GPU of its own, or the CPU."""
    chosen = asked or os.environ.get("PACELINE_DEVICE")
    if chosen is None:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        chosen = f"cuda:{local}" if local < torch.cuda.device_count() else "cpu"
    try:
        device = torch.device(chosen)
    except RuntimeError:
        raise ValueError(f"device {chosen!r} is not one that torch knows, such as cpu or cuda:0") from None
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device {device} is not there: this machine has {torch.cuda.device_count()} GPUs")
        torch.cuda.set_device(device)
    return device
