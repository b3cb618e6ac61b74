"""Check that all workers have the same custom order of an epoch, and find where they part.

Samples would be lost and doubled in silence otherwise. The digests are compared; where they differ, workers exchange
digests of ever smaller parts of the order until the first position with unlike numbers is found.
"""

from __future__ import annotations

from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.settings import must_agree

if TYPE_CHECKING:
    from paceline.feed.dealing import Dealing
    from paceline.transport import Transport

PARTS = 64
"""Into how many parts a search divides what is left to search."""
CAUSE = (
    "The order must depend on the epoch alone: an unseeded shuffle (random.shuffle, torch.randperm, a sampler without "
    "a generator) is another one on every worker; draw it with torch.Generator().manual_seed(epoch)"
)


def check_order(transport: Transport, dealing: Dealing) -> None:
    """Raise ValueError on every worker, with the first position that differs, when their orders are not the same."""
    digest = dealing.order_digest()
    if digest is None:
        return
    label = f"order({dealing.epoch})"
    everybody = must_agree(transport, label, {}, also={"digest": digest})
    if len({theirs["digest"] for theirs in everybody}) > 1:
        raise ValueError(f"workers disagree in {label}{_where(transport, label, dealing.drawn())}. {CAUSE}")


def _where(transport: Transport, label: str, numbers: NDArray[np.int64]) -> str:
    """In words, where the orders differ first."""
    start, stop = 0, max(transport.gather(f"{label}: its length", len(numbers)))
    while stop - start > PARTS:
        edges = np.linspace(start, stop, PARTS + 1, dtype=np.int64).tolist()
        mine = [_digest(numbers[a:b]) for a, b in pairwise(edges)]
        part = _first_unlike(transport.gather(f"{label}: its parts", mine))
        if part is None:
            return ""
        start, stop = edges[part], edges[part + 1]
    everybody = transport.gather(f"{label}: its numbers", numbers[start:stop].tolist())
    place = _first_unlike(everybody)
    if place is None:
        return ": its batches are cut differently"
    values = [f"sample {own[place]}" if place < len(own) else "beyond its end" for own in everybody]
    other = next(worker for worker, value in enumerate(values) if value != values[0])
    return f": position {start + place} is {values[0]} on worker 0 and {values[other]} on worker {other}"


def _digest(numbers: NDArray[np.int64]) -> str:
    return blake2b(np.ascontiguousarray(numbers).tobytes(), digest_size=8).hexdigest()


def _first_unlike(everybody: list[list[Any]]) -> int | None:
    """Return the first position at which these lists differ; None where they are equal."""
    for place in range(max(map(len, everybody), default=0)):
        values = [own[place] if place < len(own) else None for own in everybody]
        if any(value != values[0] for value in values):
            return place
    return None
