"""Connections between the processes of one worker: its first process, the *head*, and the others, its *followers*.

The head alone is a member of the fleet. Followers run the same script and make the same calls, and what a call gave on
the head, they hear from it. So every message belongs to a call, by its label: one that belongs to another call shows
that the script went another way in one of the processes.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch

from paceline.errors import CallMismatch, FleetError, PacelineError
from paceline.transport.elastic.handover import bytes_of

PIECE = 1 << 24
"""Bytes of a tensor that are sent at a time."""
RETRY_S = 0.02
MEET_S = 120.0
"""How long the processes of a worker may be apart in starting."""


def accept(socket: Path, followers: int) -> list[Connection]:
    """Wait, in the head, for its followers at this path; return their connections, by shard."""
    links: dict[int, Connection] = {}
    with Listener(str(socket), family="AF_UNIX", backlog=max(1, followers)) as listener:
        while len(links) < followers:
            link = listener.accept()
            links[link.recv()] = link
    return [links[shard] for shard in sorted(links)]


def connect(socket: Path, shard: int, *, wait: Callable[[], None]) -> Connection:
    """Connect a follower to its head; ``wait`` waits a moment, and raises when that has lasted too long."""
    while True:
        try:
            link = Client(str(socket), family="AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            wait()
            continue
        link.send(shard)
        return link


class Links:
    """This process's connections: the head's to all followers, or a follower's to the head."""

    def __init__(self, links: Sequence[Connection], *, shard: int) -> None:
        self._links, self._shard = list(links), shard

    def send(self, label: str, kind: str, content: Any = None) -> None:
        message = pickle.dumps((label, kind, content))  # tensors by value
        for link in self._links:
            self._guarded(lambda link=link: link.send_bytes(message))  # type: ignore[misc]

    def receive(self, label: str) -> list[tuple[str, Any]]:
        """Receive a message of this call by each connection: its kind and content."""
        return [self._one(label, link) for link in self._links]

    def _one(self, label: str, link: Connection) -> tuple[str, Any]:
        theirs, kind, content = pickle.loads(self._guarded(link.recv_bytes))
        if theirs != label:
            raise CallMismatch(
                f"one process of this worker is in {label} and another in {theirs}: every process of a worker must "
                "make the same calls in the same order (decide by what is the same in all, never by fleet.is_leader)"
            )
        return str(kind), content

    def send_tensor(self, tensor: torch.Tensor, *, to: int | None = None) -> None:
        """Send a tensor, whatever its size, by every connection, or to one follower."""
        links = self._links if to is None else [self._links[to - 1]]
        array: Any = bytes_of(tensor).numpy()
        data = memoryview(array)
        for at in range(0, len(data), PIECE):
            for link in links:
                self._guarded(lambda link=link, at=at: link.send_bytes(data[at : at + PIECE]))  # type: ignore[misc]

    def receive_tensor(self, tensor: torch.Tensor) -> None:
        """Receive into a tensor of the size of the one sent; a follower's."""
        data = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
        array: Any = data.numpy()
        view, (link,) = memoryview(array), self._links
        for at in range(0, len(view), PIECE):
            self._guarded(lambda at=at: link.recv_bytes_into(view[at : at + PIECE]))  # type: ignore[misc]
        with torch.no_grad():
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))

    def close(self) -> None:
        for link in self._links:
            link.close()

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (EOFError, OSError):
            who = "the first process of this worker" if self._shard else "another process of this worker"
            raise FleetError(f"{who} has ended") from None


class SharedTensor:
    """A tensor of zeros in memory that the processes of a worker share.

    The head makes it, followers open it by its ``path``. It has no name in any folder, so nothing of it is left when
    they end, whatever they die of.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        length = max(1, size) * dtype.itemsize
        self._file = os.memfd_create("paceline")
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        os.truncate(self._file, length)
        self.tensor = opened(self.path, size, dtype)

    def all_have_it(self) -> None:
        """Remove the name, once everybody has opened the tensor: it lives as long as somebody uses it."""
        os.close(self._file)


def opened(path: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor that another process has made."""
    return torch.from_file(path, shared=True, size=size, dtype=dtype)


def portable(error: BaseException) -> tuple[type[BaseException], tuple[Any, ...], dict[str, Any]]:
    """Return an error in parts that can be sent, whatever its constructor takes."""
    known = isinstance(error, (PacelineError, ValueError, TypeError, OSError, SystemExit, KeyboardInterrupt))
    plain = {name: value for name, value in vars(error).items() if isinstance(value, (str, int, float))}
    return (type(error), error.args, plain) if known else (FleetError, (f"{type(error).__name__}: {error}",), {})


def rebuilt(kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any]) -> BaseException:
    """Return the error again, without calling its own constructor."""
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(fields)
    if isinstance(error, SystemExit):
        error.code = args[0] if args else None
    return error
