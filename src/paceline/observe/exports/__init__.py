"""A run for other tools: Perfetto, TensorBoard, CSV, and a flat dictionary a step for any logger (docs/report.md)."""

from paceline.observe.exports.csv import write_csv
from paceline.observe.exports.perfetto import write_perfetto
from paceline.observe.exports.scalars import scalars
from paceline.observe.exports.tensorboard import write_tensorboard

__all__ = ["scalars", "write_csv", "write_perfetto", "write_tensorboard"]
