"""The fields of a step's record, by kind: one declaration for the reader, the arrays and the table."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from paceline.observe.analysis.stretches import FIGURES
from paceline.observe.exports import COLUMNS, LEFT_OUT
from paceline.observe.log.sanitise import NAMES, PER_STEP, PER_WORKER, SANITISERS, sanitisers
from paceline.records import StepRecord


@dataclass(frozen=True)
class MoreFacts(StepRecord):
    """A record with three new facts, and nothing else edited."""

    loading_s: tuple[float, ...] = ()
    retries: tuple[int, ...] = ()
    temperature: float | None = None


def test_every_field_is_of_one_kind() -> None:
    told = [*NAMES, *PER_WORKER, *PER_STEP, "sums", "ranges"]
    assert sorted(told) == sorted(field.name for field in fields(StepRecord))


def test_a_new_fact_is_sanitised_by_its_name_and_type() -> None:
    new = {name: how for name, how in sanitisers(MoreFacts).items() if name not in SANITISERS}
    assert new.keys() == {"loading_s", "retries", "temperature"}
    first, second = new["loading_s"]([0.5, -1.0])
    assert first == 0.5
    assert math.isnan(second)
    assert new["retries"]([2.0, 0]) == (2, 0)
    assert new["temperature"](None) is new["temperature"](math.inf) is None


def test_the_table_has_every_fact_but_those_left_out() -> None:
    assert {*PER_WORKER, *PER_STEP} == {*COLUMNS, *LEFT_OUT} - {"step", "epoch", "generation", "t", "worker", "machine"}


def test_what_becomes_an_array_is_a_field_of_the_record() -> None:
    assert {*FIGURES} <= {*PER_WORKER, *PER_STEP}
