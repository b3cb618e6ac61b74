"""The scheduler of many threads: a deadlock is seen with every thread's place, time is virtual, a seed replays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from scheduler import Hang, Scheduler

from paceline import concurrency

Program = Callable[[], Any]
SEEDS = range(12)
"""Enough for both ways to draw a schedule."""


def run(*programs: Program, seed: int = 0, before: Callable[[Scheduler], Any] = lambda _: None) -> Scheduler:
    """Run each program in a thread and a process of its own, until all that are not dead have ended."""
    scheduler = Scheduler(seed, limit_s=100.0)
    with concurrency.use(scheduler):
        tasks = [scheduler.spawn(one, name="user", process=number) for number, one in enumerate(programs)]
        before(scheduler)
        scheduler.run(lambda: all(task.done or task.process in scheduler.dead for task in tasks))
    errors = [task.error for task in tasks if task.error is not None]
    assert not errors, errors
    return scheduler


@pytest.mark.parametrize("seed", SEEDS)
def test_two_that_wait_for_each_others_lock_are_a_deadlock_with_both_their_places(seed: int) -> None:
    one, other, held = None, None, list[int]()

    def first_takes(number: int) -> None:
        mine, theirs = (one, other) if number == 0 else (other, one)
        assert mine is not None
        assert theirs is not None
        with mine:
            held.append(number)
            while len(held) < 2:
                concurrency.sleep(0.1)
            with theirs:
                pytest.fail("both hold one lock, and wait for the other's")

    scheduler = Scheduler(seed)
    with concurrency.use(scheduler):
        one, other = concurrency.Lock(), concurrency.Lock()
        for number in range(2):
            scheduler.spawn(partial(first_takes, number), name=f"taker {number}", process="here")
        with pytest.raises(Hang, match="nobody can run, and no timer is set") as hang:
            scheduler.run(lambda: False)
    assert str(hang.value).count("first_takes: with theirs:") == 2
    assert "here taker 0 [waits]" in str(hang.value)
    assert "here taker 1 [waits]" in str(hang.value)


def test_a_wait_that_nobody_ends_is_seen_and_one_with_a_timeout_ends_in_virtual_time() -> None:
    def wait(timeout: float | None) -> None:
        condition = concurrency.Condition()
        with condition:
            assert not condition.wait(timeout)

    scheduler = run(lambda: wait(50.0))
    assert 1050.0 <= scheduler.now < 1051.0
    with pytest.raises(Hang, match="nobody can run"):
        run(lambda: wait(None))


def test_a_run_that_goes_on_for_ever_is_ended_with_the_places_of_its_threads() -> None:
    def sleep_on() -> None:
        while True:
            concurrency.sleep(1.0)

    with pytest.raises(Hang, match="the run does not end") as hang:
        run(sleep_on)
    assert "sleep_on: concurrency.sleep(1.0)" in str(hang.value)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_condition_wakes_whoever_waits_and_a_lock_is_held_by_one_at_a_time(seed: int) -> None:
    scheduler = Scheduler(seed)
    with concurrency.use(scheduler):
        condition, items, got, inside = concurrency.Condition(), list[int](), list[int](), list[int]()

        def take() -> None:
            with condition:
                assert condition.wait_for(lambda: items, timeout=30.0)
                inside.append(1)
                assert len(inside) == 1
                concurrency.sleep(0.5)
                got.append(items.pop())
                inside.clear()

        def give() -> None:
            for number in range(2):
                concurrency.sleep(1.0)
                with condition:
                    items.append(number)
                    condition.notify_all()

        for program in (take, take, give):
            scheduler.spawn(program, name=program.__name__, process="here")
        scheduler.run(lambda: all(task.done for task in scheduler.tasks))
    assert [task.error for task in scheduler.tasks] == [None] * 3
    assert sorted(got) == [0, 1]


def test_a_queue_an_event_and_a_join_end_with_what_they_wait_for_or_their_timeout() -> None:
    found: list[Any] = []

    def program() -> None:
        queue, event = concurrency.SimpleQueue(), concurrency.Event()  # type: ignore[var-annotated]

        def give() -> None:
            concurrency.sleep(1.0)
            queue.put(7)
            event.set()

        thread = concurrency.Thread(target=give, name="giver")
        thread.start()
        with pytest.raises(concurrency.Empty):
            queue.get(timeout=0.2)
        thread.join(timeout=0.2)
        found.append((event.wait(0.2), thread.is_alive()))
        found.append((queue.get(), event.wait(5.0)))
        thread.join()
        found.append(thread.is_alive())

    run(program)
    assert found == [(False, True), (7, True), False]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lock_whose_owner_was_killed_goes_to_whoever_comes_next(seed: int) -> None:
    lock, held = [], list[str]()

    def owner() -> None:
        lock.append(concurrency.Lock())
        with lock[0]:
            held.append("owner")
            concurrency.sleep(50.0)
            pytest.fail("it is dead by then")

    def heir() -> None:
        while not held:
            concurrency.sleep(0.1)
        concurrency.sleep(10.0)
        with lock[0]:
            held.append("heir")

    run(owner, heir, seed=seed, before=lambda scheduler: scheduler.after(5.0, lambda: scheduler.kill(0)))
    assert held == ["owner", "heir"]


def test_a_frozen_process_stands_still_and_goes_on_where_it_was() -> None:
    ticks: list[float] = []

    def tick() -> None:
        for _ in range(4):
            ticks.append(concurrency.monotonic())
            concurrency.sleep(1.0)

    def freeze(scheduler: Scheduler) -> None:
        scheduler.after(1.5, lambda: scheduler.freeze(0))
        scheduler.after(9.5, lambda: scheduler.thaw(0))

    run(tick, before=freeze)
    assert [round(at - 1000.0) for at in ticks] == [0, 1, 10, 11] or [round(at - 1000.0) for at in ticks] == [
        0,
        1,
        9,
        10,
    ]


def test_a_seed_replays_its_order_and_seeds_draw_unlike_ones() -> None:
    def order(seed: int) -> str:
        said: list[str] = []

        def say(name: str) -> None:
            lock = concurrency.Lock()
            for _ in range(12):
                said.append(name)
                with lock:
                    pass

        run(*(partial(say, name) for name in "abc"), seed=seed)
        return "".join(said)

    orders = [order(seed) for seed in SEEDS]
    assert orders == [order(seed) for seed in SEEDS]
    assert len(set(orders)) > 3
    assert all(sorted(one) == sorted("abc" * 12) for one in orders)


def test_a_signal_ends_a_wait_and_the_lock_is_held_again_while_it_passes() -> None:
    seen: list[str] = []

    def waits() -> None:
        condition = concurrency.Condition()
        for wait in (
            lambda: condition.wait(),
            lambda: condition.wait_for(lambda: False),
            lambda: concurrency.sleep(90),
        ):
            try:
                with condition:
                    wait()
            except KeyboardInterrupt:
                seen.append("interrupted")
        with condition:
            seen.append("free")

    def signals(scheduler: Scheduler) -> None:
        for seconds in (1.0, 2.0, 3.0):
            scheduler.after(seconds, lambda: scheduler.interrupt(scheduler.tasks[0], KeyboardInterrupt()))

    scheduler = run(waits, before=signals)
    assert seen == [*["interrupted"] * 3, "free"]
    assert scheduler.now < 1010.0
