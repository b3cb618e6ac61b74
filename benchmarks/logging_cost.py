"""What the event log costs a training: microseconds of CPU a step, and the length of 10 ms steps with it and without.

CPU is that of the whole process, the thread that writes the file included. Blocks of steps with and without a log,
longer than the log's own period, take turns, so that whatever else the computer does meets both; the ratio is the
median over pairs of neighbours. A full disk and a folder deleted in mid-run are tried as well: the run must go on at
the same speed, with one warning.

(The file is not called logging.py: Python would then take it for its own module in every script beside it.)

    python benchmarks/logging_cost.py
"""

from __future__ import annotations

import json
import logging
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from _smoke import smoke

from paceline.observe import EventLog
from paceline.records import StepRecord

STEPS, STEP_S, PAIRS, BLOCK = 1_000, 0.010, 25, 40
TROUBLED = 300
"""Steps that are logged while the disk is full or gone."""
globals().update(smoke(STEPS=20, PAIRS=1, BLOCK=3, TROUBLED=120))
MICROSECONDS = 1e6


def record(step: int, workers: int) -> StepRecord:
    """As a run would write it: every field that a step can have is filled."""
    rng = np.random.default_rng(step)
    seconds = tuple(rng.uniform(0.01, 0.1, workers).tolist())
    ones, ranges = (1,) * workers, tuple(((k * 64, k * 64 + 64),) for k in range(workers))
    return StepRecord(
        step=step, epoch=0, generation=0, workers=tuple(range(workers)), planned=(64,) * workers,
        samples=(64,) * workers, seconds=seconds, micro_batches=ones, slowest_s=seconds, unfinished_s=seconds,
        behind=ones, late_s=seconds,
        forecast_s=seconds, deadline_s=0.1, wall_s=0.1, round_s=0.01, weight=64.0 * workers, loss=0.5, grad_norm=1.5,
        sums={"correct": 50.0}, ranges=ranges, shortfall_s=seconds,
    )  # fmt: skip


def cpu_us(workers: int) -> tuple[float, float]:
    """Microseconds of CPU a step: of the whole process, and of the thread that trains."""
    records = [record(k, workers) for k in range(STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        log = EventLog(Path(folder))
        whole, mine = time.process_time(), time.thread_time()
        for each in records:
            log.write("step", **vars(each))
        mine = time.thread_time() - mine
        log.close()
        whole = time.process_time() - whole
        written = sum(1 for _ in log.path.open())
    assert written == STEPS, f"only {written} of {STEPS} events are in the log"
    return MICROSECONDS * whole / STEPS, MICROSECONDS * mine / STEPS


def overhead() -> dict[str, float]:
    """Blocks of 10 ms steps with a log over the blocks without one beside them: the median ratio, by clock and CPU."""
    work, each = _work(), record(0, 4)
    ratios: dict[str, list[float]] = {"overhead": [], "overhead_cpu": []}
    with tempfile.TemporaryDirectory() as folder:
        log = EventLog(Path(folder))
        for pair in range(PAIRS):
            took = {}
            for logged in (True, False) if pair % 2 else (False, True):
                clock, cpu = time.perf_counter(), time.process_time()
                for _ in range(BLOCK):
                    work()
                    if logged:
                        log.write("step", **vars(each))
                took[logged] = (time.perf_counter() - clock, time.process_time() - cpu)
            for place, name in enumerate(ratios):
                ratios[name].append(took[True][place] / took[False][place])
            if sys.stderr.isatty():
                print(f"\r{pair + 1} of {PAIRS} pairs of blocks", end="", file=sys.stderr, flush=True)
        log.close()
    return {name: statistics.median(values) for name, values in ratios.items()}


def _work():
    """About 10 ms of arithmetic."""
    matrix = np.random.default_rng(0).random((64, 64))

    def repeat(times: int) -> None:
        for _ in range(times):
            matrix @ matrix

    repeat(100)
    trials = []
    for _ in range(20):
        started = time.perf_counter()
        repeat(100)
        trials.append(time.perf_counter() - started)
    times = max(1, round(100 * STEP_S / statistics.median(trials)))
    return lambda: repeat(times)


class Count(logging.Handler):
    warnings = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings += 1


def trouble(kind: str) -> dict[str, float | bool]:
    """Log through a full disk or a deleted folder: the longest call, and whether there was exactly one warning."""
    logger, count = logging.getLogger("paceline.observe"), Count()
    logger.addHandler(count)
    logger.propagate = False
    folder = Path(tempfile.mkdtemp())
    if kind == "full_disk":
        (folder / "events.jsonl").symlink_to("/dev/full")
    log, longest = EventLog(folder), 0.0
    for k in range(TROUBLED):
        if k == 100 and kind == "deleted_folder":
            shutil.rmtree(folder)
        started = time.perf_counter()
        log.write("step", **vars(record(k, 4)))
        longest = max(longest, time.perf_counter() - started)
        time.sleep(0.003)
    log.close()
    logger.removeHandler(count)
    shutil.rmtree(folder, ignore_errors=True)
    return {f"{kind}_longest_write_ms": 1000 * longest, f"{kind}_warned_once": count.warnings == 1}


def main() -> None:
    whole, mine = cpu_us(4)
    many, _ = cpu_us(64)
    figures: dict[str, float | bool] = {"us_per_step": whole, "us_per_step_training_thread": mine}
    figures |= {"us_per_step_64_workers": many} | overhead()
    figures |= trouble("full_disk") | trouble("deleted_folder")
    print(f"\n4 workers: {whole:.0f} us of CPU a step, of these {mine:.1f} in the training thread; 64: {many:.0f} us.")
    print(json.dumps({key: value if isinstance(value, bool) else round(value, 4) for key, value in figures.items()}))


if __name__ == "__main__":
    main()
