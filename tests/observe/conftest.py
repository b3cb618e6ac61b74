"""Synthetic runs: machines of known speed, so that every figure has a known answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from summary_writers import stand_in

from paceline.records import StepRecord

MakeRecord = Callable[..., StepRecord]


@pytest.fixture
def make_record() -> MakeRecord:
    def make(
        step: int, speeds: Sequence[float], shares: Sequence[int], *, other_s: float = 0.0, **more: Any
    ) -> StepRecord:
        """Return a step on machines of these samples/s; ``other_s`` is the time after the slowest gradient."""
        seconds = tuple(share / speed if share else 0.0 for share, speed in zip(shares, speeds))
        fields: dict[str, Any] = {
            "step": step,
            "epoch": 0,
            "generation": 0,
            "workers": tuple(range(len(shares))),
            "planned": tuple(shares),
            "samples": tuple(shares),
            "seconds": seconds,
            "wall_s": max(seconds) + other_s,
            "weight": float(sum(shares)),
            "loss": 1.0,
        }
        return StepRecord(**(fields | more))

    return make


@pytest.fixture
def summary_writer() -> Iterator[None]:
    with stand_in():
        yield


@pytest.fixture
def run_event() -> dict[str, Any]:
    workers = [
        {"rank": rank, "host": "here", "pid": rank, "device": "cpu", "emulated": f"{slow}x"}
        for rank, slow in enumerate((1, 1, 2, 4))
    ]
    return {
        "event": "run", "t": 1000.0, "version": 1, "run_id": "r", "name": "digits", "started": 1000.0,
        "pace": "adaptive", "combine": "gradients", "transport": "fixed", "backend": "gloo", "workers": workers,
    }  # fmt: skip
