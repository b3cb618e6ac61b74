"""The plain data that all parts exchange: to JSON and back, and a history that keeps the last."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.records import History, Plan, StepRecord
from quick import examples

seconds = st.floats(0, 1e6, allow_nan=False)


@st.composite
def records(draw: st.DrawFn) -> StepRecord:
    workers = draw(st.integers(1, 4))
    counts = st.tuples(*[st.integers(0, 10**9)] * workers)
    times = st.tuples(*[seconds] * workers)
    ranges = st.tuples(
        *[st.lists(st.tuples(st.integers(0, 99), st.integers(100, 200)), max_size=2).map(tuple)] * workers
    )
    return StepRecord(
        step=draw(st.integers(0, 10**9)),
        epoch=draw(st.integers(0, 100)),
        generation=draw(st.integers(0, 9)),
        workers=tuple(range(workers)),
        planned=draw(counts),
        samples=draw(counts),
        seconds=draw(times),
        micro_batches=draw(counts),
        forecast_s=draw(st.none() | times),
        deadline_s=draw(st.none() | seconds),
        loss=draw(st.none() | seconds),
        applied=draw(st.booleans()),
        sums=draw(st.dictionaries(st.text(max_size=5), seconds, max_size=3)),
        ranges=draw(ranges),
    )


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow])
@given(record=records())
def test_a_record_survives_the_log_exactly(record: StepRecord) -> None:
    assert StepRecord.from_json(json.loads(json.dumps(record.to_json()))) == record


@given(samples=st.lists(st.integers(0, 10**6), min_size=1, max_size=5).map(tuple), deadline=st.none() | seconds)
def test_a_plan_survives_the_wire_exactly(samples: tuple[int, ...], deadline: float | None) -> None:
    plan = Plan(generation=1, step=2, samples=samples, deadline_s=deadline)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan.total == sum(samples)


def test_keys_of_a_newer_version_are_ignored() -> None:
    assert Plan.from_json({"generation": 0, "step": 1, "samples": [2], "mood": "good"}) == Plan(0, 1, (2,))


def test_records_cannot_be_changed() -> None:
    plan: Any = Plan(0, 1, (2,))
    with pytest.raises(FrozenInstanceError):
        plan.step = 3


def test_a_history_keeps_the_last_records() -> None:
    history = History(keep=3)
    assert history.last is None
    for step in range(5):
        history.append(
            StepRecord(step=step, epoch=0, generation=0, workers=(0,), planned=(1,), samples=(1,), seconds=(0.1,))
        )
    assert len(history) == 3
    assert [record.step for record in history] == [2, 3, 4]
    assert (history[0].step, history.last.step) == (2, 4)
