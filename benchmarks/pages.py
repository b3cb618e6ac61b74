"""What the report and the live page cost: seconds and megabytes of a report, and one core's part for 20 viewers.

The runs are made up: 1,000 steps of 64 workers for the report (with ``--long`` also 100,000 steps of 32), and 4 and 100
workers whose log grows while 20 viewers look on. Times of reports are from the log on disk to the file, in a process of
their own; ``cpu`` is processor time, which other work on the computer changes less.

    python benchmarks/pages.py [--long]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from _smoke import smoke

VIEWERS, SETTLE_S, WATCHED_S = 20, 2.0, 8.0
REPORTED = (1_000, 64)
"""Steps and workers."""
globals().update(smoke(VIEWERS=2, SETTLE_S=0.5, WATCHED_S=1.5, REPORTED=(30, 4)))
REPORT = """
import resource, sys, time
started = time.perf_counter()
from typer.testing import CliRunner
from paceline.cli import app
result = CliRunner().invoke(app, ["report", sys.argv[1], "--html"])
assert result.exit_code == 0, result.output
usage = resource.getrusage(resource.RUSAGE_SELF)
print(time.perf_counter() - started, usage.ru_utime + usage.ru_stime)
"""


def events(steps: int, workers: int) -> Iterator[str]:
    """The lines of a log: machines of four kinds, shares by speed, 5 % noise, one stall in the middle."""
    rng = np.random.default_rng(0)
    speeds = 500 / np.array([1.0, 1.0, 1.5, 3.0])[rng.integers(4, size=workers)]
    shares = np.floor(32 * workers * speeds / speeds.sum()).astype(int)
    machines = [{"rank": rank, "device": "cpu"} for rank in range(workers)]
    yield json.dumps(
        {"event": "run", "t": 0.0, "version": 1, "name": "made up", "pace": "adaptive", "workers": machines}
    )
    clock, position, zeros = 0.0, 0, [0.0] * workers
    for step in range(steps):
        seconds = shares / speeds * np.exp(0.05 * rng.standard_normal(workers))
        seconds[0] *= 20 if step == steps // 2 else 1
        wall = float(seconds.max()) + 0.01
        clock += wall
        ends = position + np.cumsum(shares)
        ranges = [[[int(end - share), int(end)]] for share, end in zip(shares, ends)]
        position = int(ends[-1])
        record = {
            "step": step, "epoch": 0, "generation": 0, "workers": list(range(workers)), "planned": shares.tolist(),
            "samples": shares.tolist(), "seconds": seconds.tolist(), "micro_batches": [4] * workers, "late_s": zeros,
            "slowest_s": (seconds / 4).tolist(), "forecast_s": (shares / speeds).tolist(), "wall_s": wall,
            "round_s": 0.005, "loss": 1 / (1 + step), "ranges": ranges, "shortfall_s": zeros,
        }  # fmt: skip
        yield json.dumps({"event": "step", "t": clock, **record})


def write(folder: Path, steps: int, workers: int) -> Path:
    folder.mkdir()
    with (folder / "events.jsonl").open("w") as log:
        log.writelines(line + "\n" for line in events(steps, workers))
    return folder


def report(folder: Path, steps: int, workers: int, name: str) -> dict[str, float]:
    say(f"a report of {steps:,} steps of {workers} workers")
    run = write(folder / name, steps, workers)
    done = subprocess.run([sys.executable, "-c", REPORT, str(run)], capture_output=True, text=True, check=True)
    seconds, cpu = map(float, done.stdout.split())
    size = (run / "report.html").stat().st_size / 1e6
    return {f"{name}_s": seconds, f"{name}_cpu_s": cpu, f"{name}_mb": size}


def watched(folder: Path, workers: int) -> dict[str, float]:
    """One core's part that the server takes with 20 viewers, and the longest way of a step to a viewer."""
    from paceline.page.server import LivePage

    say(f"{VIEWERS} viewers of {workers} workers")
    run = write(folder / f"live{workers}", 300, workers)
    more = list(events(400, workers))[301:]
    page, stop = LivePage(run), threading.Event()
    waits: dict[float, float] = {}  # when a step was first seen, by when it was logged
    viewers = subprocess.Popen([sys.executable, __file__, "--view", page.url + "events"])  # their cost is not ours
    threading.Thread(target=_grow, args=(run, more, stop), daemon=True).start()
    time.sleep(SETTLE_S)
    clock, cpu, own = time.perf_counter(), time.process_time(), time.thread_time()
    with urllib.request.urlopen(page.url + "events") as stream:
        for line in stream:
            if line.startswith(b"data: "):
                waits.setdefault(json.loads(line[6:])["last"], time.time())
            if time.perf_counter() - clock > WATCHED_S and len(waits) > 1:
                break
    own = time.thread_time() - own  # to read the stamps is the measurement's cost, not the server's
    part = (time.process_time() - cpu - own) / (time.perf_counter() - clock)
    stop.set()
    viewers.terminate()
    viewers.wait()
    page.close()
    return {
        f"viewers_cpu_{workers}": part,
        f"step_to_viewer_s_{workers}": max(seen - logged for logged, seen in list(waits.items())[1:]),
    }


def _grow(run: Path, lines: list[str], stop: threading.Event) -> None:
    """A step every 0.3 s, stamped with the time it is written."""
    with (run / "events.jsonl").open("a") as log:
        for line in lines:
            log.write(json.dumps({**json.loads(line), "t": time.time()}) + "\n")
            log.flush()
            if stop.wait(0.3):
                return


def view(url: str) -> None:
    """Be the viewers, until ended."""

    def look() -> None:
        with urllib.request.urlopen(url) as stream:
            for _ in stream:
                pass

    for _ in range(VIEWERS):
        threading.Thread(target=look, daemon=True).start()
    threading.Event().wait()


def say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)


def main() -> None:
    if "--view" in sys.argv:
        view(sys.argv[-1])
        return
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        figures |= report(folder, *REPORTED, "report")
        figures |= watched(folder, 4) | watched(folder, 100)
        if "--long" in sys.argv:
            figures |= report(folder, 100_000, 32, "long_report")
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
