"""TLS between roster and workers, over bytes that their own sockets carry: nothing here blocks or knows a socket.

So the roster's one thread serves others while a handshake hangs, and a worker's threads may read and send at once, for
which OpenSSL's connections are not made.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import TYPE_CHECKING, Any

from paceline import concurrency
from paceline.roster import wire

if TYPE_CHECKING:
    import ssl

ALERT, HANDSHAKE = 0x15, 0x16
"""A TLS connection's first byte, from either side, is one of these."""
CHUNK = 64 * 1024


def needs_ssl() -> Any:
    """Python's ssl module, which few builds lack."""
    try:
        import ssl
    except ImportError:
        raise ValueError(
            "this Python has no ssl module, which the connections of an elastic fleet need: install one built with "
            "OpenSSL"
        ) from None
    return ssl


def fingerprint_of(certificate: bytes) -> str:
    return hashlib.sha256(certificate).hexdigest()


@cache
def _client_context() -> ssl.SSLContext:
    """No authority vouches for a roster: `shake_hands` compares its fingerprint, and the proofs contain it."""
    module = needs_ssl()
    context: ssl.SSLContext = module.SSLContext(module.PROTOCOL_TLS_CLIENT)
    context.minimum_version = module.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, module.CERT_NONE
    return context


class Channel:
    """One end of a connection: `open` what has come, `seal` what is to be sent, and send what is `outgoing`."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        """``context``: the roster's, with its certificate; None: a worker's end."""
        self._ssl = needs_ssl()
        self._in, self._out = self._ssl.MemoryBIO(), self._ssl.MemoryBIO()
        self._tls: Any = (context or _client_context()).wrap_bio(self._in, self._out, server_side=context is not None)
        self._lock = concurrency.Lock()
        self._early = b""
        """What is to be sent once the handshake is over."""
        self.ready = False
        if context is None:
            self._shake_hands()

    def open(self, data: bytes) -> bytes:
        """What these bytes bring, if anything yet. Raises EOFError when the other end has closed."""
        with self._lock:
            self._in.write(data)
            try:
                return self._read() if self.ready or self._shake_hands() else b""
            except self._ssl.SSLZeroReturnError:
                raise EOFError("it closed the connection") from None
            except self._ssl.SSLError as error:
                raise wire.Garbled(f"not TLS: {error.reason or error}") from None

    def seal(self, data: bytes) -> bytes:
        """The bytes to send for ``data``; before the handshake is over none, for they follow it."""
        with self._lock:
            if not self.ready:
                self._early += data
                return b""
            self._tls.write(data)
            return bytes(self._out.read())

    def outgoing(self) -> bytes:
        """What the handshake wants sent."""
        with self._lock:
            return bytes(self._out.read())

    @property
    def fingerprint(self) -> str:
        """Of the certificate that the roster has shown to this worker."""
        return fingerprint_of(self._tls.getpeercert(binary_form=True))

    def _shake_hands(self) -> bool:
        try:
            self._tls.do_handshake()
        except self._ssl.SSLWantReadError:
            return False
        self.ready = True
        if self._early:
            self._tls.write(self._early)
            self._early = b""
        return True

    def _read(self) -> bytes:
        parts: list[bytes] = []
        while True:
            try:
                part = self._tls.read(CHUNK)
            except self._ssl.SSLWantReadError:
                return b"".join(parts)
            if not part:
                return b"".join(parts)
            parts.append(part)
