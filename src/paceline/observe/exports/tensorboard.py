"""A run as TensorBoard's event file, written by torch's own `SummaryWriter`, which needs TensorBoard's package."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from paceline import concurrency
from paceline.observe.analysis.evaluations import evaluations, logged_figures
from paceline.observe.exports.scalars import scalars
from paceline.observe.log import sanitise
from paceline.observe.log.reader import RunLog

MOST_STEPS = 10_000
"""Of a longer run every few steps are written: TensorBoard draws a thousand points a curve."""
LARGEST = 3.4e38
"""What the 32-bit float of an event holds."""
MISSING = "TensorBoard's files need its package, which is not installed: pip install 'paceline[tensorboard]'"


def write_tensorboard(log: RunLog, folder: Path) -> Path:
    """Write ``folder/events.out.tfevents…`` with every figure of `scalars`, and what was evaluated and logged.

    A second export of the run into the same folder replaces the first: TensorBoard would draw both. Raises ValueError
    without TensorBoard.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(MISSING) from None
    folder.mkdir(parents=True, exist_ok=True)
    started = _started(log)
    suffix = f".paceline-{int(started)}"
    earlier = set(folder.glob(f"events.out.tfevents.*{suffix}"))
    with SummaryWriter(str(folder), filename_suffix=suffix) as writer:
        for step, t, figures in _rows(log):
            for name, value in figures.items():
                bounded = min(max(value, -LARGEST), LARGEST)
                writer.add_scalar(name, bounded, step, walltime=t if math.isfinite(t) else started)
    for file in earlier:
        file.unlink()
    return next(folder.glob(f"events.out.tfevents.*{suffix}"))


def _rows(log: RunLog) -> Iterator[tuple[int, float, Mapping[str, float]]]:
    """Step, Unix seconds (NaN when the log does not say) and figures by name."""
    every = -(-len(log.records) // MOST_STEPS) or 1
    for record, t in list(zip(log.records, log.times))[::every]:
        yield record.step, t, scalars(record)
    for found in evaluations(log.others):
        yield found.step, found.t, {f"evaluate/{name}": value for name, value in found.means.items()}
    yield from logged_figures(log.others)


def _started(log: RunLog) -> float:
    t = sanitise.timestamp(log.run.get("started", log.run.get("t")))
    return t if math.isfinite(t) else concurrency.time()
