"""The round's small facts: what each worker writes is read by all, whatever the others write."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.gradients.header import FIELDS, SUMS, Header, Layout
from paceline.records import Plan

facts = st.floats(allow_nan=False, allow_infinity=False, width=64)


def summed(headers: list[Header]) -> Header:
    """What every worker holds after the round."""
    layout = Layout(len(headers), len(headers[0].used), len(headers[0].counters))
    result = Header(layout)
    result.vector[:] = np.sum([header.vector for header in headers], axis=0)
    return result


@given(data=st.data(), workers=st.integers(1, 4), parameters=st.integers(0, 5), counters=st.integers(0, 3))
def test_every_workers_facts_arrive_unchanged(
    data: st.DataObject, workers: int, parameters: int, counters: int
) -> None:
    layout = Layout(workers, parameters, counters)
    table = data.draw(st.lists(st.tuples(*[facts] * len(FIELDS)), min_size=workers, max_size=workers))
    used = data.draw(st.lists(st.tuples(*[st.booleans()] * parameters), min_size=workers, max_size=workers))
    headers = []
    for rank in range(workers):
        header = Header(layout)
        header.write(rank, **dict(zip(FIELDS, table[rank], strict=True)))
        header.used[:] = used[rank]
        header.counters[:] = rank
        headers.append(header)
    result = summed(headers)
    for number, name in enumerate(FIELDS):
        assert result.column(name).tolist() == [row[number] for row in table]
    assert [count > 0 for count in result.used] == [any(column) for column in zip(*used, strict=True)]
    assert result.counters.tolist() == [sum(range(workers))] * counters


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    workers = draw(st.integers(1, 4))
    maybe = st.just(math.nan) | st.floats(0, 1e6)
    return Plan(
        generation=draw(st.integers(0, 2**40)),
        step=draw(st.integers(0, 2**50)),
        samples=draw(st.tuples(*[st.integers(0, 2**50)] * workers)),
        deadline_s=draw(st.none() | st.floats(0, 1e6)),
        least_count=draw(st.floats(0, 1)),
        forecast_s=draw(st.none() | st.tuples(*[maybe] * workers).filter(lambda f: not all(map(math.isnan, f)))),
    )


@given(plan=plans())
def test_a_plan_written_by_the_leader_is_read_by_all(plan: Plan) -> None:
    layout = Layout(len(plan.samples), 3, 0)
    headers = [Header(layout) for _ in plan.samples]
    headers[0].write_plan(plan)
    read = summed(headers).read_plan()
    assert read is not None
    assert repr(read) == repr(plan)  # NaN equals itself here


def test_without_a_plan_there_is_none() -> None:
    assert Header(Layout(2, 1, 0)).read_plan() is None


@given(values=st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=4))
def test_a_figure_is_the_sum_over_those_who_added_it_and_zero_is_a_figure(values: list[Any]) -> None:
    headers = [Header(Layout(len(values), 0, 0)) for _ in values]
    for header, value in zip(headers, values, strict=True):
        if value is not None:
            header.add(5, value)
    added = [value for value in values if value is not None]
    assert summed(headers).sums() == ({5: pytest.approx(sum(added), abs=1e-6)} if added else {})


def test_the_last_slot_can_be_used_and_the_next_is_refused() -> None:
    header = Header(Layout(1, 0, 0))
    header.add(SUMS - 1, 0.0)
    assert header.sums() == {SUMS - 1: 0.0}
    with pytest.raises(ValueError, match=f"{SUMS} different figures"):
        header.add(SUMS, 1.0)


def test_the_wire_shares_the_headers_memory_on_the_cpu() -> None:
    header = Header(Layout(2, 0, 0))
    header.tensor().add_(1.0)
    assert header.column("loss").tolist() == [1.0, 1.0]


def test_totals_are_those_of_the_last_round_and_of_what_was_written_since() -> None:
    header = Header(Layout(workers=2, parameters=1, counters=0))
    header.write(0, weight=3.0, loss=math.nan)
    assert header.total("weight") == 3.0
    assert math.isnan(header.total("loss"))
    header.tensor().mul_(2)
    assert header.total("weight") == 6.0
    header.write(1, weight=1.0)
    assert (header.total("weight"), header.total("samples")) == (7.0, 0.0)
