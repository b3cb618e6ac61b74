"""A fleet whose members change, in one process: workers are coroutines, and bytes decide who moves and who dies.

It is the protocol of paceline.transport.elastic and paceline.step.members without tensors and sockets, around the
real roster, feed and pacers. A worker runs until it has to wait; then somebody else does. Messages to and from the
roster take any time, in order. A collective needs all members of its generation; once all came and one of them is gone,
it may end on some and fail on others. When the bytes are used up there are no more faults, and everything must come to
an end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from elastic_worker import EPOCHS, LENGTH, Chance, Group, Rules, Worker

from paceline.roster.membership_rules import CLOSED, MembershipRules, Refused, Tell
from paceline.roster.state import Generation, Hello, RosterState

FAULTS_IN, FAULTS_IN_SETTLING = 24, 8
"""One move in so many is a fault, while the bytes last; more of them while somebody settles in a new generation."""
TICKS = 20_000
"""A schedule that is not over by then never will be."""


class World:
    """The roster, the processes, and chance."""

    def __init__(
        self, schedule: bytes, *, rules: Rules | None = None, workers: int = 3, minimum: int = 1, adaptive: bool = False
    ) -> None:
        self.chance, self.rules, self.adaptive = Chance(schedule), rules or Rules(), adaptive
        self.minimum, self.largest = minimum, workers + 1
        self.membership = MembershipRules(RosterState(minimum=minimum, maximum=self.largest))
        self.workers: list[Worker] = []
        self.groups: dict[int, Group] = {}
        self.at_roster: deque[Callable[[], None]] = deque()
        """What the roster will see by itself: processes that ended, workers that went silent."""
        self.by_id: dict[int, Worker] = {}
        self.turn = self.settling = 0
        self.membership.expect(workers)
        for slot in range(workers):
            self.start(f"host/{slot}")

    def start(self, name: str) -> None:
        self.workers.append(Worker(self, name, f"session {len(self.workers)}"))

    def group(self, generation: Generation) -> Group:
        return self.groups.setdefault(generation.number, Group(generation))

    def register(self, worker: Worker) -> str:
        try:
            worker.id = self.membership.register(Hello(worker.name, worker.session, {"name": worker.name})).id
        except Refused as refused:
            return refused.kind
        self.by_id[worker.id] = worker
        return "in"

    # -- faults ----------------------------------------------------------------------------------------------------

    def fault(self) -> None:
        living = [worker for worker in self.workers if worker.alive]
        kind = self.chance.choose(8)
        if kind < 4 and living:
            victim = living[self.chance.choose(len(living))]
            (self.kill, self.freeze, self.wake, self.ask_to_leave)[kind](victim)
        elif kind < 6 and living:
            victim = living[self.chance.choose(len(living))]
            self.kill(victim)
            self.start(victim.name)
        else:
            self.start_one(self.chance.choose(self.largest))

    def start_one(self, slot: int) -> None:
        if all(worker.name != f"host/{slot}" or not worker.alive for worker in self.workers):
            self.start(f"host/{slot}")

    def kill(self, worker: Worker) -> None:
        """Its connections break at once; the roster sees that, and the launcher that the process ended, later."""
        worker.alive = False
        worker.done_all = worker.done_all and not worker.outbox
        worker.outbox.clear()
        worker.story.close()
        if worker.group is not None:
            worker.group.broken = True
        self.at_roster.append(lambda: self.lose(worker) if worker.id >= 0 else self.miss_birth(worker))

    def lose(self, worker: Worker) -> None:
        if self.by_id.get(worker.id) is worker and worker.id in self.membership.roster.workers:
            self.membership.lost(worker.id, CLOSED, sure=False)
        self.at_roster.append(
            lambda: self.by_id.get(worker.id) is worker and self.membership.died(worker.name, "was killed")
        )

    def miss_birth(self, worker: Worker) -> None:
        if not any(other.alive and other.name == worker.name for other in self.workers):
            self.membership.died(worker.name, "was killed before it was there")

    def freeze(self, worker: Worker) -> None:
        worker.frozen = True
        self.at_roster.append(lambda: self.miss(worker))

    def miss(self, worker: Worker) -> None:
        known = self.by_id.get(worker.id) is worker and worker.id in self.membership.roster.workers
        if worker.alive and worker.frozen and known:
            self.membership.silent(worker.id, "was silent")

    def wake(self, worker: Worker) -> None:
        if worker.frozen and worker.alive:
            worker.frozen = False
            if worker.id >= 0:
                worker.tell_roster(lambda: None)

    def ask_to_leave(self, worker: Worker) -> None:
        worker.leaving = True

    # -- time ------------------------------------------------------------------------------------------------------

    def run(self) -> World:
        """Until all is over; an AssertionError when that cannot be, or something is wrong on the way."""
        for _ in range(TICKS):
            calm = self.chance.over
            if calm:
                self.calm_down()
            elif self.chance.choose(FAULTS_IN_SETTLING if self.settling else FAULTS_IN) == 1:
                self.fault()
            moves = list(self.possible())
            if moves:
                self.pick(moves)()
                self.post()
            elif self.over:
                return self
            else:
                assert not calm, f"everybody waits for ever: {self.describe()}"
        raise AssertionError(f"no end after {TICKS} moves: {self.describe()}")

    def drive(self, until: Callable[[], bool], *, without: Sequence[Worker] = ()) -> None:
        """A schedule by hand: all but these move, without faults, until something is so."""
        for _ in range(TICKS):
            if until():
                return
            self.turn += 1
            moves = list(self.possible(without=without))
            moves[self.turn % len(moves)]()
            self.post()
        raise AssertionError(f"it never came to that: {self.describe()}")

    def possible(self, *, without: Sequence[Worker] = ()) -> Iterator[Callable[[], Any]]:
        for worker in self.workers:
            if worker in without:
                continue
            if worker.ready_to_move:
                yield worker.move
            if worker.inbox and worker.alive and not worker.frozen:
                yield worker.listen
            if worker.outbox and not worker.frozen:
                yield worker.speak
        if self.at_roster:
            yield lambda: self.at_roster.popleft()()

    def pick(self, moves: list[Callable[[], Any]]) -> Callable[[], Any]:
        self.turn += 1
        return moves[self.turn % len(moves) if self.chance.over else self.chance.choose(len(moves))]

    def post(self) -> None:
        for said in self.membership.drain():
            for id in said.to if isinstance(said, Tell) else ():
                self.by_id[id].inbox.append(said.message)

    def calm_down(self) -> None:
        """No more faults: whoever sleeps wakes up, and the launcher starts what the minimum needs."""
        for worker in self.workers:
            self.wake(worker)
        if self.membership.ended or self.membership.roster.finishing:
            return
        living = {worker.name for worker in self.workers if worker.alive}
        for slot in range(self.largest):
            if len(living) < self.minimum and f"host/{slot}" not in living:
                self.start(f"host/{slot}")
                living.add(f"host/{slot}")

    @property
    def over(self) -> bool:
        return self.membership.ended and not any(worker.alive for worker in self.workers)

    def describe(self) -> str:
        living = [f"{w.name} (id {w.id}, step {w.index}, calls {w.calls})" for w in self.workers if w.alive]
        return f"{', '.join(living)}; the roster: {self.membership.waiting or 'waits for nobody'}"

    # -- what must hold ----------------------------------------------------------------------------------------------

    def check_commit(self, one: Worker) -> None:
        """Of one step all who are in have the same."""
        for other in self.workers:
            if other is not one and self.is_in(other) and self.is_in(one) and len(other.history) > one.index:
                assert other.history[one.index] == one.history[one.index], f"two commits of step {one.index}"

    def is_in(self, worker: Worker) -> bool:
        known = self.membership.roster.workers.get(worker.id)
        fits = (
            known is not None and known.session == worker.session and self.membership.roster.seat_of(known) is not None
        )
        return worker.alive and not worker.outside and fits

    def audit(self) -> None:
        """Every position of every epoch once, by the history of those who came to the end, who all have the same."""
        winners = [worker for worker in self.workers if worker.done_all]
        assert winners, "nobody came to the end"
        for worker in winners:
            assert worker.history == winners[0].history, "unlike histories"
            assert (worker.feed.epoch, worker.feed.remaining) == (EPOCHS - 1, 0), "an unfinished feed"
            assert worker.pacer.state_dict() == winners[0].pacer.state_dict(), "unlike paces"
        for epoch in range(EPOCHS):
            counted = [
                position
                for _, at, (_, ranges) in winners[0].history
                for own in (ranges if at == epoch else ())
                for start, stop in own
                for position in range(start, stop)
            ]
            assert sorted(counted) == list(range(LENGTH)), f"epoch {epoch} counted {sorted(counted)}"
