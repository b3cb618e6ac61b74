"""Figures of the user's own, to Weights & Biases, TensorBoard, MLflow or a function: ``fleet.log``, ``fleet.log_to``.

Every worker may log, and the leader of the moment writes, so a figure is written once. None of these packages is
needed here: a writer is known by the call that it has.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

logger = logging.getLogger("paceline.observe")

Write = Callable[[dict[str, float], int], Any]
"""Takes figures by name, and the step they belong to."""


def write_to(writer: Any) -> Write:
    """How figures are given to this writer.

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
    """Raise ValueError unless all are single numbers; does not wait for a device."""
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
    """Where this worker would write figures, if it led."""

    def __init__(self, *, leads: Callable[[], bool], observe: Callable[[str, Mapping[str, Any]], None]) -> None:
        self._leads, self._observe = leads, observe
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
        self._observe("log", {"step": step, "figures": plain})
        for writer in self._writers:
            writer.write(plain, step)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


class _Writer:
    """One of them, made when it is first needed."""

    def __init__(self, writer: Any, make: Callable[[], Any] | None) -> None:
        self._writer, self._make = writer, make
        self._write = write_to(writer) if writer is not None else None
        self._worked = self._warned = False

    def write(self, figures: dict[str, float], step: int) -> None:
        """An error at the first time is raised, for the set-up is wrong. Later it is a warning: a training must not end
        because a server is away."""
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
        """What was made here is ended here; the user's own is only flushed."""
        calls = ("finish", "close") if self._make is not None else ("flush",)
        end = next((end for call in calls if callable(end := getattr(self._writer, call, None))), None)
        if end is None or self._write is None:
            return
        try:
            end()
        except Exception as error:
            logger.warning("fleet.log: %s could not be ended (%s)", type(self._writer).__name__, error)
