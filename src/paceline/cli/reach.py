"""``paceline doctor --to HOST``: whether another computer is reached, how fast, and over which interface.

Bytes are timed with the doctor there, ``paceline doctor --answer`` (`paceline.transport.link_speed`).
"""

from __future__ import annotations

import os
import socket
import statistics
from collections.abc import Iterator
from typing import NamedTuple

from paceline import concurrency
from paceline.transport.link_speed import MOST_BYTES, PORT, DoctorProbe, bandwidth

PATIENCE_S = 3.0
PINGS = 11
MEASURED_S = 1.0
"""Seconds for which each direction is measured."""


class Target(NamedTuple):
    """Another computer, as the user named it and as the system finds it."""

    name: str
    address: str
    port: int
    told: bool
    """Whether the user gave the port."""


class Finding(NamedTuple):
    """One line: its subject, ``ok``, ``note`` or ``failed``, the text, what to do, and the number in the text."""

    name: str
    state: str
    text: str
    advice: str = ""
    value: float | None = None


def parse(text: str) -> Target:
    """Look ``HOST[:PORT]`` up; ValueError, in one line, where that cannot be.

    >>> parse("127.0.0.1:80"), parse("127.0.0.1").port
    (Target(name='127.0.0.1', address='127.0.0.1', port=80, told=True), 7071)
    """
    bare = text.strip()
    host, _, port = bare.rpartition(":") if bare.count(":") == 1 or "]:" in bare else (bare, "", "")
    host = host.removeprefix("[").removesuffix("]")
    if not host or (":" in bare and not port and bare.endswith(":")):
        raise ValueError(f"{text!r} is no computer's address; write HOST or HOST:PORT, for example 10.0.0.5:{PORT}")
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"the port in {text!r} is not a number from 1 to 65535")
    number = int(port or PORT)
    try:
        address = str(socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"no computer is known as {host!r} here ({reason}): give its address") from None
    return Target(host, address, number, bool(port))


def examine(target: Target) -> Iterator[Finding]:
    """Yield what is found about the way to another computer, line by line."""
    yield way_out(target)
    began = concurrency.perf_counter()
    try:
        connection = socket.create_connection((target.address, target.port), timeout=PATIENCE_S)
    except ConnectionRefusedError:
        yield _refused(target, concurrency.perf_counter() - began)
        return
    except OSError as error:
        yield _unreached(target, error)
        return
    connected_s = concurrency.perf_counter() - began
    with connection:
        probe = DoctorProbe(connection)
        if not probe.greeted():
            text = f"{_where(target)} takes connections ({connected_s * 1000:.1f} ms to connect); it is not a doctor"
            yield Finding("reach", "ok", text, _ask_for_doctor(target), connected_s)
            return
        yield Finding("reach", "ok", f"the doctor at {_where(target)} answers")
        try:
            yield from measured(probe)
        except OSError as error:
            yield Finding("bandwidth", "failed", f"the connection broke while bytes were timed ({error})")


def way_out(target: Target) -> Finding:
    """Find the interface that packets leave by, and the one that Gloo would use."""
    from paceline.transport.network import address_towards, interfaces

    known = interfaces()
    forced = os.environ.get("GLOO_SOCKET_IFNAME")
    if forced and forced not in known:
        others = ", ".join(f"{name} ({address})" for name, address in known.items())
        return Finding(
            "way", "failed", f"GLOO_SOCKET_IFNAME is {forced}, which has no address here", f"there are {others}"
        )
    try:
        address = address_towards(target.address, target.port)
    except OSError as error:
        return Finding("way", "failed", f"no route to {target.address} ({error.strerror or error})")
    name = next((name for name, own in known.items() if own == address), "an unnamed interface")
    if forced and known[forced] != address:
        text = f"packets leave by {name} ({address}); Gloo uses {forced} ({known[forced]}), as GLOO_SOCKET_IFNAME says"
        return Finding("way", "note", text, "unset it, unless the others reach this computer there")
    return Finding("way", "ok", f"packets leave by {name} ({address}), and Gloo would use it")


def measured(probe: DoctorProbe) -> Iterator[Finding]:
    """Yield the round trip and both directions' bandwidth, measured with the doctor there."""
    trips = sorted(probe.trip_s() for _ in range(PINGS))
    latency = statistics.median(trips)
    text = f"{latency * 1000:.1f} ms there and back (median of {PINGS}, longest {trips[-1] * 1000:.1f})"
    yield Finding("latency", "ok", text, value=latency)
    there, back = (
        bandwidth(timed, trip_s=latency, most_bytes=MOST_BYTES, lasting_s=MEASURED_S)
        for timed in (probe.there_s, probe.back_s)
    )
    text = f"{there / 1e6:,.0f} Mbit/s there, {back / 1e6:,.0f} Mbit/s back"
    yield Finding("bandwidth", "ok", text, value=min(there, back))


def _refused(target: Target, seconds: float) -> Finding:
    text = f"{target.address} answers after {seconds * 1000:.1f} ms, but nothing listens at port {target.port}"
    return Finding("reach", "failed" if target.told else "note", text, _ask_for_doctor(target), seconds)


def _unreached(target: Target, error: OSError) -> Finding:
    silent = isinstance(error, TimeoutError)
    how = f"no answer within {PATIENCE_S:.0f} s" if silent else str(error.strerror or error)
    advice = (
        "a firewall drops what comes there, or no network leads to it" if silent else "is it switched on, and near?"
    )
    return Finding("reach", "failed", f"{_where(target)} is not reached: {how}", advice)


def _where(target: Target) -> str:
    named = f" ({target.address})" if target.name != target.address else ""
    return f"{target.name}{named}, port {target.port}"


def _ask_for_doctor(target: Target) -> str:
    return (
        f"bandwidth is measured with the doctor there: run `paceline doctor --answer` on {target.name}, and this again"
    )
