"""The event log: its folder, its writer and its reader."""
