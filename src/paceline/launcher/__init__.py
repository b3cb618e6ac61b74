"""The launcher: it starts the workers of a fleet on this computer, and supervises them until all have ended."""
