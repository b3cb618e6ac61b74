"""Which address a worker takes, on threads of one process that are on computers of their own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import switch as switches
import torch.distributed as dist
from switch import Switch

from paceline.transport import survey as addresses
from paceline.transport.group import Group

needs_switch = pytest.mark.skipif(bool(switches.missing()), reason=switches.missing())


class Calm:
    """A watch over a group that nothing happens to."""

    def check(self) -> None: ...

    def check_group(self, group: Group) -> None: ...


def find(switch: Switch, meeting: dict[str, str]) -> list[Any]:
    """What each computer's worker finds: its address, or the error's text. ``meeting``: where the fleet meets, as seen
    from each."""
    store = dist.HashStore()
    facts = {rank: {"host": name, "place": name, "device": "cpu"} for rank, name in enumerate(meeting)}

    def work(rank: int, name: str) -> Any:
        group: Any = Group(rank, len(meeting), store=store)
        watch: Any = Calm()
        with switch.inside(name):
            try:
                own = addresses.own_addresses(meeting[name], 9)
                return addresses.find_address(group, own, facts=facts, watch=watch)
            except ConnectionError as error:
                return str(error)

    with ThreadPoolExecutor(len(meeting)) as pool:
        return list(pool.map(work, range(len(meeting)), meeting))


@needs_switch
@pytest.mark.slow
def test_a_fleet_over_two_networks_takes_the_one_that_joins_all() -> None:
    """They meet over a network on which they do not reach each other; the one beside the roster over loopback."""
    with Switch("abc", networks={"meet0": "abc", "eth0": "abc", "spare0": "bc"}) as switch:
        switch.dead.add("meet0")
        meets = switch.address("a", "meet0")
        assert find(switch, {"a": "127.0.0.1", "b": meets, "c": meets}) == [
            switch.address(one, "eth0") for one in "abc"
        ]
        switch.dead.clear()
        found = find(switch, {"a": "127.0.0.1", "b": meets, "c": meets})
        assert found == [switch.address(one, "meet0") for one in "abc"], "the way to the meeting is preferred"


@needs_switch
@pytest.mark.slow
def test_two_who_do_not_reach_each_other_are_named_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "PATIENCE_S", 0.5)
    with Switch("abc") as switch:
        switch.between["a", "c"].cut = True
        found = find(switch, dict.fromkeys("abc", switch.address("b")))
        assert len(set(found)) == 1
        told = f"worker 0 (a, cpu) does not reach worker 2 (c, cpu) at {switch.address('c')}"
        assert found[0] == f"{told}: a firewall, or no way between them"


def test_no_address_that_everybody_reaches_is_told() -> None:
    said = [{"addresses": ["x", "y"]}, {"addresses": ["u"]}, {"addresses": ["v"]}]
    found = [{"1": ["u"], "2": ["v"]}, {"0": ["x"], "2": ["v"]}, {"0": ["y"], "1": ["u"]}]
    text = addresses.unreached(said, found, ["worker 0", "worker 1", "worker 2"])
    assert text == "worker 0 has no address that everybody reaches: worker 1 at x; worker 2 at y"


def test_on_one_computer_nothing_is_tried() -> None:
    group: Any = None
    watch: Any = None
    facts = {0: {"place": "here"}, 3: {"place": "here"}}
    assert addresses.find_address(group, ["127.0.0.1", "10.0.0.1"], facts=facts, watch=watch) == "127.0.0.1"


def test_what_served_before_comes_first_as_long_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(addresses, "interfaces", lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.1", "eth1": "10.1.0.1"})
    assert addresses.own_addresses("127.0.0.1", 9) == ["127.0.0.1", "10.0.0.1", "10.1.0.1"]
    assert addresses.own_addresses("127.0.0.1", 9, first="10.1.0.1") == ["10.1.0.1", "127.0.0.1", "10.0.0.1"]
    assert addresses.own_addresses("127.0.0.1", 9, first="10.9.0.1") == ["127.0.0.1", "10.0.0.1", "10.1.0.1"]


def test_the_named_interface_leaves_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert addresses.own_addresses("198.51.100.1", 9) == ["127.0.0.1"]
