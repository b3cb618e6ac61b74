"""Figures for experiment trackers: those of a step (`scalars`), and the user's own (``fleet.log``, ``fleet.log_to``).

Every worker may log, and the leader of the moment writes to Weights & Biases, TensorBoard, MLflow or a function, so
that a figure is written once. None of these packages is needed here: a writer is recognised by the method that it has.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from paceline.records import StepRecord

logger = logging.getLogger("paceline.observe")
Write = Callable[[dict[str, float], int], Any]
"""A function of figures by name and the step that they belong to."""


def scalars(record: StepRecord) -> dict[str, float]:
    """Return the figures of a step by name, for TensorBoard, Weights & Biases, MLflow or any other logger.

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


def write_to(writer: Any) -> Write:
    """Return the function that gives figures to this writer.

    >>> write_to(lambda figures, step: print(step, figures))({"loss": 0.5}, 3)
    3 {'loss': 0.5}
    """
    if not isinstance(writer, logging.Logger):
        if callable(getattr(writer, "add_scalar", None)):  # torch's SummaryWriter, tensorboardX
            return lambda figures, step: [writer.add_scalar(name, value, step) for name, value in figures.items()]
        if callable(getattr(writer, "log_metrics", None)):  # mlflow, Lightning's loggers, Comet
            return lambda figures, step: writer.log_metrics(figures, step=step)
        if callable(getattr(writer, "log", None)):  # a run of wandb
            return lambda figures, step: writer.log(figures, step=step)
        if callable(writer):
            return lambda figures, step: writer(figures, step)
    raise ValueError(
        f"fleet.log_to takes a TensorBoard SummaryWriter, a wandb run, the mlflow module or a function of (figures, "
        f"step); {type(writer).__name__} has none of add_scalar, log_metrics and log: write a function that calls it"
    )


def check_figures(figures: Mapping[str, Any]) -> None:
    """Raise ValueError unless all figures are single numbers, without waiting for a device."""
    for name, value in figures.items():
        if not isinstance(name, str):
            raise ValueError(f"fleet.log takes figures by name, got the name {name!r}")
        single = callable(getattr(value, "item", None)) and math.prod(getattr(value, "shape", ())) == 1
        if not (single or isinstance(value, (int, float, np.number, np.bool_))):
            raise ValueError(
                f"fleet.log takes numbers, and {name!r} is a {type(value).__name__}: give anything else to your own "
                "logger, under fleet.is_leader"
            )


class Trackers:
    """The writers to which this worker gives figures while it is the leader."""

    def __init__(self, *, leads: Callable[[], bool], log_event: Callable[[str, Mapping[str, Any]], None]) -> None:
        self._leads, self._log_event = leads, log_event
        self._writers: list[_Writer] = []

    def add(self, writer: Any, make: Callable[[], Any] | None) -> None:
        if writer is not None and make is not None:
            raise ValueError("fleet.log_to takes a writer or make=..., a function that makes one, not both")
        if make is not None and not callable(make):
            raise ValueError(f"fleet.log_to(make=...) takes a function that makes a writer, got {type(make).__name__}")
        if writer is not None or make is not None:
            self._writers.append(_Writer(writer, make))

    def log(self, figures: Mapping[str, Any], step: int) -> None:
        check_figures(figures)
        if not figures or not self._leads():
            return
        plain = {name: float(value) for name, value in figures.items()}
        self._log_event("log", {"step": step, "figures": plain})
        for writer in self._writers:
            writer.write(plain, step)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


class _Writer:
    """One writer, made when it is first needed."""

    def __init__(self, writer: Any, make: Callable[[], Any] | None) -> None:
        self._writer, self._make = writer, make
        self._write = write_to(writer) if writer is not None else None
        self._worked = self._warned = False

    def write(self, figures: dict[str, float], step: int) -> None:
        """Write figures; an error of the first call is raised, one of a later call is a warning.

        An error at first means a wrong set-up. Later a training must not end because a server cannot be reached.
        """
        try:
            if self._write is None:
                assert self._make is not None
                self._writer = self._make()
                self._write = write_to(self._writer)
            self._write(dict(figures), step)
        except Exception as error:
            if not self._worked:
                raise
            if not self._warned:
                name = type(self._writer).__name__
                logger.warning("fleet.log: %s failed (%s): the training goes on, figures may be missing", name, error)
            self._warned = True
        self._worked = True

    def close(self) -> None:
        """Close a writer that was made here; flush one that the user made."""
        calls = ("finish", "close") if self._make is not None else ("flush",)
        end = next((end for call in calls if callable(end := getattr(self._writer, call, None))), None)
        if end is None or self._write is None:
            return
        try:
            end()
        except Exception as error:
            logger.warning("fleet.log: %s could not be ended (%s)", type(self._writer).__name__, error)
