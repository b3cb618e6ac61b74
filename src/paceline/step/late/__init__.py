"""Rounds that wait for nobody: the proxy's thread, work in flight on the device, and how a late worker catches up."""
