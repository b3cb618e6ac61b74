"""Tests mirror the source; shared helpers lie beside the tests that use them."""

import sys
from pathlib import Path

from hypothesis import settings

settings.register_profile("patient", deadline=None)  # a busy computer is no failure
settings.load_profile("patient")
sys.path.insert(0, str(Path(__file__).parent / "fleet"))
