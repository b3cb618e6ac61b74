"""A store in memory, with the methods of torch's that the library uses, for workers that are threads of one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from memory_engine import MemoryNetwork

TIMEOUT_S = 20.0
"""How long a connection and a missing key are waited for."""
RESET = "memory store: Connection reset by peer"


class MemoryServer:
    """The store's values, and whether it can be reached. It is found in its network at the address ``at``."""

    def __init__(self, network: MemoryNetwork, at: tuple[str, int], *, timeout_s: float = TIMEOUT_S) -> None:
        self.network, self.at, self.timeout_s = network, at, timeout_s
        self.values: dict[str, bytes] = {}
        self.up = True
        self.life = 0
        """Counts how often the server went down: connections of an earlier life stay broken."""
        network.servers[at] = self

    def stop(self) -> None:
        """Go down: all connections break, and the values are lost."""
        with self.network.lock:
            self.up, self.values = False, {}
            self.life += 1
            self.network.lock.notify_all()

    def start(self) -> None:
        """Come back, empty."""
        with self.network.lock:
            self.up = True
            self.network.lock.notify_all()


def open_memory_store(network: MemoryNetwork, at: tuple[str, int], *, timeout_s: float = TIMEOUT_S) -> MemoryStore:
    """Return a connection to the server at this address; RuntimeError when none is there after ``timeout_s``."""
    network.point()
    if not network.wait_until(lambda: at in network.servers and network.servers[at].up, timeout_s):
        raise RuntimeError(f"memory store: Connection refused ({at[0]}:{at[1]})")
    return MemoryStore(network.servers[at])


class MemoryStore:
    """One connection to a server. Every operation raises RuntimeError once it is broken."""

    def __init__(self, server: MemoryServer) -> None:
        self.server = server
        self._life = server.life
        self._cut = False

    def cut(self) -> None:
        """Break this connection."""
        with self.server.network.lock:
            self._cut = True
            self.server.network.lock.notify_all()

    def clone(self) -> MemoryStore:
        """Return another connection to the same server."""
        return open_memory_store(self.server.network, self.server.at, timeout_s=self.server.timeout_s)

    def set(self, key: str, value: str | bytes) -> None:
        with self._request():
            self.server.values[key] = _bytes(value)
            self.server.network.lock.notify_all()

    def get(self, key: str) -> bytes:
        found: list[bytes] = []

        def there() -> bool:
            self._check()
            found.extend([self.server.values[key]] if key in self.server.values else [])
            return bool(found)

        self.server.network.point()
        if not self.server.network.wait_until(there, self.server.timeout_s):
            raise RuntimeError(f"memory store: wait timeout after {self.server.timeout_s:.0f} s, keys: {key}")
        return found[0]

    def add(self, key: str, amount: int) -> int:
        with self._request():
            total = int(self.server.values.get(key, b"0")) + amount
            self.server.values[key] = str(total).encode()
            self.server.network.lock.notify_all()
            return total

    def check(self, keys: Sequence[str]) -> bool:
        with self._request():
            return all(key in self.server.values for key in keys)

    def delete_key(self, key: str) -> bool:
        with self._request():
            return self.server.values.pop(key, None) is not None

    def list_keys(self) -> list[str]:
        with self._request():
            return list(self.server.values)

    def compare_set(self, key: str, expected: str | bytes, wanted: str | bytes) -> bytes:
        """Set a key that has the expected value, or none where nothing is expected; returns what it has then."""
        with self._request():
            present = self.server.values.get(key)
            if present is None and _bytes(expected):
                return _bytes(expected)
            if present is None or present == _bytes(expected):
                present = self.server.values[key] = _bytes(wanted)
                self.server.network.lock.notify_all()
            return present

    @contextmanager
    def _request(self) -> Iterator[None]:
        """Hold the lock under which a request is answered."""
        self.server.network.point()
        with self.server.network.lock:
            self._check()
            yield

    def _check(self) -> None:
        if self._cut or not self.server.up or self.server.life != self._life:
            raise RuntimeError(RESET)


class MemoryPrefix:
    """A connection with a prefix before each key."""

    def __init__(self, prefix: str, store: MemoryStore | MemoryPrefix) -> None:
        self._prefix, self._store = prefix, store

    def clone(self) -> MemoryPrefix:
        return MemoryPrefix(self._prefix, self._store.clone())

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def get(self, key: str) -> bytes:
        return self._store.get(f"{self._prefix}/{key}")

    def add(self, key: str, amount: int) -> int:
        return self._store.add(f"{self._prefix}/{key}", amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check([f"{self._prefix}/{key}" for key in keys])

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(f"{self._prefix}/{key}")

    def list_keys(self) -> list[str]:
        keys = self._store.list_keys()
        return [key.removeprefix(f"{self._prefix}/") for key in keys if key.startswith(f"{self._prefix}/")]

    def compare_set(self, key: str, expected: str | bytes, wanted: str | bytes) -> bytes:
        return self._store.compare_set(f"{self._prefix}/{key}", expected, wanted)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
