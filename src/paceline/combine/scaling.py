"""Loss scaling for half precision, with torch's GradScaler, when workers may hold unlike precisions.

Each worker divides its own scale out of its gradients before the round, so a bf16 worker, an fp16 worker and a CPU can
share a step. An overflow anywhere skips the update everywhere, and every scaler hears of it.
"""

from __future__ import annotations

from typing import Any


def next_state(state: dict[str, Any], *, overflow: bool) -> dict[str, Any]:
    """GradScaler's rule: an overflow backs the scale off; ``growth_interval`` steps without one let it grow.

    >>> state = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2, "_growth_tracker": 1}
    >>> next_state(state, overflow=False)["scale"], next_state(state, overflow=True)["scale"]
    (16.0, 4.0)
    """
    if overflow:
        return {**state, "scale": state["scale"] * state["backoff_factor"], "_growth_tracker": 0}
    if state["_growth_tracker"] + 1 >= state["growth_interval"]:
        return {**state, "scale": state["scale"] * state["growth_factor"], "_growth_tracker": 0}
    return {**state, "_growth_tracker": state["_growth_tracker"] + 1}


def is_active(scaler: Any) -> bool:
    return scaler is not None and bool(scaler.is_enabled())
