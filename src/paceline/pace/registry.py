"""Paces by name: the one list of them. `register` adds one; whatever takes a name reads this list.

    @register
    class Mine:
        name = "mine"
        ...

From then on ``paceline.join(pace="mine")``, the simulator's table, the what-if and the reports know it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from paceline.pace.base import Pacer
from paceline.pace.traits import Traits, declared

_PACES: dict[str, type[Pacer]] = {}
Kind = TypeVar("Kind", bound=Pacer)


def register(kind: type[Kind]) -> type[Kind]:
    """Make the class known by its ``name``; returns it, so that this is a decorator too.

    A name stands for ``kind()``, or for ``kind.from_text("name:settings")`` where the class has that method.
    """
    name = getattr(kind, "name", None)
    if not isinstance(kind, type) or not isinstance(name, str) or not name or set(name) & set(": ,"):
        raise ValueError(f"a pace is a class with a name such as 'mine', not {kind!r} with the name {name!r}")
    if _PACES.setdefault(name, kind) is not kind:
        raise ValueError(f"there is a pace {name!r} already, {_PACES[name].__name__}: take another name")
    return kind


def registered() -> Mapping[str, type[Pacer]]:
    """All paces by name, in the order in which they were registered."""
    return MappingProxyType(_PACES)


def traits_of(name: str) -> Traits:
    """What the pace of this name says of itself; the defaults for one that is not known here."""
    return declared(_PACES.get(name, object))


def baseline() -> type[Pacer]:
    """The pace that the others are compared with: equal shares, and everybody is waited for."""
    return next(kind for kind in _PACES.values() if declared(kind).equal_shares)


def make(pace: str | Pacer) -> Pacer:
    """A pacer from its name or from itself.

    >>> make("fixed:1,1,2")
    Fixed([1.0, 1.0, 2.0])
    """
    if isinstance(pace, Pacer) and not isinstance(pace, type):
        return pace
    if not isinstance(pace, str):
        raise ValueError(f"pace must be a name or a pacer such as Adaptive(), not {pace!r}. Known names: {_known()}")
    name, _, settings = pace.strip().partition(":")
    from_text = getattr(_PACES.get(name), "from_text", None)
    if name not in _PACES or (settings and from_text is None):
        raise ValueError(f"unknown pace {pace!r}. Known names: {_known()}")
    made: Pacer = _PACES[name]() if from_text is None else from_text(pace)
    return made


def _known() -> str:
    return ", ".join(declared(kind).usage or name for name, kind in _PACES.items())
