"""The roster's own certificate: its arithmetic against published figures, and that it is kept."""

from __future__ import annotations

import hashlib
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from paceline.roster.certificate import BASE, ORDER, PRIME, Certificate, make, sign, times

KEY = 0xC9AFA9D845BA75166B5C215767B1D6934E50C3DB36E89B127B8A622B120F6721
ONCE = 0xA6E3C57DD01ABE90086538398355DD4C3B17AA873382B0F24D6129493D8AAD60
"""RFC 6979, A.2.5: P-256 with SHA-256, message "sample"."""


def test_a_public_key_and_a_signature_are_those_of_the_standard() -> None:
    assert times(KEY, BASE) == (
        0x60FED4BA255A9D31C961EB74C6356D68C049B8923B61FA6CE669622E60F29FB6,
        0x7903FE1008B8BC99A41AE9E95628BC64F2F1B20C2D7E9F5177A3C294D4462299,
    )
    assert sign(KEY, b"sample", once=ONCE) == (
        0xEFD48B2AACB6A8FD1140DD9CD45E81D69D2C877B56AAF991C34D0EA84EAF3716,
        0xF7CB1C942D657C41D436C7A1B6E29F65F3E900DBB9AFF4064DC4AB2F843ACDA8,
    )


def test_points_lie_on_the_curve() -> None:
    b = 0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B
    for number in (1, 2, 3, 7, ORDER // 3, ORDER - 2):
        x, y = times(number, BASE)
        assert (y * y - x**3 + 3 * x - b) % PRIME == 0


def test_other_software_reads_the_certificate_and_finds_its_signature_right(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl program here to compare with")
    file = tmp_path / "roster.pem"
    file.write_text(make())
    checked = subprocess.run(
        ["openssl", "verify", "-check_ss_sig", "-CAfile", file, file], capture_output=True, text=True
    )
    assert checked.stdout.strip() == f"{file}: OK", checked.stderr
    told = subprocess.run(
        ["openssl", "x509", "-in", file, "-noout", "-fingerprint", "-sha256"], capture_output=True, text=True
    )
    shown = told.stdout.strip().partition("=")[2].replace(":", "").lower()
    assert shown == Certificate(file).fingerprint


def test_it_is_kept_for_its_owner_alone_and_is_the_same_the_next_time(tmp_path: Path) -> None:
    file = tmp_path / "kept" / "roster.json.pem"
    first = Certificate(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert Certificate(file).fingerprint == first.fingerprint
    assert len({first.fingerprint, Certificate().fingerprint, Certificate().fingerprint}) == 3


def test_a_certificate_that_cannot_be_used_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "roster.json.pem"
    file.write_text("not a certificate")
    with pytest.raises(ValueError, match="move it away, and a new one is made"):
        Certificate(file)
    with pytest.raises(ValueError, match="cannot be written"):
        Certificate(file / "below a file")


def test_the_fingerprint_is_the_sha256_of_the_certificates_bytes(tmp_path: Path) -> None:
    import ssl

    file = tmp_path / "roster.pem"
    seen = Certificate(file).fingerprint
    pem = file.read_text()
    der = ssl.PEM_cert_to_DER_cert(pem[pem.index("-----BEGIN CERTIFICATE") :])
    assert seen == hashlib.sha256(der).hexdigest()
