"""Workers on computers of their own: a benchmark's processes, each in a namespace of the switch between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _smoke import forked, free_port, smoking

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from switch import Switch, enter

PLACES, RESULT = "BENCHMARK_PLACES", "BENCHMARK_RESULT"
"""Variables of a worker: where each is, and where worker 0 leaves its figures."""


def run_on(switch: Switch, script: str, seats: Sequence[str], *args: str, within: float = 1800) -> Any:
    """Start ``script`` once for each seat, a computer's name, and return what worker 0 gave to `leave_result`."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        shared = {
            "MASTER_ADDR": switch.address(seats[0]),
            "GLOO_SOCKET_IFNAME": next(name for name, on in switch.networks.items() if seats[0] in on),
            "PACELINE_RUN_DIR": f"{folder}/run",
            PLACES: json.dumps([switch.place(seat) for seat in seats]),
            RESULT: str(result),
        }
        if smoking():
            sys.argv[1:] = args
            forked(sys.modules["__main__"].main, len(seats), **shared)
        else:
            _start([sys.executable, script, *args], len(seats), shared, within)
        return json.loads(result.read_text())


def _start(command: Sequence[str], count: int, shared: Mapping[str, str], within: float) -> None:
    port = {"MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    workers = []
    try:
        for rank in range(count):
            own = {"RANK": str(rank), "LOCAL_RANK": "0"}
            workers.append(subprocess.Popen(command, env={**os.environ, **shared, **port, **own}))
        codes = [worker.wait(within) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    if any(codes):
        raise SystemExit(f"a worker failed: exit codes {codes}")


def is_worker() -> bool:
    """Whether this process is one of `run_on`; it lives on its computer from here on."""
    if PLACES not in os.environ:
        return False
    enter(json.loads(os.environ[PLACES])[int(os.environ["RANK"])])
    return True


def leave_result(figures: Any) -> None:
    if os.environ["RANK"] == "0":
        Path(os.environ[RESULT]).write_text(json.dumps(figures))


def sent_bytes() -> int:
    """That this worker's computer has sent so far, headers included."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    cards = (line.split(":") for line in lines)
    return sum(int(figures.split()[8]) for name, figures in cards if name.strip() != "lo")
