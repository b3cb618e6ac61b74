"""Sentences on where workers were, from a log, which may hold anything."""

from typing import Any

import pytest

from paceline.observe.words.lines import last_places, places_text

TWO = {"sites": [[[0, 1], [2]], [[3]]], "tree": True, "round_trip_s": 0.041, "bits_s": 8.2e7}


def test_sites_are_told_with_who_crosses_and_what_lies_between() -> None:
    said = "2 sites, 41 ms and 82 Mbit/s apart: workers 0 1 2 | 3; sums cross once, by workers 0 3"
    assert places_text(TWO) == said


def test_computers_of_one_site_are_told_one_by_one() -> None:
    said = {"sites": [[[0, 2], [1, 3]]], "tree": False, "round_trip_s": 0.0002, "bits_s": 9.4e9}
    assert places_text(said) == (
        "2 computers, under 1 ms and 9.4 Gbit/s apart: workers 0 2 | 1 3; sums go round them in this order"
    )


def test_the_last_membership_counts() -> None:
    others = [{"event": "generation", "places": TWO}, {"event": "note"}, {"event": "generation"}]
    assert last_places({"event": "run", "places": TWO}, others[:2]) == TWO
    assert last_places({"event": "run", "places": TWO}, others) is None, "those who are left are on one computer"


def test_large_fleets_are_cut_short() -> None:
    sites = [[[20 * site + worker for worker in range(20)]] for site in range(10)]
    text = places_text({"sites": sites, "tree": True})
    assert "and 2 more" in text
    assert "and 4 more" in text


@pytest.mark.parametrize("strange", [None, {}, {"sites": 3}, {"sites": [[[0, 1]]]}, {"sites": [[], [1]]}])
def test_one_computer_or_nonsense_is_nothing(strange: Any) -> None:
    assert places_text(strange) == ""


def test_a_figure_that_is_none_is_left_out() -> None:
    assert places_text({"sites": [[[0]], [[1]]], "round_trip_s": "x", "bits_s": None}).startswith("2 sites: workers")
