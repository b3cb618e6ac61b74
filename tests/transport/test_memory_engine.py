"""The engine, the store and the connector in memory: as Gloo and torch's store where that matters."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import memory_engine
import pytest
import torch
from memory_connector import MemoryConnector
from memory_engine import MemoryEngine, MemoryNetwork
from memory_store import MemoryPrefix, MemoryServer, MemoryStore, open_memory_store

from clocks import give_clock
from paceline import concurrency
from paceline.errors import FLEET_FAILED
from paceline.roster import Generation
from paceline.transport import group as groups
from paceline.transport.engines import contract, gloo
from paceline.transport.engines.contract import Check, EngineWork
from paceline.transport.engines.gloo import GlooMessage
from paceline.transport.group import Group, Watched

AT = ("store", 1)


def no_look() -> None:
    """Wait for as long as it takes."""


def over() -> None:
    raise RuntimeError("it is over")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_engine, "CHECK_S", 0.02)


def engines(size: int, network: MemoryNetwork | None = None) -> list[MemoryEngine]:
    network = network or MemoryNetwork()
    return [MemoryEngine(network, "group", rank, size, process=f"process {rank}") for rank in range(size)]


def test_of_a_killed_workers_peers_those_beside_it_fail_and_the_others_wait() -> None:
    four = engines(4)
    tensors = [torch.ones(2) for _ in four]
    works = [engine.sum(tensor) for engine, tensor in zip(four[1:], tensors[1:], strict=True)]
    four[0].network.kill("process 0")
    for beside in (works[0], works[2]):
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            beside.wait(no_look)
    with pytest.raises(RuntimeError, match="it is over"):
        works[1].wait(over)
    assert [bool(tensor.isnan().all()) for tensor in tensors] == [False, True, False, True]
    four[2].abort()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        works[1].wait(no_look)


def test_one_worker_may_have_a_sum_that_another_never_gets() -> None:
    three = engines(3)
    works = [engine.sum(torch.ones(1)) for engine in three]
    works[0].wait(no_look)
    three[1].abort()
    with pytest.raises(RuntimeError):
        works[2].wait(no_look)


def test_a_buffer_that_is_written_into_too_early_is_seen_and_a_send_that_nobody_holds_never_comes() -> None:
    first, second = engines(2)
    data, got = torch.ones(2), torch.zeros(2)
    sent = first.send(data, 1, 7)
    coming = second.receive(got, 0, 7)
    data.fill_(5.0)
    coming.wait(no_look)
    sent.wait(no_look)
    assert got.tolist() == [5.0, 5.0]
    first.send(data, 1, 8)
    with pytest.raises(RuntimeError, match="it is over"):
        second.receive(got, 0, 8).wait(over)


def test_a_sum_that_was_given_up_before_its_end_is_written_all_the_same() -> None:
    first, second = engines(2)
    mine = torch.ones(1)
    assert not first.sum(mine).abandon()
    second.sum(torch.ones(1)).wait(no_look)
    assert mine.tolist() == [2.0]


def test_unlike_operations_are_a_fault() -> None:
    first, second = engines(2)
    first.sum(torch.ones(3))
    with pytest.raises(RuntimeError, match="comes with sum, 4"):
        second.sum(torch.ones(4))
    assert len(first.network.faults) == 1


def test_broken_pairs_and_groups_of_other_keys_are_apart() -> None:
    network = MemoryNetwork()
    three, others = engines(3, network), [MemoryEngine(network, "other", rank, 2) for rank in range(2)]
    network.break_pair("group", 0, 1)
    kept = three[2].send(torch.ones(1), 0, 1)
    three[0].receive(torch.zeros(1), 2, 1).wait(no_look)
    assert kept.abandon()
    with pytest.raises(RuntimeError):
        three[0].receive(torch.zeros(1), 1, 1).wait(no_look)
    works = [engine.sum(torch.ones(1)) for engine in others]
    for work in works:
        work.wait(no_look)


def test_members_that_do_not_come_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_engine, "FORMING_S", 0.05)
    with pytest.raises(RuntimeError, match="timed out"):
        MemoryEngine(MemoryNetwork(), "group", 0, 2).join(no_look)
    with pytest.raises(RuntimeError, match="it is over"):
        MemoryEngine(MemoryNetwork(), "group", 0, 2).join(over)


# -- the store -----------------------------------------------------------------------------------------------------


def stores(*, timeout_s: float = 0.05) -> tuple[MemoryServer, MemoryStore]:
    network = MemoryNetwork()
    server = MemoryServer(network, AT, timeout_s=timeout_s)
    return server, open_memory_store(network, AT)


def test_the_store_answers_as_torchs_does() -> None:
    _, store = stores()
    real = torch.distributed.HashStore()
    for one in (store, MemoryPrefix("a", store), real):
        one.set("x", "1")
        assert one.get("x") == b"1"
        assert (one.add("n", 2), one.add("n", 3), one.get("n")) == (2, 5, b"5")
        assert (one.check(["x"]), one.check(["x", "y"])) == (True, False)
        assert one.compare_set("free", "", "mine") == b"mine"
        assert one.compare_set("free", "", "other") == b"mine"
        assert one.compare_set("free", "mine", "other") == b"other"
        assert one.compare_set("none", "some", "other") == b"some"
        assert one.delete_key("x")
        assert not one.check(["x"])
    assert sorted(store.list_keys()) == ["a/free", "a/n", "free", "n"]
    assert sorted(MemoryPrefix("a", store).list_keys()) == ["free", "n"]
    with pytest.raises(RuntimeError, match="timeout"):
        store.get("x")


def test_a_value_that_is_waited_for_comes() -> None:
    _, store = stores(timeout_s=20)
    other = store.clone()
    threading.Timer(0.05, other.set, ("late", b"value")).start()
    assert store.get("late") == b"value"


def test_broken_connections_stay_broken_and_new_ones_go_to_a_server_that_came_back() -> None:
    server, store = stores()
    other = store.clone()
    store.cut()
    with pytest.raises(RuntimeError, match="reset by peer"):
        store.set("x", "1")
    other.set("x", "1")
    server.stop()
    with pytest.raises(RuntimeError, match="reset by peer"):
        other.get("x")
    with pytest.raises(RuntimeError, match="refused"):
        open_memory_store(server.network, AT, timeout_s=0.01)
    server.start()
    with pytest.raises(RuntimeError, match="reset by peer"):
        other.check(["x"])
    assert not open_memory_store(server.network, AT).check(["x"])


def test_a_scheduler_is_asked_before_each_operation() -> None:
    points: list[int] = []
    network = MemoryNetwork(point=lambda: points.append(1))
    MemoryServer(network, AT)
    open_memory_store(network, AT).set("x", "")
    MemoryEngine(network, "group", 0, 1).sum(torch.ones(1)).wait(no_look)
    assert len(points) == 4


# -- the connector -------------------------------------------------------------------------------------------------


def generation(number: int) -> Generation:
    return Generation(number, (4, 6), (), (), (), {4: {}, 6: {}}, AT, True, 0)


def patient(group: Group) -> Any:
    return SimpleNamespace(
        check=no_look, check_group=lambda group: None, group=group, failed=lambda error, group: error
    )


def connectors(network: MemoryNetwork) -> dict[int, MemoryConnector]:
    make = partial(MemoryConnector, torch.device("cpu"), check=no_look, cpu_engine=False, network=network)
    return {worker: make(process=worker) for worker in (4, 6)}


def test_a_connector_forms_groups_that_gather_and_sum() -> None:
    network = MemoryNetwork()
    MemoryServer(network, AT)
    both = connectors(network)

    def work(worker: int) -> list[Any]:
        found = []
        for number in (1, 2):
            group = both[worker].open_store(generation(number), worker=worker)
            both[worker].connect(group, generation(number), watch=patient(group))
            said = group.gather("key", "label", worker, watch=patient(group))
            tensors = [torch.full((length,), float(worker)) for length in (3, 1 << 20)]
            for tensor in tensors:
                Watched(group.start_sum(tensor), patient(group), group=group).wait()
            found += [said, [float(tensor[0]) for tensor in tensors]]
            group.gather("key2", "label", worker, watch=patient(group))
            both[worker].break_off(group)
            assert group.close()
        return found

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, (4, 6))) == [[[4, 6], [10.0, 10.0]] * 2] * 2


def test_a_broken_connection_to_the_store_is_opened_anew_once_it_is_forgotten() -> None:
    network = MemoryNetwork()
    MemoryServer(network, AT)
    connector = connectors(network)[4]
    connector.open_store(generation(1), worker=4)
    connector.root.cut()
    with pytest.raises(RuntimeError, match="reset by peer"):
        connector.open_store(generation(2), worker=4).store.set("x", "")
    connector.forget_store()
    connector.open_store(generation(2), worker=4).store.set("x", "there")
    assert connector.ask("generation2/x", at=AT) == "there"
    assert connector.ask("nothing", at=AT) == ""


# -- threads that stay in the engine -------------------------------------------------------------------------------


class Endless(EngineWork):
    """A work whose end the engine forgot."""

    def __init__(self) -> None:
        self.freed = threading.Event()

    def wait(self, check: Check) -> None:
        self.freed.wait(20)

    def abandon(self) -> bool:
        return False


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The exit codes with which the process would have ended."""
    codes: list[int] = []
    happened = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        happened.set()

    monkeypatch.setattr(concurrency, "end_process", end)
    monkeypatch.setattr(groups, "LEAVE_S", 0.2)
    monkeypatch.setattr(groups, "SLICE_S", 0.02)
    return SimpleNamespace(codes=codes, happened=happened)


