"""Starts a benchmark's workers as ``paceline run -q -n N`` does, also without the command line's packages.

python benchmarks/_launch.py 4 FOLDER SCRIPT ...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paceline.launcher.fixed_fleet import launch_fixed
from paceline.launcher.supervise import Order, worker_settings


def main() -> int:
    """Run the workers to their end; return their exit code."""
    workers, folder, script, *args = sys.argv[1:]
    run_dir = Path(folder) / "run"
    run_dir.mkdir()
    settings = worker_settings(name=Path(script).stem, run_dir=run_dir)
    return launch_fixed(Order((sys.executable, "-u", script, *args), int(workers), settings, run_dir, quiet=True))


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a thread that still imports torch could crash the interpreter's end
