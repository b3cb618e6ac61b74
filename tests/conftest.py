"""Tests mirror the source; shared helpers lie beside the tests that use them."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from quick import FEW, PROFILE, USUAL

settings.register_profile("thorough", deadline=None)  # a busy computer is no failure
settings.register_profile("usual", deadline=None, max_examples=USUAL)
settings.register_profile("quick", deadline=None, max_examples=FEW)
settings.load_profile(PROFILE)
for folder in ("natural", "fleet", "cli"):
    sys.path.insert(0, str(Path(__file__).parent / folder))
sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

# A suite that was started with nohup or & ignores these signals, and what it starts would inherit that. A handler that
# does nothing ignores them as well, but the children begin with the system's own: they are sent some in tests.
IGNORED = "SUITE_IGNORES"
"""Variable for the suite's own processes (xdist's), which are children too."""
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN or str(number.value) in os.environ.get(IGNORED, "").split():
        signal.signal(number, lambda *_: None)
        os.environ[IGNORED] = f"{os.environ.get(IGNORED, '')} {number.value}"


_frozen_modules = 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What imports have left, hundreds of thousands of objects, need not be looked at again by every loop that searches
    for things with state, nor by every collection of garbage."""
    global _frozen_modules
    if len(sys.modules) > _frozen_modules + 100:
        gc.collect()
        gc.freeze()
        _frozen_modules = len(sys.modules)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Any]:
    from shells import Shell

    shell = Shell(tmp_path)
    yield shell
    for process in shell.started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.communicate()
