"""Periods of local steps and rounds of parameters, with all workers in this process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import paceline
from lone import flat, join, mse, numbers
from paceline.averaging.parameter_round import ParameterRound, RoundExchange
from paceline.averaging.period import Period, PeriodDealer
from paceline.averaging.periods import EmulatedOutages
from paceline.averaging.weighted_average import WeightedAverage
from paceline.checkpoint import content
from paceline.errors import Dropped, FleetError, GenerationOver, MisuseError
from paceline.gradients.gradients import Gradients
from paceline.machines.failures import Failures, Trouble
from paceline.records import Plan, StepRecord
from paceline.transport.fixed import Alone
from side_by_side import SideBySide, together

pytestmark = pytest.mark.slow  # seconds, all together

RATE = 0.1
DATA = numbers(48)
SETTINGS: dict[str, Any] = {"global_batch": 8, "micro_batch": 2, "shuffle": False}
Vector = torch.Tensor


def zeros() -> nn.Linear:
    model = nn.Linear(3, 1).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


class Training:
    """Plain SGD from zero on one worker, and what it has seen."""

    def __init__(self, fleet: paceline.Fleet, **settings: Any) -> None:
        self.fleet, self.model = fleet, fleet.model(zeros())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        fleet.track(optimizer=self.optimizer)
        self.steps: Any = fleet.steps(DATA, **SETTINGS | settings)._loop
        self.rounds: list[int] = []
        """Before each local step."""

    def run(
        self, after: Callable[[paceline.Step], Any] = lambda step: None, *, work: Callable[[], None] = lambda: None
    ) -> Training:
        """``work`` is called in each step, ``after`` after its commit; True leaves the loop."""
        for step in self.steps:
            self.rounds.append(step.round)
            for x, y in step:
                step.backward(mse(self.model, x, y))
                step.add(seen=len(x))
            work()
            step.commit(self.optimizer)
            if after(step):
                break
        return self

    @property
    def weights(self) -> Vector:
        return flat(self.model)

    @property
    def records(self) -> list[StepRecord]:
        return list(self.fleet.history)


def positions(record: StepRecord, rank: int) -> list[int]:
    return [place for start, end in record.ranges[rank] for place in range(start, end)]


def counted(records: Sequence[StepRecord]) -> Counter[tuple[int, int]]:
    """How often each position of each epoch was counted."""
    return Counter((one.epoch, p) for one in records for rank in range(len(one.ranges)) for p in positions(one, rank))


def once(epochs: int = 1) -> Counter[tuple[int, int]]:
    return Counter((epoch, place) for epoch in range(epochs) for place in range(len(DATA)))


def by_hand(weights: Vector, where: Sequence[int], batch: int) -> Vector:
    """Local steps of SGD over these positions of the dataset, in its own order."""
    x, y = DATA.tensors
    x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    for part in torch.tensor(where, dtype=torch.long).split(batch) if len(where) else ():
        weights = weights - RATE * 2 * ((x[part] @ weights - y[part, 0]) @ x[part]) / len(part)
    return weights


def nothing() -> Vector:
    return torch.zeros(4, dtype=torch.float64)


def close(one: Vector, other: Vector) -> bool:
    return bool((one - other).abs().max() < 1e-12)


class FakeClock:
    """Stands still on each thread until it is moved there."""

    def __init__(self) -> None:
        self._own = threading.local()

    def perf_counter(self) -> float:
        return getattr(self._own, "now", 100.0)

    def move(self, seconds: float) -> None:
        self._own.now = self.perf_counter() + seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr("paceline.concurrency.perf_counter", clock.perf_counter)
    return clock


# -- periods -----------------------------------------------------------------------------------------------------------


def test_a_period_ends_after_so_many_local_steps_and_with_the_epoch(tmp_path: Path) -> None:
    with join(tmp_path, combine=paceline.Averaging(every_steps=4)) as fleet:
        ends: list[bool] = []
        training = Training(fleet, epochs=2).run(lambda step: ends.append(step.ends_epoch))
    assert training.rounds == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3]
    assert [record.samples for record in training.records] == [(32,), (16,), (32,), (16,)]
    assert [index for index, last in enumerate(ends) if last] == [5, 11]
    assert counted(training.records) == once(2)
    assert [record.sums["seen"] for record in training.records] == [32, 16, 32, 16]
    assert close(training.weights, by_hand(nothing(), 2 * list(range(48)), 8)), "an average of one is that one"


def test_a_period_by_the_clock_ends_with_the_local_step_whose_end_is_nearest(tmp_path: Path, clock: FakeClock) -> None:
    with join(tmp_path, combine=paceline.Averaging(period_s=2.0)) as fleet:
        training = Training(fleet).run(work=lambda: clock.move(0.9))
    assert training.rounds == [0, 0, 1, 1, 2, 2]
    assert [record.wall_s for record in training.records] == pytest.approx([1.8, 1.8, 1.8])
    assert counted(training.records) == once()


def test_by_the_clock_a_fast_worker_makes_more_local_steps(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(fleet: paceline.Fleet, transport: SideBySide) -> Training:
        training = Training(fleet)
        with pytest.raises(TypeError, match="nobody knows how many"):
            len(training.steps)
        return training.run(work=lambda: clock.move((0.45, 0.9)[fleet.rank]))

    fast, slow = together(monkeypatch, tmp_path, script, combine=paceline.Averaging(period_s=2.0))
    assert fast.records[0].samples == (16, 8)
    assert fast.records[0].seconds == pytest.approx((1.8, 1.8))
    assert fast.records[1].planned == (15, 9), "what is left is dealt by speed, 7 steps to 4"
    assert fast.rounds.count(0) == 4
    assert slow.rounds.count(0) == 2
    assert counted(fast.records) == once()
    assert torch.equal(fast.weights, slow.weights)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("every", [{"every_steps": 1}, {"every_steps": 3}, {"period_s": 0.01}])
def test_every_sample_of_an_epoch_counts_once_and_all_end_equal(
    every: dict[str, Any], overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def script(fleet: paceline.Fleet, transport: SideBySide) -> Training:
        training = Training(fleet, epochs=2, shuffle=True, global_batch=10)
        return training.run(lambda step: seen.append(sum(step.record.samples)))

    one, other = together(monkeypatch, tmp_path, script, combine=paceline.Averaging(**every, overlap=overlap))
    assert counted(one.records) == once(2)
    assert sum(seen) == 2 * len(DATA)
    assert sum(record.sums["seen"] for record in one.records) == 2 * len(DATA)
    assert torch.equal(one.weights, other.weights)
    told = [[(record.ranges, record.samples, record.planned) for record in each.records] for each in (one, other)]
    assert told[0] == told[1]


# -- rounds ------------------------------------------------------------------------------------------------------------


def test_with_a_round_after_every_step_averages_are_those_of_the_whole_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = together(
        monkeypatch, tmp_path, lambda fleet, _: Training(fleet).run(), combine=paceline.Averaging(every_steps=1)
    )
    assert torch.equal(one.weights, other.weights)
    assert close(one.weights, by_hand(nothing(), range(48), 8))
    assert one.rounds == list(range(6))


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_averages_of_several_local_steps_are_those_by_hand(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    """By the clock, so that the workers have done unlike amounts."""

    def script(fleet: paceline.Fleet, transport: SideBySide) -> Training:
        return Training(fleet).run(work=lambda: clock.move((0.45, 0.9)[fleet.rank]))

    one, other = together(monkeypatch, tmp_path, script, combine=paceline.Averaging(period_s=2.0, weights=weights))
    centre = nothing()
    for record in one.records:
        moved = [by_hand(centre, positions(record, rank), 4) - centre for rank in (0, 1)]
        parts = np.array(record.samples) if weights == "samples" else np.array(record.samples) > 0
        centre = centre + sum(float(part) / float(parts.sum()) * way for part, way in zip(parts, moved, strict=True))
    assert len(one.records) > 2
    assert close(one.weights, centre)
    assert torch.equal(one.weights, other.weights)


def test_springs_pull_each_worker_and_push_the_centre_as_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after: dict[int, list[Vector]] = {0: [], 1: []}

    def script(fleet: paceline.Fleet, transport: SideBySide) -> Training:
        training = Training(fleet)
        return training.run(lambda step: after[fleet.rank].append(training.weights))

    combine = paceline.research.ElasticAverage(tau=2, alpha=0.3, weights="fixed")
    one, other = together(monkeypatch, tmp_path, script, combine=combine)
    centre, own = nothing(), [nothing(), nothing()]
    for number, record in enumerate(one.records):
        own = [by_hand(own[rank], positions(record, rank), 4) for rank in (0, 1)]
        apart = [mine - centre for mine in own]
        own, centre = [mine - 0.3 * way for mine, way in zip(own, apart, strict=True)], centre + 0.3 * sum(apart)
        if number + 1 < len(one.records):
            assert all(close(after[rank][2 * number + 1], own[rank]) for rank in (0, 1))
    assert close(one.weights, centre), "at the end everybody holds the centre"
    assert torch.equal(one.weights, other.weights)


def test_a_group_steps_with_the_mean_of_its_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    combine = paceline.Averaging(every_steps=3, groups=[[0, 1]])
    losses: dict[int, list[float]] = {0: [], 1: []}

    def script(fleet: paceline.Fleet, transport: SideBySide) -> Training:
        return Training(fleet).run(lambda step: losses[fleet.rank].append(step.loss))

    one, other = together(monkeypatch, tmp_path, script, combine=combine)
    # A period of three steps is dealt in two halves, and each local step takes four samples of both.
    places = [
        half + step * 4 + n for base in (0, 24) for step in range(3) for half in (base, base + 12) for n in range(4)
    ]
    assert close(one.weights, by_hand(nothing(), places, 8))
    assert losses[0] == losses[1]
    assert torch.equal(one.weights, other.weights)


@pytest.mark.parametrize("settings", [{"groups": [[0], [1]], "overlap": True}, {"overlap": True}])
def test_a_worker_alone_has_nothing_to_overlap(settings: dict[str, Any], tmp_path: Path) -> None:
    if "groups" in settings:
        with pytest.raises(ValueError, match="must hold each rank from 0 to 0"):
            join(tmp_path, combine=paceline.Averaging(every_steps=2, **settings))
        return
    with join(tmp_path, combine=paceline.Averaging(every_steps=2, **settings)) as fleet:
        training = Training(fleet).run()
        assert not training.steps.combine.periods.overlaps
    assert close(training.weights, by_hand(nothing(), range(48), 8))


def test_batch_norms_statistics_are_their_mean_by_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(fleet: paceline.Fleet, transport: SideBySide) -> list[Any]:
        model = fleet.model(nn.Sequential(nn.BatchNorm1d(3), zeros()).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        steps = fleet.steps(DATA, **SETTINGS | {"micro_batch": 4})._loop
        for step in steps:
            for x, y in step:
                step.backward(mse(model, x, y))
            step.commit(optimizer)
            break
        return [model[0].running_mean.clone(), int(model[0].num_batches_tracked)]

    one, other = together(monkeypatch, tmp_path, script, combine=paceline.Averaging(every_steps=1))
    x, _ = DATA.tensors
    assert torch.allclose(one[0], 0.1 * x[:8].mean(0), atol=1e-12)
    assert torch.equal(one[0], other[0])
    assert (one[1], other[1]) == (2, 2), "the micro-batches of both"


# -- beside local steps ------------------------------------------------------------------------------------------------


def test_a_round_beside_local_steps_lands_when_the_next_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParameterRound, "over", property(lambda round: False))
    combine = paceline.Averaging(every_steps=2, overlap=True)
    one, other = together(monkeypatch, tmp_path, lambda fleet, _: Training(fleet).run(), combine=combine)
    start, own, landing = nothing(), [nothing(), nothing()], list[Vector]()
    for record in one.records:
        own = [by_hand(own[rank], positions(record, rank), 4) for rank in (0, 1)]
        if landing:
            own, start = _land(own, start, landing)
        landing = [mine - start for mine in own]
    own, start = _land(own, start, landing)
    assert [record.samples for record in one.records] == [(8, 8)] * 3
    assert one.rounds == [0, 0, 0, 0, 1, 1], "the first lands after the fourth step"
    assert close(one.weights, start)
    assert torch.equal(one.weights, other.weights)


def _land(own: list[Vector], start: Vector, updates: list[Vector]) -> tuple[list[Vector], Vector]:
    average = (updates[0] + updates[1]) / 2
    return [mine + average - update for mine, update in zip(own, updates, strict=True)], start + average


def test_a_round_that_is_over_lands_after_the_local_step_that_finds_it_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round is held up until both workers have made two more local steps, and over when the next begins."""
    before: dict[int, list[Vector]] = {0: [], 1: []}
    go_on = threading.Event()
    stepped = threading.Barrier(2)

    def script(fleet: paceline.Fleet, transport: SideBySide) -> Training:
        transport.before_round = lambda label: None if go_on.wait(20) else pytest.fail("nobody let the round go on")
        training = Training(fleet, global_batch=4, micro_batch=1)

        def after(step: paceline.Step) -> bool:
            periods = training.steps.combine.periods
            before[fleet.rank].append(training.weights)
            if step.index == 5:  # the round after step 3 has been under way for two steps
                assert periods.under_way is not None
                assert not periods.under_way.over
                stepped.wait(20)
                go_on.set()
                periods.under_way.wait(20)
            return step.index == 6

        return training.run(after)

    combine = paceline.Averaging(every_steps=4, overlap=True)
    one, _ = together(monkeypatch, tmp_path, script, combine=combine)
    assert one.rounds == [0] * 7
    assert one.steps.rounds > 1, "and the loop that was left has met the other"
    own: dict[int, list[int]] = {rank: positions(one.records[0], rank) for rank in (0, 1)}
    at_round = [by_hand(nothing(), own[rank], 2) for rank in (0, 1)]
    average = (at_round[0] + at_round[1]) / 2
    for rank in (0, 1):
        assert close(before[rank][3], at_round[rank]), "beside the round a worker goes on from where it was"
        since = by_hand(before[rank][3], positions(one.records[1], rank), 2) - at_round[rank]
        assert close(before[rank][6], average + since)