def waiting_in(group: Group, work: EngineWork) -> threading.Thread:
    thread = threading.Thread(target=Watched(work, patient(group), group=group).wait, daemon=True)
    thread.start()
    while not group.waits._waits:
        threading.Event().wait(0.001)
    return thread


def test_a_thread_that_stays_stuck_in_the_engine_ends_its_worker(
    ended: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    group, work = Group(0, 2), Endless()
    thread = waiting_in(group, work)
    connectors(MemoryNetwork())[4].break_off(group)
    assert ended.happened.wait(5)
    assert ended.codes == [FLEET_FAILED]
    assert "stuck in Gloo" in capsys.readouterr().err
    work.freed.set()
    thread.join(5)


def test_a_thread_that_leaves_in_time_does_not_and_nobody_watches_where_nobody_waits(ended: Any) -> None:
    group, work = Group(0, 2), Endless()
    thread = waiting_in(group, work)
    group.end_if_stuck()
    work.freed.set()
    thread.join(5)
    waiting_in(group, later := Endless())  # another wait is another matter
    assert not ended.happened.wait(0.5)
    later.freed.set()
    before = threading.active_count()
    Group(0, 2).end_if_stuck()
    assert threading.active_count() <= before


def test_a_wait_that_is_entered_after_the_group_was_broken_off_ends_at_once(ended: Any) -> None:
    group = Group(0, 2)
    connectors(MemoryNetwork())[4].break_off(group)
    with pytest.raises(RuntimeError, match="the group is over"):
        Watched(Endless(), patient(group), group=group).wait()
    assert not ended.codes


def test_a_start_that_stays_stuck_in_the_engine_ends_its_worker_too(ended: Any) -> None:
    group, work = Group(0, 2), Endless()

    def start(group: Group) -> EngineWork:
        work.wait(no_look)
        return work

    thread = threading.Thread(target=lambda: Watched.started(start, patient(group), group=group), daemon=True)
    thread.start()
    while not group.waits._waits:
        threading.Event().wait(0.001)
    connectors(MemoryNetwork())[4].break_off(group)
    assert ended.happened.wait(5)
    work.freed.set()
    thread.join(5)


def test_a_message_that_gloo_forgot_can_be_left() -> None:
    class Forgotten:
        freed = threading.Event()

        def wait(self, timeout: Any) -> None:
            self.freed.wait(20)

    group = Group(0, 2)
    message = GlooMessage(Forgotten()).leavable()
    waits = Watched(message, patient(group), group=group)
    threading.Timer(0.1, group.break_off).start()
    with pytest.raises(RuntimeError, match="the group is over"):
        waits.wait()
    Forgotten.freed.set()


def test_a_message_that_can_be_left_ends_and_fails_as_its_engine_says() -> None:
    class Work:
        def __init__(self, error: str = "") -> None:
            self.error = error

        def wait(self, timeout: Any) -> None:
            if self.error:
                raise RuntimeError(self.error)

    ends = GlooMessage(Work()).leavable()
    assert not ends.done
    ends.wait(no_look)
    assert ends.done
    with pytest.raises(RuntimeError, match="closed by peer"):
        GlooMessage(Work("closed by peer")).leavable().wait(no_look)


def test_a_group_that_is_broken_off_while_it_connects_fails_as_well() -> None:
    group, engine = Group(0, 2), MemoryEngine(MemoryNetwork(), "group", 0, 2)

    def make(rank: int, size: int) -> tuple[MemoryEngine, str]:
        group.break_off()
        return engine, "memory"

    group.connect(make)
    with pytest.raises(RuntimeError, match="closed by peer"):
        group.receive(torch.zeros(1), 1, 7).wait(no_look)
    with pytest.raises(RuntimeError, match="over"):
        group.check_open()


@pytest.mark.parametrize("case", ["hopeless", "whole", "nobody waits", "just begun", "broken off"])
def test_a_group_is_hopeless_where_a_thread_waits_for_long_though_a_connection_is_broken(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "LEAVE_S", 100.0)
    now = [1000.0]
    give_clock(monkeypatch, groups, SimpleNamespace(monotonic=lambda: now[0]))
    network = MemoryNetwork()
    group, engine = Group(0, 3), MemoryEngine(network, "group", 0, 3)
    group.connect(lambda rank, size: (engine, "memory"))
    work = Endless()
    thread = waiting_in(group, work) if case != "nobody waits" else threading.Thread()
    now[0] += 99.0 if case == "just begun" else 101.0
    if case != "whole":
        network.break_pair("group", 0, 2)
    if case == "broken off":
        group.break_off()
    assert group.hopeless is (case == "hopeless")
    work.freed.set()
    if thread.ident:
        thread.join(5)


def test_a_wedged_engine_is_such_a_case(ended: Any) -> None:
    network = MemoryNetwork()
    group, engine = Group(0, 2), MemoryEngine(network, "group", 0, 2)
    group.connect(lambda rank, size: (engine, "memory"))
    network.wedge(engine)
    waiting_in(group, engine.sum(torch.zeros(3)))
    group.break_off()
    group.end_if_stuck()
    assert ended.happened.wait(5)


# -- Gloo ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [b"", b"{", b"3", b"[[1]]"])
def test_where_an_engine_listens_may_be_lost_with_a_restarted_store(value: bytes) -> None:
    store = SimpleNamespace(get=lambda key: value)
    with pytest.raises(RuntimeError):
        gloo._doors_of(store, 1)


def test_looks_are_as_far_apart_everywhere() -> None:
    assert gloo.CHECK.total_seconds() == contract.CHECK_S
