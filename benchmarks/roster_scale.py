"""How large a fleet can one roster serve? Members that speak its protocol, without torch and without training.

The roster is a process of its own; all members live in this one. Of each size:

- ``join_s``: from the first connection until the last member is let in, 32 of them at a time
- ``retries``: handshakes that nobody answered in time, and that were begun again
- ``form_s``: from the first member's request until the last one has the generation
- ``beat_ms``: from a beat to the roster's answer, median and 99th percentile; everybody beats five times a second
- ``cpu``: the part of one core that the roster needs meanwhile
- ``lost_s``: one member's connection closes; until the last of the others has heard of it
- ``reform_s``: from there until the last has the next generation

``join_cpu_s``, ``form_cpu_s`` and ``reform_cpu_s`` are the roster's own processor seconds for these: on a computer that
has other work they say more.

    python benchmarks/roster_scale.py [--smoke]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import selectors
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from _smoke import smoke

from paceline.roster import RosterServer, wire
from paceline.roster.client import BACK_OFF_S
from paceline.roster.liveness import BEAT_S, computer
from paceline.roster.wire import RosterConnection, shake_hands

SIZES = (10, 100, 1000)
STEADY_S = 10.0
HANDS = 32
"""Members that shake hands at once."""
MOST_TRIES = 10
WITHIN_S = 120.0
TOKEN = "a token"
SHORT = 4096
"""Bytes of a line; a longer one is a generation, and not worth reading here."""

globals().update(smoke(SIZES=(10, 200), STEADY_S=0.5))


def serve(pipe: Any, members: int) -> None:
    """The roster's process: says its address, and then its thread's processor seconds whenever it is asked."""
    server = RosterServer(minimum=members - 1, maximum=members, token=TOKEN, expect=members)
    server._store.start = lambda: None  # type: ignore[method-assign]  # torch's store, which nobody here uses
    server.start()
    pipe.send(server.address)
    clock = time.pthread_getcpuclockid(server._thread.ident or 0)
    while pipe.recv():
        pipe.send(time.clock_gettime(clock))
    server.close()


class Lines:
    """A member's ear: short lines are read, of a long one it is enough that it came."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        self._rest += data
        if b"\n" not in data:
            return []
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        return [wire.decode(line) if len(line) < SHORT else {"generation": None} for line in lines]


class Member:
    """One worker, as far as the roster can tell."""

    def __init__(self, address: str, number: int) -> None:
        facts = {"host": f"computer-{number // 8}.example", "device": "cpu", "pid": number, "emulated": None}
        hello = {"name": f"{facts['host']}/{number}", "session": f"{number:016x}", "facts": facts}
        hello |= {"process": [os.getpid(), computer()], "generation": 0, "was": None, "returning": False}
        self.tries = 0
        self.connection = self._let_in(wire.parse_address(address), hello)
        self.connection._lines = Lines()  # type: ignore[assignment]
        self.sent: dict[int, float] = {}
        self.next_beat, self.count = 0.0, 0

    def _let_in(self, address: tuple[str, int], hello: dict[str, Any]) -> RosterConnection:
        """As a worker does it: again, when nobody answers in time."""
        while True:
            self.tries += 1
            try:
                return shake_hands(address, token=TOKEN, hello=hello)
            except (OSError, EOFError):
                if self.tries == MOST_TRIES:
                    raise
                time.sleep(BACK_OFF_S[min(self.tries, len(BACK_OFF_S)) - 1])

    def say(self, message: dict[str, Any]) -> None:
        send = getattr(self.connection, "send", None)
        send(message) if send else self.connection.socket.sendall(wire.encode(message))

    def beat(self, now: float, generation: int) -> None:
        self.count += 1
        self.sent[self.count], self.next_beat = now, now + BEAT_S
        spots = {"calls": (40, "round of step 40", True)}
        self.say({"beat": self.count, "generation": generation, "doing": "step 40", "begun": 41, "spots": spots})


