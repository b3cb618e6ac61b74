"""Lines, proofs, silence and calls: the roster's small pure parts."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.roster import liveness
from paceline.roster.calls import Beat, Heard, Mismatch, Spot, mismatch, sentence, waited_for
from paceline.roster.liveness import (
    BUSY,
    CEILING_S,
    FINE,
    FLOOR_S,
    FROZEN,
    GONE,
    HOLDING_S,
    ProcessState,
    SilenceCheck,
    SilenceLimit,
    process_state_of,
)
from paceline.roster.wire import Garbled, Lines, decode, encode, parse_address, proof, proven


@given(st.lists(st.dictionaries(st.text(), st.integers() | st.text() | st.none())), st.integers(1, 50))
def test_messages_arrive_whole_however_their_bytes_are_cut(messages: list[dict[str, object]], piece: int) -> None:
    data = b"".join(encode(message) for message in messages)
    lines = Lines(10_000)
    got = [message for at in range(0, len(data), piece) for message in lines.feed(data[at : at + piece])]
    assert got == messages


@given(st.binary())
def test_garbage_is_refused_and_nothing_worse(data: bytes) -> None:
    with suppress(Garbled):
        assert isinstance(decode(data), dict)


def test_deep_nesting_is_garbage_too() -> None:
    with pytest.raises(Garbled):
        decode(b"[" * 60_000)


def test_a_line_without_end_is_given_up_at_its_bound() -> None:
    lines = Lines(100)
    for _ in range(10):
        lines.feed(b"x" * 10)
    with pytest.raises(Garbled, match="more than 100 bytes"):
        lines.feed(b"x" * 10)


def test_a_proof_serves_one_role_one_pair_of_challenges_one_certificate_and_one_token() -> None:
    mine = proof("token", "worker", "a", "b", "f")
    assert proven(mine, proof("token", "worker", "a", "b", "f"))
    others = [
        ("other", "worker", "a", "b", "f"),
        ("token", "roster", "a", "b", "f"),
        ("token", "worker", "b", "a", "f"),
        ("token", "worker", "a", "b", "g"),
    ]
    assert not any(proven(mine, proof(*other)) for other in others)
    assert not proven(None, mine)


@pytest.mark.parametrize("address", ["", "host", "host:", ":7070", "host:0", "host:70700", "host:port", "host:٣"])
def test_a_bad_address_is_explained(address: str) -> None:
    with pytest.raises(ValueError, match="write HOST:PORT"):
        parse_address(address)


@given(st.lists(st.floats(0, 100)))
def test_the_limit_of_silence_lies_between_its_floor_and_its_ceiling(gaps: list[float]) -> None:
    limit = SilenceLimit()
    for gap in gaps:
        limit.note(gap)
    assert FLOOR_S <= limit.limit_s <= CEILING_S


def test_the_limit_of_silence_grows_with_late_beats_and_forgets_them_in_time() -> None:
    limit = SilenceLimit()
    limit.note(1.2)
    assert limit.limit_s == pytest.approx(FLOOR_S + 4.0)
    for _ in range(300):
        limit.note(0.2)
    assert limit.limit_s == pytest.approx(FLOOR_S)


def test_a_freeze_does_not_raise_the_limit_of_silence_but_one_that_follows_at_once_does() -> None:
    limit = SilenceLimit()
    limit.note_return(2.0, now=100.0)  # silent from 98 to 100
    limit.note_return(2.0, now=100.0 + FLOOR_S + 2.0)
    assert limit.limit_s == pytest.approx(FLOOR_S)
    limit.note_return(2.0, now=102.5 + FLOOR_S + 2.0)  # it was heard for half a second
    assert limit.limit_s == pytest.approx(FLOOR_S + 4 * 1.8)


def judge(silence: SilenceCheck, silent_s: float, state: ProcessState) -> str:
    return silence.judge(silent_s, limit_s=1.2, state=state)


def test_a_process_that_is_gone_is_given_up_at_once() -> None:
    assert judge(SilenceCheck(ProcessState(ticks=7)), 0.5, ProcessState(gone=True)) == GONE


def test_a_stopped_process_is_given_up_at_its_limit() -> None:
    silence, stopped = SilenceCheck(ProcessState(ticks=7)), ProcessState(stopped=True, ticks=7)
    assert [judge(silence, after, stopped) for after in (0.5, 1.1, 1.25)] == [FINE, FINE, FROZEN]


def test_a_process_that_computes_is_waited_for_until_it_stops_computing() -> None:
    silence = SilenceCheck(ProcessState(ticks=0))
    verdicts = [judge(silence, 0.1 * tick, ProcessState(ticks=tick)) for tick in range(5, 60)]
    assert set(verdicts) == {FINE, BUSY}
    still = [judge(silence, 6 + 0.1 * tick, ProcessState(ticks=59)) for tick in range(30)]
    assert FROZEN in still


def test_even_a_process_that_computes_is_not_waited_for_for_ever() -> None:
    silence = SilenceCheck(ProcessState(ticks=0))
    verdicts = [judge(silence, 0.5 * tick, ProcessState(ticks=tick)) for tick in range(1, int(2 * HOLDING_S) + 10)]
    assert FROZEN in verdicts[-10:]
    assert FROZEN not in verdicts[:-10]


def test_where_nothing_is_known_of_a_process_the_limit_alone_decides() -> None:
    silence = SilenceCheck(ProcessState())
    assert [judge(silence, after, ProcessState()) for after in (0.5, 1.1, 1.8)] == [FINE, FINE, FROZEN]


def test_a_process_is_looked_at_on_its_own_computer_only() -> None:
    assert process_state_of(os.getpid(), "another computer") == liveness.UNKNOWN
    assert process_state_of(2**22 + 1, liveness.computer()).gone == bool(liveness.computer())


def waiting(call: int, label: str, *, begun: int = 5, beats: int = 2) -> Heard:
    heard = Heard()
    for _ in range(beats):
        heard.note(Beat(1, label, begun, {"calls": Spot(call, label, True)}), now=0.0)
    return heard


def working(call: int, doing: str, *, begun: int = 5) -> Heard:
    heard = Heard()
    heard.note(Beat(1, doing, begun, {"calls": Spot(call, "before", False)}), now=0.0)
    return heard


NAMES = {0: "worker 0 (cpu)", 1: "worker 1 (cpu)", 2: "worker 2 (cpu)"}


def test_unlike_calls_under_one_number_are_named() -> None:
    unlike = mismatch({0: waiting(7, "a round"), 1: waiting(7, "fleet.save()"), 2: waiting(7, "a round")})
    assert unlike is not None
    assert sentence(unlike.labels, NAMES).startswith(
        "workers 0 and 2 called a round, but worker 1 (cpu) called fleet.save(): "
        "every worker must make the same calls in the same order"
    )


def test_one_beat_is_not_enough_to_judge_by() -> None:
    assert mismatch({0: waiting(7, "a round"), 1: waiting(7, "fleet.save()", beats=1)}) is None


def test_workers_in_calls_of_other_numbers_are_only_slow() -> None:
    assert mismatch({0: waiting(7, "a round"), 1: waiting(6, "fleet.save()"), 2: working(6, "step 4")}) is None


def test_a_worker_that_went_past_a_call_is_named() -> None:
    unlike = mismatch({0: waiting(7, "fleet.save()"), 1: working(6, "step 5", begun=6), 2: working(6, "", begun=7)})
    assert unlike is not None
    text = sentence(unlike.labels, NAMES)
    assert text.startswith("worker 0 (cpu) called fleet.save(), but worker 1 (cpu) called step 5 without it")
    assert unlike.strangers({0: 3, 1: 1, 2: 1}) == [0]
    assert unlike.strangers({0: 1, 1: 3, 2: 4}) == [1, 2]
    assert not unlike.strangers({0: 1, 1: 3, 2: 1}), "the first ones differ themselves"


def test_those_who_came_later_are_strangers_where_the_first_ones_agree() -> None:
    unlike = Mismatch({}, {0: "a round", 1: "fleet.save()", 2: "a round", 3: "fleet.any()"})
    assert unlike.strangers({0: 2, 1: 4, 2: 2, 3: 5}) == [1, 3]
    assert unlike.strangers({0: 3, 1: 2, 2: 3, 3: 3}) == [0, 2, 3]
    assert not unlike.strangers({0: 2, 1: 2, 2: 2, 3: 5})


def test_whoever_waits_long_is_told_for_whom_at_growing_intervals() -> None:
    heard = {0: waiting(7, "step 41"), 1: working(6, "its own code after step 40"), 2: waiting(7, "step 41")}
    assert waited_for(0, heard) == ("step 41", "worker 1 (its own code after step 40)")
    told = []
    for second in range(200):
        if heard[0].reminder_is_due(float(second)):
            heard[0].reminded += 1
            told.append(second)
    assert told == [6, 16, 31, 91, 151]
