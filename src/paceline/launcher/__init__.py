"""Starting the workers of a fleet on this computer, and staying with them until all have ended."""
