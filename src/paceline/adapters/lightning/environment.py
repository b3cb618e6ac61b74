"""The launcher's variables, from which Lightning would conclude that it is to make a fleet of its own."""

from __future__ import annotations

from paceline.training.join import hide_variables

HIDDEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")


def hide_launcher() -> None:
    """Hide from Lightning or Fabric that a launcher started several workers; call it once the fleet is joined.

    `PacelineStrategy` does it by itself. A script with `paceline.join` and Fabric does it before it makes ``Fabric()``,
    which is then one process's, as it should be: the workers are the fleet's. A later `paceline.join` in the script
    still finds the others.
    """
    hide_variables(HIDDEN)
