"""Rules of the papers that a run does not need: the core knows them by name and imports them when they are asked for.

P2's weights (WP-SGD), P3's cut-off with its forecasts, and P4's elastic averages. Nothing outside imports this package;
the registries of paces, forecasts, merges and averaging weights list its names. They may change in any minor version.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.research.cutoff import Cutoff
    from paceline.research.elastic_average import ElasticAverage

__all__ = ["Cutoff", "ElasticAverage"]

_MODULES = {"Cutoff": "cutoff", "ElasticAverage": "elastic_average"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: most runs need none."""
    if name in _MODULES:
        return getattr(import_module(f"paceline.research.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'paceline.research' has no attribute {name!r}")
