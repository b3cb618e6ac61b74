"""How a training follows who is there, on one worker: a transport that says what it was told to say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import paceline
from lone import flat, join, linear, mse, numbers, sgd
from paceline.checkpoint import parts
from paceline.errors import Dropped, FleetError
from paceline.gradients.buckets import Bucket
from paceline.gradients.header import Header, Layout
from paceline.records import StepRecord
from paceline.roster import Generation, Gone
from paceline.step.members import Membership
from paceline.step.script_loops import Passes
from paceline.transport.elastic.changes import MembershipChange, change_to
from paceline.transport.fixed import Alone
from paceline.worker_exit import Leave


class FakeElastic(Alone):
    """An elastic transport without others: it notes what is asked of it, and the others say what this worker says."""

    name = "elastic"
    solitary = False
    elastic = True
    generation = 1

    def __init__(self, workers: tuple[int, ...], *, rank: int, outside: bool = False) -> None:
        super().__init__()
        self.workers, self.rank, self.size, self.outside = workers, rank, len(workers), outside
        self.did: list[str] = []
        self.reform = SimpleNamespace(must_change=False, may_change=False)
        self.lanes = SimpleNamespace(rounds=0)
        self.loop = SimpleNamespace(number=0, told=None, of_fleet=lambda: self.loop_of_fleet, begin=self._begin_loop)
        self.loop_of_fleet = 1
        self.listener: Any = None
        self.intact: Callable[[], bool] = lambda: False
        self.kept_for_later = False
        self.in_re_form: Callable[[], None] = lambda: None
        self.in_deliver: Callable[[], None] = lambda: None

    @property
    def id(self) -> int:
        return self.workers[self.rank]

    def _begin_loop(self, number: int, told: str) -> None:
        self.loop.number, self.loop.told = number, told

    def show(self, workers: tuple[int, ...], *, rank: int, generation: int) -> None:
        self.workers, self.rank, self.size, self.generation = workers, rank, len(workers), generation

    def gather(self, label: str, value: Any) -> list[Any]:
        return super().gather(label, value) * self.size

    def deliver_members_changed(self) -> None:
        self.did.append("deliver")
        self.in_deliver()

    def re_form(self) -> None:
        self.did.append("re-form")
        self.in_re_form()

    def take_over_later(self) -> bool:
        return self.kept_for_later

    def depart(self, *, agreed: bool) -> None:
        self.did.append("depart agreed" if agreed else "depart")

    def doing(self, what: str, *, begun: int | None = None) -> None:
        if what.startswith("waiting"):
            self.did.append(what)


class Recorder:
    """Keeps what it is told."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.events, self.went_on_in = folder, list[tuple[str, dict[str, Any]]](), list[Path]()

    def event(self, event: str, fields: Any) -> None:
        self.events.append((event, dict(fields)))

    def go_on_in(self, folder: Path) -> None:
        self.went_on_in.append(folder)


