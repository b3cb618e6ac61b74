"""Tests mirror the source; shared helpers lie beside the tests that use them."""

import os
import sys
from pathlib import Path

from hypothesis import settings

settings.register_profile("thorough", deadline=None)  # a busy computer is no failure
settings.register_profile("quick", deadline=None, max_examples=20)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "thorough"))
for folder in ("natural", "fleet"):
    sys.path.insert(0, str(Path(__file__).parent / folder))
