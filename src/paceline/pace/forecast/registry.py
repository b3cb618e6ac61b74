"""Forecasts by name: the one list of them. `register` adds one.

A forecast that needs more than NumPy lies outside of this room and is a plug-in: `PLUG_INS` knows its name and the
module that registers it, which is imported when the name is first asked for. So ``Cutoff(forecast="deep")`` works
without an import by the user, and only a run that wants the deep forecast loads torch for it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

from paceline.pace.forecast.base import Forecast

Make = TypeVar("Make", bound=Callable[..., Forecast])


class PlugIn(NamedTuple):
    """A forecast outside of this room."""

    module: str
    """Registers the forecast when it is imported."""
    usage: str


PLUG_INS = {"deep": PlugIn("paceline.deep.forecast", "deep, deep:FILE (a model written by `paceline learn`)")}
_FORECASTS: dict[str, Callable[..., Forecast]] = {}


def register(name: str, kind: Make) -> Make:
    """Let the name stand for ``kind()``, or for ``kind.from_text("name:settings")`` where the class has that method."""
    _FORECASTS[name] = kind
    return kind


def make(forecast: str | Forecast) -> Forecast:
    """A forecast from its name or from itself."""
    if isinstance(forecast, Forecast) and not isinstance(forecast, type):
        return forecast
    if not isinstance(forecast, str):
        known = _known()
        raise ValueError(f"forecast must be a name or a forecast such as Smoothed(), not {forecast!r}. Known: {known}")
    name, _, settings = forecast.strip().partition(":")
    kind: Any = _FORECASTS.get(name) or _plugged_in(name)
    from_text = getattr(kind, "from_text", None)
    if kind is None or (settings and from_text is None):
        raise ValueError(f"unknown forecast {forecast!r}. Known: {_known()}")
    made: Forecast = kind() if from_text is None else from_text(forecast)
    return made


def _plugged_in(name: str) -> Callable[..., Forecast] | None:
    if name in PLUG_INS:
        import_module(PLUG_INS[name].module)
    return _FORECASTS.get(name)


def _known() -> str:
    own = [name for name in _FORECASTS if name not in PLUG_INS]
    return ", ".join([*own, *(plug_in.usage for plug_in in PLUG_INS.values())])
