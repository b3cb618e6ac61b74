"""Emulated links."""

from __future__ import annotations

import pytest

from paceline.machines.link import Link, link_from_env, parse_link


def test_bandwidth_and_delay_are_read_in_the_usual_units() -> None:
    assert parse_link("100mbit,30ms") == Link(1e8, 0.03)
    assert parse_link(" 1.5 GBIT , 0ms") == Link(1.5e9, 0.0)
    assert parse_link("64kbit,5ms").describe() == "0.064 Mbit/s, 5 ms"


@pytest.mark.parametrize("text", ["", "fast", "100mbit", "100,30", "0mbit,1ms", "1mbit,-1ms", "1..2mbit,1ms"])
def test_what_is_no_network_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="network"):
        parse_link(text)


def test_a_worker_alone_has_no_network() -> None:
    assert Link(1e6, 1.0).seconds(10**9, workers=1) == 0.0


def test_two_workers_send_everything_once_and_more_of_them_nearly_twice() -> None:
    link = Link(8e6, 0.0)
    assert link.seconds(1_000_000, workers=2) == pytest.approx(1.0)
    assert link.seconds(1_000_000, workers=1000) == pytest.approx(2.0, rel=0.01)


def test_nothing_is_emulated_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_NETWORK", raising=False)
    assert link_from_env() is None
    monkeypatch.setenv("PACELINE_NETWORK", "10mbit,1ms")
    assert link_from_env() == Link(1e7, 0.001)
