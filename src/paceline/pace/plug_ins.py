"""Things by name, some of them in plug-ins: modules that are imported when their name is first asked for.

>>> ways: Registry[str] = Registry()
>>> ways.add("long", "the long way")
>>> ways.plug_in("short", "paceline.no_such_module", usage="short:METRES")
>>> ways.get("long"), ways.names(), ways.usages(), list(ways.present())
('the long way', ('long', 'short'), ['long', 'short:METRES'], ['long'])
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Generic, NamedTuple, TypeVar

Thing = TypeVar("Thing")


class PlugIn(NamedTuple):
    """A name whose thing is not imported yet."""

    module: str
    """Module that adds the thing to the registry when it is imported."""


class Registry(Generic[Thing]):
    """An ordered list of things by name."""

    def __init__(self) -> None:
        self._entries: dict[str, Thing | PlugIn] = {}
        self._usages: dict[str, str] = {}

    def add(self, name: str, thing: Thing) -> None:
        """Let the name stand for the thing. The thing of a plug-in takes the plug-in's position."""
        self._entries[name] = thing

    def plug_in(self, name: str, module: str, *, usage: str = "") -> None:
        """Let the name stand for what ``module`` adds under it; ``usage`` shows the name with its settings."""
        self._entries[name] = PlugIn(module)
        self._usages[name] = usage or name

    def get(self, name: str) -> Thing | None:
        """Return the thing of this name, importing its plug-in if need be; None for an unknown name."""
        entry = self._entries.get(name)
        if isinstance(entry, PlugIn):
            import_module(entry.module)
            entry = self._entries[name]
            assert not isinstance(entry, PlugIn), f"the plug-in of {name!r} did not add it"
        return entry

    def loaded(self) -> dict[str, Thing]:
        """Return everything that is imported, by name."""
        return {name: entry for name, entry in self._entries.items() if not isinstance(entry, PlugIn)}

    def present(self) -> dict[str, Thing]:
        """Return everything, by name, without the plug-ins that are not installed."""
        found: dict[str, Thing] = {}
        for name in self._entries:
            try:
                thing = self.get(name)
            except ImportError:
                continue
            assert thing is not None
            found[name] = thing
        return found

    def names(self) -> tuple[str, ...]:
        """Return all names, those of plug-ins included, without importing any."""
        return tuple(self._entries)

    def usages(self) -> list[str]:
        """Return how each name is written, for messages that list the known ones."""
        return [self._usages.get(name, name) for name in self._entries]


def complete(kind: Any, protocol: type[Any]) -> None:
    """Give a class that follows only the required part of ``protocol`` the defaults of the rest."""
    for name, default in vars(protocol).items():
        if not name.startswith("_") and not hasattr(kind, name):
            setattr(kind, name, default)
