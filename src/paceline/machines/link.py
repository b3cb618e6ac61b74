"""An emulated network link: how long a sum over the fleet would take on it.

Every worker has a link of its own with this bandwidth and delay. Summing B bytes over n workers moves at least
``2 (n - 1) / n * B`` over each link (in and out run at once) and takes two crossings, there and back, so

    seconds = 2 * delay + 2 * (n - 1) / n * B / bandwidth

which no algorithm beats: the emulation shows the best that the link could do.

>>> link = parse_link("100mbit,20ms")
>>> round(link.seconds(1_000_000, workers=4), 3)
0.16
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class Link:
    """A worker's link to the network."""

    bits_per_s: float
    delay_s: float

    def seconds(self, data: int, *, workers: int) -> float:
        """Return the seconds of a sum of ``data`` bytes over ``workers`` workers."""
        if workers < 2:
            return 0.0
        return 2 * self.delay_s + 2 * (workers - 1) / workers * 8 * data / self.bits_per_s

    def describe(self) -> str:
        return f"{self.bits_per_s / 1e6:g} Mbit/s, {1000 * self.delay_s:g} ms"


def parse_link(text: str) -> Link:
    """Parse a bandwidth (kbit, mbit or gbit per second) and a one-way delay, such as ``100mbit,30ms``."""
    found = re.fullmatch(r"\s*([\d.]+)\s*(kbit|mbit|gbit)\s*,\s*([\d.]+)\s*ms\s*", text.lower())
    try:
        if found is None:
            raise ValueError
        link = Link(float(found[1]) * _UNITS[found[2]], float(found[3]) / 1000)
    except ValueError:
        raise ValueError(f"a network is a bandwidth and a delay such as 100mbit,30ms, not {text!r}") from None
    if not link.bits_per_s > 0:
        raise ValueError(f"a network needs a bandwidth above 0, not {text!r}")
    return link


def link_from_env() -> Link | None:
    """Return the link that PACELINE_NETWORK asks to emulate, if any."""
    text = os.environ.get("PACELINE_NETWORK", "")
    return parse_link(text) if text else None
