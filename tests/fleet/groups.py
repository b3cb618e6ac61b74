"""Starts workers of several processes for tests, as ``paceline run --procs-per-worker`` does."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crew import Crew, Outcome, _text, start
from flock import Flock
from nursery import Worker, end_all

from ports import own_port


def variables(folder: str, shard: int, shards: int) -> dict[str, str]:
    place = {"PACELINE_PROCS_PER_WORKER": str(shards), "PACELINE_SHARD": str(shard), "PACELINE_GROUP_DIR": folder}
    return {**place, "PACELINE_DEVICE": "cpu"}


class Groups(Crew):
    """A fleet of fixed size; ``sizes``: how many processes each worker has. Outcomes are those of the processes, worker
    by worker."""

    def __init__(
        self, case: str, sizes: Sequence[int], folder: Path, *, args: Any = None, devices: Sequence[str] = ()
    ) -> None:
        """``devices``: of all processes, one after another."""
        self.folder, self.size, port = folder, len(sizes), own_port()
        folder.mkdir(parents=True, exist_ok=True)
        self.workers: list[Worker] = []
        self._meeting = [tempfile.TemporaryDirectory(prefix="groups-") for _ in sizes]
        for rank, (shards, meeting) in enumerate(zip(sizes, self._meeting, strict=True)):
            place = {"RANK": rank, "WORLD_SIZE": len(sizes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            fleet = {key: str(value) for key, value in place.items()} if len(sizes) > 1 else {}
            for shard in range(shards):
                own = {"PACELINE_RUN_DIR": str(folder / "run"), "QUICK_EXIT": "1"}
                if devices:
                    own["PACELINE_DEVICE"] = devices[len(self.workers)]
                env = {**fleet, **variables(meeting.name, shard, shards), **own}
                self.workers.append(start(folder, len(self.workers), case, args, env))

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for folder in self._meeting:
            folder.cleanup()


def run_groups(
    case: str, sizes: Sequence[int], folder: Path, *, args: Any = None, devices: Sequence[str] = ()
) -> list[Any]:
    """Run a case to its end and return every process's value; any failure fails the test with its text."""
    with Groups(case, sizes, folder, args=args, devices=devices) as groups:
        outcomes = groups.wait()
    for number, outcome in enumerate(outcomes):
        assert outcome.code == 0, f"process {number} ended with {outcome.code}:\n{outcome.err[-4000:]}"
    return [outcome.value for outcome in outcomes]


class GroupFlock(Flock):
    """Workers of several processes that come and go; a slot's outcome is that of its first process."""

    def __init__(self, case: str, size: int, folder: Path, *, shards: int = 2, **more: Any) -> None:
        self._shards, self._followers = shards, dict[int, list[Worker]]()
        self._meeting: list[Any] = []
        super().__init__(case, size, folder, **more)

    def start(self, slot: int, *, expected: bool = False, **env: str) -> None:
        meeting = tempfile.TemporaryDirectory(prefix="groups-")
        self._meeting.append(meeting)
        super().start(slot, expected=expected, **variables(meeting.name, 0, self._shards), **env)
        told = {**self._variables(slot), **env}
        self._followers[slot] = [
            start(
                self.folder,
                100 * (slot + 1) + shard,
                self.case,
                self.args,
                told | variables(meeting.name, shard, self._shards),
            )
            for shard in range(1, self._shards)
        ]

    def kill(self, slot: int) -> None:
        for follower in self._followers[slot]:
            follower.kill_group()
        super().kill(slot)

    def kill_follower(self, slot: int) -> None:
        """As a launcher does it: the others of the worker end with it."""
        self._followers[slot][0].kill_group()
        self.workers[slot].kill_group()
        self.workers[slot].wait()
        self.tell_death(slot)

    def wait(self, *, within: float = 90.0) -> dict[int, Outcome]:
        outcomes = super().wait(within=within)
        for slot, followers in self._followers.items():
            for number, follower in enumerate(followers, start=1):
                code = follower.wait(20)
                assert code in (outcomes[slot].code, 1, 75, -9), (
                    slot,
                    code,
                    _text(self.folder / f"err.{100 * (slot + 1) + number}"),
                )
        return outcomes

    def __exit__(self, *_: object) -> None:
        end_all([one for followers in self._followers.values() for one in followers])
        super().__exit__()
        for folder in self._meeting:
            folder.cleanup()
