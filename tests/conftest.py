"""Tests mirror the source; shared helpers lie beside the tests that use them."""

import os
import signal
import sys
from pathlib import Path

from hypothesis import settings

settings.register_profile("thorough", deadline=None)  # a busy computer is no failure
settings.register_profile("quick", deadline=None, max_examples=20)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "thorough"))
for folder in ("natural", "fleet"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

# A suite that was started with nohup or & ignores these signals, and what it starts would inherit that. A handler that
# does nothing ignores them as well, but the children begin with the system's own: they are sent some in tests.
IGNORED = "SUITE_IGNORES"
"""Variable for the suite's own processes (xdist's), which are children too."""
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN or str(number.value) in os.environ.get(IGNORED, "").split():
        signal.signal(number, lambda *_: None)
        os.environ[IGNORED] = f"{os.environ.get(IGNORED, '')} {number.value}"
