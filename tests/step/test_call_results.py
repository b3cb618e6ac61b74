"""Results of calls between loops: given again to a script that makes its loops again, or refused."""

from __future__ import annotations

import pytest
import torch

from paceline.step.script_loops import MOST, CallResults


def test_results_are_found_again_by_call_and_number_and_are_copies() -> None:
    results = CallResults()
    given = {"correct": 3.0, "table": torch.ones(2)}
    results.add("evaluate", given)
    results.add("any", False)
    given["correct"] = 0.0
    (found,) = results.find("evaluate", 0)
    assert (found["correct"], found["table"].tolist()) == (3.0, [1.0, 1.0])
    assert results.find("any", 1) == [False]
    assert results.find("any", len(results)) == []


def test_another_call_in_the_place_of_a_remembered_one_is_refused() -> None:
    results = CallResults([["evaluate", {"count": 1}]])
    with pytest.raises(ValueError, match=r"fleet\.any between loops .* fleet\.evaluate was called there before"):
        results.find("any", 0)


def test_a_result_too_large_to_be_kept_is_refused_when_it_is_asked_for() -> None:
    results = CallResults()
    results.add("evaluate", {"table": torch.zeros(MOST + 1)})
    with pytest.raises(ValueError, match="too large to be remembered"):
        results.find("evaluate", 0)


def test_results_survive_a_checkpoint_and_the_way_to_a_worker_that_joins() -> None:
    results = CallResults([["evaluate", {"count": 2, "table": torch.eye(2)}], ["any", True]])
    for again in (CallResults(results.to_list()), CallResults.from_json(results.to_json())):
        assert len(again) == 2
        assert again.find("evaluate", 0)[0]["table"].tolist() == [[1.0, 0.0], [0.0, 1.0]]
        assert again.find("any", 1) == [True]
    assert len(CallResults.from_json("")) == 0


def test_a_checkpoint_of_before_names_the_vote_as_it_was_called_then() -> None:
    assert CallResults([["agree", True]]).find("any", 0) == [True]
