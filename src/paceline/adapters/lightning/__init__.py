"""Lightning's Trainer on a fleet: ``Trainer(strategy=PacelineStrategy(global_batch=256, micro_batch=16))``."""

from paceline.adapters.lightning.version import check_version

check_version()

from paceline.adapters.lightning.environment import hide_launcher  # noqa: E402
from paceline.adapters.lightning.strategy import PacelineStrategy  # noqa: E402

__all__ = ["PacelineStrategy", "hide_launcher"]