class Worker:
    """One worker in a loop of its script, and its membership."""

    def __init__(
        self, fleet: paceline.Fleet, transport: FakeElastic, folder: Path, *, loops: int, **settings: Any
    ) -> None:
        self.fleet, self.transport = fleet, transport
        self.model = fleet.model(linear())
        self.optimizer = sgd(self.model)
        fleet.track(optimizer=self.optimizer)
        for _ in range(loops):
            self.steps: Any = fleet.steps(
                numbers(48), **{"global_batch": 12, "micro_batch": 4, "shuffle": False} | settings
            )._loop
        self.recorder, self.passes, self.led, self.checked = Recorder(folder), Passes(), list[int](), list[Any]()
        self.agreed: dict[str, Any] = {"global_batch": 12, "epochs": 1}
        self.members = Membership(
            transport,  # type: ignore[arg-type]
            self.steps,
            ahead=5,
            agreed=lambda: self.agreed,
            recorder=self.recorder,  # type: ignore[arg-type]
            passes=self.passes,
            seen=lambda: {"found": []},
            check_seen=self.checked.append,
            leads=lambda: self.led.append(transport.rank),
            before_leaving=lambda: transport.did.append("before leaving"),
        )
        self.steps.loop.membership = self.members

    def train(self, steps: int) -> None:
        for step in self.steps:
            for x, y in step:
                step.backward(mse(self.model, x, y))
            step.commit(self.optimizer)
            if step.index + 1 == steps:
                break

    def hear(self, *, leaves: Sequence[int] = (), changes: Sequence[int] = (), generation: int = 1) -> None:
        """The header of the last round: who leaves, and who has heard of a change, by rank."""
        header = Header(Layout(self.transport.size, 0, 0))
        for rank in range(self.transport.size):
            header.write(rank, leaves=float(rank in leaves), changes=float(rank in changes))
        self.members.note_intentions(header, workers=self.transport.workers, generation=generation)

    def change(self, after: tuple[int, ...], *, renewed: Sequence[int] = (), **gone: str) -> MembershipChange:
        """To a next generation of these workers."""
        left = {int(name.removeprefix("w")): text for name, text in gone.items()}
        facts = {worker: {"host": f"host{worker}"} for worker in after}
        return change_to(
            Generation(self.transport.generation + 1, after, tuple(renewed), (), (), facts, ("", 0), True, 0),
            workers=self.transport.workers,
            renewed=set(renewed),
            gone={worker: Gone(worker, text) for worker, text in left.items()},
            facts=[{"ahead": worker} for worker in after],
        )

    def follow(self, change: MembershipChange, *, id: int) -> None:
        """The change is delivered to this worker."""
        now = change.generation
        rank = now.workers.index(id)
        show = lambda: self.transport.show(now.workers, rank=rank, generation=now.number)  # noqa: E731
        self.members.members_changed(change, show)


MakeWorker = Callable[..., Any]


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeWorker:
    number = iter(range(9))

    @contextmanager
    def make(
        workers: tuple[int, ...] = (4,),
        *,
        rank: int = 0,
        outside: bool = False,
        loops: int = 1,
        combine: Any = "gradients",
        **settings: Any,
    ) -> Iterator[Worker]:
        transport, folder = FakeElastic(workers, rank=rank, outside=outside), tmp_path / str(next(number))
        monkeypatch.setattr("paceline.training.join._make_transport", lambda *args: transport)
        with join(folder, "equal", combine=combine) as fleet:
            yield Worker(fleet, transport, folder, loops=loops, **settings)

    return make


# -- at step boundaries ------------------------------------------------------------------------------------------------


def test_a_loop_begins_with_its_number_and_hears_of_its_members(worker: MakeWorker) -> None:
    with worker(loops=2) as one:
        assert one.transport.listener is one.members
        assert one.transport.loop.number == 2
        assert one.transport.loop.told == one.passes.call_results.to_json()
        assert one.transport.intact == one.steps.gradients.mean_gradient.intact
        assert one.members.facts() == {"ahead": 5}


def test_where_nothing_is_due_a_boundary_is_passed_at_once(worker: MakeWorker) -> None:
    with worker((4, 5)) as one:
        one.members.at_boundary()
        one.hear()
        one.members.at_boundary(agreed=lambda: pytest.fail("nobody is to be asked"))
        assert one.transport.did == []
        assert not one.members.all_leave


def test_where_somebody_heard_of_a_change_the_fleet_is_re_formed(worker: MakeWorker) -> None:
    with worker((4, 5)) as one:
        one.hear(changes=[1])
        one.members.at_boundary()
        assert one.transport.did == ["deliver", "re-form", "deliver"]


def test_where_another_worker_leaves_the_fleet_is_re_formed_too(worker: MakeWorker) -> None:
    with worker((4, 5)) as one:
        one.hear(leaves=[1])
        one.members.at_boundary()
        assert one.transport.did == ["deliver", "re-form", "deliver"]
        assert not one.members.all_leave


