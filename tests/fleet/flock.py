"""Starts real workers of an elastic fleet for tests, under a roster in the test's own process."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crew import Outcome, _text, outcome, start
from nursery import Worker, elastic_variables, end_all

from paceline.observe import RunLog, read_log
from paceline.observe.analysis.audit import audit
from paceline.roster import RosterServer
from ports import own_port

TOKEN = "a-token-for-tests"


class Flock:
    """Workers that come and go. Use as a context manager: nothing survives it."""

    def __init__(
        self,
        case: str,
        size: int,
        folder: Path,
        *,
        minimum: int = 1,
        maximum: int = 8,
        args: Any = None,
        env: dict[str, str] | None = None,
        state: Path | None = None,
        own: dict[int, dict[str, str]] | None = None,
    ) -> None:
        """``own``: variables of single workers, by slot."""
        self.own = own or {}
        self.case, self.folder, self.args, self.env = case, folder, args or {}, env or {}
        folder.mkdir(parents=True, exist_ok=True)
        self._sizes, self._state = (minimum, maximum), state
        self.server = self._host(expect=size, port=own_port() if state else 0)  # it may come back there
        self.workers: dict[int, Worker] = {}
        for slot in range(size):
            self.start(slot, expected=True)

    def _host(self, *, expect: int, port: int = 0) -> RosterServer:
        minimum, maximum = self._sizes
        server = RosterServer(
            minimum=minimum, maximum=maximum, token=TOKEN, port=port, expect=expect, state=self._state
        )
        server.start()
        return server

    def restart_roster(self, *, pause: float = 0.5) -> None:
        port = self.server.port
        self.server.close()
        time.sleep(pause)
        self.server = self._host(expect=0, port=port)

    def start(self, slot: int, *, expected: bool = False, **env: str) -> None:
        """Start a worker, or start it again."""
        self.workers[slot] = start(self.folder, slot, self.case, self.args, {**self._variables(slot), **env})

    def _variables(self, slot: int) -> dict[str, str]:
        told = elastic_variables(slot, run_dir=self.folder / "run", address=self.server.address, token=TOKEN)
        return {**told, "QUICK_EXIT": "1", **self.env, **self.own.get(slot, {})}

    def __enter__(self) -> Flock:
        return self

    def __exit__(self, *_: object) -> None:
        end_all(self.workers.values())
        self.server.close()

    # -- faults ----------------------------------------------------------------------------------------------------

    def send(self, slot: int, number: signal.Signals) -> None:
        os.kill(self.workers[slot].pid, number)

    def kill(self, slot: int) -> None:
        self.workers[slot].kill_group()
        self.workers[slot].wait()
        self.tell_death(slot)

    def tell_death(self, slot: int) -> None:
        """As a launcher does."""
        self.server.died(f"{socket.gethostname()}/{slot}", "was killed by signal 9 (SIGKILL)")

    # -- watching --------------------------------------------------------------------------------------------------

    def records(self) -> list[dict[str, Any]]:
        log = self.folder / "run" / "events.jsonl"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return [event for line in lines if (event := _event(line)).get("event") == "step"]

    def wait_for_step(self, step: int, *, within: float = 60.0) -> None:
        """Until the log holds this step or a later one."""
        until = time.monotonic() + within
        while not any(record["step"] >= step for record in self.records()):
            assert time.monotonic() < until, f"no step {step}: {self.complaints()}"
            assert any(worker.poll() is None for worker in self.workers.values()), self.complaints()
            time.sleep(0.02)

    def wait_for_workers(self, number: int) -> None:
        """Until the last step in the log was made by so many."""
        self.wait_until(lambda: len(self.records()[-1]["workers"]) == number)

    def wait_for_member(self, worker: int) -> None:
        """Until the last step in the log was made with this one."""
        self.wait_until(lambda: worker in self.records()[-1]["workers"])

    def together_since(self, generation: int) -> bool:
        """Whether all of the workers are in one generation, later than this one."""
        now = self.server.snapshot()
        return now["generation"] > generation and len(now["members"]) == len(self.workers)

    def wait_until(self, happened: Callable[[], bool], *, within: float = 60.0) -> None:
        until = time.monotonic() + within
        while not happened():
            assert time.monotonic() < until, self.complaints()
            time.sleep(0.02)

    def wait_for(self, name: str, *, within: float = 60.0) -> None:
        until = time.monotonic() + within
        while not (self.folder / name).exists():
            assert time.monotonic() < until, f"no worker made {name}: {self.complaints()}"
            time.sleep(0.02)

    def wait(self, *, within: float = 90.0) -> dict[int, Outcome]:
        until = time.monotonic() + within
        while any(worker.poll() is None for worker in self.workers.values()):
            assert time.monotonic() < until, f"a worker hangs: {self.complaints()}"
            time.sleep(0.02)
        return {slot: self.outcome(slot) for slot in self.workers}

    def wait_for_end(self, slot: int) -> None:
        """Until this worker's process has ended."""
        self.wait_until(lambda: self.workers[slot].poll() is not None)

    def hurry(self) -> dict[int, Outcome]:
        """Nothing more is to happen: come to the end, without pauses where the case makes some."""
        (self.folder / "hurry").touch()
        return self.wait()

    def outcome(self, slot: int) -> Outcome:
        """How this worker has ended, as far as it has."""
        return outcome(self.folder, slot, self.workers[slot].poll())

    def said(self, slot: int) -> str:
        """What this worker has written to stderr so far."""
        return _text(self.folder / f"err.{slot}")

    def complaints(self) -> str:
        said = {slot: self.outcome(slot) for slot in self.workers}
        return "\n".join(f"worker {slot} ({one.code}): {one.err[-2500:]}" for slot, one in said.items())


def sound(
    folder: Path,
    outcomes: dict[int, Outcome],
    *,
    ended: set[int],
    epochs: int | None,
    length: int,
    whole: bool = True,
) -> tuple[RunLog, list[Any]]:
    """Those who ended well have equal replicas, and every sample of every epoch counted once (None: it is a stream).
    Returns the run's log and their values. ``whole``: the log has its end, which a leader may not live to write."""
    for slot in ended:
        one = outcomes[slot]
        assert one.code == 0, f"worker {slot} ended with {one.code}: {one.err[-3000:]}"
    values = [outcomes[slot].value for slot in sorted(ended)]
    assert all(value["weights"] == values[0]["weights"] for value in values), "replicas are not equal bit for bit"
    run = read_log(folder / "run")
    if epochs is not None:
        seen = audit(run)
        assert [entry.epoch for entry in seen] == list(range(epochs))
        assert all(entry.sound and entry.whole >= whole and entry.counted == length for entry in seen), seen
    return run, values


def _event(line: str) -> dict[str, Any]:
    try:
        return dict(json.loads(line))
    except ValueError:
        return {}
