"""How others reach what listens on this computer."""

from __future__ import annotations

import socket


def reached_at(host: str) -> str:
    """The address at which others reach something that listens on ``host``, which may stand for all addresses."""
    if host not in ("0.0.0.0", "::"):
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        try:
            datagrams.connect(("10.255.255.254", 9))  # sends nothing, only chooses the route
            return str(datagrams.getsockname()[0])
        except OSError:
            return socket.gethostname()
