"""P3's deep forecast. See docs/forecast.md."""
