"""How kill.py reads what its workers noted."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import _kill_stamps as stamps
from _kill_stamps import Commit, Process

A, B, C = Process(0, 10), Process(1, 11), Process(2, 12)


def commits(*lines: tuple[float, int, int]) -> list[Commit]:
    return [Commit(at, step, workers, 0) for at, step, workers in lines]


def test_a_watch_reads_on_and_leaves_an_unfinished_line_for_later(tmp_path: Path) -> None:
    file, watch = tmp_path / "2.12", stamps.Watch(tmp_path)
    file.write_text("1.5 7 4 2\n1.6 8 ")
    assert watch.look() == {C: [Commit(1.5, 7, 4, 2)]}
    with file.open("a") as end:
        end.write("3 1\n")
    assert watch.look() == {C: [Commit(1.5, 7, 4, 2), Commit(1.6, 8, 3, 1)]}


def test_the_newest_process_has_the_place() -> None:
    again = Process(1, 99)
    assert stamps.latest({B: commits((2.0, 1, 3)), again: commits((3.0, 2, 3)), C: []}) == {1: again}


def test_a_commit_that_still_counted_the_dead_one_is_no_recovery() -> None:
    told = {A: commits((0.9, 0, 3), (1.1, 1, 3)), B: commits((1.2, 1, 3), (1.5, 2, 2))}
    assert stamps.recovered_at(told, [A, B], since=1.0, workers=2) is None
    told[A] = [*told[A], *commits((1.4, 2, 2))]
    assert stamps.recovered_at(told, [A, B], since=1.0, workers=2) == 1.5
    assert stamps.recovered_at(told, [A, B, C], since=1.0, workers=2) is None


def test_a_fleet_is_whole_when_everybody_has_made_steps_with_everybody() -> None:
    told = {A: commits((1.0, 0, 2), (2.0, 1, 2)), B: commits((1.0, 0, 2), (2.1, 1, 2))}
    assert stamps.is_whole(told, workers=2, steps=2)
    assert not stamps.is_whole(told, workers=2, steps=2, since=1.5)
    assert not stamps.is_whole(told, workers=3, steps=2)
    assert not stamps.is_whole({**told, B: commits((1.0, 0, 1), (2.1, 1, 2))}, workers=2, steps=2)


def test_the_longest_gap_is_that_of_one_process_within_the_given_steps() -> None:
    told = {A: commits((0.0, 0, 3), (5.0, 1, 3), (5.1, 2, 3), (5.4, 3, 3)), B: commits((5.05, 1, 3), (5.15, 2, 3))}
    assert round(stamps.longest_gap_s(told, [A, B], steps=(1, 3)), 6) == 0.3


def test_commits_without_somebody_alive_are_counted() -> None:
    told = {A: commits((0.5, 0, 1), (1.1, 1, 3), (1.2, 2, 2), (1.3, 3, 4))}
    assert stamps.odd_sizes(told, [A], since=1.0, allowed=(3, 4)) == 1
