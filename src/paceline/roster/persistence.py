"""What lies beside the roster: its state in a file, and the torch store through which groups are formed."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline import concurrency

logger = logging.getLogger("paceline")


def load(path: Path) -> dict[str, Any] | None:
    """Return the state that an earlier roster saved; None when there is none yet."""
    try:
        saved = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the roster's state file {path} cannot be read ({error}): move it away to begin anew"
        ) from None
    if not isinstance(saved, dict) or saved.get("version") != 1:
        raise ValueError(f"{path} is not a roster's state file of version 1: give --state another path")
    return saved


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Replace the file in one step: a crash leaves the old state or the new one, whole."""
    draft = path.with_name(f".{path.name}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    with draft.open("w") as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def beside(path: Path) -> Path:
    """Return the file for the certificate of a roster that keeps something else in ``path``.

    >>> beside(Path("roster.json")).name
    'roster.json.pem'
    """
    return path.with_name(f"{path.name}.pem")


class StoreHost:
    """Hosts a TCPStore. The port is bound at once, torch is loaded on a thread: early workers wait in the queue.

    torch's store knows no token: whoever reaches this port can read and change what the workers form their groups
    from. It survives garbage (each piece costs a few lines on stderr). Hence loopback unless told otherwise; beyond
    that, fence the port. ``holder``: whose process this is, in words.
    """

    def __init__(self, host: str, *, holder: str = "roster") -> None:
        self.host, self._holder = host, holder
        self._socket = socket.create_server((host, 0), family=family(host), backlog=1024)
        self.port = int(self._socket.getsockname()[1])
        self._lock = concurrency.Lock()
        self._store: Any = None
        self._closed = False

    def start(self) -> None:
        """Make the store; returns at once."""
        concurrency.Thread(target=self._run, name="paceline-store", daemon=True).start()

    def _run(self) -> None:
        try:
            import torch.distributed

            dist: Any = torch.distributed  # its type stubs leave out half of what it exports

            with self._lock:
                listener = self._socket.detach()
            if listener < 0:  # closed meanwhile
                return
            store = dist.TCPStore(
                self._reachable(), self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener
            )
        except Exception as error:  # the workers will time out on their own; a script without a fleet does not care
            logger.error("the %s cannot host the fleet's store: %s", self._holder, error)
            return
        with self._lock:
            if not self._closed:
                self._store = store
                self._on_made(store)

    def _on_made(self, store: Any) -> None:
        """Note the store's port, under the lock, once the store is there."""

    def _reachable(self) -> str:
        return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)

    def close(self) -> None:
        with self._lock:
            self._store, self._closed = None, True
            self._socket.close()


def family(host: str) -> socket.AddressFamily:
    """Return IPv4 or IPv6, as the host's address is."""
    return socket.getaddrinfo(host or "127.0.0.1", 0, type=socket.SOCK_STREAM)[0][0]
