"""P3's deep forecast and its learning: the only pace code with torch. See docs/research.md."""
