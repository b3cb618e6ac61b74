"""Checkpoints: what they hold, their file, the folder of automatic ones."""
