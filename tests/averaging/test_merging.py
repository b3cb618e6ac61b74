"""Updates and where they land, for a worker that hears its own update back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.averaging.weighted_average import Averaging, Outer, WeightedAverage
from paceline.research.elastic_average import ElasticAverage, Springs
from paceline.transport import Alone

numbers = st.floats(-1e3, 1e3, allow_nan=False).map(lambda value: np.float32(value).item())


def averages(at: float, outer: Outer | None = None) -> tuple[torch.nn.Parameter, WeightedAverage]:
    parameter = torch.nn.Parameter(torch.tensor([at]))
    return parameter, WeightedAverage(Averaging(overlap=True, outer=outer), [parameter], Alone())


@given(numbers, numbers, numbers)
def test_a_worker_that_has_not_moved_since_stands_exactly_at_the_new_start(
    start: float, at: float, mean: float
) -> None:
    parameter, merging = averages(start)
    parameter.data.fill_(at)
    merging.land([torch.tensor([mean])], merging.update())
    assert parameter.item() == (torch.tensor([start]) + torch.tensor([mean])).item()
    assert merging.update()[0].item() == 0.0


def test_what_was_done_since_stands_on_top_and_is_the_next_update() -> None:
    parameter, merging = averages(1.0)
    parameter.data.fill_(3.0)
    update = merging.update()
    parameter.data.fill_(3.5)
    merging.land([torch.tensor([4.0])], update)
    assert parameter.item() == 1.0 + 4.0 + 0.5
    assert merging.update()[0].item() == 0.5
    assert merging.rounds == 1


def test_an_outer_optimiser_moves_the_start_and_not_what_was_done_since() -> None:
    parameter, merging = averages(1.0, Outer(lr=0.5, momentum=0.0))
    parameter.data.fill_(3.0)
    update = merging.update()
    parameter.data.fill_(3.25)
    merging.land([torch.tensor([4.0])], update)
    assert parameter.item() == 1.0 + 0.5 * 4.0 + 0.25


FACTS_OF_TWO = np.array([[1.0, 6.0, 0.0, 0.0, 2.0, 1.0], [1.0, 2.0, 0.0, 0.0, 4.0, 1.0]])
"""Steps, samples, contraction, momentum, distance, present."""


class First(Alone):
    """The first of two workers."""

    size = 2


def merging_of_two(settings: Averaging | ElasticAverage) -> tuple[torch.nn.Parameter, WeightedAverage | Springs]:
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    merging = settings.merge([parameter], First())
    parameter.data.fill_(3.0)
    return parameter, merging


@pytest.mark.parametrize("settings", [Averaging(outer=Outer()), ElasticAverage()])
def test_a_part_may_be_worked_out_again_among_fewer_and_nothing_was_changed(
    settings: Averaging | ElasticAverage,
) -> None:
    parameter, merging = merging_of_two(settings)
    before = str(merging.state_dict())
    for _ in range(3):
        merging.part(FACTS_OF_TWO)
    assert parameter.item() == 3.0
    assert str(merging.state_dict()) == before
    merging.members_changed((0,))
    alone = merging.part(FACTS_OF_TWO[:1])[0].item()
    assert alone == pytest.approx(2.0 * (1.0 if isinstance(settings, Averaging) else settings.alpha_for(1)))


def test_an_average_weighs_by_samples_and_all_stand_at_its_end() -> None:
    parameter, merging = merging_of_two(Averaging())
    assert merging.part(FACTS_OF_TWO)[0].item() == 2.0 * 6 / 8
    total = torch.tensor([2.5])
    merging.take(FACTS_OF_TWO, [total], ())
    assert parameter.item() == 3.5
    assert total.item() == 2.5, "it may have to be handed to a worker that missed the round's end"


def test_springs_pull_the_worker_and_the_centre() -> None:
    parameter, merging = merging_of_two(ElasticAverage(alpha=0.25, weights="fixed"))
    assert isinstance(merging, Springs)
    assert merging.part(FACTS_OF_TWO)[0].item() == 0.5
    merging.take(FACTS_OF_TWO, [torch.tensor([1.5])], ())
    assert (parameter.item(), merging.centre[0].item()) == (2.5, 2.5)
    with merging.shown():
        assert parameter.item() == merging.centre[0].item()


def test_a_newcomer_begins_at_the_centre_with_a_peers_memory() -> None:
    _, giver = merging_of_two(ElasticAverage())
    giver.take(FACTS_OF_TWO, [torch.tensor([1.0])], ())
    giver.members_changed((0, None))
    with giver.shown():
        state = giver.state_dict()
        parameter = torch.nn.Parameter(giver._parameters[0].detach().clone())
    newcomer = ElasticAverage().merge([parameter], First())
    newcomer.load_state_dict(state)
    assert isinstance(giver, Springs)
    assert isinstance(newcomer, Springs)
    assert newcomer.centre[0].item() == giver.centre[0].item()
    assert str(newcomer.state_dict()) == str(state)