def test_the_fleet_is_re_formed_only_where_all_agree(worker: MakeWorker) -> None:
    with worker((4, 5)) as one:
        one.hear(changes=[0])
        one.members.at_boundary(agreed=lambda: False)
        assert one.transport.did == ["deliver"]


def test_a_change_of_a_generation_that_is_over_is_asked_about_and_not_made(worker: MakeWorker) -> None:
    """The call whether all agree is made by all who heard of it, or some would wait for others."""
    asked: list[int] = []
    with worker((4, 5)) as one:
        one.hear(changes=[0])
        one.transport.in_deliver = lambda: setattr(one.transport, "generation", 2)
        one.members.at_boundary(agreed=lambda: bool(asked.append(1)) or True)
        assert one.transport.did == ["deliver"]
        assert asked == [1]


def test_who_was_asked_to_leave_goes_after_the_round_in_which_it_said_so(worker: MakeWorker) -> None:
    with worker((4, 5), rank=1) as one:
        assert one.members.intentions() == {"leaves": 0.0, "changes": 0.0}
        one.transport.leaving = one.transport.reform.may_change = True
        assert one.members.leaving
        assert one.members.intentions() == {"leaves": 1.0, "changes": 1.0}
        one.hear(leaves=[0, 1])
        assert one.members.all_leave
        with pytest.raises(Leave):
            one.members.at_boundary()
        assert one.transport.did == ["deliver", "before leaving", "depart agreed"]


def test_who_is_asked_to_leave_while_it_waits_to_re_form_goes_unannounced(worker: MakeWorker) -> None:
    def leave() -> None:
        raise Leave

    with worker((4, 5)) as one:
        one.hear(changes=[0])
        one.transport.in_re_form = leave
        with pytest.raises(Leave):
            one.members.at_boundary()
        assert one.transport.did == ["deliver", "re-form", "before leaving", "depart"]


def test_who_was_dropped_at_a_boundary_enters_anew_as_often_as_it_takes(worker: MakeWorker) -> None:
    dropped = [Dropped("it was silent for 9 s"), Dropped("and once more")]

    def drop() -> None:
        if dropped:
            raise dropped.pop(0)

    with worker((4, 5)) as one:
        notes: list[str] = []
        one.steps.loop.notes.log_event = lambda event, fields: notes.append(fields["text"])
        one.hear(changes=[0])
        one.transport.in_re_form = drop
        one.members.at_boundary()
        assert one.transport.did == ["deliver", "re-form", *["waiting to enter", "re-form"] * 2]
        assert notes == ["it was silent for 9 s; it enters anew"]


@pytest.mark.parametrize("combine", ["gradients", paceline.Averaging(every_steps=2)])
def test_a_loop_is_left_after_the_step_in_which_this_worker_was_asked_to(worker: MakeWorker, combine: Any) -> None:
    def train(one: Worker) -> None:
        for step in one.steps:
            for x, y in step:
                step.backward(mse(one.model, x, y))
                one.transport.leaving = step.index == 1  # with two micro-batches of the step left
            step.commit(one.optimizer)

    with worker(combine=combine) as one:
        with pytest.raises(Leave):
            train(one)
        assert [record.samples for record in one.fleet.history][-1] == ((4,) if combine == "gradients" else (16,))
        assert one.transport.did[-2:] == ["before leaving", "depart agreed"]


@pytest.mark.parametrize("outside", [False, True])
def test_who_waits_outside_has_the_memory_of_its_sums_handed_out_meanwhile(
    worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, outside: bool
) -> None:
    touched: set[Bucket] = set()
    monkeypatch.setattr(Bucket, "touch", lambda bucket: touched.add(bucket))
    with worker((-1, 9), rank=1, outside=outside) as one:
        assert touched == set(one.steps.gradients.buckets.buckets if outside else ())


