"""What a roster by itself says: where it is, how to join, who comes and goes."""

import pytest

from paceline.cli.host import welcome, words


def test_the_welcome_gives_both_ways_to_join() -> None:
    text = welcome("10.0.0.7:29400", "s3cret-token", minimum=2, maximum=8)
    first, launcher, other = text.splitlines()
    assert first == "paceline: roster at 10.0.0.7:29400 for 2 to 8 workers; Ctrl-C ends it"
    assert launcher.endswith("PACELINE_TOKEN=s3cret-token paceline run --join 10.0.0.7:29400 train.py")
    for part in ("PACELINE_ROSTER=10.0.0.7:29400", "PACELINE_TOKEN=s3cret-token", "PACELINE_WORKER=0"):
        assert part in other


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
