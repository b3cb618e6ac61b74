"""Two source trees side by side: are losses and weights the same, bit for bit?

A change that should not alter the numbers shows here that it does not. Some twenty trainings, over paces, combines,
optimisers, checkpoints and a worker's death, run with each tree's library. They depend on no clock, or, where a pace
follows the measured speed, on one that the case itself moves, so that every run of one tree gives the same bits. Rounds
with a deadline are not among them: real waits of several threads decide what ends in time.

    git worktree add /tmp/before HEAD~5
    python benchmarks/same_numbers.py /tmp/before
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from _smoke import smoke

HERE = Path(__file__).parents[1]
BEFORE: Path | None = None
"""The other tree, unless the command line names one."""
ONLY: list[str] = []
globals().update(smoke(BEFORE=HERE, ONLY=["fixed", "average"]))
CASES = Path(__file__).with_name("_same_numbers_cases.py")


def found_by(tree: Path, names: list[str]) -> dict[str, Any]:
    """Return what each case finds with the library of this source tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = [sys.executable, str(CASES), *names]
    found: dict[str, Any] = {}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            name, result = json.loads(line)
            found[name] = result
            print(f"  {tree.name}: {name}", file=sys.stderr, flush=True)
    return found


def names_of_cases() -> list[str]:
    """Return the names of all cases."""
    sys.path.insert(0, str(CASES.parent))
    from _same_numbers_cases import CASES as cases

    return list(cases)


def main() -> None:
    """Compare the tree that is named with this one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "before", type=Path, nargs="?", default=BEFORE, help="the other source tree: a folder with src/paceline in it"
    )
    parser.add_argument("--only", nargs="*", help="names of cases; all unless given")
    asked = parser.parse_args()
    if asked.before is None:
        parser.error("name the other source tree")
    names = asked.only or ONLY or names_of_cases()
    before, after = (found_by(tree, names) for tree in (asked.before, HERE))
    unlike = [name for name in names if before.get(name) is None or before.get(name) != after.get(name)]
    print(json.dumps({"cases": len(names), "same": len(names) - len(unlike), "unlike": unlike}))
    sys.exit(1 if unlike else 0)


if __name__ == "__main__":
    main()
