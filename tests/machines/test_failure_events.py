"""Events at steps: how they are written, and how they are told from random failures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.machines.failures import Event, parse_events, parse_failures, seconds, split


def test_every_kind_of_event_is_read() -> None:
    text = "kill:2@30, freeze:1@50:5s, join@80, leave:3@60, kill:?@30:stay, freeze:?@0:250ms"
    assert parse_events(text) == (
        Event("freeze", 0, seconds=0.25, text="freeze:?@0:250ms"),
        Event("kill", 30, worker=2, text="kill:2@30"),
        Event("kill", 30, stays=True, text="kill:?@30:stay"),
        Event("freeze", 50, worker=1, seconds=5.0, text="freeze:1@50:5s"),
        Event("leave", 60, worker=3, text="leave:3@60"),
        Event("join", 80, text="join@80"),
    )


def test_no_text_is_no_events() -> None:
    assert parse_events("  ") == ()
    assert split(" ") == ("", "")


def test_random_failures_and_events_of_one_list_are_told_apart_by_the_at_sign() -> None:
    random, events = split("lost:0.33, kill:1@20,restart:0.1x5:stale , join@60")
    assert parse_failures(random).describe().startswith("exchange lost with p 0.33; restart from stale")
    assert [event.text for event in parse_events(events)] == ["kill:1@20", "join@60"]


def test_an_event_among_random_failures_says_who_plays_it() -> None:
    with pytest.raises(ValueError, match=r"failure 'kill:1@20': .*paceline run -n MIN:MAX --failures"):
        parse_failures("lost:0.1,kill:1@20")


@given(st.lists(st.integers(0, 99), max_size=8))
def test_events_come_by_step_and_keep_their_order_within_one(steps: list[int]) -> None:
    read = parse_events(",".join(f"kill:{place}@{step}" for place, step in enumerate(steps)))
    assert [(event.step, event.worker) for event in read] == sorted((step, place) for place, step in enumerate(steps))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("explode:1@3", "'explode' is not known; write kill:2@30"),
        ("@3", "'' is not known"),
        ("kill@3", "its number, or \\? for one at random, not ''; write it as kill:2@30"),
        ("kill:x@3", "its number, or \\? for one at random, not 'x'"),
        ("kill:-1@3", "not '-1'"),
        ("kill:1@", "a whole number from 0, not ''"),
        ("kill:1@soon", "a whole number from 0, not 'soon'"),
        ("kill:1@3:back", "'back' after the step is not known; write it as kill:2@30 or kill:2@30:stay"),
        ("freeze:1@3", "does not say how long; write it as freeze:1@50:5s"),
        ("freeze:1@3:5", "with its unit, such as 5s"),
        ("freeze:1@3:0s", "above 0"),
        ("leave:1@3:5s", "'5s' after the step"),
        ("join:4@3", "gets the next number by itself; write it as join@80"),
        ("join@80@90", "a whole number from 0, not '80@90'"),
        ("kill:1:2@3", "cannot be understood; write it as kill:2@30"),
    ],
)
def test_a_wrong_event_is_refused_with_what_to_write_instead(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=f"event '{text.replace('?', '.')}': .*{part}"):
        parse_events(text)


@pytest.mark.parametrize("text", ["", "5", "s", "-1s", "1e3s", "nan", "5 h", "٥s"])
def test_a_duration_needs_a_number_and_a_unit(text: str) -> None:
    with pytest.raises(ValueError, match="such as 5s, 500ms or 2m"):
        seconds(text)
