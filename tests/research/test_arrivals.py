"""Exchanges by arrival, with all workers in this process: the centre meets them one by one."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import paceline
from lone import flat, mse, numbers
from paceline.errors import FleetError, MisuseError
from paceline.records import StepRecord
from paceline.research.by_arrival import next_turn
from paceline.research.elastic_average import ElasticAverage
from side_by_side import SideBySide, together

pytestmark = pytest.mark.slow  # seconds, all together

DATA = numbers(48)
ARRIVAL = ElasticAverage(exchange="arrival", weights="fixed", tau=2, alpha=0.25)


def zeros() -> nn.Linear:
    model = nn.Linear(3, 1).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def train(fleet: paceline.Fleet, *, slow: float = 0.0, epochs: int = 1, **asked: Any) -> dict[str, Any]:
    """Plain SGD from zero. ``slow``: seconds a step of the last worker."""
    model = fleet.model(asked.get("model", zeros)())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fleet.track(optimizer=optimizer)
    if "load" in asked:
        fleet.load(asked["load"])
    if "autosave" in asked:
        fleet.autosave(asked["autosave"], every_steps=1)
    steps, ends, met = 0, [], []
    for step in fleet.steps(DATA, global_batch=8, micro_batch=2, shuffle=False, epochs=epochs):
        for x, y in step:
            step.backward(mse(model, x, y))
            step.add(seen=len(x))
        time.sleep(slow if fleet.rank == fleet.world_size - 1 else 0.0)
        step.commit(optimizer)
        steps += 1
        ends.append(step.ends_epoch)
        if steps == asked["meets"] if "meets" in asked else step.ends_epoch:
            met.append(fleet.evaluate(lambda x, y: {"loss": mse(model, x, y) * len(x)}, DATA, sums="loss")["loss"])
        if step.ends_epoch and step.epoch == 0 and "save" in asked:
            fleet.save(asked["save"])
        if steps == asked.get("leaves"):
            break
        if steps == 1 and fleet.rank == asked.get("fails"):
            raise ArithmeticError("of its own")
    return {"weights": flat(model), "steps": steps, "ends": ends, "met": met, "records": list(fleet.history)}


def counted(records: list[StepRecord]) -> Counter[tuple[int, int]]:
    return Counter((r.epoch, place) for r in records for rank in r.ranges for a, b in rank for place in range(a, b))


def once(epochs: int = 1) -> Counter[tuple[int, int]]:
    return Counter((epoch, place) for epoch in range(epochs) for place in range(len(DATA)))


def test_the_longest_wait_is_served_first_and_of_equals_the_lowest_rank() -> None:
    assert next_turn(np.array([0.1, 0.3, 0.2])) == 1
    assert next_turn(np.array([0.0, 0.2, 0.2])) == 1
    assert next_turn(np.zeros(2)) is None


def test_a_fast_worker_meets_the_centre_more_often_and_every_sample_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(fleet: paceline.Fleet, _: SideBySide) -> dict[str, Any]:
        return train(fleet, slow=0.15, epochs=2)

    fast, slow = together(monkeypatch, tmp_path, script, combine=ARRIVAL)
    assert fast["steps"] > 2 * slow["steps"]
    assert torch.equal(fast["weights"], slow["weights"]), "the centre's, on all"
    assert [(r.ranges, r.planned) for r in fast["records"]] == [(r.ranges, r.planned) for r in slow["records"]]
    assert counted(fast["records"]) == once(2)
    assert sum(r.sums.get("seen", 0) for r in fast["records"]) == 96
    assert sum(fast["ends"]) == sum(slow["ends"]) == 2
    assert fast["met"] == slow["met"]


def test_one_worker_at_a_time_meets_the_centre_as_it_is_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: the exchanges of the records, one after another."""

    def script(fleet: paceline.Fleet, _: SideBySide) -> dict[str, Any]:
        return train(fleet, slow=0.03)

    one, two = together(monkeypatch, tmp_path, script, combine=ARRIVAL)
    centre = torch.zeros(4, dtype=torch.float64)
    own = [centre.clone(), centre.clone()]
    for record in one["records"]:
        assert sum(count > 0 for count in record.samples) <= 1
        for rank, ranges in enumerate(record.ranges):
            places = [place for start, end in ranges for place in range(start, end)]
            if not places:
                continue
            x, y = DATA.tensors
            x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
            for part in torch.tensor(places).split(4):
                own[rank] = own[rank] - 0.1 * 2 * ((x[part] @ own[rank] - y[part, 0]) @ x[part]) / len(part)
            way = own[rank] - centre
            own[rank], centre = own[rank] - 0.25 * way, centre + 0.25 * way
    assert (one["weights"] - centre).abs().max() < 1e-12
    assert torch.equal(one["weights"], two["weights"])


