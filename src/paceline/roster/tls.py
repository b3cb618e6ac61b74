"""TLS between roster and workers: the roster's certificate, and channels over bytes that their own sockets carry.

The certificate is signed by itself. No authority vouches for it and no name in it is read: a worker compares its
fingerprint, the SHA-256 of its bytes, with that of the join line. The package cryptography makes it; whoever uses or
checks one needs Python's ssl alone.

Nothing here blocks or has a socket. So the roster's one thread serves others while a handshake hangs, and a worker's
threads may read and send at once, for which OpenSSL's connections are not made.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import concurrency
from paceline.roster import wire

if TYPE_CHECKING:
    import ssl

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
                raise wire.Garbled(f"not TLS: {error.reason or error}") from None

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
