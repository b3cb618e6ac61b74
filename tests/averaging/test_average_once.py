"""``Averaging(every="end")``: workers go their own ways through all epochs, and are averaged once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_averaging_combine import (
    DATA,
    RATE,
    FakeClock,
    Training,
    by_hand,
    clock,  # noqa: F401
    close,
    counted,
    nothing,
    once,
    positions,
)
from torch import nn

import paceline
from lone import join, mse
from paceline.averaging.combine import check_fits
from paceline.averaging.weighted_average import Averaging
from paceline.averaging.weights import LocalWork
from paceline.errors import MisuseError
from paceline.machines.failures import parse_failures
from paceline.research.wp_weights import log_contraction, wp
from paceline.transport.fixed import Alone
from side_by_side import SideBySide, together

pytestmark = pytest.mark.slow  # seconds, all together

ONCE = paceline.Averaging(every="end", period_s=2.0)
Way = Callable[[paceline.Fleet, SideBySide], Any]


def own_way(training: Training, rank: int, batch: int = 4) -> torch.Tensor:
    """Where this worker comes to by itself, through all periods and epochs."""
    end = nothing()
    for record in training.records:
        end = by_hand(end, positions(record, rank), batch)
    return end


def unequal(clock: FakeClock, **settings: Any) -> Way:  # noqa: F811
    def script(fleet: paceline.Fleet, transport: SideBySide) -> Training:
        return Training(fleet, **settings).run(work=lambda: clock.move((0.3, 0.9)[fleet.rank]))

    return script


def test_workers_are_averaged_once_at_the_end_of_all_epochs(
    tmp_path: Path,
    clock: FakeClock,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = together(monkeypatch, tmp_path, unequal(clock, epochs=3), combine=ONCE)
    assert counted(one.records) == once(3)
    assert torch.equal(one.weights, other.weights)
    samples = np.sum([record.samples for record in one.records], axis=0)
    assert samples[0] > 2 * samples[1], "the fast one does more"
    parts = samples / samples.sum()
    assert close(one.weights, parts[0] * own_way(one, 0) + parts[1] * own_way(one, 1))


def test_the_weights_are_those_of_all_the_work_since_the_start(
    tmp_path: Path,
    clock: FakeClock,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    combine = paceline.Averaging(every="end", period_s=2.0, weights="wp", weight_decay=0.5)
    one, other = together(monkeypatch, tmp_path, unequal(clock, epochs=2), combine=combine)
    steps = np.sum([-(-np.array(record.samples) // 4) for record in one.records], axis=0)
    parts = wp(LocalWork(steps=steps, log_contraction=steps * log_contraction(RATE, 0.5))).weights.tolist()
    assert 0 < parts[1] < 0.4
    assert close(one.weights, parts[0] * own_way(one, 0) + parts[1] * own_way(one, 1))
    assert torch.equal(one.weights, other.weights)


def test_no_parameters_travel_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[tuple[int, torch.Size]] = []

    def script(fleet: paceline.Fleet, transport: SideBySide) -> Training:
        plain = transport.sum

        def watched(tensor: torch.Tensor) -> Any:
            if fleet.rank == 0 and tensor.numel() == 4:
                summed.append((len(fleet.history), tensor.shape))
            return plain(tensor)

        transport.sum = watched  # type: ignore[method-assign]
        return Training(fleet, epochs=2).run()

    combine = paceline.Averaging(every="end", every_steps=2)
    one, other = together(monkeypatch, tmp_path, script, combine=combine)
    assert [rounds for rounds, _ in summed] == [len(one.records) - 1]
    assert len(one.records) == 6, "three rounds an epoch, which count and deal"
    assert torch.equal(one.weights, other.weights)


CALLS: dict[str, Callable[[paceline.Fleet, Path], Any]] = {
    "evaluate": lambda fleet, folder: fleet.evaluate(lambda *batch: {"seen": len(batch[0])}, DATA, sums="seen"),
    "save": lambda fleet, folder: fleet.save(folder / "saved"),
    "any": lambda fleet, folder: fleet.any(False),
    "barrier": lambda fleet, folder: fleet.barrier(),
    "autosave": lambda fleet, folder: fleet.autosave(folder / "auto", every_steps=1),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_would_show_one_workers_parameters_is_refused_in_the_loop(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(fleet: paceline.Fleet, transport: SideBySide) -> None:
        training = Training(fleet)
        if call != "autosave":
            CALLS[call](fleet, tmp_path)  # all are equal before the first step
            training.run(lambda step: CALLS[call](fleet, tmp_path))
        CALLS[call](fleet, tmp_path)
        training.run()

    combine = paceline.Averaging(every="end", every_steps=2)
    with pytest.raises(MisuseError, match=r"do it after the loop, or leave every= out"):
        together(monkeypatch, tmp_path, script, combine=combine)


def test_after_the_loop_everything_may_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(fleet: paceline.Fleet, transport: SideBySide) -> Any:
        Training(fleet).run()
        found, *_ = (CALLS[call](fleet, tmp_path) for call in ("evaluate", "save", "any", "barrier"))
        return found

    for found in together(monkeypatch, tmp_path, script, combine=paceline.Averaging(every="end", every_steps=2)):
        assert found["seen"] == len(DATA)


def test_alone_a_worker_is_its_own_average_at_any_time(tmp_path: Path) -> None:
    with join(tmp_path, combine=paceline.Averaging(every="end", every_steps=2)) as fleet:
        training = Training(fleet, epochs=2).run(lambda step: CALLS["evaluate"](fleet, tmp_path) and None)
    assert close(training.weights, by_hand(nothing(), 2 * list(range(48)), 8))


@pytest.mark.parametrize("asks", [True, False])
def test_who_leaves_the_loop_early_is_averaged_in_the_next_call_of_all_or_as_the_fleet_is_left(
    asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings: dict[int, Training] = {}

    def script(fleet: paceline.Fleet, transport: SideBySide) -> torch.Tensor:
        training = trainings[fleet.rank] = Training(fleet, epochs=2)
        training.run(lambda step: step.index == (3, 4)[fleet.rank])
        apart = training.weights
        if asks:
            fleet.evaluate(lambda *batch: {"seen": len(batch[0])}, DATA, sums="seen")
        return apart

    combine = paceline.Averaging(every="end", every_steps=2)
    apart = together(monkeypatch, tmp_path, script, combine=combine)
    one, other = trainings[0], trainings[1]
    assert not torch.equal(*apart)
    assert torch.equal(one.weights, other.weights)
    samples = np.sum([record.samples for record in one.records], axis=0)
    assert samples.tolist() == [16, 20]
    assert close(one.weights, (16 * apart[0] + 20 * apart[1]) / 36)


def test_batch_norms_statistics_are_those_of_all_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def script(fleet: paceline.Fleet, transport: SideBySide) -> tuple[torch.Tensor, int]:
        model = fleet.model(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double())
        norm: Any = model[0]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in fleet.steps(DATA, epochs=2, global_batch=12, micro_batch=6, shuffle=False):
            for x, y in step:
                step.backward(mse(model, x, y))
            own[fleet.rank].append(norm.running_mean.clone())
            step.commit(optimizer)
        return norm.running_mean.clone(), int(norm.num_batches_tracked)

    combine = paceline.Averaging(every="end", every_steps=2)
    (one, tracked), (other, _) = together(monkeypatch, tmp_path, script, combine=combine)
    assert torch.equal(one, other)
    assert tracked == 16
    assert close(one, (own[0][-1] + own[1][-1]) / 2)


def test_groups_are_averaged_once_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    combine = paceline.Averaging(every="end", every_steps=2, groups=[[0, 1], [2]])
    found = together(monkeypatch, tmp_path, lambda fleet, _: Training(fleet, epochs=2).run(), size=3, combine=combine)
    assert counted(found[0].records) == once(2)
    assert all(torch.equal(found[0].weights, one.weights) for one in found)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"every": "epoch"}, '"end" averages once'),
        ({"every": 4}, "give every_steps"),
        ({"every": "end", "overlap": True}, "leave overlap out"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: Any, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        Averaging(**settings)


def test_where_workers_come_and_go_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Averaging\(every=...\) needs a fleet of fixed size"):
        ONCE.check_elastic()


def test_emulated_failures_are_refused() -> None:
    dealing: Any = SimpleNamespace(length=48)
    with pytest.raises(ValueError, match='emulated failures cannot be had with every="end"'):
        check_fits(Alone(), dealing, parse_failures("lost:0.5"), grouped=False, overlaps=False, once=True)