def test_who_waits_outside_enters_at_its_first_boundary(worker: MakeWorker) -> None:
    with worker((-1, 9), rank=1, outside=True) as one:
        one.members.at_boundary(agreed=lambda: pytest.fail("nobody is to be asked"))
        assert one.transport.did == ["waiting to enter", "re-form"]
        one.transport.kept_for_later = True
        one.members.at_boundary()
        assert one.transport.did == ["waiting to enter", "re-form"], "a state that waited for it was taken over"
        assert one.members.still_outside


def test_a_newcomer_passes_by_the_loops_before_the_fleets(worker: MakeWorker) -> None:
    with worker((-1, 9), rank=1, outside=True) as one:
        assert not one.members.passed_by
        one.transport.loop_of_fleet = 2
        assert one.members.passed_by
        assert list(one.steps) == []
        one.transport.outside = False
        assert not one.members.passed_by


# -- other members -----------------------------------------------------------------------------------------------------


def test_those_who_are_left_go_on_in_the_open_step_with_what_the_lost_one_did_dealt_again(worker: MakeWorker) -> None:
    with worker((4, 5, 6)) as one:
        next(iter(one.steps))
        training, dealing, state = one.steps.training, one.steps.dealing, one.steps.combine.open_step
        state.last = True
        training.lap(state, (0, 3, 1), (4, 1, 3))
        assert dealing.remaining == 44
        one.steps.loop.position.full_shares, training.plan = (10, 20, 30), state.plan
        changed: list[Any] = []
        one.steps.combine.members_changed = changed.append
        one.follow(one.change((4, 6), w5="was killed"), id=4)
        assert (one.transport.workers, one.transport.generation) == ((4, 6), 2)
        assert dealing.remaining == 47, "what worker 5 did in the lap before is undone, what worker 6 did is not"
        assert changed == [(0, 2)]
        assert (state.workers, state.generation, state.shares, state.plan.samples) == ((4, 6), 2, (8, 7), (4, 4))
        assert state.counted == (0, 1)
        assert state.hurried
        assert training.plan is None, "a plan for the old members is void"
        assert one.steps.loop.position.full_shares == (10, 30)
        assert len(dealing.deal((4, 4))) == 2


def test_members_change_while_the_trainings_state_is_held(worker: MakeWorker) -> None:
    with worker((4, 5)) as one:
        held: list[bool] = []
        change = one.change((4, 5, 8), renewed=[8])

        def show() -> None:
            held.append(one.steps.training.lock._is_owned())
            one.transport.show((4, 5, 8), rank=0, generation=2)

        one.steps.loop.position.full_shares = (6, 6)
        one.members.members_changed(change, show)
        assert held == [True]
        assert one.steps.dealing._ahead == [4, 5, 8], "what each worker's loader holds ready"
        assert one.steps.loop.position.full_shares == (), "nobody knows the newcomer's"


def test_a_member_whose_script_has_no_loop_yet_says_nothing_of_itself(worker: MakeWorker) -> None:
    with worker((4, 5)) as one:
        change = one.change((4, 8), renewed=[8])
        one.follow(replace(change, facts=({"ahead": 4, "computes_on": "cpu"}, None)), id=4)
        assert one.steps.dealing._ahead == [4, 0]
        assert one.steps.loop.micro_batches.devices == ("cpu", "")


def test_a_generation_is_announced_with_who_came_and_who_went_and_why(worker: MakeWorker) -> None:
    with worker((4, 5)) as one:
        one.steps.training.index = 3
        one.follow(one.change((4, 8), renewed=[8], w5="was killed"), id=4)
        assert one.recorder.events == [
            (
                "generation",
                {
                    "number": 2,
                    "step": 3,
                    "workers": [4, 8],
                    "joined": [{"id": 8, "host": "host8"}],
                    "left": [{"id": 5, "text": "was killed"}],
                },
            )
        ]
        assert one.led == [], "it led before"