def test_calls_at_unlike_moments_bring_all_together_and_nothing_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(fleet: paceline.Fleet, _: SideBySide) -> dict[str, Any]:
        return train(fleet, slow=0.01, epochs=3, meets=3 + 2 * fleet.rank)

    found = together(monkeypatch, tmp_path, script, combine=ARRIVAL, size=3)
    assert all(len(one["met"]) == 1 and one["met"] == found[0]["met"] for one in found)
    assert all(torch.equal(one["weights"], found[0]["weights"]) for one in found)
    assert counted(found[0]["records"]) == once(3)


def test_a_loop_may_be_left_early_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = together(monkeypatch, tmp_path, lambda fleet, _: train(fleet, leaves=3), combine=ARRIVAL)
    assert [one["steps"] for one in found] == [3, 3]


@pytest.mark.parametrize("failures", ["lost:0.5", "frozen:0.3x2", "restart:0.3x2"])
@pytest.mark.parametrize("weights", ["dynamic", "known"])
def test_emulated_failures_leave_the_books_balanced(
    failures: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_FAILURES", failures)
    combine = ElasticAverage(exchange="arrival", weights=weights)
    one, two = together(monkeypatch, tmp_path, lambda fleet, _: train(fleet, epochs=2), combine=combine)
    assert torch.equal(one["weights"], two["weights"])
    assert counted(one["records"]) == once(2)


def test_an_error_of_one_worker_does_not_leave_the_other_hanging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.averaging.periods.LEAVING_S", 0.1)
    with pytest.raises((ArithmeticError, FleetError)):
        together(monkeypatch, tmp_path, lambda fleet, _: train(fleet, fails=1), combine=ARRIVAL)
    threads = [one for one in threading.enumerate() if one.name == "paceline-arrivals"]
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_unlike_calls_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(fleet: paceline.Fleet, _: SideBySide) -> None:
        model = fleet.model(zeros())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in fleet.steps(DATA, global_batch=8, micro_batch=2):
            for x, y in step:
                step.backward(mse(model, x, y))
            step.commit(optimizer)
            fleet.any(True) if fleet.rank else fleet.evaluate(lambda x, y: {"x": x[:, 0]}, DATA)

    with pytest.raises(MisuseError, match="not every worker called"):
        together(monkeypatch, tmp_path, script, combine=ARRIVAL)


def test_batch_norm_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()

    with pytest.raises(ValueError, match="GroupNorm"):
        together(monkeypatch, tmp_path, lambda fleet, _: train(fleet, model=model), combine=ARRIVAL)


@pytest.mark.parametrize("how", ["save", "autosave"])
def test_a_training_resumes_at_the_end_of_an_epoch(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ("saved.pt" if how == "save" else "folder")
    asked = {how: path}
    together(monkeypatch, tmp_path / "one", lambda fleet, _: train(fleet, epochs=1, **asked), combine=ARRIVAL)
    again = together(monkeypatch, tmp_path / "two", lambda fleet, _: train(fleet, epochs=2, load=path), combine=ARRIVAL)
    assert torch.equal(again[0]["weights"], again[1]["weights"])
    assert counted(again[0]["records"]) == Counter((1, place) for place in range(len(DATA)))
