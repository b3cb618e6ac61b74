"""Forecasts of the next step: last value, smoothed, order statistics, empirical window, and P3's deep model.

>>> make("smoothed").name
'smoothed'
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.pace.forecast.base import Forecast, Seen
from paceline.pace.forecast.last import LastValue
from paceline.pace.forecast.order import OrderStatistics, expected_order
from paceline.pace.forecast.smoothed import Smoothed
from paceline.pace.forecast.window import Window

__all__ = ["Forecast", "LastValue", "OrderStatistics", "Seen", "Smoothed", "Window", "expected_order", "make"]

_BY_NAME: dict[str, Callable[[], Forecast]] = {
    "last": LastValue,
    "smoothed": Smoothed,
    "elfving": OrderStatistics,
    "window": Window,
}
_KNOWN = "last, smoothed, elfving, window, deep, deep:FILE (a model written by `paceline learn`)"


def make(forecast: str | Forecast) -> Forecast:
    """A forecast from its name or from itself."""
    if isinstance(forecast, Forecast) and not isinstance(forecast, type):
        return forecast
    if not isinstance(forecast, str):
        raise ValueError(f"forecast must be a name or a forecast such as Smoothed(), not {forecast!r}. Known: {_KNOWN}")
    name, _, file = forecast.strip().partition(":")
    if name == "deep":
        # torch is needed by this forecast alone, so it is loaded with it.
        from paceline.deep.forecast import Deep

        return Deep(model=file or None)
    if name not in _BY_NAME or file:
        raise ValueError(f"unknown forecast {forecast!r}. Known: {_KNOWN}")
    return _BY_NAME[name]()