def test_who_comes_to_lead_writes_the_last_records_once(worker: MakeWorker) -> None:
    with worker((4, 5, 6), rank=1) as one:
        for number in range(3):
            record = StepRecord(number, 0, 1, (4, 5, 6), (4, 4, 4), (4, 4, 4), (0.1, 0.1, 0.1))
            one.fleet.history.append(record)
        one.follow(one.change((4, 5)), id=5)
        assert [event for event, _ in one.recorder.events] == ["generation"]
        assert one.led == []
        one.recorder.events.clear()
        one.follow(one.change((5,), w4="was killed"), id=5)
        assert [event for event, _ in one.recorder.events] == ["generation", "step", "step", "step"]
        assert [fields["step"] for _, fields in one.recorder.events[1:]] == [0, 1, 2]
        assert one.led == [0]
        one.recorder.events.clear()
        one.follow(one.change((5, 7), renewed=[7]), id=5)
        assert [event for event, _ in one.recorder.events] == ["generation"]
        assert one.led == [0]


def test_before_it_says_anything_of_itself_a_worker_sees_who_is_there(worker: MakeWorker) -> None:
    with worker() as one:
        one.members.keep_up()
        assert one.transport.did == ["deliver"]


# -- a newcomer --------------------------------------------------------------------------------------------------------


def given_by(peer: Worker) -> tuple[list[torch.Tensor], MembershipChange]:
    """The peer's state, and the change by which worker 9 entered: the peer knows of it first."""
    change = peer.change((4, 9), renewed=[9])
    peer.follow(change, id=4)
    return [part.clone() for part in peer.members.give_state()], change


def test_a_newcomer_finds_a_size_of_its_own(worker: MakeWorker) -> None:
    with worker(micro_batch="auto") as peer:
        peer.steps.loop.micro_batches.sizing.search.keep(6, by_memory=False)
        peer.train(2)
        assert peer.fleet.history[-1].micro_size == (6,)
        assert peer.members.facts() == {"ahead": 5, "computes_on": peer.steps.loop.micro_batches.own_device}
        state, change = given_by(peer)
        with worker((-1, 9), rank=1, outside=True, micro_batch="auto") as one:
            one.hear(changes=[0])
            one.transport.outside = False
            one.transport.show((4, 9), rank=1, generation=2)
            assert one.members.take_over(state, change) is True
            assert not one.steps.loop.micro_batches.sizing.search.settled
            assert one.steps.loop.micro_batches.sizes == {"micro_size": 0, "memory_bound": False}
            assert len(one.steps.loop.micro_batches.devices) == 2


@pytest.mark.parametrize(
    "combine", ["gradients", paceline.Averaging(every_steps=1), paceline.research.ElasticAverage()]
)
def test_a_newcomer_takes_over_where_a_peer_is(worker: MakeWorker, combine: Any) -> None:
    with worker(combine=combine) as peer:
        peer.train(2)
        peer.fleet.state.best = 0.25
        peer.transport.lanes.rounds, peer.transport.calls = 17, 23
        peer.passes.saves = 3
        state, change = given_by(peer)
        with peer.steps.combine.shown():
            weights = flat(peer.model)
        with worker((-1, 9), rank=1, outside=True, combine=combine) as one:
            one.fleet.state.best = 0.0
            one.hear(changes=[0])
            one.transport.outside = False
            one.transport.show((4, 9), rank=1, generation=2)
            assert not torch.equal(flat(one.model), weights)
            assert one.members.take_over(state, change) is True
            assert torch.equal(flat(one.model), weights)
            assert one.optimizer.state_dict()["state"].keys() == peer.optimizer.state_dict()["state"].keys()
            assert one.fleet.state.best == 0.25
            assert (one.steps.index, one.steps.rounds, one.steps.progress) == (2, 2, 0.5)
            assert [r.to_json() for r in one.fleet.history] == [r.to_json() for r in peer.fleet.history]
            assert one.steps.dealing.state_dict() == peer.steps.dealing.state_dict()
            assert (one.transport.lanes.rounds, one.transport.calls, one.passes.saves) == (17, 23, 3)
            assert one.recorder.went_on_in == [peer.recorder.run_dir.absolute()]
            assert one.checked == [{"found": []}], "its data are compared with the peer's"
            one.members.at_boundary()
            assert one.transport.did == [], "what was due before it entered is not due any more"


