"""Checkpoints: their content, their files, and automatic saving."""
