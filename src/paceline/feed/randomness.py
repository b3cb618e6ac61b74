"""Random numbers that belong to a sample, not to whoever happens to fetch it.

Before ``dataset[i]`` runs, the three global generators that augmentations use are seeded with a key of (seed, epoch,
position). So a sample meets the same noise on any worker, in any loader process, before and after a resume; and no
two workers share noise because their processes were seeded alike. `seed_micro_batch` does the same for dropout.

The price was measured on one slow core: 3.9 us for Python's generator, 1.6 us for NumPy's and 1.1 us for torch's
(``torch.manual_seed`` would take 130 us, as it also visits every other device). NumPy gets a 32-bit seed, since a
longer one takes 8.6 us. Whether a dataset uses a generator cannot be known, so none is left out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from paceline.feed.keys import key

_MICRO_BATCH = 0x6D6963726F
"""Keeps the keys of micro-batches apart from those of samples."""


def seed_generators(sample_key: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generators from one 63-bit key.

    NumPy's and torch's CPU generator are the same algorithm and use 32 bits of the seed, so each gets its own half
    of the key: equal seeds would give equal noise.
    """
    random.seed(sample_key)
    np.random.seed(sample_key >> 31)
    torch.default_generator.manual_seed(sample_key)


def seed_micro_batch(seed: int, epoch: int, position: int, device: torch.device) -> None:
    """Seed torch's CPU generator, and that of ``device`` if it is a GPU, for the forward of one micro-batch.

    ``position`` is the micro-batch's first. Nothing is synchronised: a CUDA generator's seed lives on the host.
    """
    micro_key = key(seed, epoch, position, _MICRO_BATCH)
    torch.default_generator.manual_seed(micro_key)
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(micro_key)


class Generators:
    """The three global generators' states at one moment."""

    def __init__(self) -> None:
        self._random = random.getstate()
        self._numpy: Any = np.random.get_state()
        self._torch = torch.default_generator.get_state()

    def restore(self) -> None:
        random.setstate(self._random)
        np.random.set_state(self._numpy)
        torch.default_generator.set_state(self._torch)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave the user's own random numbers in this process as they were, whatever is seeded inside."""
    before = Generators()
    try:
        yield
    finally:
        before.restore()
