"""From one membership to the next."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.roster import Generation, Gone
from paceline.transport.elastic.changes import MembershipChange, change_to


def change(
    before: tuple[int, ...], after: tuple[int, ...], renewed: set[int] | None = None, **gone: str
) -> MembershipChange:
    left = {int(worker.removeprefix("w")): text for worker, text in gone.items()}
    return change_to(
        Generation(5, after, (), (), (), {}, ("", 0), True, 0),
        workers=before,
        renewed=renewed or set(),
        gone={worker: Gone(worker, text) for worker, text in left.items()},
        facts=[{"ahead": worker} for worker in after],
    )


def test_who_stays_keeps_its_old_rank_and_who_is_new_has_none() -> None:
    found = change((0, 1, 2), (0, 2, 3), w1="was killed")
    assert (found.old_ranks, found.joined) == ((0, 2, None), (3,))
    assert found.left == (Gone(1, "was killed"),)
    assert found.facts == ({"ahead": 0}, {"ahead": 2}, {"ahead": 3})


def test_who_died_and_came_back_under_its_name_left_and_joined() -> None:
    found = change((0, 1), (0, 1), renewed={1}, w1="was killed")
    assert (found.old_ranks, found.joined, found.left) == ((0, None), (1,), (Gone(1, "was killed"),))


def test_of_one_whose_reason_nobody_knows_it_is_said_that_it_left() -> None:
    assert change((0, 1), (0,)).left == (Gone(1, "left"),)


def test_a_worker_that_waited_to_enter_saw_nobody_leave() -> None:
    found = change((-1, 4), (0, 4), renewed={4})
    assert (found.old_ranks, found.joined) == ((None, None), (0, 4))
    assert found.left == (Gone(4, "left"),)


@given(st.lists(st.integers(0, 9), unique=True), st.lists(st.integers(0, 9), unique=True, min_size=1), st.data())
def test_everybody_stays_joins_or_leaves(before: list[int], after: list[int], data: st.DataObject) -> None:
    renewed = data.draw(st.sets(st.sampled_from(after)))
    found = change(tuple(before), tuple(after), renewed)
    staying = {worker for worker, old in zip(after, found.old_ranks, strict=True) if old is not None}
    assert staying == (set(before) & set(after)) - renewed
    assert all(before[old] == worker for worker, old in zip(after, found.old_ranks, strict=True) if old is not None)
    assert set(found.joined) == set(after) - staying
    assert {gone.id for gone in found.left} == set(before) - staying
