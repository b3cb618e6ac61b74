"""The books against random schedules under a fake clock: every sample once, the same books on every worker."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.feed import Feed
from paceline.feed.dealing import SampleDealing
from paceline.gradients.header import Header, Layout
from paceline.pace import Ask, Pacer, make
from paceline.pace.shares import proportional
from paceline.records import History, LoopSettings, Plan, StepRecord
from paceline.research.cutoff import Cutoff
from paceline.step.step_state import StepState
from paceline.step.training_state import TrainingState
from quick import examples

MICRO_BATCH = 4


class Wild(Pacer):
    """A pacer that deals, cuts off and over-deals at random."""

    name = "wild"

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def check(self, workers: int) -> None:
        return

    def observe(self, record: StepRecord) -> None:
        return

    def plan(self, ask: Ask) -> Plan:
        dice = random.Random(f"{self.seed}/{ask.step}")
        assert ask.total >= 1
        assert ask.unit >= 1
        kind = dice.choice(["all", "deadline", "deadline", "count"])
        total = ask.total if kind == "all" or ask.last else round(ask.total * dice.uniform(1.0, 4.0))
        parts = np.array([dice.choice([0.0, 1.0, dice.random()]) for _ in ask.workers])
        samples = proportional(parts if parts.any() else np.ones(len(ask.workers)), total)
        return Plan(
            generation=ask.generation,
            step=ask.step,
            samples=tuple(samples.tolist()),
            deadline_s=dice.uniform(0.0, 2.0) if kind == "deadline" else None,
            wait_for=dice.randint(1, len(ask.workers)) if kind == "count" else None,
        )

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        return


def books_of(
    rank: int,
    size: int,
    *,
    length: int,
    batch: int,
    epochs: int,
    pacer: Any,
    ahead: int = 0,
    avoid_singles: bool = False,
    order: Callable[[int], list[int]] | None = None,
) -> TrainingState:
    transport = SimpleNamespace(rank=rank, size=size, generation=0, workers=tuple(range(size)), elastic=False)
    feed = Feed(length, workers=size, seed=3, order=order)
    source: Any = SimpleNamespace(ahead=0)
    wanted = LoopSettings(
        global_batch=batch, micro_batch=MICRO_BATCH, auto=False, epochs=epochs, shuffle=True, drop_last=False
    )
    return TrainingState(
        transport=transport,  # type: ignore[arg-type]
        pacer=pacer,
        dealing=SampleDealing(feed, source, rank=rank, micro_batch=MICRO_BATCH, ahead=[ahead] * size),
        settings=wanted,
        unit=1,
        avoid_singles=avoid_singles,
        history=History(),
        first_index=0,
        log_event=lambda event, fields: None,
    )


class Clock:
    """A fake fleet: who has done how much when a round closes."""

    def __init__(self, seed: int, size: int) -> None:
        self.dice = random.Random(f"clock/{seed}")
        self.pace_s = [self.dice.uniform(0.005, 0.05) for _ in range(size)]

    def work(
        self, shares: tuple[int, ...], *, deadline_s: float | None, wait_for: int | None
    ) -> tuple[list[int], float]:
        """Samples that each worker has done when the round closes, and when that is."""
        stalls = [self.dice.choice([0.0, 0.0, 0.0, self.dice.uniform(0.0, 5.0)]) for _ in shares]
        ends = [stall + share * pace for stall, share, pace in zip(stalls, shares, self.pace_s, strict=True)]
        if wait_for is not None:
            closes = sorted(ends)[wait_for - 1]
            return [share if end <= closes else 0 for share, end in zip(shares, ends, strict=True)], closes
        if deadline_s is None:
            return list(shares), max(ends)
        room = [
            max(0, math.floor((deadline_s - stall) / pace)) for stall, pace in zip(stalls, self.pace_s, strict=True)
        ]
        return [min(share, fits) for share, fits in zip(shares, room, strict=True)], deadline_s


def one_step(fleet: list[TrainingState], clock: Clock) -> StepState:
    """What the loop and the proxy do with the books of all workers in one step; returns the leader's turn."""
    plan = fleet[0].plan or fleet[0].first_plan()
    turns = [books.open(plan) for books in fleet]
    turn = turns[0]
    assert sum(turn.shares) <= (fleet[0].dealing.remaining or 0)
    done, closed_s = clock.work(turn.shares, deadline_s=turn.plan.deadline_s, wait_for=turn.plan.wait_for)
    while turn.plan.bounded and turn.last and sum(done) < turn.dealt:
        done = _lap(fleet, turns, done, clock)
    header = Header(Layout(len(fleet), 0, 0))
    if turn.next_plan is not None:
        header.write_plan(turn.next_plan)
    seconds = tuple(count * pace for count, pace in zip(done, clock.pace_s, strict=True))
    record = StepRecord(
        step=turn.index,
        epoch=turn.epoch,
        generation=0,
        workers=tuple(range(len(fleet))),
        planned=turn.shares,
        samples=tuple(done),
        seconds=seconds,
        micro_batches=tuple(-(-count // MICRO_BATCH) for count in done),
        unfinished_s=tuple(max(0.0, closed_s - own) for own in seconds) if turn.plan.bounded else (),
        deadline_s=turn.plan.deadline_s,
        wait_for=turn.plan.wait_for,
        wall_s=closed_s,
    )
    for books, own in zip(fleet, turns, strict=True):
        books.close(own, header, record, by_deadline=turn.plan.bounded)
    return turn


def _lap(fleet: list[TrainingState], turns: list[StepState], done: list[int], clock: Clock) -> list[int]:
    """Deal what is left of the epoch again, to some; returns what each worker has done then."""
    before = [sum(stop - start for start, stop in part) for part in turns[0].ranges] or [0] * len(fleet)
    fresh = tuple(now - then for now, then in zip(done, before, strict=True))
    left = (fleet[0].dealing.remaining or 0) - sum(fresh)
    free = np.array([float(clock.dice.random() < 0.6) for _ in fleet])
    shares = tuple(proportional(free, left).tolist()) if free.any() else (0,) * len(fleet)
    for books, turn in zip(fleet, turns, strict=True):
        books.lap(turn, fresh, shares)
    assert [turn.extra for turn in turns] == list(shares), "every worker holds its own part of the same deal"
    more = [clock.dice.randint(0, share) if clock.dice.random() < 0.5 else share for share in shares]
    return [count + extra for count, extra in zip(done, more, strict=True)]


def positions(record: StepRecord) -> Counter[tuple[int, int]]:
    return Counter((record.epoch, p) for worker in record.ranges for start, stop in worker for p in range(start, stop))


def train(fleet: list[TrainingState], clock: Clock, *, most: int = 10_000) -> list[StepRecord]:
    records: list[StepRecord] = []
    while not fleet[0].finished and len(records) < most:
        turn = one_step(fleet, clock)
        assert turn.record is not None
        records.append(turn.record)
        states = [{**books.state_dict(), "plan": repr(books.plan)} for books in fleet]
        assert all(state == states[0] for state in states[1:]), "the books are the same on every worker"
    return records


pacers = st.sampled_from(["wild", "wild", "adaptive", "joint", "cutoff"])


def make_pacers(name: str, seed: int, size: int) -> list[Any]:
    return [Wild(seed) if name == "wild" else make(name) for _ in range(size)]


@pytest.mark.slow
@given(
    name=pacers,
    seed=st.integers(0, 10**6),
    size=st.integers(1, 5),
    length=st.integers(1, 150),
    batch=st.integers(1, 40),
    epochs=st.integers(1, 3),
    ahead=st.integers(0, 20),
    avoid_singles=st.booleans(),
)
@settings(max_examples=examples(60), deadline=None)
def test_every_sample_counts_once_and_an_epoch_keeps_its_number_of_steps_give_or_take_one(
    name: str, seed: int, size: int, length: int, batch: int, epochs: int, ahead: int, avoid_singles: bool
) -> None:
    options = {"length": length, "batch": batch, "epochs": epochs, "ahead": ahead, "avoid_singles": avoid_singles}
    fleet = [
        books_of(rank, size, pacer=pacer, **options)  # type: ignore[arg-type]
        for rank, pacer in enumerate(make_pacers(name, seed, size))
    ]
    records = train(fleet, Clock(seed, size))
    assert [record.step for record in records] == list(range(len(records)))
    counted = sum((positions(record) for record in records), Counter())
    assert counted == Counter((epoch, p) for epoch in range(epochs) for p in range(length))
    most = math.ceil(length / batch)
    for epoch in range(epochs):
        assert sum(record.epoch == epoch for record in records) in (most, most - 1)
    assert fleet[0].progress == 1.0


@given(
    name=pacers,
    seed=st.integers(0, 10**6),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    length=st.integers(1, 100),
    batches=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    stop=st.integers(0, 12),
)
@settings(max_examples=examples(40), deadline=None)
def test_a_checkpoint_at_any_step_goes_on_in_any_fleet_with_any_batch_and_no_sample_is_lost_or_doubled(
    name: str, seed: int, sizes: tuple[int, int], length: int, batches: tuple[int, int], stop: int
) -> None:
    fleets = [
        [
            books_of(rank, size, length=length, batch=batch, epochs=2, pacer=pacer)
            for rank, pacer in enumerate(make_pacers(name, seed, size))
        ]
        for size, batch in zip(sizes, batches, strict=True)
    ]
    first = train(fleets[0], Clock(seed, sizes[0]), most=stop)
    saved = fleets[0][0].state_dict()
    for books in fleets[1]:
        books.load_state_dict(saved)
    second = train(fleets[1], Clock(seed + 1, sizes[1]))
    counted = sum((positions(record) for record in (*first, *second)), Counter())
    assert counted == Counter((epoch, p) for epoch in range(2) for p in range(length))
    assert [record.step for record in (*first, *second)] == list(range(len(first) + len(second)))


@pytest.mark.parametrize("bounded", [True, False])
def test_a_step_with_a_deadline_keeps_the_books_from_before_it_for_a_loop_that_saves(bounded: bool) -> None:
    (books,) = [books_of(0, 1, length=40, batch=8, epochs=1, pacer=make("equal"))]
    plan = Plan(generation=0, step=0, samples=(8,), deadline_s=1.0 if bounded else None)
    turn = books.open(plan)
    turn.start(0.0)
    before = books.state_dict()
    record = StepRecord(step=0, epoch=0, generation=0, workers=(0,), planned=(8,), samples=(8,), seconds=(1.0,))
    books.close(turn, Header(Layout(1, 0, 0)), record, by_deadline=bounded)
    assert books.state_dict() != before
    assert turn.before == (before if bounded else None), "even where the loop had begun the step"


def test_an_epochs_custom_order_may_have_another_length() -> None:
    orders = {0: list(range(20)), 1: list(range(7)), 2: [3] * 11}
    fleet = [
        books_of(rank, 3, length=20, batch=5, epochs=3, pacer=Wild(1), order=orders.__getitem__) for rank in range(3)
    ]
    records = train(fleet, Clock(1, 3))
    counted = sum((positions(record) for record in records), Counter())
    assert counted == Counter((epoch, p) for epoch, order in orders.items() for p in range(len(order)))


def test_replicas_are_compared_only_among_those_that_gave_a_fingerprint() -> None:
    header = Header(Layout(3, 0, 0))
    for rank, value in enumerate([5.0, 0.0, 5.0]):
        header.write(rank, fingerprint=value)
    assert not header.differ()
    header.write(1, fingerprint=6.0)
    assert header.differ()


def test_after_replicas_differed_the_next_step_waits_for_everybody_and_deals_no_more_than_it_should() -> None:
    fleet = [books_of(rank, 2, length=100, batch=10, epochs=1, pacer=make("equal")) for rank in range(2)]
    turns = [books.open(Plan(generation=0, step=0, samples=(10, 10), deadline_s=1.0, expects=10)) for books in fleet]
    header = Header(Layout(2, 0, 0))
    for rank in range(2):
        header.write(rank, fingerprint=1.0 + rank)
    header.write_plan(Plan(generation=0, step=1, samples=(10, 10), deadline_s=1.0, expects=10))
    record = StepRecord(
        step=0, epoch=0, generation=0, workers=(0, 1), planned=(10, 10), samples=(5, 5), seconds=(1.0, 1.0)
    )
    for books, turn in zip(fleet, turns, strict=True):
        books.close(turn, header, record, by_deadline=turn.plan.bounded)
        assert books.plan is not None
        after = books.open(books.plan)
        assert (after.plan.bounded, after.compare, after.shares) == (False, True, (5, 5))
        assert replace(after.plan, samples=()).deadline_s is None


def test_the_history_can_be_read_while_another_thread_writes_it() -> None:
    history = History()
    record = StepRecord(step=0, epoch=0, generation=0, workers=(0,), planned=(1,), samples=(1,), seconds=(1.0,))
    for _ in range(3):
        history.append(record)
    for _ in history:
        history.append(record)
    assert len(history) == 6


def test_what_a_lost_worker_did_in_earlier_laps_is_given_back_and_the_step_goes_on_with_the_others_shares() -> None:
    training = books_of(0, 3, length=24, batch=12, epochs=1, pacer=make("equal"))
    step_state = training.open(Plan(generation=0, step=0, samples=(6, 4, 2), forecast_s=(0.1, 0.2, 0.3)))
    training.lap(step_state, (5, 3, 2), (1, 1, 0))
    assert step_state.counted == (5, 3, 2)
    left = training.dealing.remaining
    transport: Any = training._transport
    transport.workers, transport.size, transport.generation = (0, 2), 2, 1
    training.members_changed((0, 2), ahead=(0, 0), open_step=step_state)
    assert (step_state.counted, step_state.shares, step_state.expected) == ((5, 2), (6, 2), 8)
    assert (step_state.workers, step_state.generation, step_state.hurried) == ((0, 2), 1, True)
    assert (step_state.plan.samples, step_state.plan.forecast_s) == ((6, 2), (0.1, 0.3))
    assert step_state.next_plan is None
    assert training.dealing.remaining == left + 3, "what the lost one had done is dealt again"


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.integers(2, 5),
    length=st.integers(1, 150),
    batch=st.integers(5, 40),
    static=st.floats(0.1, 1.0),
)
def test_where_the_batch_is_not_kept_every_step_is_dealt_one_batch_and_every_sample_still_counts_once(
    seed: int, size: int, length: int, batch: int, static: float
) -> None:
    """P3's own rule: nothing is made up later, so an epoch has more steps."""
    pacers = [Cutoff(static=static, keep_batch=False) for _ in range(size)]
    fleet = [books_of(rank, size, length=length, batch=batch, epochs=1, pacer=pacers[rank]) for rank in range(size)]
    records = train(fleet, Clock(seed, size))
    counted = sum((positions(record) for record in records), Counter())
    assert counted == Counter((0, position) for position in range(length))
    left = length
    for record in records:
        assert sum(record.planned) == min(batch, left) or record is records[-1]
        left -= record.total
    assert len(records) >= -(-length // batch)
