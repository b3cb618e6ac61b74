"""A run for Prometheus: its text format, with HELP and TYPE lines. Served by the live page at ``/metrics``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.observe.page.live import LiveRun

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Sample = tuple[Mapping[str, Any], float | None]
"""Labels and a value; None is left out."""


def metrics(live: LiveRun) -> str:
    """The newest figures; speeds and waiting are over the last 20 steps."""
    now, run = live.snapshot(), live.run
    info = {key: run.get(key, "") for key in ("name", "run_id", "pace", "combine", "transport", "backend")}

    def each(figure: str) -> list[Sample]:
        return [({"worker": row.worker, "machine": row.machine}, float(getattr(row, figure))) for row in now.present]

    families: list[tuple[str, str, str, list[Sample]]] = [
        ("run_info", "gauge", "The run; always 1.", [(info, 1.0)]),
        ("run_ended", "gauge", "Whether the log holds the run's end.", [({}, float(live.end is not None))]),
        ("steps_total", "counter", "Steps committed since the run's start.", [({}, float(live.steps))]),
        ("samples_total", "counter", "Samples counted since the run's start.", [({}, float(live.samples))]),
        ("last_step_timestamp_seconds", "gauge", "When the newest step was logged.", [({}, live.last_t)]),
        ("samples_per_second", "gauge", "Samples a second of the fleet.", [({}, now.samples_per_s)]),
        ("limit_samples_per_second", "gauge", "The sum of the workers' own speeds.", [({}, now.limit or None)]),
        ("of_limit_ratio", "gauge", "Part of the limit that was reached.", [({}, now.of_limit or None)]),
        ("loss", "gauge", "The fleet's weighted mean loss in the newest step.", [({}, now.loss)]),
        ("workers", "gauge", "Workers present.", [({}, float(len(now.present)))]),
        ("worker_share_samples", "gauge", "The worker's samples in the newest step.", each("samples")),
        ("worker_samples_per_second", "gauge", "The worker's own speed.", each("speed")),
        ("worker_waiting_ratio", "gauge", "Part of a step the worker waits.", each("waiting")),
    ]  # fmt: skip
    if live.elastic:
        told = "Memberships of the fleet since the run's start."
        families.append(("generations_total", "counter", told, [({}, float(live.generations))]))
    return "".join(_family(f"paceline_{name}", kind, text, samples) for name, kind, text, samples in families)


def _family(name: str, kind: str, text: str, samples: Iterable[Sample]) -> str:
    known = [(labels, value) for labels, value in samples if value is not None and math.isfinite(value)]
    lines = [f"{name}{_labels(labels)} {float(value)!r}" for labels, value in known]
    return "\n".join([f"# HELP {name} {text}", f"# TYPE {name} {kind}", *lines]) + "\n"


def _labels(labels: Mapping[str, Any]) -> str:
    inside = ",".join(f'{key}="{_escaped(str(value))}"' for key, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
