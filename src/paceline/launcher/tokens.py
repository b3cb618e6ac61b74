"""A run's token and its address: who may join, and where.

The token is better given as the variable PACELINE_TOKEN or in a file than as an option: every user of a computer can
read the options of its processes, and only the owner their environment.
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


def own_token(token: str | None, file: Path | None) -> str:
    """The token of a roster started here: as given, else a new one. A file that is not there yet is made with it."""
    if file is not None and token is None and not file.exists():
        made = secrets.token_urlsafe(24)
        _write(file, made)
        return made
    return _given(token, file) or secrets.token_urlsafe(24)


def their_token(token: str | None, file: Path | None) -> str:
    """The token of a roster elsewhere; it must be given."""
    found = _given(token, file)
    if found is None:
        raise ValueError(
            "joining a fleet needs its token, which its launcher printed: set PACELINE_TOKEN, or give --token-file"
        )
    return found


def _given(token: str | None, file: Path | None) -> str | None:
    if token is not None and file is not None:
        raise ValueError("give --token or --token-file, not both")
    if file is not None:
        try:
            return _checked(file.read_text(encoding="utf-8").strip(), f"the file {file}")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the token cannot be read from {file} ({error})") from None
    if token is not None:
        return _checked(token, "--token")
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
    """``host`` if this computer can be listened on there."""
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


def printable(token: str, *, option: str | None, file: Path | None) -> str:
    """The token as a shell reads it in the lines that are printed: what is kept in a file or in the variable is not
    written out, for what a launcher prints ends up in logs.

    >>> printable("s3cret-token", option=None, file=Path("token"))
    '"$(cat token)"'
    """
    if file is not None:
        return f'"$(cat {shlex.quote(str(file))})"'
    if option is None and "PACELINE_TOKEN" in os.environ:
        return '"$PACELINE_TOKEN"'
    return shlex.quote(token)


def join_line(address: str, token: str, script: Sequence[str]) -> str:
    """The command that joins a fleet; ``token`` as `printable` gives it."""
    return f"PACELINE_TOKEN={token} paceline run --join {address} {shlex.join(script)}"


def invitation(address: str, token: str, script: Sequence[str], *, loopback: bool) -> str:
    """How others join, in one line; who can is said too."""
    who = "this computer (--host opens it to others)" if loopback else "another machine"
    return f"to join from {who}: {join_line(address, token, script)}"
