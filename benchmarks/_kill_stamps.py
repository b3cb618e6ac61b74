"""What the workers of kill.py noted after each commit, and what follows from it. Seconds are CLOCK_MONOTONIC's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple


class Commit(NamedTuple):
    """One line of a worker's file."""

    at: float
    step: int
    workers: int
    """How many took part in the step."""
    rank: int


class Process(NamedTuple):
    """Who wrote a file: the worker's place, and the process that had it."""

    slot: int
    pid: int


Commits = Mapping[Process, Sequence[Commit]]


class Watch:
    """The files of a folder, each read on from where it was last time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._commits: dict[Process, list[Commit]] = {}

    def look(self) -> Commits:
        """All commits so far, by process."""
        for path in self._folder.iterdir():
            begin = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(begin)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = begin + len(whole)
            process = Process(*(int(number) for number in path.name.split(".")))
            self._commits.setdefault(process, []).extend(_commit(line) for line in whole.decode().splitlines())
        return self._commits


def _commit(line: str) -> Commit:
    at, *numbers = line.split()
    return Commit(float(at), *(int(number) for number in numbers))


def latest(commits: Commits) -> dict[int, Process]:
    """By slot, the process that committed last."""
    ends = sorted((theirs[-1].at, process) for process, theirs in commits.items() if theirs)
    return {process.slot: process for _, process in ends}


def is_whole(commits: Commits, *, workers: int, steps: int, since: float = 0.0) -> bool:
    """Whether each of ``workers`` places has made ``steps`` steps since then, its last ones, with everybody."""
    present = latest(commits)
    ends = [[one for one in commits[process] if one.at > since][-steps:] for process in present.values()]
    return len(present) == workers and all(
        len(end) == steps and all(one.workers == workers for one in end) for end in ends
    )


def recovered_at(commits: Commits, who: Iterable[Process], *, since: float, workers: int) -> float | None:
    """When the last of ``who`` had committed a step of at most ``workers`` workers after ``since``; None: not yet."""
    firsts = [
        next((one.at for one in commits.get(process, ()) if one.at > since and one.workers <= workers), None)
        for process in who
    ]
    return None if not firsts or None in firsts else max(first for first in firsts if first is not None)


def entry(commits: Commits, process: Process, *, since: float) -> Commit | None:
    """The first commit of a process after that time; None: not yet."""
    return next((one for one in commits.get(process, ()) if one.at > since), None)


def longest_gap_s(commits: Commits, who: Iterable[Process], *, steps: tuple[int, int]) -> float:
    """The longest time between two commits of one process, between the two ``steps``."""
    first, last = steps
    return max(gap for process in who for gap in _gaps(one for one in commits[process] if first <= one.step <= last))


def step_gaps_s(commits: Commits, process: Process, *, before: float, steps: int) -> list[float]:
    """The times between the last ``steps`` commits of a process before that time."""
    return _gaps([one for one in commits[process] if one.at < before][-steps:])


def odd_sizes(commits: Commits, who: Iterable[Process], *, since: float, allowed: Collection[int]) -> int:
    """Commits after that time by another number of workers than can be explained: somebody alive was left out."""
    return sum(one.at > since and one.workers not in allowed for process in who for one in commits[process])


def _gaps(commits: Iterable[Commit]) -> list[float]:
    return [later.at - earlier.at for earlier, later in pairwise(commits)]
