"""The sizes that ``micro_batch="auto"`` has found, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from paceline.observe.words.numbers import size as between
from paceline.records import StepRecord

MOST_NAMED = 8
"""Workers that are named one by one."""


class FoundSize(NamedTuple):
    """Of one worker's micro-batches."""

    samples: int
    by_memory: bool
    """Memory, not speed, bounds it."""


def found_sizes(records: Iterable[StepRecord]) -> dict[int, FoundSize]:
    """The last size of each worker that has found one, by identity."""
    found = {}
    for record in records:
        for worker, samples, bound in zip(record.workers, record.micro_size, record.memory_bound):
            if samples:
                found[worker] = FoundSize(samples, bool(bound))
    return dict(sorted(found.items()))


def sizes_text(found: Mapping[int, FoundSize]) -> str:
    """One line.

    >>> sizes_text({0: FoundSize(32, False), 1: FoundSize(8, True)})
    'Micro-batches: worker 0 32, worker 1 8 (memory).'
    >>> sizes_text({worker: FoundSize(8 * (1 + worker % 2), worker == 3) for worker in range(20)})
    'Micro-batches: 8 to 16 samples; on 1 of 20 workers, as many as memory holds.'
    """
    if not found:
        return ""
    if len(found) <= MOST_NAMED:
        each = (f"worker {one} {size.samples}{' (memory)' if size.by_memory else ''}" for one, size in found.items())
        return f"Micro-batches: {', '.join(each)}."
    samples, bound = [size.samples for size in found.values()], sum(size.by_memory for size in found.values())
    memory = f"; on {bound} of {len(found)} workers, as many as memory holds" if bound else ""
    return f"Micro-batches: {between(min(samples), max(samples))} samples{memory}."
