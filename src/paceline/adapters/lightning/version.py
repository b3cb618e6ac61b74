"""Whether the Lightning that is installed is one whose loops are known here."""

from __future__ import annotations

import importlib.metadata

SUPPORTED = "2.6"
"""The adapter follows the loops inside Lightning, which other versions may have changed."""


def check_version() -> None:
    """Raise ImportError with what to install, unless Lightning is there and of the version that is supported."""
    try:
        found = importlib.metadata.version("lightning")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError("paceline.adapters.lightning needs Lightning: pip install 'paceline[lightning]'") from None
    if ".".join(found.split(".")[:2]) != SUPPORTED:
        raise ImportError(
            f"paceline.adapters.lightning works with Lightning {SUPPORTED}, and {found} is installed: "
            f"pip install 'lightning>={SUPPORTED},<2.7'"
        )
