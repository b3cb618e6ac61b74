"""What workers print: prefixes, unfinished lines, and last words held back."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from paceline.launcher.output import HOLD_S, PARTIAL_S, OutputStream, headline

TRACEBACK = ["Traceback (most recent call last):", '  File "a.py", line 3, in f', "ValueError: no"]


def listen(rank: int, *, holds: bool = True) -> tuple[OutputStream, list[str]]:
    said: list[str] = []
    return OutputStream(rank, said.append, holds=holds), said


def test_worker_0_speaks_as_it_is_and_others_carry_their_rank() -> None:
    for rank, wanted in [(0, "a\nb\n"), (2, "[2] a\n[2] b\n")]:
        output, said = listen(rank)
        output.feed(b"a\nb\n", 0.0)
        assert "".join(said) == wanted


@given(st.text(alphabet="ab\n é", max_size=60), st.lists(st.integers(0, 80), max_size=5))
def test_lines_come_out_whole_however_the_bytes_are_cut(text: str, cuts: list[int]) -> None:
    data, (output, said) = text.encode(), listen(1)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, stop in pairwise(edges):
        output.feed(data[start:stop], 0.0)
    output.close(0.0)
    lines = text.removesuffix("\n").split("\n") if text else []
    assert "".join(said) == "".join(f"[1] {line}\n" for line in lines)


def test_an_unfinished_line_of_worker_0_is_shown_after_a_moment_and_goes_on_in_place() -> None:
    output, said = listen(0)
    output.feed(b"50 %\r", 0.0)
    output.tick(PARTIAL_S / 2, failing=False)
    assert said == []
    output.tick(PARTIAL_S * 2, failing=False)
    output.feed(b"100 %\n", 1.0)
    assert "".join(said) == "50 %\r100 %\n"


def test_of_another_workers_progress_bar_only_the_end_is_shown() -> None:
    output, said = listen(3)
    output.feed(b"10 %\r50 %\r100 %\n", 0.0)
    assert said == ["[3] 100 %\n"]


def test_last_words_are_held_and_shown_only_when_the_worker_lives_on() -> None:
    output, said = listen(1)
    output.feed("\n".join(["before", *TRACEBACK, ""]).encode(), 10.0)
    output.tick(10.0 + HOLD_S / 2, failing=False)
    assert said == ["[1] before\n"]
    assert (output.held, output.held_since) == (TRACEBACK, 10.0)
    output.tick(10.0 + HOLD_S * 2, failing=False)
    assert said[1:] == [f"[1] {line}\n" for line in TRACEBACK]
    assert (output.held, output.shown) == ([], TRACEBACK)


def test_the_unfinished_beginning_of_last_words_is_not_shown_as_a_progress_bar_is() -> None:
    output, said = listen(0)
    output.feed(b"paceline: worker 2 was", 0.0)
    output.tick(PARTIAL_S * 2, failing=False)
    output.feed(b" lost\n", 1.0)
    assert (said, output.held) == ([], ["paceline: worker 2 was lost"])
    output, said = listen(0, holds=False)
    output.feed(b"paceline: ", 0.0)
    output.tick(PARTIAL_S * 2, failing=False)
    assert said == ["paceline: "], "on stdout they are words like any other"


def test_while_the_fleet_fails_last_words_stay_held() -> None:
    output, said = listen(1)
    output.feed(b"paceline: worker 2 was lost\n", 0.0)
    output.tick(100.0, failing=True)
    assert said == []


def test_the_engines_own_prefix_is_taken_off_and_stdout_is_never_held() -> None:
    output, _ = listen(1)
    output.feed(b"[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: no\n", 0.0)
    assert output.held == ["Traceback (most recent call last):", "ValueError: no"]
    output, said = listen(1, holds=False)
    output.feed(b"Traceback (most recent call last):\n", 0.0)
    assert said == ["[1] Traceback (most recent call last):\n"]


def test_the_headline_of_last_words_is_the_last_exceptions_line() -> None:
    chained = [*TRACEBACK, "", "During handling of the above exception, another exception occurred:", ""]
    chained += ["Traceback (most recent call last):", '  File "a.py", line 9', "KeyError: 'x'", "of two lines"]
    assert headline(TRACEBACK) == "ValueError: no"
    assert headline(chained) == "KeyError: 'x'"
    assert headline(["usage: a.py [-h]", "a.py: error: no such option"]) == "a.py: error: no such option"
    assert headline([]) == ""
