"""Averages of parameters, now and then (``combine="average"`` and ``"elastic-average"``)."""
