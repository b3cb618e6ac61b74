"""Updates and where they land, for a worker that hears its own update back."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.combine.averaging_settings import Averaging
from paceline.combine.merging import Averages
from paceline.combine.outer import Outer
from paceline.transport import Alone

numbers = st.floats(-1e3, 1e3, allow_nan=False).map(lambda value: np.float32(value).item())


def averages(at: float, outer: Outer | None = None) -> tuple[torch.nn.Parameter, Averages]:
    parameter = torch.nn.Parameter(torch.tensor([at]))
    return parameter, Averages(Averaging(overlap=True, outer=outer), [parameter], Alone())


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
