"""Tensors that the loss reaches, that are no parameters of the fleet, and that the script trains by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.step.checks.user_code import OwnLeaves


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_leaf_that_the_script_changes_is_told_of_once_it_has_changed(by_hand: bool) -> None:
    model, leaves = nn.Linear(3, 2), OwnLeaves()
    delta = torch.zeros(3, requires_grad=True)
    x = torch.ones(4, 3, requires_grad=True)

    def look() -> str:
        return leaves.look(model(x + delta).mean(), model.parameters())

    assert look() == ""
    if by_hand:
        with torch.no_grad():
            delta.add_(1.0)
    said = look()
    assert ("a tensor of shape [3]" in said) == by_hand
    assert look() == "", "nothing has changed since"


def test_a_loose_parameter_is_told_of_too_where_its_gradient_is_used() -> None:
    model, scale, leaves = nn.Linear(3, 2), nn.Parameter(torch.ones(())), OwnLeaves()
    for number in range(3):
        loss = (model(torch.ones(3)) * scale).sum()
        assert bool(leaves.look(loss, model.parameters())) == (number > 0)
        loss.backward()
        with torch.no_grad():
            scale.sub_(scale.grad)
        scale.grad = None


def test_models_that_train_by_turns_are_the_fleets() -> None:
    nets, leaves = [nn.Linear(3, 3), nn.Linear(3, 3)], OwnLeaves()
    for number in range(4):
        for turn, net in enumerate(nets):
            net.requires_grad_(turn == number % 2)
        loss = nets[1](nets[0](torch.ones(3))).sum()
        assert leaves.look(loss, [*nets[0].parameters(), *nets[1].parameters()]) == ""
        loss.backward()
        with torch.no_grad():
            for parameter in nets[number % 2].parameters():
                parameter.sub_(0.1)
                parameter.grad = None


def test_a_teacher_that_follows_the_weights_may_change() -> None:
    model, teacher, leaves = nn.Linear(3, 2), nn.Linear(3, 2), OwnLeaves()
    for _ in range(3):
        loss = (model(torch.ones(3)) - teacher(torch.ones(3))).sum()
        assert leaves.look(loss, model.parameters()) == ""
        loss.backward()
        with torch.no_grad():
            for parameter in (*model.parameters(), *teacher.parameters()):
                parameter.mul_(0.9)
