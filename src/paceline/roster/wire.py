"""How roster and workers speak: one JSON object a line, over TLS, after each has proven that it knows the token.

The roster sends a random challenge; the worker answers with one of its own and a proof, the roster with its proof:

    proof = HMAC-SHA256(token, role | roster's challenge | worker's challenge | the certificate's fingerprint)

The token itself never travels. Each side puts in the fingerprint that it knows or has seen, so proofs that somebody in
between passes on, under a certificate of his own, do not fit.

The roster's certificate is signed by itself. No authority vouches for it and no name in it is read: a worker compares
its fingerprint, the SHA-256 of its bytes, with that of the join line. The package cryptography makes it; whoever uses
or checks one needs Python's ssl alone.

A `Channel` is TLS over bytes that its owner's socket carries: it has no socket and never blocks. So the roster's one
thread serves others while a handshake hangs, and a worker's threads may read and send at once, for which OpenSSL's
connections are not made.

The worker's side of the handshake is `shake_hands`: connect, see the certificate, prove and be proven to, and be let
in or not. The roster's side is in `server.py`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import selectors
import socket
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import concurrency

if TYPE_CHECKING:
    import ssl

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


ALERT, HANDSHAKE = 0x15, 0x16
"""The first byte of a TLS connection, from either side, is one of these."""
CHUNK = 64 * 1024
ALWAYS = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""The dates between which a certificate is valid: whatever a computer's clock shows."""
CERTIFICATE = "-----BEGIN CERTIFICATE-----"


def needs_ssl() -> Any:
    """Return Python's ssl module, which few builds lack."""
    try:
        import ssl
    except ImportError:
        raise ValueError(
            "this Python has no ssl module, which the connections of an elastic fleet need: install one built with "
            "OpenSSL"
        ) from None
    return ssl


def fingerprint_of(certificate: bytes) -> str:
    """Return the SHA-256 of a certificate's bytes (DER) in hexadecimal digits."""
    return hashlib.sha256(certificate).hexdigest()


# -- the roster's certificate --------------------------------------------------------------------------------------


class Certificate:
    """The roster's certificate as an SSL context, and the fingerprint by which workers recognise it."""

    def __init__(self, file: Path | None = None) -> None:
        """Load the certificate that ``file`` keeps, readable by its owner alone; make it if it is missing.

        None makes a new certificate, which is not kept.
        """
        if file is None:
            with tempfile.NamedTemporaryFile("w", prefix="paceline-", suffix=".pem") as passing:  # mode 0600
                passing.write(make_certificate())
                passing.flush()
                self.context, self.fingerprint = _load(Path(passing.name))
        else:
            _make_once(file)
            self.context, self.fingerprint = _load(file)


def make_certificate() -> str:
    """Return a new key on the curve P-256 and its certificate, as PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise ValueError(
            "the roster of an elastic fleet makes itself a certificate, which needs cryptography: "
            "pip install cryptography"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "paceline roster")])
    begin, end = ALWAYS
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    return (private + certificate.public_bytes(serialization.Encoding.PEM)).decode()


def _make_once(file: Path) -> None:
    if file.exists():
        return
    draft = file.with_name(f".{file.name}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(make_certificate())
        draft.replace(file)
    except OSError as error:
        raise ValueError(f"the roster's certificate cannot be written to {file} ({error.strerror or error})") from None


def _load(file: Path) -> tuple[ssl.SSLContext, str]:
    ssl = needs_ssl()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nobody resumes a session
    try:
        context.load_cert_chain(file)
        pem = file.read_text()
        certificate = ssl.PEM_cert_to_DER_cert(pem[pem.index(CERTIFICATE) :])
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise ValueError(
            f"the roster's certificate {file} cannot be read ({error}): move it away, and a new one is made"
        ) from None
    return context, fingerprint_of(certificate)


# -- a connection --------------------------------------------------------------------------------------------------


@cache
def _client_context() -> ssl.SSLContext:
    """Return a context without authorities: `shake_hands` compares the fingerprint, and the proofs contain it."""
    module = needs_ssl()
    context: ssl.SSLContext = module.SSLContext(module.PROTOCOL_TLS_CLIENT)
    context.minimum_version = module.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, module.CERT_NONE
    return context


class Channel:
    """One end of a connection: `open` decrypts, `seal` encrypts, `outgoing` returns what the handshake sends."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        """Begin the handshake; ``context`` is the roster's, with its certificate, and None on a worker's end."""
        self._ssl = needs_ssl()
        self._in, self._out = self._ssl.MemoryBIO(), self._ssl.MemoryBIO()
        self._tls: Any = (context or _client_context()).wrap_bio(self._in, self._out, server_side=context is not None)
        self._lock = concurrency.Lock()
        self._early = b""
        """Bytes to send once the handshake is over."""
        self.ready = False
        if context is None:
            self._shake_hands()

    def open(self, data: bytes) -> bytes:
        """Return the decrypted content of ``data``, empty during the handshake; EOFError: the other end has closed."""
        with self._lock:
            self._in.write(data)
            try:
                return self._read() if self.ready or self._shake_hands() else b""
            except self._ssl.SSLZeroReturnError:
                raise EOFError("it closed the connection") from None
            except self._ssl.SSLError as error:
                raise Garbled(f"not TLS: {error.reason or error}") from None

    def seal(self, data: bytes) -> bytes:
        """Return the bytes to send for ``data``; none before the handshake is over, which they follow."""
        with self._lock:
            if not self.ready:
                self._early += data
                return b""
            self._tls.write(data)
            return bytes(self._out.read())

    def outgoing(self) -> bytes:
        """Return the bytes that the handshake is to send."""
        with self._lock:
            return bytes(self._out.read())

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the certificate that the roster has shown to this worker."""
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


