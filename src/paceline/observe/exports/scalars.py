"""One step as a flat dictionary of numbers, the form every experiment tracker takes."""

from __future__ import annotations

import math

from paceline.records import StepRecord


def scalars(record: StepRecord) -> dict[str, float]:
    """Figures of a step by name, for TensorBoard, Weights & Biases, MLflow or any other logger.

    In a training loop, after the commit: ``wandb.log(scalars(step.record), step=step.index)``.
    What was not measured is left out.
    """
    figures: dict[str, float | None] = {
        "loss": record.loss,
        "grad_norm": record.grad_norm,
        "speed/samples_per_s": record.total / record.wall_s if record.wall_s > 0 else None,
        "time/step_s": record.wall_s,
        "time/round_s": record.round_s,
        "time/deadline_s": record.deadline_s,
        "fleet/workers": len(record.workers),
        "fleet/undone": sum(max(0, p - s) for p, s in zip(record.planned, record.samples)),
    }
    figures |= {f"sum/{name}": value for name, value in record.sums.items()}
    figures |= {f"share/worker {worker}": n for worker, n in zip(record.workers, record.samples)}
    figures |= {f"compute_s/worker {worker}": s for worker, s in zip(record.workers, record.seconds)}
    return {name: float(value) for name, value in figures.items() if value is not None and math.isfinite(value)}
