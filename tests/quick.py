"""How thorough properties are tested: quickly (``make check``), as usual, or as they say (``thorough``)."""

import os

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "usual")
FEW = 12
"""Examples of a quick property."""
USUAL = 40


def examples(most: int) -> int:
    """For a property that says itself how many examples are enough."""
    return min(most, {"quick": FEW, "usual": USUAL}.get(PROFILE, most))
