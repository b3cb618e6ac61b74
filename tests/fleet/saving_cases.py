"""Trainings that save by themselves, for real workers: killed, resumed, at other sizes and with other paces."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from exact_cases import Numbers
from torch import nn

import paceline

RANK = int(os.environ.get("RANK", "0"))


class Tally:
    """How often each position of each epoch was counted. It is tracked, so a checkpoint's tally says what its weights
    have seen, whatever was done and lost before."""

    def __init__(self, epochs: int, length: int) -> None:
        self.counts = torch.zeros(epochs, length, dtype=torch.int64)

    def add(self, record: paceline.StepRecord) -> None:
        for start, stop in (part for worker in record.ranges for part in worker):
            self.counts[record.epoch, start:stop] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = state["counts"].clone()


def counted(args: dict[str, Any]) -> dict[str, Any]:
    """Train, saving by itself; returns the tally of what the final weights have seen."""
    folder, epochs, length = Path(args["folder"]), args["epochs"], args["length"]
    if args.get("stuck_at"):
        _get_stuck_in_fsync(args["stuck_at"], Path(args["sign"]))
    with paceline.join(args.get("pace", "adaptive"), combine=args.get("combine", "gradients"), quiet=True) as fleet:
        model = fleet.model(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-7, momentum=0.9)
        tally = Tally(epochs, length)
        fleet.track(optimizer=optimizer, tally=tally)
        fleet.autosave(
            folder / str(RANK) if args.get("apart") else folder, every_steps=args["every"], extra=lambda: "x"
        )
        extra = fleet.load(folder, missing_ok=True)
        first, known = None, len(fleet.history)
        for step in fleet.steps(Numbers(length), global_batch=args["global_batch"], micro_batch=4, epochs=epochs):
            first = step.index if first is None else first
            for x in step:
                step.backward(model(x).square().mean())
            step.commit(optimizer)
            rounds = (
                list(fleet.history)[known:] if "combine" in args else [step.record]
            )  # of averages, or the step's own
            for record in rounds:
                tally.add(record)
            known = len(fleet.history)
            time.sleep(args.get("pause_s", 0.0))
        weights = [value for p in model.parameters() for value in p.flatten().tolist()]
        return {
            "tally": tally.counts.tolist(),
            "extra": extra,
            "first": first,
            "last": step.index,
            "weights": weights,
            "folder": sorted(file.name for file in folder.iterdir()) if folder.exists() else [],
        }


def _get_stuck_in_fsync(number: int, sign: Path) -> None:
    """The disk stops answering in the middle of the ``number``-th checkpoint."""
    fsync, calls = os.fsync, 0

    def stuck(handle: int) -> None:
        nonlocal calls
        calls += not os.path.isdir(f"/proc/self/fd/{handle}")
        if calls == number:
            sign.touch()
            time.sleep(600)
        fsync(handle)

    os.fsync = stuck
