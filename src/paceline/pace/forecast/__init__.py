"""Forecasts of the next step: last value, smoothed, order statistics, empirical window. Pure NumPy."""

from paceline.pace.forecast.base import Forecast, Seen
from paceline.pace.forecast.last import LastValue
from paceline.pace.forecast.order import OrderStatistics, expected_order
from paceline.pace.forecast.smoothed import Smoothed
from paceline.pace.forecast.window import Window

__all__ = ["Forecast", "LastValue", "OrderStatistics", "Seen", "Smoothed", "Window", "expected_order"]
