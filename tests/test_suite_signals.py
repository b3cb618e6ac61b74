"""The suite itself under nohup, or in the background of a shell: what its tests start hears signals all the same."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = f"""
import os, runpy, subprocess, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
runpy.run_path(sys.path[0] + "/conftest.py")
child = "import signal; print(*(signal.getsignal(n) is signal.SIG_IGN for n in (signal.SIGINT, signal.SIGHUP)))"
print(subprocess.check_output([sys.executable, "-c", child], text=True).strip(), flush=True)
for number in (signal.SIGINT, signal.SIGHUP) if "again" not in sys.argv else ():
    os.kill(os.getpid(), number)
if "again" not in sys.argv:
    subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[1], "again"])
""".replace("import os,", "import signal, os,")


def ignore() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


@pytest.mark.slow
def test_under_nohup_the_suite_lives_on_and_its_children_hear_signals() -> None:
    command = [sys.executable, "-c", SUITE, SUITE]
    done = subprocess.run(command, preexec_fn=ignore, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "False False\nFalse False\n"), done.stderr
