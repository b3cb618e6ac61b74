"""Engines: their contract, their kinds by name, and layers around them (small sums, tree sums).

Here is the one list of the kinds. `register` adds one; PACELINE_BACKEND chooses by name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

from paceline.transport.engines.contract import EngineKind, Facts
from paceline.transport.engines.gloo import Gloo
from paceline.transport.engines.nccl import Nccl

_KINDS: dict[str, EngineKind] = {}
ENGINES: Mapping[str, EngineKind] = MappingProxyType(_KINDS)
"""All kinds by name."""


def register(kind: EngineKind) -> None:
    """Make a kind of engine known by its name."""
    if _KINDS.setdefault(kind.name, kind) is not kind:
        raise ValueError(f"there is an engine {kind.name!r} already: take another name")


register(Gloo())
register(Nccl())


def choose(facts: Facts) -> EngineKind:
    """Return the kind that PACELINE_BACKEND names, else the last one registered that suits these workers."""
    wanted = os.environ.get("PACELINE_BACKEND", "").lower()
    if wanted and wanted not in ENGINES:
        raise ValueError(f"PACELINE_BACKEND is {wanted!r}; it can be {' or '.join(ENGINES)}")
    return ENGINES[wanted] if wanted else next(kind for kind in reversed(list(ENGINES.values())) if kind.suits(facts))
