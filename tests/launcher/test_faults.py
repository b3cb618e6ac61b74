"""Faults played on workers that only write down what was done to them."""

from collections.abc import Sequence

from paceline.launcher.faults import Faults
from paceline.machines.failures import parse_events
from paceline.machines.spot import Market, Row


class Dummies:
    """Workers 0 to ``count`` - 1, with room for ``room``."""

    def __init__(self, count: int, room: int = 8) -> None:
        self.there = set(range(count))
        self.outside: set[int] = set()
        self.room = room
        self.done: list[str] = []
        self.notes: list[str] = []

    @property
    def living(self) -> Sequence[int]:
        return sorted(self.there)

    @property
    def inside(self) -> frozenset[int]:
        return frozenset(self.there - self.outside)

    def kill(self, number: int, *, returns: bool) -> None:
        self.there.discard(number)
        self.done.append(f"kill {number}{' for good' if not returns else ''}")

    def freeze(self, number: int, *, seconds: float) -> None:
        self.done.append(f"freeze {number} {seconds:g}")

    def leave(self, number: int, *, notice_s: float | None = None) -> None:
        self.there.discard(number)
        self.done.append(f"leave {number} {notice_s}")

    def add(self, *, new: bool) -> int | None:
        if len(self.there) >= self.room:
            return None
        number = min(set(range(99)) - self.there) if not new else max(self.there, default=-1) + 1
        self.there.add(number)
        self.done.append(f"add {number}")
        return number

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_events_strike_when_their_step_was_logged_and_only_once() -> None:
    workers, faults = Dummies(4), Faults(parse_events("kill:2@30,freeze:1@30:5s,join@80,leave:3@60,kill:0@90:stay"))
    for step, wanted in [
        (-1, []),
        (29, []),
        (31, ["kill 2", "freeze 1 5"]),
        (59, []),
        (85, ["leave 3 None", "add 2"]),
        (300, ["kill 0 for good"]),
    ]:
        faults.play(workers, step=step, elapsed_s=0.0)
        assert workers.done == wanted
        workers.done.clear()


def test_what_cannot_be_done_is_noted_and_skipped() -> None:
    workers, faults = Dummies(2, room=2), Faults(parse_events("kill:7@1,join@2"))
    faults.play(workers, step=5, elapsed_s=0.0)
    assert workers.done == []
    assert workers.notes == ["kill:7@1: skipped, worker 7 is not running", "join@2: skipped, the fleet is full"]


def test_a_question_mark_is_some_living_worker_the_same_for_the_same_seed() -> None:
    def struck(seed: int) -> list[str]:
        workers = Dummies(6)
        Faults(parse_events("kill:?@1,kill:?@1,kill:?@1"), seed=seed).play(workers, step=1, elapsed_s=0.0)
        return workers.done

    assert struck(3) == struck(3)
    assert len(set(struck(3))) == 3
    assert len({tuple(struck(seed)) for seed in range(20)}) > 1


def test_a_question_mark_with_nobody_alive_is_skipped() -> None:
    workers = Dummies(0)
    Faults(parse_events("kill:?@1")).play(workers, step=1, elapsed_s=0.0)
    assert workers.notes == ["kill:?@1: skipped, no worker is running"]


def spot(*rows: tuple[float, str]) -> list[Row]:
    return [Row(at, change[0] == "+", change[1:]) for at, change in rows]


def play(faults: Faults, workers: Dummies, *times: float) -> None:
    for elapsed in times:
        faults.play(workers, step=-1, elapsed_s=elapsed)


def test_spot_nodes_come_as_workers_and_go_for_good() -> None:
    workers = Dummies(0)
    faults = Faults(market=Market(spot((0, "+a"), (0, "+b"), (10, "-a"), (20, "+c")), room=2))
    assert faults.starts_workers
    play(faults, workers, 0, 0, 9.9)
    assert workers.done == ["add 0", "add 1"]
    play(faults, workers, 10)
    assert faults.coming
    play(faults, workers, 20)
    assert workers.done == ["add 0", "add 1", "kill 0 for good", "add 0"]
    assert not faults.coming


def test_the_traces_clock_begins_with_its_first_event_and_runs_once_the_fleet_stands() -> None:
    workers = Dummies(0)
    faults = Faults(market=Market(spot((50, "+a"), (50, "+b"), (60, "-a")), room=2))
    workers.outside = {0, 1}
    play(faults, workers, 0, 30)
    assert workers.done == ["add 0", "add 1"]
    assert not faults.coming
    workers.outside = set()
    play(faults, workers, 100, 109.9)
    assert workers.done == ["add 0", "add 1"]
    play(faults, workers, 110)
    assert workers.done == ["add 0", "add 1", "kill 0 for good"]


def test_with_notice_a_spot_node_is_asked_first() -> None:
    workers = Dummies(0)
    play(Faults(market=Market(spot((0, "+a"), (0, "+b"), (1, "-b")), room=2), notice_s=2.0), workers, 0, 0, 1)
    assert workers.done == ["add 0", "add 1", "leave 1 2.0"]


def test_a_node_that_goes_before_it_could_start_never_starts() -> None:
    workers = Dummies(0, room=1)
    faults = Faults(market=Market(spot((0, "+a"), (0, "+b"), (1, "-b")), room=2))
    play(faults, workers, 0, 0)
    assert faults.coming
    play(faults, workers, 1)
    workers.room = 2
    play(faults, workers, 2)
    assert workers.done == ["add 0"]


def test_a_node_whose_worker_had_gone_by_itself_takes_nobody_elses_place_with_it() -> None:
    workers = Dummies(0)
    faults = Faults(market=Market(spot((0, "+a"), (0, "+b"), (1, "+c"), (2, "-a")), room=3))
    play(faults, workers, 0, 0)
    workers.there.discard(0)
    play(faults, workers, 1, 2)
    assert workers.done == ["add 0", "add 1", "add 0"]


def test_the_only_worker_with_the_state_is_spared_and_goes_when_another_has_it() -> None:
    workers = Dummies(0)
    faults = Faults(market=Market(spot((0, "+a"), (1, "-a"), (2, "+b")), room=2))
    play(faults, workers, 0, 0, 1)
    assert workers.notes[-1] == "spot: a is spared until another worker has the training's state"
    workers.outside = {1}
    play(faults, workers, 2, 3)
    assert workers.done == ["add 0", "add 1"]
    workers.outside = set()
    play(faults, workers, 4)
    assert workers.done == ["add 0", "add 1", "kill 0 for good"]


def test_nodes_without_room_are_mentioned_once() -> None:
    workers = Dummies(0)
    Faults(market=Market(spot((0, "+a"), (0, "+b"), (0, "+c")), room=1)).play(workers, step=-1, elapsed_s=0.0)
    assert [note for note in workers.notes if "wait" in note] == ["spot: b and further nodes wait until there is room"]
