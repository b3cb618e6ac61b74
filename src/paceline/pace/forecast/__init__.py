"""Forecasts of the next step: last value, smoothed, order statistics, empirical window, and others that plug in.

>>> make("smoothed").name
'smoothed'
"""

from __future__ import annotations

from paceline.pace.forecast.base import Forecast, Seen
from paceline.pace.forecast.last import LastValue
from paceline.pace.forecast.order import OrderStatistics, expected_order
from paceline.pace.forecast.registry import make, register
from paceline.pace.forecast.smoothed import Smoothed
from paceline.pace.forecast.window import Window

__all__ = [
    "Forecast",
    "LastValue",
    "OrderStatistics",
    "Seen",
    "Smoothed",
    "Window",
    "expected_order",
    "make",
    "register",
]

register("last", LastValue)
register("smoothed", Smoothed)
register("elfving", OrderStatistics)
register("window", Window)
