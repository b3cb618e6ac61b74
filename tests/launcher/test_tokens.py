"""A run's token: made, kept, read again, and never shown among options."""

from pathlib import Path

import pytest

from paceline.launcher.tokens import invitation, own_token, their_token
from paceline.roster.wire import written


def test_a_token_is_made_kept_in_a_private_file_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    file = tmp_path / "token"
    made = own_token(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert own_token(file) == their_token(file) == made
    assert len(own_token(None)) >= 24
    assert own_token(None) != own_token(None)
    monkeypatch.setenv("PACELINE_TOKEN", "from-the-environment")
    assert own_token(None) == their_token(None) == "from-the-environment"
    assert own_token(file) == made, "a file that is named counts before the variable"


@pytest.mark.parametrize("token", ["", "short", "with a space in it", "ü" * 12, "x" * 2000, "new\nline12345"])
def test_a_token_that_is_no_token_is_refused(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", token)
    with pytest.raises(ValueError, match="PACELINE_TOKEN: a token is 8 to 1024 plain characters"):
        own_token(None)


def test_joining_without_a_token_says_where_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    with pytest.raises(ValueError, match="set PACELINE_TOKEN, or give --token-file"):
        their_token(None)
    with pytest.raises(ValueError, match="cannot be read from"):
        their_token(tmp_path / "none")


def test_the_invitation_keeps_the_token_out_of_the_options_and_says_who_can_join() -> None:
    line = invitation("10.0.0.7:29400", "s3cret-token", ["train.py", "--lr", "0.1", "a b"], loopback=False)
    assert line == (
        "to join from another machine: PACELINE_TOKEN=s3cret-token "
        "paceline run --join 10.0.0.7:29400 train.py --lr 0.1 'a b'"
    )
    assert "to join from this computer (--host" in invitation("127.0.0.1:1", "s3cret-token", ["t.py"], loopback=True)
    assert written("::1", 80) == "[::1]:80"
