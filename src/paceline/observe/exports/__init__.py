"""Exports of a run: Perfetto, TensorBoard, CSV, and a flat dictionary per step for any logger (docs/monitoring.md)."""

from paceline.observe.exports.csv_and_tensorboard import write_csv, write_tensorboard
from paceline.observe.exports.perfetto import write_perfetto
from paceline.observe.exports.trackers import scalars

__all__ = ["scalars", "write_csv", "write_perfetto", "write_tensorboard"]
