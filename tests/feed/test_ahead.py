"""The number of steps of an epoch, which the training's state keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paceline.pace import make as make_pacer
from paceline.pace.steering import LEAST
from paceline.records import History, Plan
from paceline.step.training_state import TrainingState

BATCH = 64


def opened_shares(books: TrainingState, dealing: Any, over: float) -> int:
    """Deal the next step from a plan that offers ``over`` times what it expects; return what was dealt."""
    expects = books._goal(books.epoch_step, dealing.remaining, dealing.length)[0]
    offered = (max(1, round(over * expects)),) * 2
    plan = Plan(0, books.epoch_step, offered, deadline_s=1.0, expects=expects)
    return sum(books.open(plan).shares)


def make(dealing: Any) -> TrainingState:
    return TrainingState(
        transport=SimpleNamespace(rank=1, size=2, generation=0, workers=(0, 1), elastic=False),  # type: ignore[arg-type]
        pacer=make_pacer("equal"),
        dealing=dealing,
        settings=SimpleNamespace(global_batch=BATCH, epochs=1),  # type: ignore[arg-type]
        unit=1,
        avoid_singles=False,
        history=History(),
        first_index=0,
        log_event=lambda *_: None,
    )


@given(st.integers(1, 20 * BATCH), st.floats(0.5, 20), st.lists(st.floats(0, 1), min_size=21, max_size=21))
def test_however_much_is_offered_an_epoch_keeps_its_steps_give_or_take_one(
    length: int, over: float, done: list[float]
) -> None:
    dealing = SimpleNamespace(length=length, remaining=length, epoch=0, progress=0.0, deal=tuple)
    books, steps = make(dealing), -(-length // BATCH)
    while dealing.remaining:
        dealt = opened_shares(books, dealing, over)
        last = books.epoch_step + 1 >= steps
        assert 0 < dealt <= dealing.remaining
        assert not last or dealt == dealing.remaining
        dealing.remaining -= dealt if last else round(done[books.epoch_step] * dealt)
        books.epoch_step += 1
    assert steps - 1 <= books.epoch_step <= steps


@given(st.integers(1, 20 * BATCH), st.floats(1, 20), st.lists(st.floats(0, 1), min_size=21, max_size=21))
def test_with_a_floor_an_epoch_has_no_thin_step_but_its_last(length: int, over: float, done: list[float]) -> None:
    dealing = SimpleNamespace(length=length, remaining=length, epoch=0, progress=0.0, deal=tuple)
    books, counts = make(dealing), []
    while dealing.remaining:
        expects = books._goal(books.epoch_step, dealing.remaining, dealing.length)[0]
        offered = (max(1, round(over * expects / 2)),) * 2
        step_state = books.open(Plan(0, books.epoch_step, offered, deadline_s=1.0, expects=expects, least_count=0.7))
        dealt = sum(step_state.shares)
        counts.append(dealt if step_state.last else max(step_state.floor, round(done[books.epoch_step] * dealt)))
        dealing.remaining -= counts[-1]
        books.epoch_step += 1
    assert min(counts[:-1], default=BATCH) >= 0.7 * BATCH
    assert -(-length // BATCH) - 1 <= len(counts) <= -(-length // BATCH)


def test_the_last_step_but_one_takes_all_when_that_is_one_batch_at_most() -> None:
    dealing = SimpleNamespace(length=10 * BATCH + 20, remaining=BATCH, epoch=0, progress=0.9, deal=tuple)
    books = make(dealing)
    assert books._goal(9, BATCH, dealing.length) == (BATCH, True)
    assert books._goal(9, BATCH + 1, dealing.length)[1] is False
    assert books._goal(8, BATCH, dealing.length)[1] is False


def test_in_the_middle_of_an_epoch_all_that_is_offered_is_dealt() -> None:
    dealing = SimpleNamespace(length=100 * BATCH, remaining=50 * BATCH, epoch=0, progress=0.5, deal=tuple)
    books = make(dealing)
    books.epoch_step = 50
    assert opened_shares(books, dealing, 3.0) == 6 * BATCH


def test_near_its_end_so_much_is_left_that_later_steps_can_do_their_least() -> None:
    dealing = SimpleNamespace(length=100 * BATCH, remaining=4 * BATCH, epoch=0, progress=0.96, deal=tuple)
    books = make(dealing)
    books.epoch_step = 96
    assert opened_shares(books, dealing, 3.0) == 4 * BATCH - 2 * round(LEAST * BATCH)
