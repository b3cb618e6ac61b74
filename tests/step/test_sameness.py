"""What workers hold, as numbers to compare and in words."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from paceline.step.checks.sameness import parameters_of, saved_buffers_of, state_of, together, unlike_modes, unlike_text


def stepped() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    adam = torch.optim.Adam(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 10)
    net(torch.randn(4, 3)).sum().backward()
    adam.step()
    schedule.step()
    return net, adam, schedule


def test_equal_things_have_equal_numbers_and_a_change_of_any_kind_shows_by_name() -> None:
    (net, adam, schedule), (net_, adam_, schedule_) = stepped(), stepped()

    def number_and_names() -> tuple[float, list[str]]:
        ours = together(parameters_of([net]), state_of([("adam", adam), ("schedule", schedule), ("copy", net)]))
        other = together(parameters_of([net_]), state_of([("adam", adam_), ("schedule", schedule_), ("copy", net_)]))
        pairs = zip(ours.by_name().items(), other.by_name().items(), strict=True)
        return ours.number() == other.number(), [one[0] for one, another in pairs if one != another]

    assert number_and_names() == (True, [])
    adam_.state[net_[0].weight]["exp_avg"][0, 0] += 1
    assert number_and_names() == (False, ["adam: exp_avg of its parameter 0"])
    adam_.load_state_dict(adam.state_dict())
    schedule_.last_epoch += 1
    assert number_and_names() == (False, ["schedule"])
    schedule_.load_state_dict(schedule.state_dict())
    net_[1].running_mean.add_(1)
    assert number_and_names() == (False, ["copy: 1.running_mean"])
    assert saved_buffers_of([net]).number() != saved_buffers_of([net_]).number()


def test_things_of_other_kinds_may_be_each_workers_own() -> None:
    class Clock:
        def state_dict(self) -> dict[str, float]:
            raise AssertionError("nobody asks")

    assert state_of([("clock", Clock())]).by_name() == {}


def test_the_worker_the_object_and_the_line_to_write_are_named() -> None:
    first = {"parameter 0.weight": 1, "optimizer: exp_avg of its parameter 0": 1}
    text = unlike_text([first, first, {**first, "parameter 0.weight": 2}], when="before the first step")
    assert text.startswith("before the first step worker 2 does not hold what worker 0 does: parameter 0.weight. ")
    assert "before fleet.model(...)" in text
    assert "fleet.track" not in text
    text = unlike_text([first, {**first, "optimizer: exp_avg of its parameter 0": 2}], when="in step 4", causes=["x"])
    assert "fleet.track(optimizer=...)" in text
    assert "before fleet.model" not in text
    assert text.endswith("Other causes: x")
    assert unlike_text([first, deepcopy(first)], when="") == ""


def test_unlike_modes_name_the_module_and_both_workers() -> None:
    assert unlike_modes([["0"], ["0"]], step=3) == ""
    assert "in step 3 the module 1 (and 1 more) evaluates on worker 0 and trains on worker 1" in unlike_modes(
        [["0", "1", "2"], ["0"]], step=3
    )
