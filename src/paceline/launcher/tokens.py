"""A run's token and address, with which others join it.

The token is given as the variable PACELINE_TOKEN or in a file, and not as an option: every user of a computer can read
the options of its processes, but only the owner their environment.
"""

from __future__ import annotations

import os
import secrets
import shlex
import socket
from collections.abc import Sequence
from pathlib import Path

SHORTEST = 8
LONGEST = 1024


def own_token(file: Path | None) -> str:
    """Return the token of a roster started here, as given or new; a ``file`` that does not exist yet is written."""
    if file is not None and not file.exists():
        made = secrets.token_urlsafe(24)
        _write(file, made)
        return made
    return _given(file) or secrets.token_urlsafe(24)


def their_token(file: Path | None) -> str:
    """Return the token of a remote roster; raise ValueError unless it was given."""
    found = _given(file)
    if found is None:
        raise ValueError(
            "joining a fleet needs its token, which its launcher printed: set PACELINE_TOKEN, or give --token-file"
        )
    return found


def read_token(file: Path) -> str:
    """Return the token in a file; raise ValueError when there is none."""
    try:
        return _checked(file.read_text(encoding="utf-8").strip(), f"the file {file}")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the token cannot be read from {file} ({error})") from None


def _given(file: Path | None) -> str | None:
    if file is not None:
        return read_token(file)
    if (variable := os.environ.get("PACELINE_TOKEN")) is not None:
        return _checked(variable, "PACELINE_TOKEN")
    return None


def _checked(token: str, where: str) -> str:
    if not SHORTEST <= len(token) <= LONGEST or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"{where}: a token is {SHORTEST} to {LONGEST} plain characters without spaces")
    return token


def _write(file: Path, token: str) -> None:
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(f"{token}\n")
    except OSError as error:
        raise ValueError(f"the token cannot be written to {file} ({error.strerror or error})") from None


def check_host(host: str) -> str:
    """Return ``host`` if this computer can listen on that address; raise ValueError otherwise."""
    try:
        for family, kind, proto, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, proto) as probe:
                probe.bind(address)
            return host
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"--host {host}: not an address of this computer ({reason}); 0.0.0.0 stands for all it has"
        ) from None
    raise ValueError(f"--host {host}: not an address of this computer")


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")


def printable(token: str, *, file: Path | None) -> str:
    """Return the token as a shell expression, for the lines that are printed.

    A token in a file or in the variable is not written out, because a launcher's output ends up in logs.

    >>> printable("s3cret-token", file=Path("token"))
    '"$(cat token)"'
    """
    if file is not None:
        return f'"$(cat {shlex.quote(str(file))})"'
    if "PACELINE_TOKEN" in os.environ:
        return '"$PACELINE_TOKEN"'
    return shlex.quote(token)


def join_line(address: str, token: str, script: Sequence[str]) -> str:
    """Return the command that joins a fleet; ``token`` is a result of `printable`."""
    return f"PACELINE_TOKEN={token} paceline run --join {address} {shlex.join(script)}"


def invitation(address: str, token: str, script: Sequence[str], *, loopback: bool) -> str:
    """Return one line that shows how, and from where, others can join."""
    who = "this computer (--host opens it to others)" if loopback else "another machine"
    return f"to join from {who}: {join_line(address, token, script)}"
