"""What is sent in a round of parameters, and room for the same."""

from __future__ import annotations

import torch

from paceline.averaging.parameter_round import ParameterRound
from paceline.averaging.period import Period
from paceline.gradients import Header
from paceline.gradients.fleet_sums import Flats
from paceline.gradients.header import Layout

LAYOUT = Layout(2, 0, 1)


def a_round(statistics: int) -> ParameterRound:
    period = Period(began=0.0, shares=(4, 4), windows=(4,), batches=(2,), member=0)
    header = Header(LAYOUT)
    header.write(1, samples=4)
    total = Flats([torch.zeros(2, 2), torch.zeros(3, dtype=torch.float64)])
    return ParameterRound(period, header=header, table=torch.ones(2, 8), statistics=torch.ones(statistics), total=total)


def test_statistics_are_sent_where_there_are_some() -> None:
    assert [len(a_round(statistics).wired()) for statistics in (0, 5)] == [2, 3]


def test_what_is_handed_over_is_read_from_the_room_made_for_it() -> None:
    one = a_round(5)
    other = one.emptied(LAYOUT)
    sent, room = (each.wired() + each.total.flats for each in (one, other))
    assert [(part.shape, part.dtype) for part in sent] == [(part.shape, part.dtype) for part in room]
    assert not any(part.any() for part in room[:3])
    for mine, theirs in zip(room, sent, strict=True):
        mine.copy_(theirs)
    assert other.header.column("samples").tolist() == [0, 4]
    assert other.facts.tolist() == one.facts.tolist()
    sent[0].fill_(9.0)
    assert other.facts.max() == 1.0, "whatever still writes into the one does not reach the other"