def test_a_round_beside_local_steps_that_fails_is_raised_where_it_lands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(fleet: paceline.Fleet, transport: SideBySide) -> None:
        def fail(label: str) -> None:
            raise MisuseError(f"no {label}")

        transport.before_round = fail
        Training(fleet).run()

    with pytest.raises(MisuseError, match="no the round after 0 rounds"):
        together(monkeypatch, tmp_path, script, combine=paceline.Averaging(every_steps=2, overlap=True))


# -- calls of all workers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_rounds_are_run_until_all_have_come_to_the_same_call(
    overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 waits after its first step, and worker 0 needs nearly everything that is left to come to its own."""

    def script(fleet: paceline.Fleet, transport: SideBySide) -> tuple[bool, Vector, Training]:
        training, found = Training(fleet), list[Any]()

        def after(step: paceline.Step) -> None:
            if step.index == (9, 0)[fleet.rank]:
                found.extend([fleet.any(fleet.rank == 0), training.weights])

        training.run(after)
        return found[0], found[1], training

    combine = paceline.Averaging(every_steps=1, overlap=overlap)
    one, other = together(monkeypatch, tmp_path, script, combine=combine)
    assert one[0] is other[0] is True
    assert torch.equal(one[1], other[1])
    assert counted(one[2].records) == once()
    waiting = [record for record in one[2].records if record.samples[1] == 0]
    assert len(waiting) >= 7
    assert all(record.planned[1] == 0 for record in waiting[1:]), "nothing more lies with the worker that waits"


def test_workers_in_unlike_calls_are_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(fleet: paceline.Fleet, transport: SideBySide) -> str:
        training = Training(fleet)

        def after(step: paceline.Step) -> Any:
            return fleet.any(True) if fleet.rank else fleet.evaluate(lambda x, y: {"x": x[:, 0]}, DATA)

        with pytest.raises(MisuseError) as error:
            training.run(after)
        return str(error.value)

    found = together(monkeypatch, tmp_path, script, combine=paceline.Averaging(every_steps=2))
    assert found[0].startswith("not every worker called fleet.evaluate()")
    assert found[1].startswith("not every worker called fleet.any()")


def test_evaluation_sees_the_centre_and_training_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(fleet: paceline.Fleet, transport: SideBySide) -> list[Vector]:
        training, found = Training(fleet), list[Vector]()

        def after(step: paceline.Step) -> bool:
            fleet.evaluate(lambda x, y: found.append(training.weights) or {}, DATA, batch_size=len(DATA))
            found.append(training.weights)
            return True

        training.run(after)
        return found

    combine = paceline.research.ElasticAverage(tau=2, alpha=0.3, weights="fixed")
    one, other = together(monkeypatch, tmp_path, script, combine=combine)
    assert torch.equal(one[0], other[0])
    assert not torch.equal(one[-1], other[-1])
    moved = [by_hand(nothing(), range(rank * 8, rank * 8 + 4), 4) for rank in (0, 1)]
    assert close(one[0], 0.3 * (moved[0] + moved[1]))
    assert close(other[-1], 0.7 * moved[1])


# -- the fleet goes on without this worker -----------------------------------------------------------------------------


class Unheard(Alone):
    """Alone, and in some rounds the fleet has gone on without this worker."""

    def __init__(self, *dropped_in: str) -> None:
        super().__init__()
        self._dropped_in = list(dropped_in)

    def round(self, label: str, **options: Any) -> Any:
        if label in self._dropped_in:
            self._dropped_in.remove(label)
            raise Dropped("this worker was silent for 9 s")
        return super().round(label, **options)


def test_who_was_dropped_gives_its_period_up_and_is_dealt_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transport = Unheard("the round after 1 rounds")
    monkeypatch.setattr("paceline.training.join._make_transport", lambda *args: transport)
    with join(tmp_path, combine=paceline.Averaging(every_steps=2)) as fleet:
        training = Training(fleet).run()
    assert training.rounds == [0, 0, 1, 1, 1, 1, 2, 2]
    assert counted(training.records) == once()
    assert "after 1 rounds: this worker was silent for 9 s; it enters anew" in caplog.text


def test_who_was_dropped_while_it_waits_in_a_call_cannot_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = Unheard("the round after 0 rounds")
    monkeypatch.setattr("paceline.training.join._make_transport", lambda *args: transport)
    monkeypatch.setattr("paceline.fleet.end_with_one_line", lambda error: None)

    def script() -> None:
        with join(tmp_path, combine=paceline.Averaging(every_steps=2)) as fleet:
            training = Training(fleet)

            def after(step: paceline.Step) -> None:
                transport.size = 2  # somebody else is waited for
                training.steps.combine.meet("fleet.any()")

            training.run(after)

    with pytest.raises(FleetError, match="while it waited in a call for the others: start it again"):
        script()


class Members:
    """Follows nobody, and raises what it is told to at the first boundaries."""

    leaving = False

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.asked, self.heard_of, self.kept_up = list(errors), list[bool](), list[int](), 0
        self.passed_by = False

    def at_boundary(self, *, agreed: Callable[[], bool]) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.asked.append(agreed())

    def keep_up(self) -> None:
        self.kept_up += 1

    def intentions(self) -> dict[str, float]:
        return {"leaves": float(self.leaving)}

    def note_intentions(self, header: Any, *, workers: Sequence[int], generation: int) -> None:
        self.heard_of.append(int(header.column("samples").sum()))


def test_members_may_change_right_after_a_round_and_nowhere_else(tmp_path: Path) -> None:
    with join(tmp_path, combine=paceline.Averaging(every_steps=3)) as fleet:
        training, members = Training(fleet), Members(Dropped("it was silent"))
        training.steps.loop.membership = members
        training.run()
    assert members.heard_of == [24, 24]
    assert members.kept_up == 2
    assert members.asked == [True, True], "before each of the two periods, and nobody was in a call"


def test_who_is_asked_to_leave_ends_its_period_with_the_step_it_is_in(tmp_path: Path) -> None:
    members = Members()

    def ask(step: paceline.Step) -> bool:
        members.leaving = step.index == 3
        return step.index == 4

    with join(tmp_path, combine=paceline.Averaging(every_steps=3)) as fleet:
        training = Training(fleet)
        training.steps.loop.membership = members
        training.run(ask)
    assert members.heard_of == [24, 8], "the second round comes two steps early"


# -- dealing and exchanging, by themselves -----------------------------------------------------------------------------


def a_dealer(
    settings: Any, *, size: int = 3, remaining: int = 1000, rank: int = 1, overlaps: bool = False, lengths: Any = ()
) -> tuple[PeriodDealer, SimpleNamespace]:
    dealt: list[tuple[int, ...]] = []

    def deal(wanted: tuple[int, ...]) -> tuple[int, ...]:
        dealt.append(wanted)
        return wanted

    transport = SimpleNamespace(rank=rank, size=size, gather=lambda label, mine: [plan.to_json()] * size)
    plan = Plan(generation=0, step=0, samples=(6, 3, 0)[:size])
    loop = SimpleNamespace(
        transport=transport,
        dealing=SimpleNamespace(deal=deal, remaining=remaining, length=1000, dealt=dealt),
        training=SimpleNamespace(plan_for=lambda step: plan),
        settings=SimpleNamespace(global_batch=12),
    )
    return PeriodDealer(loop, settings, overlaps=overlaps, lengths=lengths), loop  # type: ignore[arg-type]


def test_a_period_in_steps_has_that_many_times_the_plan(clock: FakeClock) -> None:
    dealer, _ = a_dealer(paceline.Averaging(every_steps=5))
    period = dealer.open(0)
    assert period.shares == (30, 15, 5), "and everybody has at least a sample a step"
    assert (period.windows, period.batches, period.began) == ((15,), (3,), 100.0)
    beside, _ = a_dealer(paceline.Averaging(every_steps=5), overlaps=True)
    assert beside.open(0).shares == (60, 30, 10), "and as much for while the round runs"


def test_a_period_by_the_clock_has_what_each_worker_may_do_in_it() -> None:
    dealer, _ = a_dealer(paceline.Averaging(period_s=2.0))
    assert dealer.open(0).shares == (16, 16, 16), "four steps while no speed is known"
    dealer.note_speeds(np.array([40, 4, 0]), seconds=np.array([2.0, 2.0, 0.0]), walls=np.array([2.0, 2.0, 0.0]))
    assert dealer.open(1).shares == (56, 8, 16), "at 1.4 times the speed, in whole steps of four"


def test_who_waits_for_the_others_is_dealt_nothing_until_all_do() -> None:
    dealer, _ = a_dealer(paceline.Averaging(every_steps=2))
    dealer.together = np.array([7.0, 0.0, 0.0])
    assert dealer.open(0).shares == (0, 6, 2)
    dealer.together = np.array([7.0, 7.0, 7.0])
    assert dealer.open(0).shares == (12, 6, 2)


def test_where_everybody_claims_its_part_of_an_epoch_it_is_dealt_as_that_opens() -> None:
    dealer, loop = a_dealer(paceline.research.ElasticAverage(tau=2), lengths=(400, 300, 300))
    loop.dealing.remaining = 1000
    dealer.together = np.array([7.0, 0.0, 0.0])
    assert dealer.open(0).shares == (8, 8, 8), "and who waits keeps its own"
    loop.dealing.remaining = 976
    dealer.open(1)
    assert loop.dealing.dealt == [(400, 300, 300), (8, 8, 8), (8, 8, 8)]


def test_among_other_members_speeds_follow_and_a_plan_is_asked_for_anew() -> None:
    dealer, loop = a_dealer(paceline.Averaging(period_s=2.0))
    dealer.note_speeds(np.array([40, 4, 20]), seconds=np.full(3, 2.0), walls=np.full(3, 2.0))
    dealer.plan, dealer.together = Plan(generation=0, step=0, samples=(1, 1, 1)), np.ones(3)
    loop.transport.rank, loop.transport.size = 0, 2
    dealer.members_changed((2, None))
    assert dealer.plan is None
    assert (dealer.position.member, dealer.position.members, dealer.together.tolist()) == (0, (0,), [0.0, 0.0])
    assert dealer.state_dict() == {"speeds": [10.0, 10.0], "rates": [10.0, 10.0]}


def test_speeds_of_another_number_of_workers_are_not_taken_over() -> None:
    dealer, _ = a_dealer(paceline.Averaging(period_s=2.0))
    dealer.load_state_dict({"speeds": [1.0, 2.0], "rates": [1.0, 2.0]})
    assert dealer.state_dict()["speeds"] == [0.0, 0.0, 0.0]
    dealer.load_state_dict({"speeds": [1.0, 2.0, 3.0]})
    assert dealer.state_dict() == {"speeds": [1.0, 2.0, 3.0], "rates": [1.0, 2.0, 3.0]}, "older ones have no rates"


class Reforming(Alone):
    """Alone, with members lost in some of its rounds, whose result some had and gave."""

    elastic = True

    def __init__(self, *, losses: int, gives: Callable[[Sequence[torch.Tensor]], bool] = lambda into: False) -> None:
        super().__init__()
        self.losses, self._gives, self.reformed, self.delivered = losses, gives, 0, 0

    def sum(self, tensor: torch.Tensor) -> Any:
        if self.losses:
            self.losses -= 1
            raise GenerationOver("worker 1 was lost", generation=0)
        return super().sum(tensor)

    def deliver_members_changed(self) -> None:
        self.delivered += 1

    def recover(
        self, over: Any, sums: Any = (), tensors: Any = (), *, renew: Any = list, background: bool = False
    ) -> Any:
        self.reformed += 1
        if not all(one.abandon() for one in sums):
            tensors = renew(tensors)
        if self._gives(tensors):
            return tensors
        self.deliver_members_changed()
        return None


def an_exchange(transport: Alone) -> tuple[RoundExchange, Callable[[], ParameterRound], nn.Linear]:
    model = zeros()
    gradients = Gradients(Alone(), [model])
    training = SimpleNamespace(plan_for=lambda step: Plan(generation=0, step=step, samples=(8,)))
    loop: Any = SimpleNamespace(
        transport=transport,
        gradients=gradients,
        training=training,
        membership=None,
        micro_batches=SimpleNamespace(sizes={}),
        device=torch.device("cpu"),
        add_figures=lambda header, added: None,
    )
    merging = paceline.Averaging(every_steps=1).merge(gradients.everything, transport)
    exchange = RoundExchange(loop, merging, [model], overlaps=False)
    period = Period(began=0.0, shares=(8,), windows=(8,), batches=(8,), member=0, done=[8], steps=1)

    def write() -> ParameterRound:
        return exchange.write(period, number=0, call=0.0, present=True, optimizers=(), first_member=True)

    with torch.no_grad():
        model.weight.add_(1.0)
    return exchange, write, model


def test_a_round_in_which_somebody_is_lost_gives_nothing_and_is_run_again() -> None:
    transport = Reforming(losses=1)
    exchange, write, _ = an_exchange(transport)
    assert exchange.run(write(), 0) is None
    again = exchange.run(write(), 0)
    assert again is not None
    assert transport.reformed == 1
    assert [view.flatten().tolist() for view in again.total.views] == [[1.0, 1.0, 1.0], [0.0]]
    assert again.header.read_plan() == Plan(generation=0, step=1, samples=(8,))


def test_the_result_that_others_had_of_a_round_is_taken_over() -> None:
    def give(into: Sequence[torch.Tensor]) -> bool:
        for tensor in into:
            tensor.fill_(3.0)
        return True

    exchange, write, model = an_exchange(Reforming(losses=1, gives=give))
    found = exchange.run(write(), 0)
    assert found is not None
    assert all((view == 3.0).all() for view in found.total.views)
    assert found.facts.min() == found.header.column("samples")[0] == 3.0
    assert model.weight.tolist() == [[1.0, 1.0, 1.0]], "nothing changes before the round is taken"


def test_what_asks_the_store_is_asked_again_when_members_have_changed() -> None:
    transport = Reforming(losses=0)
    exchange, _, _ = an_exchange(transport)
    answers: list[Any] = [GenerationOver("the store is away", generation=0), "written"]

    def write() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert exchange.persistently(write) == "written"
    assert (transport.reformed, transport.delivered) == (1, 1)


def test_a_round_says_what_this_worker_did_and_who_waits() -> None:
    exchange, _, _ = an_exchange(Alone())
    period = Period(began=0.0, shares=(9,), windows=(9,), batches=(4,), member=0, done=[7], steps=2)
    period.wall_s, period.seconds, period.loss, period.contraction = 1.5, 1.25, 3.0, -0.5
    momentum = torch.optim.SGD(zeros().parameters(), lr=RATE, momentum=0.75)
    round = exchange.write(period, number=4, call=17.0, present=False, optimizers=[momentum], first_member=True)
    assert round.table.tolist() == [[17.0, 1.5, 2.0, 7.0, -0.5, 0.75, 0.0, 0.0]]
    said = [round.header.column(name)[0] for name in ("samples", "loss", "seconds")]
    assert said == [7.0, 3.0, 1.25]
    plan = round.header.read_plan()
    assert plan is not None
    assert plan.step == 5


def test_a_round_s_facts_travel_in_double_precision() -> None:
    """Two calls are told apart by 48 bits, and weights follow from distances alike on all workers."""
    exchange, _, _ = an_exchange(Alone())
    period = Period(began=0.0, shares=(9,), windows=(9,), batches=(4,), member=0, done=[7], steps=2)
    period.contraction = -0.1
    round = exchange.write(period, number=0, call=2.0**47 + 1, present=True, optimizers=[], first_member=True)
    assert round.table[0, 0] == 2.0**47 + 1
    assert round.facts[0, 2] == -0.1


# -- state -------------------------------------------------------------------------------------------------------------


COMBINES = [
    paceline.Averaging(every_steps=2, outer=paceline.Outer()),
    paceline.research.ElasticAverage(tau=2, alpha=0.3),
]


def saved(training: Training) -> torch.Tensor:
    """What a checkpoint holds of it: the parameters that are shown, and the loop."""
    with training.steps.combine.shown():
        return content.pack({"model": training.model.state_dict(), "steps": training.steps.state_dict()})


def load(training: Training, packed: torch.Tensor) -> None:
    state = content.unpack(packed, device=torch.device("cpu"))
    training.model.load_state_dict(state["model"])
    training.steps.load_state_dict(state["steps"])


@pytest.mark.parametrize("combine", COMBINES, ids=lambda combine: combine.name)
def test_a_training_goes_on_from_a_checkpoint_as_if_nothing_had_been(combine: Any, tmp_path: Path) -> None:
    kept: list[torch.Tensor] = []
    with join(tmp_path / "whole", combine=combine) as fleet:
        whole = Training(fleet, epochs=2)
        whole.run(lambda step: kept.append(saved(whole)))
    with join(tmp_path / "again", combine=combine) as fleet:
        again = Training(fleet, epochs=2)
        load(again, kept[3])
        again.run()
        state = again.steps.state_dict()
    assert again.rounds == whole.rounds[4:]
    assert counted([*whole.records[:2], *again.records]) == once(2)
    assert state["round"] == state["merging"]["rounds"] == len(whole.records)
    if combine.name == "average":  # the other's workers all begin at the centre
        assert torch.equal(again.weights, whole.weights)


@pytest.mark.parametrize("combine", COMBINES, ids=lambda combine: combine.name)
def test_a_checkpoint_of_another_combine_is_gone_on_from_and_rounds_are_counted_anew(
    combine: Any, tmp_path: Path
) -> None:
    kept: list[torch.Tensor] = []
    with join(tmp_path / "before") as fleet:
        before = Training(fleet)
        before.run(lambda step: kept.append(saved(before)) or step.index == 1)
    with join(tmp_path / "after", combine=combine) as fleet:
        after = Training(fleet)
        load(after, kept[1])
        merging = after.steps.combine.periods.merge
        start = merging._start if isinstance(merging, WeightedAverage) else merging.centre
        assert torch.equal(torch.cat([one.flatten() for one in start]), before.weights), "the common start"
        assert after.steps.index == 2
        after.run()
    assert after.rounds == [0, 0, 1, 1]
    assert [record.step for record in after.records] == [0, 1]
    assert counted([*before.records, *after.records]) == once()


@pytest.mark.parametrize("combine", COMBINES, ids=lambda combine: combine.name)
def test_a_newcomer_goes_on_where_the_peer_is_whose_state_it_took(combine: Any, tmp_path: Path) -> None:
    packed: list[torch.Tensor] = []

    with join(tmp_path / "peer", combine=combine, seed=5) as fleet:
        peer = Training(fleet, shuffle=True)
        peer.run(lambda step: packed.append(content.pack(peer.steps.combine.newcomer_state())))
    with join(tmp_path / "newcomer", combine=combine, seed=6) as fleet:
        newcomer = Training(fleet, shuffle=True)
        state = content.unpack(packed[3], device=torch.device("cpu"))
        newcomer.steps.combine.take_over(state, ahead=[0])
        assert newcomer.steps.combine.rounds == newcomer.steps.training.index == 2
        assert newcomer.steps.index == 4
        assert len(newcomer.records) == 2
        newcomer.run()
    assert newcomer.rounds == peer.rounds[4:]
    assert counted(newcomer.records) == once()
    assert [record.ranges for record in newcomer.records] == [record.ranges for record in peer.records]
    if combine.name == "average":
        assert torch.equal(newcomer.weights, peer.weights)


def test_a_newcomer_with_another_order_is_refused(tmp_path: Path) -> None:
    combine, packed = paceline.Averaging(every_steps=2), list[dict[str, Any]]()
    options: dict[str, Any] = {"shuffle": None}
    with join(tmp_path / "peer", combine=combine) as fleet:
        peer = Training(fleet, order=lambda epoch: list(range(48)), **options)
        peer.run(lambda step: packed.append(peer.steps.combine.newcomer_state()))
    with join(tmp_path / "newcomer", combine=combine) as fleet:
        newcomer = Training(fleet, order=lambda epoch: list(range(47, -1, -1)), **options)
        with pytest.raises(ValueError, match=r"order\(0\), .* gives another order"):
            newcomer.steps.combine.take_over(packed[1], ahead=[0])


def test_rounds_of_a_second_loop_are_counted_on(tmp_path: Path) -> None:
    with join(tmp_path, combine=paceline.Averaging(every_steps=3)) as fleet:
        training = Training(fleet).run()
        training.steps = fleet.steps(DATA, **SETTINGS)._loop
        training.run()
    assert [record.step for record in training.records] == [0, 1, 2, 3]
    assert training.rounds[6:] == [2, 2, 2, 3, 3, 3]


# -- emulated outages --------------------------------------------------------------------------------------------------


class Fate:
    """Of worker 1 alone, by round."""

    def __init__(self, **troubles: Trouble) -> None:
        self._troubles = {int(name.removeprefix("round_")): trouble for name, trouble in troubles.items()}

    def describe(self) -> str:
        return "as told"

    def at(self, *, worker: int, round: int) -> Trouble:
        return self._troubles.get(round, Trouble()) if worker == 1 else Trouble()


def with_fate(
    monkeypatch: pytest.MonkeyPatch, folder: Path, combine: Any, **troubles: Trouble
) -> tuple[list[Training], dict[int, list[Vector]]]:
    """Both workers' trainings, and their weights before each of their local steps."""
    failures, before = Failures((Fate(**troubles),), 0), dict[int, list[Vector]]({0: [], 1: []})
    monkeypatch.setattr("paceline.training.join.failures_from_env", lambda seed: failures)

    def script(fleet: paceline.Fleet, transport: SideBySide) -> Training:
        training = Training(fleet)
        return training.run(work=lambda: before[fleet.rank].append(training.weights))

    return together(monkeypatch, folder, script, combine=combine), before