ANSWER_S = 5.0
"""How long the roster may take for each answer of the handshake."""

_OPEN: weakref.WeakSet[RosterConnection] = weakref.WeakSet()


class RosterConnection:
    """A connection over which the roster has let this worker in."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.id = -1
        self.running = False
        self.store_port = 0
        self.clock_ahead_s = 0.0
        """Seconds by which the roster's clock is ahead of this computer's, but for the welcome's time on its way."""
        self._channel = Channel()
        self._sending = concurrency.Lock()
        self._lines = Lines(MAX_ANSWER)
        self._early: list[dict[str, Any]] = []
        self._selector: selectors.BaseSelector | None = None
        """Made by the first `wait`."""
        _OPEN.add(self)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the certificate that the roster has shown."""
        return self._channel.fingerprint

    def secure(self) -> None:
        """Make TLS's handshake; raises `Refused` when the roster speaks in the clear."""
        self.socket.sendall(self._channel.outgoing())
        data = self._receive()
        if data[0] not in (ALERT, HANDSHAKE):
            raise _plain(data)
        while True:
            opened = self._channel.open(data)
            self.socket.sendall(self._channel.outgoing())
            if self._channel.ready:
                self._early = self._lines.feed(opened)
                return
            data = self._receive()

    def _receive(self) -> bytes:
        data = self.socket.recv(64 * 1024)
        if not data:
            raise EOFError("it closed the connection")
        return data

    def send(self, message: Message) -> None:
        """Send a message; any thread may."""
        with self._sending:
            self.socket.sendall(self._channel.seal(encode(message)))

    def read(self) -> list[dict[str, Any]]:
        """Return the messages that have come; wait for at least some bytes."""
        early, self._early = self._early, []
        return early or self._lines.feed(self._channel.open(self._receive()))

    def answer(self) -> dict[str, Any]:
        """Return the next message; what came with it is kept for `read`."""
        while not self._early:
            self._early = self.read()
        first, *self._early = self._early
        if "refused" in first:
            raise Refused(str(first["refused"]), str(first.get("text", "")))
        return first

    def wait(self, seconds: float) -> bool:
        """Return whether messages have come, or the connection has ended, waiting up to ``seconds``.

        Only the thread that reads may call it.
        """
        if self._early:  # the socket will not announce these
            return True
        if self._selector is None:
            self._selector = selectors.DefaultSelector()
            self._selector.register(self.socket, selectors.EVENT_READ)
        return bool(self._selector.select(seconds))

    def break_off(self) -> None:
        """End the connection, from any thread: the thread that reads it wakes, and closes it."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, and the selector that watches it. No other thread may be in `wait`."""
        self.socket.close()
        if self._selector is not None:
            self._selector.close()


def _close_in_child() -> None:
    """Close connections in a forked child (a data loader), for a death shows by the end of a worker's connection."""
    for connection in list(_OPEN):
        with suppress(OSError):  # some systems' selectors do not survive a fork
            connection.close()  # the parent's selector goes on: nothing is unregistered


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def shake_hands(
    address: tuple[str, int], *, token: str, hello: Message, fingerprint: str | None = None
) -> RosterConnection:
    """Enter at the roster whose certificate has this fingerprint, if one is given."""
    sock = socket.create_connection(address, timeout=ANSWER_S)
    connection = RosterConnection(sock)
    try:
        tune(sock)
        connection.secure()
        if fingerprint not in (None, connection.fingerprint):
            raise _stranger(connection.fingerprint)
        _prove(connection, token)
        connection.send({"hello": hello})
        take_welcome(connection, connection.answer())
        return connection
    except (KeyError, TypeError):
        connection.close()
        raise Garbled("it is not a roster") from None
    except BaseException:
        connection.close()
        raise


def take_welcome(connection: RosterConnection, welcome: Message) -> None:
    """Note what the roster says to a worker that it lets in."""
    connection.id, connection.running = int(welcome["welcome"]), bool(welcome["running"])
    connection.store_port = int(welcome["store"])
    connection.clock_ahead_s = float(welcome.get("now", 0.0) or concurrency.time()) - concurrency.time()


def _prove(connection: RosterConnection, token: str) -> None:
    first = connection.answer()
    if first.get("paceline") != VERSION:
        raise Garbled(f"it is not a roster of version {VERSION}")
    theirs, mine = str(first["challenge"]), challenge()
    seen = connection.fingerprint
    connection.send({"challenge": mine, "proof": proof(token, "worker", theirs, mine, seen)})
    if not proven(connection.answer()["proof"], proof(token, "roster", theirs, mine, seen)):
        raise Refused("token", "whoever answers there does not know this run's token: it is not this run's roster")


def _plain(data: bytes) -> Exception:
    """Return the error for an answer that is not TLS: a roster of version 1 sends its challenge."""
    if b'"challenge"' in data:
        return Refused(
            "plain", "the roster there speaks in the clear, and this worker TLS: install the same paceline on both"
        )
    return Garbled("it does not speak TLS")


def _stranger(fingerprint: str) -> Refused:
    return Refused(
        "fingerprint",
        f"another roster than that of the join line answers there: its certificate has fingerprint {fingerprint}. Take "
        "the line anew from its launcher; a roster that was started again shows the old one only if it was given the "
        "same --state or --token-file",
    )
