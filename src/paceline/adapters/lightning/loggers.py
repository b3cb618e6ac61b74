"""Loggers in an elastic fleet: the leader writes, and the leader may change."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from lightning.fabric.loggers import CSVLogger


def take_over(loggers: Iterable[Any]) -> None:
    """Go on with the CSV files that another worker began: the columns are those that each file has by now.

    Lightning's writer knows only the columns that it wrote itself, and would write rows that do not fit the file.
    """
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            writer = logger.experiment
            with suppress(OSError, StopIteration), writer._fs.open(writer.metrics_file_path, "r", newline="") as file:
                writer.metrics_keys = next(csv.reader(file))
