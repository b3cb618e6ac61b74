"""Numbers for the workers of this computer: two launchers of one fleet never use the same.

A worker's identity is its computer's name and its number there, so a second launcher that joins from this computer
must take others. A number is taken by binding a name in Linux's abstract namespace of sockets: nothing is left on the
disk, and it is free again when the launcher ends, whatever it ends of. Elsewhere every number counts as free, and the
roster refuses the second worker of a name.
"""

from __future__ import annotations

import os
import socket
import sys
from itertools import count


class Places:
    """The numbers that this launcher holds in the fleet whose roster listens on ``port``."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._held: dict[int, socket.socket | None] = {}

    def take(self, lowest: int = 0) -> int:
        """The lowest number from ``lowest`` on that nobody holds; it is this launcher's until `close`."""
        return next(number for number in count(lowest) if number not in self._held and self._bind(number))

    def close(self) -> None:
        for held in self._held.values():
            if held is not None:
                held.close()
        self._held.clear()

    def _bind(self, number: int) -> bool:
        if not sys.platform.startswith("linux"):
            self._held[number] = None
            return True
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0paceline-{os.getuid()}-{self._port}-{number}")
        except OSError:
            name.close()
            return False
        self._held[number] = name
        return True
