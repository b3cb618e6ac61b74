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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from paceline.feed.keys import begun, continued, key

_MICRO_BATCH = 0x6D6963726F
_UPDATE = 0x757064617465
"""They keep the keys of micro-batches and of updates apart from those of samples."""


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
    _seed_torch(continued(_of_epoch(seed, epoch), position, _MICRO_BATCH), device)


def seed_update(seed: int, step: int, device: torch.device) -> None:
    """Seed the same generators for what comes after a step's micro-batches, the same on every worker: noise added to
    the mean gradient, and whatever an optimiser draws."""
    _seed_torch(key(seed, step, _UPDATE), device)


_of_epoch = lru_cache(maxsize=4)(begun)
"""Of the key of an epoch's micro-batches, what they share."""


def _seed_torch(torch_key: int, device: torch.device) -> None:
    if device.type == "cpu":
        torch.default_generator.manual_seed(torch_key)
        return
    for generator in _torch_generators(device):
        generator.manual_seed(torch_key)


def _torch_generators(device: torch.device) -> list[torch.Generator]:
    """The CPU's, and that of ``device`` if it is a GPU."""
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


class TorchGenerators:
    """torch's generators at one moment, of the CPU and of a GPU that is worked on: the user's own random numbers."""

    def __init__(self, device: torch.device) -> None:
        self._states = [(generator, generator.get_state()) for generator in _torch_generators(device)]

    def restore(self) -> None:
        for generator, state in self._states:
            generator.set_state(state)


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

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        return {"random": self._random, "numpy": _listed(self._numpy), "torch": self._torch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._random, self._torch = state["random"], state["torch"].cpu()
        self._numpy = tuple(state["numpy"])


def _listed(state: Any) -> list[Any]:
    return [part.tolist() if isinstance(part, np.ndarray) else part for part in state]


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave the user's own random numbers in this process as they were, whatever is seeded inside."""
    before = Generators()
    try:
        yield
    finally:
        before.restore()
