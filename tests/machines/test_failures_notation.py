"""Which worker fails in which round or at which step, and how that is written."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.machines.failures import (
    PARSERS,
    Event,
    Failures,
    Outages,
    Trouble,
    parse_events,
    parse_failures,
    seconds,
    split,
)


def troubles(failures: Failures, *, workers: int, rounds: int) -> list[list[Trouble]]:
    """Every worker's trouble, round by round."""
    return [[failures.at(worker=worker, round=number) for worker in range(workers)] for number in range(rounds)]


KINDS = st.sampled_from(["lost", "frozen", "restart"])


def test_no_failures_leave_everybody_well() -> None:
    failures = parse_failures("")
    assert failures.at(worker=3, round=9) == Trouble()
    assert failures.describe() == "none"


def test_a_lost_exchange_lets_the_worker_train_on() -> None:
    fates = troubles(parse_failures("lost:0.33", seed=1), workers=4, rounds=3000)
    away = np.array([[not fate.exchanges for fate in row] for row in fates])
    assert away.mean(axis=0) == pytest.approx(np.full(4, 0.33), abs=0.03)
    assert all(fate.trains and fate.returns_with is None for row in fates for fate in row)


def test_lost_exchanges_are_independent_of_each_other() -> None:
    away = np.array(
        [[not f.exchanges for f in row] for row in troubles(parse_failures("lost:0.5"), workers=2, rounds=4000)]
    )
    assert abs(np.corrcoef(away[:, 0], away[:, 1])[0, 1]) < 0.05
    assert abs(np.corrcoef(away[1:, 0], away[:-1, 0])[0, 1]) < 0.05


def test_a_frozen_worker_neither_trains_nor_exchanges_for_whole_bursts() -> None:
    fates = troubles(parse_failures("frozen:0.1x5", seed=4), workers=1, rounds=3000)
    away = "".join("x" if not row[0].trains else "." for row in fates)
    assert all(row[0].trains == row[0].exchanges for row in fates)
    bursts = [len(part) for part in away.strip("x").replace(".", " ").split()]
    assert bursts
    assert all(length % 5 == 0 for length in bursts)
    assert away.count("x") / len(away) == pytest.approx(5 / (5 + 9), abs=0.04)


@pytest.mark.parametrize(("text", "weights"), [("restart:0.05x20", "initial"), ("restart:0.05x20:stale", "stale")])
def test_a_restarted_worker_says_once_with_which_weights_it_returns(text: str, weights: str) -> None:
    fates = [row[0] for row in troubles(parse_failures(text, seed=2), workers=1, rounds=2000)]
    back = [number for number, fate in enumerate(fates) if fate.returns_with]
    assert len(back) > 20
    for number in back:
        assert fates[number] == Trouble(returns_with=weights)  # type: ignore[arg-type]
        assert not any(fate.trains or fate.exchanges for fate in fates[number - 20 : number])
    ends = [n for n in range(1, 2000) if fates[n].trains and not fates[n - 1].trains]
    assert ends == back


@given(KINDS, st.floats(0.01, 0.9), st.integers(1, 30), st.integers(0, 2**31), st.randoms())
def test_the_same_seed_gives_the_same_fate_in_whatever_order_it_is_asked(
    kind: str, probability: float, rounds: int, seed: int, random: Any
) -> None:
    text = f"{kind}:{probability!r}x{rounds}"
    places = [(worker, number) for worker in range(3) for number in range(40)]
    forwards = parse_failures(text, seed=seed)
    expected = {place: forwards.at(worker=place[0], round=place[1]) for place in places}
    random.shuffle(places)
    anew = parse_failures(text, seed=seed)
    assert {place: anew.at(worker=place[0], round=place[1]) for place in places} == expected


def test_seeds_workers_and_entries_have_fates_of_their_own() -> None:
    def pattern(text: str, seed: int, worker: int) -> list[bool]:
        failures = parse_failures(text, seed=seed)
        return [failures.at(worker=worker, round=number).exchanges for number in range(200)]

    one = pattern("lost:0.3", 0, 0)
    assert one != pattern("lost:0.3", 1, 0)
    assert one != pattern("lost:0.3", 0, 1)
    assert one != pattern("lost:0,lost:0.3", 0, 0)


def test_entries_add_up_and_initial_weights_outdo_stale_ones() -> None:
    failures = parse_failures("lost:0.5, restart:0.2x2, restart:0.2x3:stale", seed=3)
    for number in range(300):
        each = [entry.at(worker=0, round=number) for entry in failures.entries]
        fate = failures.at(worker=0, round=number)
        assert fate.trains == all(f.trains for f in each)
        assert fate.exchanges == all(f.exchanges for f in each)
        back = {f.returns_with for f in each}
        assert fate.returns_with == ("initial" if "initial" in back else "stale" if "stale" in back else None)


def test_a_result_can_name_its_failures() -> None:
    text = parse_failures("lost:0.33,frozen:0.1x5,restart:0.05x20:stale", seed=9).describe()
    assert text == (
        "exchange lost with p 0.33; worker frozen for 5 rounds with p 0.1; "
        "restart from stale weights after 20 rounds away, p 0.05; seed 9"
    )


def test_a_probability_of_zero_never_strikes() -> None:
    assert all(
        fate == Trouble() for row in troubles(parse_failures("restart:0x9"), workers=2, rounds=50) for fate in row
    )


def test_bursts_may_follow_each_other_without_a_round_between() -> None:
    outages = Outages(0.9, 2, (0,))
    starts = [n for n in range(200) if outages.out_since(0, n) == n]
    assert any(later - earlier == 2 for earlier, later in pairwise(starts))
    assert all(later - earlier >= 2 for earlier, later in pairwise(starts))


def test_another_kind_of_entry_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def describe(self) -> str:
            return "worker 1 gone"

        def at(self, *, worker: int, round: int) -> Trouble:
            return Trouble(trains=worker != 1)

    monkeypatch.setitem(PARSERS, "gone", lambda rest, key: Gone())
    failures = parse_failures("gone:1@30,lost:0.1")
    assert not failures.at(worker=1, round=0).trains
    assert failures.describe().startswith("worker 1 gone; exchange lost")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("broken:0.1", "'broken' is not known; there are frozen, lost, restart"),
        ("lost", "write its probability"),
        ("lost:", "write its probability"),
        ("lost:x3", "write its probability"),
        ("lost:much", "the probability is a number, not 'much'"),
        ("lost:1", "from 0 to below 1, not at 1"),
        ("lost:-0.1", "from 0 to below 1"),
        ("lost:nan", "from 0 to below 1"),
        ("lost:1e-12", "never strikes"),
        ("frozen:0.1x0", "a whole number from 1"),
        ("frozen:0.1x", "a whole number from 1"),
        ("frozen:0.1x2.5", "a whole number from 1"),
        ("frozen:0.1x5x5", "write its probability"),
        ("restart:0.1x5:new", "'initial' or 'stale' weights, not 'new'"),
        ("lost:0.1,,lost:0.2", "'' is not known"),
    ],
)
def test_what_cannot_be_understood_is_refused_with_the_entry(text: str, part: str) -> None:
    with pytest.raises(ValueError, match="failure .*" + part):
        parse_failures(text)


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
