"""What a newcomer holds already, such as frozen weights from the same file: no peer has to send it.

A newcomer and the peer that gives it a state compare a digest of each part (`Holding`), made before the others wait:
by the newcomer before it enters, by the peer beside the training. The peer's digests may be old. At the step boundary
it therefore sums the bits of each part that it is to leave out, at the speed of memory, and compares with the sums of
the very bytes that were digested: a part that has changed since, by whatever means, is sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple

import torch

from paceline import concurrency
from paceline.checkpoint.parts import StatePart, large_parts

ROW = 1024
"""Words of 8 bytes that share one sum."""
SMALL, MEDIUM, LARGE = 1 << 18, 1 << 22, 1 << 24
"""Bytes that are read at a time: on one core, on all of them, on a GPU."""
TRIES = 3
"""The number of times after which a part that had to be sent is not digested again: steps change it."""
MOST_THREADS = 4
"""Threads by which a newcomer makes its digests."""
END_S = 5.0
"""Seconds for which the end of the training waits for the thread that makes digests."""


class PartDigest(NamedTuple):
    """A part as it was when it was read."""

    digest: str
    """Digest, 128 bits, of its bytes, of their place in the state, and of the shapes and types in them."""
    sums: bytes
    """The `sums_of_bits` of these bytes."""


def look_at(part: StatePart, *, stopped: Callable[[], bool] = lambda: False) -> PartDigest | None:
    """Read a part, on one core, while others may change it; None: it was ``stopped``.

    Digest and sums are of the same bytes, of which every `SMALL` ones are copied first.
    """
    digest, rows = blake2b(part.layout.encode(), digest_size=16), _Rows()
    with _stream_beside(part.memory.device):
        for piece in pieces(part.memory, SMALL):
            if stopped():
                return None
            copy = piece.to("cpu", copy=True)
            digest.update(_buffer(copy))
            rows.add(copy)
    return PartDigest(digest.hexdigest(), rows.digest())


def sums_of_bits(memory: torch.Tensor) -> bytes:
    """Return a digest of sums of these bytes, computed where they lie.

    Each row of `ROW` words w_j has the sum of k_j (w_j xor w_j / 2**32), modulo 2**64, with random odd numbers k_j. A
    change that nobody made to deceive leaves a row's sum as it was with a probability of about 2**-32.
    """
    rows = _Rows()
    for piece in pieces(memory, MEDIUM if memory.is_cpu else LARGE):
        rows.add(piece)
    return rows.digest()


class _Rows:
    """The sums of rows, piece by piece."""

    def __init__(self) -> None:
        self._sums: list[torch.Tensor] = []

    @torch.no_grad()
    def add(self, piece: torch.Tensor) -> None:
        """Add the next bytes; only the last ones may be less than complete rows."""
        if piece.numel() % (8 * ROW):
            piece = torch.nn.functional.pad(piece, (0, -piece.numel() % (8 * ROW)))
        words = piece.view(torch.int64).view(-1, ROW)
        mixed = words >> 32
        mixed ^= words
        mixed *= _factors(piece.device)
        self._sums.append(mixed.sum(1))

    def digest(self) -> bytes:
        sums = torch.cat(self._sums).cpu() if self._sums else torch.zeros(0)
        return blake2b(_buffer(sums), digest_size=16).digest()


@cache
def _factors(device: torch.device) -> torch.Tensor:
    random = torch.Generator("cpu").manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (ROW,), generator=random, device="cpu") * 2 + 1
    return factors.to(device)


def _buffer(tensor: torch.Tensor) -> Any:
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


def pieces(memory: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    return (memory[at : at + size] for at in range(0, memory.numel(), size))


def _stream_beside(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a GPU is read beside what is started later."""
    if device.type != "cuda":
        return nullcontext()
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


class Holding:
    """The parts of this worker's replica that steps leave as they are, with their digests.

    ``state`` returns the replica's state, and ``lasting`` the paths of frozen parameters and of buffers in it.
    """

    def __init__(self, state: Callable[[], Mapping[str, Any]], lasting: Callable[[], Iterable[Any]]) -> None:
        self._state, self._lasting = state, lasting
        self._seen: dict[str, PartDigest] = {}
        """Digests by layout. The thread that makes them adds to it, and the user's reads and removes."""
        self._in_vain: Counter[str] = Counter()
        """Number of times that a part with a digest had to be sent, by layout."""
        self.due = True
        """Whether parts may have come that have no digest."""
        self._ended = False
        self._thread: concurrency.Thread | None = None

    def look(self) -> dict[str, torch.Tensor]:
        """Return the parts by digest, on a newcomer, whose script waits meanwhile and changes none of them."""
        parts = self._parts()
        for part in parts:
            if (seen := self._seen.get(part.layout)) is not None and sums_of_bits(part.memory) != seen.sums:
                del self._seen[part.layout]
        new = [part for part in parts if part.layout not in self._seen]
        threads = [
            concurrency.Thread(target=self._look_at, args=(new,), name="paceline-digest", daemon=True)
            for _ in range(min(MOST_THREADS, len(new)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {seen.digest: part.memory for part in parts if (seen := self._seen.get(part.layout)) is not None}

    def look_beside(self) -> None:
        """Begin to digest, on a thread, what has no digest yet: in each loop at first, and after each state given."""
        if not self.due or (self._thread is not None and self._thread.is_alive()):
            return
        self.due = False
        new = [part for part in self._parts() if part.layout not in self._seen and self._in_vain[part.layout] < TRIES]
        if new:
            self._thread = concurrency.Thread(target=self._look_at, args=(new,), name="paceline-digest", daemon=True)
            self._thread.start()

    def _look_at(self, new: list[StatePart]) -> None:
        while True:
            try:
                part = new.pop()  # another thread may take the last one
            except IndexError:
                return
            if (seen := look_at(part, stopped=lambda: self._ended)) is not None:
                self._seen[part.layout] = seen

    def _parts(self) -> list[StatePart]:
        try:
            lasting = set(self._lasting())
            parts = large_parts(self._state()) if lasting else []
        except Exception:  # of the script's own objects: whoever is given their state learns of it
            return []
        return [part for part in parts if lasting.issuperset(part.paths)]

    def leave_out(self, part: StatePart, held: Collection[str]) -> str:
        """Return the digest of a part of the state that is given, where its receiver holds the same; else nothing.

        ``held``: the digests of what the receiver holds.
        """
        self.due = True
        seen = self._seen.get(part.layout)
        if seen is None or not held:
            return ""
        with suppress(torch.OutOfMemoryError):  # then it is sent
            if seen.digest in held and sums_of_bits(part.memory) == seen.sums:
                return seen.digest
        self._in_vain[part.layout] += 1
        del self._seen[part.layout]
        return ""

    def close(self) -> None:
        """End the thread."""
        self._ended = True
        if self._thread is not None:
            self._thread.join(timeout=END_S)
