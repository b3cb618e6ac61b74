"""The members of a fleet, and how they reach each other.

- *group*: the members of one generation, with an engine between them. It *stands* once it is *settled*: all members
  have compared which calls they have finished, and handed results to those that lack them.
- *lane*: one of the two sequences of calls, each the same on every worker: those of the user's thread, and the
  *background* rounds, which another thread runs beside it (the proxy's, or one for averages). Calls of unlike lanes
  may come in any order, so each lane has its own numbers, tags and streams.
- *engine*: what carries sums and messages (`engines.contract`); some are layers around another one.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.transport.base import Collective, Pending, Transport
    from paceline.transport.elastic.transport import Elastic, joins_roster
    from paceline.transport.fixed import MPI_SIZES, Alone, FixedTransport, launched, refuse_mpi

__all__ = [
    "MPI_SIZES",
    "Alone",
    "Collective",
    "Elastic",
    "FixedTransport",
    "Pending",
    "Transport",
    "joins_roster",
    "launched",
    "refuse_mpi",
]

_FILES = {
    "base": ("Collective", "Pending", "Transport"),
    "elastic.transport": ("Elastic", "joins_roster"),
    "fixed": ("MPI_SIZES", "Alone", "FixedTransport", "launched", "refuse_mpi"),
}


def __getattr__(name: str) -> Any:
    """Import a name's file when it is first asked for: who reads `formats` alone does without torch."""
    for file, names in _FILES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{file}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
