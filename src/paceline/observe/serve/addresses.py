"""How others reach what listens on this computer."""

from __future__ import annotations

import socket


def reached_at(host: str) -> str:
    """The address at which others reach something that listens on ``host``, which may stand for all addresses."""
    return host if host not in ("0.0.0.0", "::") else address_outwards() or socket.gethostname()


def address_outwards(host: str | None = None) -> str | None:
    """Where packets to ``host``, or to any other computer, leave this one; None when there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        try:
            datagrams.connect((host or "10.255.255.254", 9))  # sends nothing, only chooses the route
        except OSError:
            return None
        return str(datagrams.getsockname()[0])
