"""P3's deep forecast and its learning: the only pace code with torch, plugged in by name. See docs/forecast.md."""
