"""Fingerprints of a few samples, by which workers check that they have the same data.

A fingerprint has two parts. The exact one is a digest of structure, types, shapes, whole numbers and text. The other
has, for each array of real numbers or of bytes, its mean, its spread and a few random projections: decoders and
vectorised arithmetic round differently on unlike machines, so these are compared with a tolerance. With v the values
less their mean, s_k a fixed vector of random signs and n values, ``p_k = s_k . v``. Unlike samples have projections
that differ by about |v|; those of one sample decoded by two libraries differ by a few hundredths of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.feed.randomness import key

POSITIONS = 4
"""Samples that are read, if time allows."""
MOST_SECONDS = 0.05
"""Seconds after which no further sample is read."""
MOST_VALUES = 1 << 13
"""Values of an array that are used at most, spread evenly over it."""
MOST_LEAVES = 4096
"""Entries of a list that are used at most, spread evenly over it."""
PROJECTIONS = 8
MANY = 64
"""Number of values from which an array may be a decoded image or sound."""
DECODED, ROUNDED = 0.05, 1e-4
"""Tolerances relative to |v|: for arrays with `MANY` values or more, and for smaller ones."""
EPSILON = 1e-6
"""Tolerance relative to the mean: rounding in float32."""
_LOOK = 0x6C6F6F6B
"""Constant that keeps the keys of these indices apart from others."""

Fingerprint = list[Any]
"""``[digest, sketches]``, as JSON; a sketch is ``[n, mean, |v|, p_1, ...]``."""


class NoFingerprint(Exception):
    """A sample that holds something without stable bytes."""


def look_at(length: int) -> list[int]:
    """Return distinct dataset indices to read, spread by a key and equal on every worker.

    >>> look_at(2), len(set(look_at(1000)))
    ([0, 1], 4)
    """
    if length <= POSITIONS:
        return list(range(length))
    drawn = (key(length, number, _LOOK) % length for number in range(16 * POSITIONS))
    return list(dict.fromkeys(drawn))[:POSITIONS]


def fingerprint(sample: Any) -> Fingerprint:
    """Return a sample's fingerprint; raise `NoFingerprint`, naming the type, where it has none."""
    digest, sketches = blake2b(digest_size=16), list[list[float]]()
    for exact, values in _leaves(sample):
        digest.update(f"{len(exact)}:".encode() + exact)
        if values is not None:
            sketches.append(_sketch(values))
    return [digest.hexdigest(), sketches]


def alike(one: Fingerprint, other: Fingerprint) -> bool:
    """Return whether two fingerprints may be those of one sample.

    >>> images = [np.random.default_rng(n).integers(0, 250, 4096).astype(np.uint8) for n in (0, 0, 1)]
    >>> images[1] += 1
    >>> first, decoded_elsewhere, another = map(fingerprint, images)
    >>> alike(first, decoded_elsewhere), alike(first, another)
    (True, False)
    """
    same = one[0] == other[0] and len(one[1]) == len(other[1])
    return same and all(_close(a, b) for a, b in zip(one[1], other[1], strict=True))


def _close(one: Sequence[float], other: Sequence[float]) -> bool:
    count, spread, mean = one[0], max(one[2], other[2]), max(abs(one[1]), abs(other[1]))
    tolerance = DECODED if count >= MANY else ROUNDED
    allowed = tolerance * spread + EPSILON * mean * math.sqrt(count)
    if abs(one[1] - other[1]) * math.sqrt(count) > allowed:
        return False
    return all(abs(a - b) <= allowed for a, b in zip(one[2:], other[2:], strict=True))


def _leaves(value: Any) -> Iterator[tuple[bytes, NDArray[np.float64] | None]]:
    """Yield the parts of a sample: bytes that must be equal, and values that are compared with a tolerance."""
    if isinstance(value, torch.Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)}".encode(), None
        yield from _array(_numpy(value))
    elif isinstance(value, (np.ndarray, np.generic)):
        yield f"array {value.dtype} {value.shape}".encode(), None
        yield from _array(np.asarray(value))
    elif isinstance(value, float):
        yield b"float", np.array([value])
    elif value is None or isinstance(value, (bool, int, complex, str)):
        yield f"{type(value).__name__} {value}".encode("utf-8", "surrogatepass"), None
    elif isinstance(value, (bytes, bytearray)):
        yield b"bytes", None
        yield bytes(value), None
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)}".encode(), None
        for name in sorted(value, key=repr):
            yield from _leaves(name)
            yield from _leaves(value[name])
    elif isinstance(value, (list, tuple)):
        yield f"sequence {len(value)}".encode(), None
        parts = value[:: -(-len(value) // MOST_LEAVES) or 1]
        if all(type(part) is int for part in parts):  # tokens
            yield repr(list(parts)).encode(), None
            return
        for part in parts:
            yield from _leaves(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _leaves({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    else:
        raise NoFingerprint(f"a {type(value).__name__}")


def _numpy(tensor: torch.Tensor) -> NDArray[Any]:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise NoFingerprint(f"a tensor of layout {tensor.layout}")
    tensor = _spread(tensor.detach())
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_floating_point():
        tensor = tensor.double()
    array: NDArray[Any] = tensor.cpu().numpy()
    return array


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """Return at most `MOST_VALUES` of a tensor's values, flat where it has more."""
    return tensor if tensor.numel() <= MOST_VALUES else tensor.reshape(-1)[:: -(-tensor.numel() // MOST_VALUES)]


def _array(array: NDArray[Any]) -> Iterator[tuple[bytes, NDArray[np.float64] | None]]:
    if array.dtype.kind not in "biufcSUMm":
        raise NoFingerprint(f"an array of {array.dtype}")
    if array.size > MOST_VALUES:
        array = array.reshape(-1)[:: -(-array.size // MOST_VALUES)]
    if array.dtype.kind == "c":
        array = np.stack([array.real, array.imag])
    inexact = array.dtype.kind == "f" or (array.dtype == np.uint8 and array.size >= MANY)
    if inexact:
        yield b"", array.astype(np.float64).reshape(-1)
    else:
        yield np.ascontiguousarray(array).tobytes(), None


def _sketch(values: NDArray[np.float64]) -> list[float]:
    values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    mean = float(values.mean()) if values.size else 0.0
    centred = values - mean
    return [float(values.size), mean, float(np.sqrt(centred @ centred)), *(_signs(values.size) @ centred).tolist()]


@lru_cache(maxsize=8)
def _signs(count: int) -> NDArray[np.float64]:
    drawn = np.random.Generator(np.random.PCG64(count)).integers(0, 2, (PROJECTIONS, count))
    return 2 * drawn.astype(np.float64) - 1
