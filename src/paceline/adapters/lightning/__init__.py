"""Lightning's Trainer on a fleet: ``Trainer(strategy=PacelineStrategy(global_batch=256, micro_batch=16))``."""

from __future__ import annotations

import importlib.metadata

SUPPORTED = "2.6"
"""Version of Lightning whose inner loops the adapter follows; other versions may have changed them."""


def check_version() -> None:
    """Raise ImportError that states what to install, unless Lightning is installed in the supported version."""
    try:
        found = importlib.metadata.version("lightning")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError("paceline.adapters.lightning needs Lightning: pip install 'paceline[lightning]'") from None
    if ".".join(found.split(".")[:2]) != SUPPORTED:
        raise ImportError(
            f"paceline.adapters.lightning works with Lightning {SUPPORTED}, and {found} is installed: "
            f"pip install 'lightning>={SUPPORTED},<2.7'"
        )


check_version()

from paceline.adapters.lightning.strategy import PacelineStrategy, hide_launcher  # noqa: E402

__all__ = ["PacelineStrategy", "hide_launcher"]
