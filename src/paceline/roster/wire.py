"""How roster and workers speak: one JSON object a line, over TLS, after each has proven that it knows the token.

The roster sends a random challenge; the worker answers with one of its own and a proof, the roster with its proof:

    proof = HMAC-SHA256(token, role | roster's challenge | worker's challenge | the certificate's fingerprint)

The token itself never travels. Each side puts in the fingerprint that it knows or has seen, so proofs that somebody in
between passes on, under a certificate of his own, do not fit.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import socket
from collections.abc import Mapping
from typing import Any

VERSION = 2
"""1 spoke in the clear."""
MAX_LINE = 64 * 1024
"""Bytes of a line that a worker may send."""
MAX_FIRST_LINE = 1024
"""Bytes of a line before the worker has proven that it has the token."""
MAX_ANSWER = 8 * 1024 * 1024
"""Bytes of a line that the roster may send: a generation holds every member's facts."""
MAX_FACTS = 4 * 1024
DEAD_PATH_MS = 15_000
"""Unacknowledged by the other's kernel for so long, a connection is broken."""

Message = Mapping[str, Any]


class Garbled(ValueError):
    """What came is not a message."""


class Refused(Exception):
    """The roster does not let this process in.

    ``kind``: token, ended, failed, full, garbled, plain (not TLS), fingerprint (the worker's own finding: it is another
    roster), or busy (the name is in use; the worker may try again).
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def encode(message: Message | bytes) -> bytes:
    """Return a message as a line; one that is a line already stays as it is."""
    if isinstance(message, bytes):
        return message
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Return the message in a line.

    >>> decode(b'{"ack": 3}')
    {'ack': 3}
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise Garbled("not JSON") from None
    if not isinstance(message, dict):
        raise Garbled("not a JSON object")
    return message


class Lines:
    """Bytes in, messages out, with a bound on what an unfinished line may hold."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Return the messages that ``data`` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self.limit or any(len(line) > self.limit for line in lines):
            raise Garbled(f"a line of more than {self.limit} bytes")
        return [decode(line) for line in lines]


def challenge() -> str:
    return secrets.token_hex(16)


def proof(token: str, role: str, roster_challenge: str, worker_challenge: str, fingerprint: str) -> str:
    """Return the proof that only one who has ``token`` can make.

    ``role`` keeps one side's proof from serving as the other's, ``fingerprint`` one connection's from serving in
    another.
    """
    said = "|".join(("paceline", str(VERSION), role, roster_challenge, worker_challenge, fingerprint))
    return hmac.new(token.encode(), said.encode(), hashlib.sha256).hexdigest()


def proven(said: object, expected: str) -> bool:
    return isinstance(said, str) and hmac.compare_digest(said.encode(), expected.encode())


def tune(connection: socket.socket) -> None:
    """Send small messages at once, and have the kernel notice a dead path."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", DEAD_PATH_MS),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` or ``HOST:PORT#FINGERPRINT``.

    >>> parse_address("10.0.0.5:7070"), parse_address("[::1]:7070")
    (('10.0.0.5', 7070), ('::1', 7070))
    """
    host, colon, port = address.partition("#")[0].strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"the roster's address is {address!r}; write HOST:PORT, for example 10.0.0.5:7070")
    return host, int(port)


def parse_fingerprint(address: str) -> str | None:
    """Return the fingerprint that the roster at ``HOST:PORT#FINGERPRINT`` must show; None: the token alone decides.

    >>> parse_fingerprint("10.0.0.5:7070") is None
    True
    """
    _, sign, fingerprint = address.strip().partition("#")
    if sign and not re.fullmatch("[0-9a-fA-F]{64}", fingerprint):
        raise ValueError(
            f"the roster's fingerprint is {fingerprint!r}; write HOST:PORT#FINGERPRINT with the 64 digits that its "
            "launcher printed, or HOST:PORT alone"
        )
    return fingerprint.lower() or None


def written(host: str, port: int, fingerprint: str = "") -> str:
    """Write ``HOST:PORT#FINGERPRINT``, as far as is given; an IPv6 address stands in brackets."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"{address}#{fingerprint}" if fingerprint else address
