"""The roster's own certificate: a key on the curve P-256, signed by itself, and kept so that a restart has the same.

Nobody vouches for it and no name in it is looked at: a worker compares its fingerprint, the SHA-256 of its bytes, with
that of the join line. Python's ssl can use a certificate and cannot make one; the arithmetic is here, so that a bare
Python suffices. It runs once for each key, before anybody can connect, so its timing tells nobody anything.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.roster.tls import fingerprint_of, needs_ssl

if TYPE_CHECKING:
    import ssl

PRIME = 2**256 - 2**224 + 2**192 + 2**96 - 1
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
BASE = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
"""P-256: y^2 = x^3 - 3x + b modulo `PRIME`; `BASE` generates its `ORDER` points (FIPS 186-4, D.1.2.3)."""
CURVE = bytes.fromhex("06082a8648ce3d030107")
KEY_ON_CURVE = bytes.fromhex("06072a8648ce3d0201")
SIGNED_BY_ECDSA = bytes.fromhex("300a06082a8648ce3d040302")
"""ASN.1: the names of P-256, of a public key on a curve, and of ECDSA with SHA-256."""

Point = tuple[int, int]


class Certificate:
    """What the roster shows, ready for use, and the fingerprint by which workers know it."""

    def __init__(self, file: Path | None = None) -> None:
        """``file``: where it is kept, readable by its owner alone; made if it is missing. None: a new one."""
        if file is None:
            with tempfile.NamedTemporaryFile("w", prefix="paceline-", suffix=".pem") as passing:  # its owner's alone
                passing.write(make())
                passing.flush()
                self.context, self.fingerprint = _load(Path(passing.name))
        else:
            _make_once(file)
            self.context, self.fingerprint = _load(file)


def _make_once(file: Path) -> None:
    if file.exists():
        return
    draft = file.with_name(f".{file.name}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(make())
        draft.replace(file)
    except OSError as error:
        raise ValueError(f"the roster's certificate cannot be written to {file} ({error.strerror or error})") from None


def _load(file: Path) -> tuple[ssl.SSLContext, str]:
    ssl = needs_ssl()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nobody resumes
    try:
        context.load_cert_chain(file)
        found = re.search("-+BEGIN CERTIFICATE-+(.*?)-+END", file.read_text(), re.DOTALL)
        assert found is not None
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise ValueError(
            f"the roster's certificate {file} cannot be read ({error}): move it away, and a new one is made"
        ) from None
    return context, fingerprint_of(base64.b64decode(found[1]))


# -- a new one -----------------------------------------------------------------------------------------------------


def make() -> str:
    """A new key and its certificate, as PEM. It is valid for ever, whatever a computer's clock says."""
    key = secrets.randbelow(ORDER - 1) + 1
    public = _bits(b"\4" + b"".join(part.to_bytes(32, "big") for part in times(key, BASE)))
    name = _sequence(_tagged(0x31, _sequence(bytes.fromhex("0603550403"), _tagged(0x0C, b"paceline roster"))))
    ever = _sequence(_tagged(0x18, b"20000101000000Z"), _tagged(0x18, b"99991231235959Z"))
    serial = _integer(secrets.randbits(64) + 1)
    body = _sequence(serial, SIGNED_BY_ECDSA, name, ever, name, _sequence(_sequence(KEY_ON_CURVE, CURVE), public))
    signature = _sequence(*map(_integer, sign(key, body, once=secrets.randbelow(ORDER - 1) + 1)))
    certificate = _sequence(body, SIGNED_BY_ECDSA, _bits(signature))
    kept = _sequence(_integer(1), _tagged(4, key.to_bytes(32, "big")), _tagged(0xA0, CURVE), _tagged(0xA1, public))
    return _pem("EC PRIVATE KEY", kept) + _pem("CERTIFICATE", certificate)


def sign(key: int, message: bytes, *, once: int) -> Point:
    """ECDSA's signature (r, s) of SHA-256(message): r = x of once * BASE, s = (digest + r * key) / once."""
    digest = int.from_bytes(hashlib.sha256(message).digest(), "big")
    r = times(once, BASE)[0] % ORDER
    return r, pow(once, -1, ORDER) * (digest + r * key) % ORDER


def times(number: int, point: Point) -> Point:
    """``number * point`` by doubling and adding, from the highest bit down.

    >>> times(ORDER - 1, BASE) == (BASE[0], PRIME - BASE[1])
    True
    """
    result = point
    for bit in f"{number:b}"[1:]:
        result = _sum(result, result)
        result = _sum(result, point) if bit == "1" else result
    return result


def _sum(one: Point, other: Point) -> Point:
    """The third point of the curve on the line through two, or on the tangent of one, mirrored."""
    (x, y), (u, v) = one, other
    rise, run = (3 * x * x - 3, 2 * y) if one == other else (v - y, u - x)
    slope = rise * pow(run, -1, PRIME) % PRIME
    at = (slope * slope - x - u) % PRIME
    return at, (slope * (x - at) - y) % PRIME


# -- ASN.1 ---------------------------------------------------------------------------------------------------------


def _tagged(tag: int, content: bytes) -> bytes:
    size = len(content)
    length = bytes([size]) if size < 128 else bytes([0x82, *size.to_bytes(2, "big")])
    return bytes([tag]) + length + content


def _sequence(*parts: bytes) -> bytes:
    return _tagged(0x30, b"".join(parts))


def _integer(number: int) -> bytes:
    return _tagged(2, number.to_bytes(number.bit_length() // 8 + 1, "big"))


def _bits(content: bytes) -> bytes:
    return _tagged(3, b"\0" + content)


def _pem(kind: str, content: bytes) -> str:
    lines = base64.encodebytes(content).decode()
    return f"-----BEGIN {kind}-----\n{lines}-----END {kind}-----\n"
