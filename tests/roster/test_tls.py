"""The roster's connections are encrypted, and known by the fingerprint of a certificate that it makes and keeps: over
real sockets, in one process."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import FleetError
from paceline.roster import RosterClient, RosterServer, server, wire
from paceline.roster.wire import Certificate, Channel, make_certificate
from ports import own_port

TOKEN = "s3cret-token-of-this-run"
NAME = "a-telling-name"
WRITTEN_BEFORE = """\
-----BEGIN EC PRIVATE KEY-----
MHcCAQEEIGLt/T+6ol07vFA/dE/UKZWPAVSjnKVVQLkr3eZv7grBoAoGCCqGSM49AwEHoUQDQgAE
o4ylTKlXZV4xmiERgsjuApFAedvaM9qo3n8vyfJwDe7DQXtc53I+L5enYPJEnFxS4CG2u/UAkDqA
Qvf8tCGENw==
-----END EC PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBJzCCAM0CCAGKSLi0zcjBMAoGCCqGSM49BAMCMBoxGDAWBgNVBAMMD3BhY2VsaW5lIHJvc3Rl
cjAiGA8yMDAwMDEwMTAwMDAwMFoYDzk5OTkxMjMxMjM1OTU5WjAaMRgwFgYDVQQDDA9wYWNlbGlu
ZSByb3N0ZXIwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAASjjKVMqVdlXjGaIRGCyO4CkUB529oz
2qjefy/J8nAN7sNBe1zncj4vl6dg8kScXFLgIba79QCQOoBC9/y0IYQ3MAoGCCqGSM49BAMCA0gA
MEUCIChsC1Rv+jsIXGbZmX3pRDqW8j4tyI/GG0YhJ7NLdgkvAiEAgvtGLG1CHQ8p72LQ8QzkMayY
AH0e/r6lldPKvPOJmBM=
-----END CERTIFICATE-----
"""


@contextmanager
def roster(**settings: Any) -> Iterator[RosterServer]:
    one = RosterServer(**{"minimum": 1, "maximum": 40, "token": TOKEN, **settings})
    one.start()
    try:
        yield one
    finally:
        one.close()


@contextmanager
def member(address: str, slot: int = 0, *, token: str = TOKEN) -> Iterator[RosterClient]:
    facts = {"host": NAME, "device": "cpu"}
    one = RosterClient(address, token=token, name=f"{NAME}/{slot}", facts=facts, on_over=lambda number: None)
    try:
        yield one
    finally:
        one.close()


class Between:
    """Somebody on the way to the roster: passes everything on, and keeps what he sees. With a certificate of his own he
    ends TLS here, and begins it anew."""

    def __init__(self, to: tuple[str, int], *, certificate: Certificate | None = None) -> None:
        self._to, self._certificate = to, certificate
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen = bytearray()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                worker, _ = self._listener.accept()
                roster = socket.create_connection(self._to)
                if self._certificate is not None:
                    worker = self._certificate.context.wrap_socket(worker, server_side=True)
                    theirs = ssl.create_default_context()
                    theirs.check_hostname, theirs.verify_mode = False, ssl.CERT_NONE
                    roster = theirs.wrap_socket(roster)
                for source, target in ((worker, roster), (roster, worker)):
                    threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self.seen += data
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


def test_what_crosses_the_network_holds_neither_token_nor_names() -> None:
    with roster() as here:
        between = Between(wire.parse_address(here.address))
        with member(f"{between.address}#{here.fingerprint}") as one:
            generation = one.next_generation(after=0, fresh=True, orderly=True)
            assert generation.facts[0]["name"] == f"{NAME}/0"
            one.leave("finished")
        between.close()
    seen = bytes(between.seen)
    assert len(seen) > 1000
    for secret in (TOKEN, NAME, "challenge", "hello", "generation", "paceline"):
        assert secret.encode() not in seen, secret


def test_a_wrong_fingerprint_is_one_clear_sentence() -> None:
    with roster() as here:
        began = time.monotonic()
        address = f"127.0.0.1:{here.port}#{'ab' * 32}"
        said = f"another roster than that of the join line answers there: .*{here.fingerprint}.*Take the line anew"
        with pytest.raises(FleetError, match=said), member(address):
            pass
        assert time.monotonic() - began < 5, "it is not tried again"
        with member(address.replace("ab" * 32, here.fingerprint.upper())):
            pass


def test_whoever_knows_the_token_may_leave_the_fingerprint_out() -> None:
    with roster() as here, member(f"127.0.0.1:{here.port}") as one:
        assert one.id == 0


def test_proofs_do_not_fit_when_somebody_in_between_passes_them_on() -> None:
    refused: list[str] = []
    with roster(on_event=lambda kind, said: refused.append(said["text"]) if kind == "refused" else None) as here:
        between = Between(wire.parse_address(here.address), certificate=Certificate())
        with pytest.raises(FleetError, match="does not know this run's token"), member(between.address):
            pass
        between.close()
        assert NAME.encode() not in between.seen, "the worker has not said who it is"
    assert len(refused) == 1


@pytest.mark.parametrize("bad", ["#", "#ab", "#" + "g" * 64, "#" + "a" * 63])
def test_a_fingerprint_that_is_none_is_explained(bad: str) -> None:
    with pytest.raises(ValueError, match="write HOST:PORT#FINGERPRINT with the 64 digits"):
        wire.parse_fingerprint(f"10.0.0.5:7070{bad}")


def test_a_restarted_roster_shows_the_certificate_that_it_keeps_with_its_state(tmp_path: Path) -> None:
    state, port = tmp_path / "roster.json", own_port()
    with roster(state=state, port=port) as first, member(first.address) as one:
        one.next_generation(after=0, fresh=True, orderly=True)
        first.close()
        with roster(state=state, port=port) as second:
            assert second.fingerprint == first.fingerprint
            assert one.next_generation(after=1, fresh=False, orderly=True).number == 2
            one.leave("finished")


def test_a_worker_does_not_go_over_to_a_roster_with_another_certificate(caplog: pytest.LogCaptureFixture) -> None:
    port = own_port()
    with roster(port=port) as first, member(first.address) as one, caplog.at_level(logging.WARNING, "paceline"):
        first.close()
        with roster(port=port) as second:
            until = time.monotonic() + 30
            while second.fingerprint not in caplog.text:
                assert time.monotonic() < until
                time.sleep(0.02)
            assert one.away


# -- versions that spoke in the clear --------------------------------------------------------------------------------


@pytest.mark.parametrize("first_words", [b"", b'{"challenge": "c", "proof": "p"}\n'])
def test_a_worker_that_speaks_in_the_clear_is_told_so(first_words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MUTE_S", 0.3)
    with roster() as here, socket.create_connection(("127.0.0.1", here.port), timeout=4) as old:
        old.sendall(first_words)
        said = json.loads(old.makefile("rb").readline())
    assert said["refused"] == "plain"
    assert re.match("this roster speaks TLS.*: install the paceline that the roster's computer has", said["text"])


def test_a_roster_that_speaks_in_the_clear_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as old:

        def greet() -> None:
            connection, _ = old.accept()
            connection.sendall(b'{"paceline":1,"challenge":"00"}\n')
            with suppress(OSError):
                connection.recv(4096)

        threading.Thread(target=greet, daemon=True).start()
        began = time.monotonic()
        with (
            pytest.raises(FleetError, match="the roster there speaks in the clear"),
            member(f"127.0.0.1:{old.getsockname()[1]}"),
        ):
            pass
        assert time.monotonic() - began < 5


def test_one_that_was_taken_for_an_old_worker_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MUTE_S", -1.0)  # whoever has not spoken by the next look
    with roster() as here:
        threading.Timer(0.5, monkeypatch.setattr, (server, "MUTE_S", 2.5)).start()
        with member(here.address) as one:
            assert one.id == 0


# -- many at once ----------------------------------------------------------------------------------------------------


def test_handshakes_that_hang_hold_up_nobody() -> None:
    with roster() as here, ThreadPoolExecutor(20) as pool:
        hello = Channel().outgoing()
        hanging = [socket.create_connection(("127.0.0.1", here.port)) for _ in range(20)]
        for number, one in enumerate(hanging):
            one.sendall(hello[: 10 * (number % 3) + 1])  # and not a byte more

        def enter(slot: int) -> int:
            with member(here.address, slot) as one:
                return one.id

        began = time.monotonic()
        assert sorted(pool.map(enter, range(20))) == list(range(20))
        assert time.monotonic() - began < 15, "s; each silent one would cost 5"
        for one in hanging:
            one.close()


@pytest.fixture
def pair() -> tuple[Channel, Channel]:
    ours, theirs = Channel(Certificate().context), Channel()
    while not (ours.ready and theirs.ready):
        ours.open(theirs.outgoing())
        theirs.open(ours.outgoing())
    return ours, theirs


def test_what_is_sealed_arrives_whole_however_its_bytes_are_cut(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    said = b"".join(b"%d," % number for number in range(30_000))
    sealed = ours.seal(said)
    assert said[:100] not in sealed
    assert b"".join(theirs.open(sealed[at : at + 777]) for at in range(0, len(sealed), 777)) == said


def test_threads_may_read_and_send_at_once(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    line = b"x" * 999 + b"\n"

    def talk(mine: Channel, other: Callable[[bytes], bytes], count: int) -> bytes:
        return b"".join(other(mine.seal(line)) for _ in range(count))

    with ThreadPoolExecutor(2) as pool:
        there, back = pool.submit(talk, ours, theirs.open, 2000), pool.submit(talk, theirs, ours.open, 2000)
        assert there.result(30) == back.result(30) == line * 2000


# -- the certificate -----------------------------------------------------------------------------------------------


def test_other_software_reads_the_certificate_and_finds_its_signature_right(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl program here to compare with")
    file = tmp_path / "roster.pem"
    file.write_text(make_certificate())
    checked = subprocess.run(
        ["openssl", "verify", "-check_ss_sig", "-CAfile", file, file], capture_output=True, text=True
    )
    assert checked.stdout.strip() == f"{file}: OK", checked.stderr
    printed = subprocess.run(
        ["openssl", "x509", "-in", file, "-noout", "-fingerprint", "-sha256"], capture_output=True, text=True
    )
    shown = printed.stdout.strip().partition("=")[2].replace(":", "").lower()
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
    file = tmp_path / "roster.pem"
    seen = Certificate(file).fingerprint
    pem = file.read_text()
    der = ssl.PEM_cert_to_DER_cert(pem[pem.index("-----BEGIN CERTIFICATE") :])
    assert seen == hashlib.sha256(der).hexdigest()


def test_a_certificate_of_an_older_paceline_serves_on(tmp_path: Path) -> None:
    """Version 1 of X.509, without extensions, as Paceline wrote it before it used a library."""
    file = tmp_path / "roster.pem"
    file.write_text(WRITTEN_BEFORE)
    kept = Certificate(file)
    assert kept.fingerprint == "4788d03823e0d3f6f62d68d6627830cf188b9133ee084c8f2a173f83de5d16b0"
    ours, theirs = Channel(kept.context), Channel()
    for _ in range(3):
        ours.open(theirs.outgoing())
        theirs.open(ours.outgoing())
    assert theirs.fingerprint == kept.fingerprint
    assert file.read_text() == WRITTEN_BEFORE


def test_only_making_a_certificate_needs_cryptography_and_its_absence_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "roster.pem"
    kept = Certificate(file)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ValueError, match="pip install cryptography"):
        Certificate()
    assert Certificate(file).fingerprint == kept.fingerprint
