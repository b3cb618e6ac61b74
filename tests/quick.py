"""How thorough properties are tested: as they say, or quickly (``make check``)."""

import os

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "thorough")
FEW = 12
"""Examples of a quick property."""


def examples(most: int) -> int:
    """For a property that says itself how many examples are enough."""
    return min(most, FEW) if PROFILE == "quick" else most
