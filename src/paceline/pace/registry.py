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

from paceline.pace.pacer import MinimalPacer, Pacer, Traits, UnknownSettings, completed
from paceline.pace.plug_ins import Registry

PACES: Registry[type[Pacer]] = Registry()
Kind = TypeVar("Kind", bound=MinimalPacer)


def register(kind: type[Kind]) -> type[Kind]:
    """Make the class known by its ``name``; returns it, so that this is a decorator too.

    A name stands for ``kind()``, or for ``kind.from_text("name:settings")`` where the class has that method.
    """
    name = getattr(kind, "name", None)
    if not isinstance(kind, type) or not isinstance(name, str) or not name or set(name) & set(": ,"):
        raise ValueError(f"a pace is a class with a name such as 'mine', not {kind!r} with the name {name!r}")
    other = PACES.loaded().get(name, kind)
    if other is not kind:
        raise ValueError(f"there is a pace {name!r} already, {other.__name__}: take another name")
    PACES.add(name, completed(kind))
    return kind


def registered() -> Mapping[str, type[Pacer]]:
    """Return all paces by name, in the order in which they were registered; plug-ins only where installed."""
    return MappingProxyType(PACES.present())


def traits_of(name: str) -> Traits:
    """Return the traits of the pace of this name; the defaults for an unknown one."""
    kind = PACES.get(name)
    return Traits() if kind is None else kind.traits


def baseline() -> type[Pacer]:
    """Return the pace that the others are compared with: equal shares, and everybody is waited for."""
    return next(kind for kind in PACES.loaded().values() if kind.traits.equal_shares)


def make(pace: str | MinimalPacer) -> Pacer:
    """Return a pacer from its name or from itself.

    >>> make("fixed:1,1,2")
    Fixed([1.0, 1.0, 2.0])
    """
    if isinstance(pace, MinimalPacer) and not isinstance(pace, type):
        completed(type(pace))
        return pace  # type: ignore[return-value]
    if not isinstance(pace, str):
        raise ValueError(f"pace must be a name or a pacer such as Adaptive(), not {pace!r}. Known names: {_known()}")
    kind = PACES.get(pace.strip().partition(":")[0])
    try:
        if kind is not None:
            return kind.from_text(pace)
    except UnknownSettings:
        pass
    raise ValueError(f"unknown pace {pace!r}. Known names: {_known()}")


def _known() -> str:
    loaded = PACES.loaded()
    return ", ".join((loaded[name].traits.usage if name in loaded else "") or name for name in PACES.names())
