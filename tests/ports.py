"""A port to listen on again after it was closed, or to tell others of before anybody listens."""

from __future__ import annotations

import socket
from contextlib import suppress
from random import SystemRandom

BELOW_THE_SYSTEMS = range(20_000, 32_000)
"""Linux gives away ports from 32,768 on to whoever asks for any, and one of these only to who asks for it."""


def own_port() -> int:
    """A free port of this computer that nobody gets by chance."""
    for port in SystemRandom().sample(BELOW_THE_SYSTEMS, 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("a hundred ports in a row are taken")
