"""What is tracked, what is not, and how it is found among the living objects."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

from paceline.step.tracking import Living, Tracked


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Linear(3, 2)


@pytest.fixture
def tracked(model: torch.nn.Module) -> Iterator[Tracked]:
    tracked = Tracked(model.parameters)
    yield tracked
    tracked.close()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each scan of all objects from here on."""
    scans: list[int] = []
    look = gc.get_referrers

    def get_referrers(*objects: Any) -> list[Any]:
        scans.append(1)
        return look(*objects)

    monkeypatch.setattr(gc, "get_referrers", get_referrers)
    return scans


def test_questions_that_follow_each_other_share_one_scan(tracked: Tracked, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    scans, living = counted(monkeypatch), Living()
    assert scans == []  # nobody has asked yet
    tracked.note_averages(living)
    assert tracked.missing(living) == []
    assert tracked.missing(living, optimizers=True) == []
    assert scans == [1]


def test_an_optimizer_and_its_schedule_are_missing_until_they_are_tracked(
    model: torch.nn.Module, tracked: Tracked
) -> None:
    optimizer = torch.optim.Adam(model.parameters())
    schedule = StepLR(optimizer, 5)
    assert tracked.missing() == []  # it has made no step yet
    assert tracked.missing(optimizers=True) == ["optimizer=Adam", "scheduler=StepLR"]
    optimizer.step()
    assert tracked.missing() == ["optimizer=Adam", "scheduler=StepLR"]
    tracked.add({"optimizer": optimizer})
    assert tracked.missing() == ["scheduler=StepLR"]
    tracked.add({"schedule": schedule})
    assert tracked.missing() == []


def test_what_the_script_has_dropped_is_not_missing_though_a_cycle_holds_it(
    model: torch.nn.Module, tracked: Tracked
) -> None:
    optimizer: Any = torch.optim.Adam(model.parameters())
    optimizer.itself = optimizer
    gc.disable()
    try:
        living = Living()
        assert any(thing is optimizer for thing in living.objects)
        del optimizer
        assert tracked.missing(living, optimizers=True) == []
    finally:
        gc.enable()


def test_instances_of_subclasses_and_copies_are_found_and_nothing_else_is_asked(model: torch.nn.Module) -> None:
    class Own(torch.optim.Adam):
        pass

    class Touchy:
        """Counts as an optimiser by what it says of itself, and may not be asked."""

        asked = 0

        @property
        def __class__(self) -> Any:
            Touchy.asked += 1
            return torch.optim.Optimizer

    own, touchy = Own(model.parameters()), Touchy()
    restored, copied = pickle.loads(pickle.dumps(torch.optim.SGD(model.parameters()))), copy.deepcopy(own)
    found = Living(torch.optim.Optimizer).objects
    assert all(any(thing is one for thing in found) for one in (own, restored, copied))
    assert not any(thing is touchy for thing in found)
    assert Touchy.asked == 0


def test_an_average_counts_from_its_first_update_after_it_was_noted(model: torch.nn.Module, tracked: Tracked) -> None:
    average = AveragedModel(model)
    average.update_parameters(model)
    tracked.note_averages(Living())
    assert tracked.missing() == []
    assert tracked.averages() == ["ema=AveragedModel"]
    average.update_parameters(model)
    assert tracked.missing() == ["ema=AveragedModel"]
    tracked.add({"ema": average})
    assert tracked.missing() == tracked.averages() == []
