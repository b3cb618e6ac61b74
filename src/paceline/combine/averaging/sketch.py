"""A worker's update in a few numbers, so that distances between updates can be told from the round's header.

``s = sum_i r_i x_i`` over pieces x_i of the update, each SIZE long, with one random sign r_i a piece. It is linear, and
inner products survive in expectation: ``E <s, s'> = <x, x'>``, within about ``sqrt(2 / SIZE)`` of ``|x| |x'|``. That
is enough for `spread` in weights.py, which needs a mean and a variance, and saves a second full round.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

SIZE = 64


def sketch(tensors: Iterable[torch.Tensor], *, seed: int, size: int = SIZE) -> NDArray[np.float64]:
    """The update in ``tensors`` (in the same order on every worker) as ``size`` numbers; all must use the same seed."""
    generator = torch.Generator().manual_seed(seed)
    total = np.zeros(size)
    for tensor in tensors:
        total += _pieces(tensor.detach().flatten(), size, generator)
    return total


def _pieces(flat: torch.Tensor, size: int, generator: torch.Generator) -> NDArray[np.float64]:
    count = -(-flat.numel() // size)
    padded = torch.nn.functional.pad(flat, (0, count * size - flat.numel())).view(count, size)
    signs = (2 * torch.randint(0, 2, (count,), generator=generator) - 1).to(flat)
    found: NDArray[np.float64] = (signs @ padded).double().cpu().numpy()
    return found
