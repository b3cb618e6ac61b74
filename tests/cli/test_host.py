"""What a roster by itself says: where it is, how to join, who comes and goes."""

from pathlib import Path

import pytest

from paceline.cli.host import welcome, words
from paceline.launcher.tokens import printable


def test_the_welcome_gives_both_ways_to_join() -> None:
    address = f"10.0.0.7:29400#{'ab' * 32}"
    text = welcome(address, "s3cret-token", minimum=2, maximum=8)
    first, launcher, other = text.splitlines()
    assert first == "paceline: roster at 10.0.0.7:29400 for 2 to 8 workers; Ctrl-C ends it"
    assert launcher.endswith("PACELINE_TOKEN=s3cret-token paceline run --join " + address + " train.py")
    for part in (f"PACELINE_ROSTER={address} ", "PACELINE_TOKEN=s3cret-token", "PACELINE_WORKER=0"):
        assert part in other


@pytest.mark.parametrize("kept", [{"file": Path("my token")}, {"file": None}])
def test_a_token_that_is_kept_in_a_file_or_in_the_variable_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, kept: dict[str, Path | None]
) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "s3cret-token")
    shown = printable("s3cret-token", **kept)
    assert "s3cret" not in welcome("10.0.0.7:29400", shown, minimum=2, maximum=8)
    assert shown == ("\"$(cat 'my token')\"" if kept["file"] else '"$PACELINE_TOKEN"')


def test_a_token_that_nobody_knows_yet_is_printed_as_a_shell_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    assert printable("new-token", file=None) == "new-token"
    assert printable("$1;2-token", file=None) == "'$1;2-token'"


@pytest.mark.parametrize("address", ["127.0.0.1:29400", "[::1]:29400", "localhost:29400"])
def test_on_loopback_it_says_that_only_this_computer_can_join(address: str) -> None:
    assert "only this computer can join: --host opens it" in welcome(address, "s3cret-token", minimum=1, maximum=2)


@pytest.mark.parametrize(
    ("kind", "said", "text"),
    [
        ("registered", {"id": 3, "name": "a/0"}, "worker 3 (a/0) has come"),
        ("left", {"id": 3, "name": "a/0", "text": "left (SIGTERM)"}, "worker 3 (a/0) left (SIGTERM)"),
        ("returned", {"id": 3, "name": "a/0"}, "worker 3 (a/0) is back"),
        ("refused", {"name": "", "from": "10.0.0.9:5", "text": "no token"}, "refused 10.0.0.9:5: no token"),
        ("waiting", {"text": "waiting for 1 more"}, "waiting for 1 more"),
        ("finished", {}, "the training has finished"),
        ("over", {"number": 2}, ""),
    ],
)
def test_who_comes_and_goes_is_said_in_words(kind: str, said: dict[str, object], text: str) -> None:
    assert words(kind, said) == text
