"""Loggers in an elastic fleet: the leader writes, and the leader may change."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from typing import Any

from lightning.fabric.loggers import CSVLogger
from lightning.fabric.loggers.csv_logs import _ExperimentWriter


def take_over(loggers: Iterable[Any]) -> None:
    """Go on with the CSV files that another worker began.

    Lightning's writer removes a file that it finds, and knows only the columns that it wrote itself: here the file is
    kept, and its columns are those that it has by now.
    """
    for logger in loggers:
        if not isinstance(logger, CSVLogger):
            continue
        path, text = os.path.join(logger.log_dir, _ExperimentWriter.NAME_METRICS_FILE), ""
        if logger._fs.isfile(path):
            with logger._fs.open(path, "r", newline="") as file:
                text = file.read()
        writer = logger.experiment
        if not text:
            continue
        if not logger._fs.isfile(path):
            with logger._fs.open(path, "w", newline="") as file:
                file.write(text)
        writer.metrics_keys = next(csv.reader(text.splitlines()))