@pytest.mark.parametrize("loops", [1, 2], ids=["now", "when its script has come to the fleet's loop"])
def test_a_frozen_part_that_a_newcomer_holds_stays_with_it(
    worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, loops: int
) -> None:
    monkeypatch.setattr(parts, "LEAST", 4)
    with worker(loops=loops) as peer, worker((-1, 9), rank=1, outside=True) as one:
        for each in (peer, one):
            each.model.weight.requires_grad_(False)
        weights = peer.model.weight.tolist()
        peer.members.at_boundary()
        peer.steps.loop.replica.holding._thread.join()
        one.members.at_boundary()
        assert (one.transport.did[-1], len(one.members.held())) == ("re-form", 1)
        change = peer.change((4, 9), renewed=[9])
        peer.follow(change, id=4)
        state = [part.clone() for part in peer.members.give_state(one.members.held())]
        assert [part.numel() for part in state].count(0) == 1
        one.transport.outside = False
        one.transport.show((4, 9), rank=1, generation=2)
        taken = one.members.take_over(state, change)
        assert taken is (loops == 1)
        one.model.weight.data.zero_()
        if not taken:  # its script went on, and changed what it held
            one.members._loop_number = 2
            assert one.members.take_over(state, change)
            assert one.model.weight.tolist() == weights


@pytest.mark.parametrize("steps", [0, 2])
def test_a_newcomers_first_step_is_looked_at_afterwards_unless_the_peers_was(worker: MakeWorker, steps: int) -> None:
    with worker() as peer:
        peer.train(steps) if steps else None
        state, change = given_by(peer)
        with worker((-1, 9), rank=1, outside=True) as one:
            looks: list[str] = []
            one.steps.before_first = lambda _: looks.append("before")
            one.steps.after_first = lambda _: looks.append("after")
            one.steps._call_before_step()
            one.transport.outside = False
            one.transport.show((4, 9), rank=1, generation=2)
            assert one.members.take_over(state, change) is True
            one.steps.loop.position.step = object()  # its first step was given out
            one.steps._call_before_step()
            assert looks == (["before"] if steps else ["before", "after"])
            one.steps.loop.position.step = None


def test_a_script_that_is_not_the_fleets_is_refused_and_says_what_differs(worker: MakeWorker) -> None:
    with worker() as peer:
        peer.train(1)
        state, change = given_by(peer)
        with worker((-1, 9), rank=1, outside=True) as one:
            before = flat(one.model)
            one.agreed["epochs"] = 3
            with pytest.raises(ValueError, match="not the fleet's: epochs is 3 here and 1 there"):
                one.members.take_over(state, change)
            del one.agreed["epochs"]
            with pytest.raises(ValueError, match="not the fleet's: epochs is None here and 1 there"):
                one.members.take_over(state, change)
            assert torch.equal(flat(one.model), before)
            assert one.recorder.went_on_in == []


def test_a_fleet_in_a_later_loop_is_not_entered_yet(worker: MakeWorker) -> None:
    with worker(loops=2) as peer:
        state, change = given_by(peer)
        with worker((-1, 9), rank=1, outside=True) as one:
            one.agreed.clear()  # what the loops have in common is not asked for yet
            one.transport.lanes.rounds = 3
            assert one.members.take_over(state, change) is False
            assert (one.transport.lanes.rounds, one.recorder.went_on_in, one.steps.index) == (3, [], 0)


def test_a_fleet_in_an_earlier_loop_cannot_be_entered(worker: MakeWorker) -> None:
    with worker() as peer:
        state, change = given_by(peer)
        with (
            worker((-1, 9), rank=1, outside=True, loops=2) as one,
            pytest.raises(FleetError, match="this worker's script is in loop 2 and the fleet in 1"),
        ):
            one.members.take_over(state, change)
