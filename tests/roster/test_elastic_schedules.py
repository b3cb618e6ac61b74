"""Random fault schedules on a model of the protocol: nothing lost or doubled, no two truths, no standstill."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from elastic_model import World
from elastic_worker import Chance, Rules, Unlucky
from hypothesis import given, settings
from hypothesis import strategies as st

from quick import examples

SCHEDULES = 1000


def played(seed: int, rules: Rules | None = None) -> World:
    """A fleet of 2 to 4 under a schedule of its own: how many faults, where, and in which order everybody moves."""
    dice = Random(seed)
    world = World(
        dice.randbytes(dice.choice([50, 200, 500])),
        rules=rules,
        workers=dice.choice([2, 3, 4]),
        minimum=dice.choice([1, 1, 2]),
        adaptive=dice.random() < 0.05,
    )
    world.run().audit()
    return world


def holds(seed: int, rules: Rules) -> bool:
    try:
        played(seed, rules)
    except (AssertionError, ValueError):
        return False
    return True


@pytest.mark.slow
def test_every_sample_counts_once_and_all_agree_under_any_schedule_of_faults() -> None:
    for seed in range(SCHEDULES):
        try:
            played(seed)
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error


@settings(max_examples=examples(150), deadline=None)
@given(st.binary(max_size=300), st.integers(1, 4), st.integers(1, 2), st.sampled_from([False, False, False, True]))
def test_the_same_for_schedules_that_shrink(schedule: bytes, workers: int, minimum: int, adaptive: bool) -> None:
    World(schedule, workers=workers, minimum=min(minimum, workers), adaptive=adaptive).run().audit()


def test_without_faults_nobody_does_anything_twice() -> None:
    world = World(b"", workers=3).run()
    world.audit()
    assert [len(worker.history) for worker in world.workers] == [6, 6, 6]
    assert len(world.groups) == 1


def test_schedules_do_what_they_are_for() -> None:
    """Workers are lost in the middle of steps, results handed over, newcomers given states, trainings begun anew."""
    worlds = [played(seed) for seed in range(150)]
    generations = [group.generation for world in worlds for group in world.groups.values()]
    assert sum(not generation.orderly for generation in generations) > 100
    assert sum(bool(generation.left) for generation in generations) > 100
    entered = [group for world in worlds for group in world.groups.values() if "state" in group.mail]
    handed = [group for world in worlds for group in world.groups.values() if "result" in group.mail]
    assert len(entered) > 30
    assert len(handed) > 10
    assert any(set(generation.workers) == set(generation.fresh) for generation in generations if generation.number > 1)


@pytest.mark.parametrize("rule", ["hand_over", "old_until_next_call", "claims_come_back", "confirmed_end"])
def test_a_protocol_without_this_rule_is_found_out(rule: str) -> None:
    broken = replace(Rules(), **{rule: False})
    assert any(not holds(seed, broken) for seed in range(400))


def returned_behind_a_back(rules: Rules) -> None:
    """Worker 2 is killed at a boundary and comes back with the next generation, where worker 1 fails to settle while
    the others succeed; in the one after that it is a holder of the state like any other."""
    world = World(b"", workers=3, rules=rules)
    first, second, third = world.workers
    world.drive(lambda: all(worker.index == 1 for worker in world.workers))
    world.start("host/3")
    newcomer = world.workers[-1]
    world.drive(lambda: third.due[1])
    world.drive(lambda: first.due[1] and second.due[1], without=[third])
    world.kill(third)
    world.start(third.name)
    back = world.workers[-1]
    world.drive(lambda: back.session in [asks.session for asks in world.membership.roster.newcomers()], without=[first])
    world.drive(lambda: 2 in world.groups and second.id in world.groups[2].calls.get("settle", {}))
    assert set(world.groups[2].generation.fresh) == {newcomer.id, third.id}
    world.drive(lambda: not back.outside and first.followed == 2, without=[second])
    world.kill(newcomer)
    world.chance = Unlucky(b"")
    world.drive(lambda: second.asked_after == 2, without=[first, back])
    world.chance = Chance(b"")
    world.run().audit()


def test_who_left_and_came_back_is_new_however_many_generations_that_took() -> None:
    returned_behind_a_back(Rules())
    with pytest.raises(AssertionError, match="unlike books"):
        returned_behind_a_back(Rules(newcomers_are_new=False))