class Herd:
    """All members, and one thread that beats and listens for them."""

    def __init__(self, address: str, many: int) -> None:
        self.selector = selectors.DefaultSelector()
        self.members: list[Member] = []
        self.answers_s: list[float] = []
        self.generation = 0
        began = time.perf_counter()
        with ThreadPoolExecutor(HANDS) as pool:
            coming = [pool.submit(Member, address, number) for number in range(many)]
            while coming:  # those that are in beat meanwhile, as each worker's own thread does
                let_in = [one for one in coming if one.done()]
                coming = [one for one in coming if one not in let_in]
                for one in let_in:
                    self._add(one.result())
                self._turn(lambda member, message: None)
        self.join_s = time.perf_counter() - began

    def _add(self, member: Member) -> None:
        self.members.append(member)
        self.selector.register(member.connection.socket, selectors.EVENT_READ, member)

    def _turn(self, hear: Callable[[Member, dict[str, Any]], None]) -> None:
        """Beat for those whose time has come, and listen for a moment."""
        now = time.perf_counter()
        for member in self.members:
            if now >= member.next_beat:
                member.beat(time.perf_counter(), self.generation)
        for key, _ in self.selector.select(0.002):
            for message in key.data.connection.read():
                self._hear(key.data, message)
                hear(key.data, message)

    def until(self, what: str | None, within_s: float) -> float:
        """Beat and listen until every member has heard ``what`` (None: for so long); returns the seconds."""
        began, missing = time.perf_counter(), {id(member) for member in self.members}

        def hear(member: Member, message: dict[str, Any]) -> None:
            if what is not None and what in message:
                missing.discard(id(member))

        while missing and time.perf_counter() - began < within_s:
            self._turn(hear)
        if what is not None and missing:
            raise SystemExit(f"{len(missing)} of {len(self.members)} members did not hear {what!r} in {within_s:.0f} s")
        return time.perf_counter() - began

    def _hear(self, member: Member, message: dict[str, Any]) -> None:
        if "ack" in message and (sent := member.sent.pop(message["ack"], None)):
            self.answers_s.append(time.perf_counter() - sent)
        if "dropped" in message or "fail" in message or "refused" in message:
            raise SystemExit(f"a member was given up: {message}")

    def next_generation(self, *, fresh: bool) -> float:
        """All ask, and wait until the last has it."""
        began = time.perf_counter()
        for member in self.members:
            member.say({"ready": [self.generation, fresh, fresh]})
        self.until("generation", WITHIN_S)
        self.generation += 1
        return time.perf_counter() - began

    def lose_one(self) -> float:
        lost = self.members.pop()
        self.selector.unregister(lost.connection.socket)
        lost.connection.close()
        return self.until("over", WITHIN_S)

    def close(self) -> None:
        for member in self.members:
            member.connection.close()


def measure(many: int) -> dict[str, float]:
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    roster = multiprocessing.get_context("fork").Process(target=serve, args=(theirs, many), daemon=True)
    roster.start()

    def cpu_s() -> float:
        ours.send(True)
        return float(ours.recv())

    herd = Herd(ours.recv(), many)
    join_cpu_s = cpu_s()
    form_s = herd.next_generation(fresh=True)
    form_cpu_s = cpu_s() - join_cpu_s
    herd.until(None, 2 * BEAT_S)
    herd.answers_s.clear()
    before, began = cpu_s(), time.perf_counter()
    herd.until(None, STEADY_S)
    cpu = (cpu_s() - before) / (time.perf_counter() - began)
    answers_ms = sorted(1e3 * one for one in herd.answers_s)
    before = cpu_s()
    lost_s = herd.lose_one()
    reform_s = herd.next_generation(fresh=False)
    reform_cpu_s = cpu_s() - before
    herd.close()
    ours.send(False)
    roster.join(10)
    return {
        "join_s": herd.join_s,
        "join_cpu_s": join_cpu_s,
        "retries": sum(member.tries - 1 for member in herd.members),
        "form_s": form_s,
        "form_cpu_s": form_cpu_s,
        "beat_ms": statistics.median(answers_ms),
        "beat_ms_p99": answers_ms[int(0.99 * (len(answers_ms) - 1))],
        "cpu": cpu,
        "lost_s": lost_s,
        "reform_s": reform_s,
        "reform_cpu_s": reform_cpu_s,
    }


def main() -> None:
    figures: dict[str, Any] = {"members": list(SIZES)}
    for many in SIZES:
        found = measure(many)
        print(f"{many:>6,} members: " + ", ".join(f"{name} {value:.3g}" for name, value in found.items()), flush=True)
        figures |= {f"{name}_{many}": round(value, 4) for name, value in found.items()}
    largest = SIZES[-1]
    for name in ("join_s", "form_s", "beat_ms", "beat_ms_p99", "cpu", "reform_s", "reform_cpu_s"):
        figures[name] = figures[f"{name}_{largest}"]
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