def test_a_lost_exchange_leaves_the_average_to_the_others_and_the_worker_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    combine, lost = paceline.Averaging(every_steps=2), Trouble(exchanges=False)
    (one, other), before = with_fate(monkeypatch, tmp_path, combine, round_0=lost)
    moved = [by_hand(nothing(), positions(one.records[0], rank), 4) for rank in (0, 1)]
    assert close(before[0][2], moved[0])
    assert close(before[1][2], moved[1])
    assert counted(one.records) == once(), "what it did still counts as done"
    assert torch.equal(one.weights, other.weights)


def test_a_frozen_worker_does_nothing_in_its_round_and_its_samples_are_dealt_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = Trouble(trains=False, exchanges=False)
    (one, other), _ = with_fate(monkeypatch, tmp_path, paceline.Averaging(every_steps=2), round_1=frozen)
    assert [record.samples for record in one.records] == [(8, 8), (8, 0), (8, 8), (4, 4)]
    assert counted(one.records) == once()
    assert other.rounds == [0, 0, 2, 2, 3]
    assert torch.equal(one.weights, other.weights)


@pytest.mark.parametrize("returns_with", ["initial", "stale"])
def test_a_worker_that_returns_has_the_parameters_its_trouble_left_it(
    returns_with: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away, back = Trouble(trains=False, exchanges=False), Trouble(returns_with=returns_with)
    combine = paceline.research.ElasticAverage(tau=2, alpha=0.3, weights="fixed")
    (_, other), before = with_fate(monkeypatch, tmp_path, combine, round_2=away, round_3=back)
    assert other.rounds == [0, 0, 1, 1, 3]
    # The last local step of round 1 begins from where the worker stood one step into it.
    began = before[1][2]
    assert close(before[1][4], nothing() if returns_with == "initial" else began)


def test_parameters_are_kept_only_where_failures_are_emulated() -> None:
    parameter = torch.ones(3)
    EmulatedOutages(None, [parameter]).come_back(Trouble(returns_with="initial"))
    assert parameter.tolist() == [1.0, 1.0, 1.0]
    outages = EmulatedOutages(Failures((), 0), [parameter])
    parameter.fill_(2.0)
    outages.come_back(Trouble(exchanges=False))
    outages.come_back(Trouble(returns_with="stale"))
    assert parameter.tolist() == [1.0, 1.0, 1.0], "nothing stale is known before the first exchange"
    parameter.fill_(4.0)
    outages.come_back(Trouble(returns_with="stale"))
    assert parameter.tolist() == [1.0, 1.0, 1.0], "it has come back with those"


def test_a_worker_that_returns_has_a_new_optimiser() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    outages = EmulatedOutages(Failures((), 0), [parameter])
    (parameter**2).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["step"] = 7
    outages.come_back(Trouble(), [optimizer])
    assert optimizer.state[parameter]["momentum_buffer"].abs().sum() > 0
    outages.come_back(Trouble(returns_with="stale"), [optimizer])
    assert not optimizer.state
    assert optimizer.param_groups[0]["step"] == 0


def test_emulated_failures_are_refused_beside_local_steps_and_in_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for settings, what in (({"overlap": True}, "overlap"), ({"groups": [[0, 1]]}, "groups, whose members")):
        with pytest.raises(ValueError, match=f"emulated failures cannot be had with {what}"):
            with_fate(monkeypatch, tmp_path / what[:6], paceline.Averaging(every_steps=2, **settings))
