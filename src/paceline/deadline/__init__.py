"""Rounds that wait for nobody: the proxy, work in flight, catching up."""
