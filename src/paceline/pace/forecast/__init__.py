"""Forecasts of the next step: auto, general, last value, smoothed, order statistics, empirical window, and plug-ins.

>>> make("smoothed").name
'smoothed'
"""

from __future__ import annotations

from paceline.pace.forecast.auto import AutoForecast
from paceline.pace.forecast.base import Forecast, Seen
from paceline.pace.forecast.general import General
from paceline.pace.forecast.last import LastValue
from paceline.pace.forecast.order import OrderStatistics, expected_order
from paceline.pace.forecast.registry import make, register
from paceline.pace.forecast.smoothed import Smoothed
from paceline.pace.forecast.window import Window

__all__ = [
    "Auto",
    "AutoForecast",
    "Forecast",
    "General",
    "LastValue",
    "OrderStatistics",
    "Seen",
    "Smoothed",
    "Window",
    "expected_order",
    "make",
    "register",
]

Auto = AutoForecast
"""The forecast by its name; `paceline.Auto` is the pace."""

register("auto", AutoForecast)
register("general", General)
register("last", LastValue)
register("smoothed", Smoothed)
register("elfving", OrderStatistics)
register("window", Window)
