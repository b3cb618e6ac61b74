"""Emulated machines, which make a worker as slow as another machine, for experiments on one computer.

Nothing is emulated unless the user asks for it, with ``paceline run --emulate`` or the variable PACELINE_EMULATE.

>>> slow = parse_fleet("1,4", sample_ms=2.0)[1]
>>> slow.seconds(step=0, samples=10)
0.08
"""

from __future__ import annotations

import os
from dataclasses import replace

from paceline.machines.machine import Machine, parse_fleet
from paceline.machines.trace import Trace, read_trace

__all__ = ["SAMPLE_MS", "Machine", "Trace", "from_env", "parse_fleet", "read_trace"]

SAMPLE_MS = 2.0
"""Default milliseconds per sample of the reference machine, without PACELINE_SAMPLE_MS."""


def from_env(rank: int, *, around: bool = False) -> Machine | None:
    """Return the machine that worker ``rank`` emulates, from PACELINE_EMULATE, PACELINE_SAMPLE_MS and PACELINE_SEED.

    An elastic fleet (``around``) may have more workers than machines: the list then begins again, with the worker's own
    jitter.
    """
    text = os.environ.get("PACELINE_EMULATE", "").strip()
    if not text:
        return None
    sample_ms = _number("PACELINE_SAMPLE_MS", SAMPLE_MS)
    fleet = parse_fleet(text, sample_ms=sample_ms, seed=int(_number("PACELINE_SEED", 0)))
    if around:
        return replace(fleet[rank % len(fleet)], rank=rank)
    if rank >= len(fleet):
        raise ValueError(
            f"PACELINE_EMULATE ({text!r}) describes {len(fleet)} machines, but this is worker {rank} "
            f"(counted from 0): give one machine for each worker"
        )
    return fleet[rank]


def _number(variable: str, default: float) -> float:
    text = os.environ.get(variable, "").strip()
    try:
        return float(text) if text else default
    except ValueError:
        raise ValueError(f"{variable} is {text!r}, which is not a number") from None
