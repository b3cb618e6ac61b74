"""One process of the model fleet: its training, its calls, and how it follows who is there (see `elastic_model`)."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.feed import Feed
from paceline.pace import Adaptive, Ask, Equal, Pacer
from paceline.records import Plan, StepRecord
from paceline.roster.state import Generation, Ready

if TYPE_CHECKING:
    from elastic_model import World

EPOCHS = 2
LENGTH = 14
BATCH = 6
AHEAD = 2

Wait = Generator[Callable[[], bool], None, Any]


@dataclass(frozen=True)
class Rules:
    """What the protocol keeps to. Any of them broken must be found out."""

    hand_over: bool = True
    """Who has the result of a call gives it to those whose call failed."""
    old_until_next_call: bool = True
    """Who was given a result goes on under the old members until its next call."""
    newcomers_are_new: bool = True
    """Who left and came back is not taken for who it was, however many generations that took."""
    claims_come_back: bool = True
    """What the lost had claimed goes back to the pool."""
    confirmed_end: bool = True
    """Nobody goes home before all have the last step."""


class Chance:
    """Choices read from a byte string; 0, the harmless one, when it is used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._next = 0

    @property
    def over(self) -> bool:
        return self._next >= len(self._data)

    def choose(self, options: int) -> int:
        if self.over or options < 2:
            return 0
        self._next += 1
        return self._data[self._next - 1] % options


@lru_cache
def equal_plan(total: int, members: tuple[int, ...]) -> Plan:
    """Equal shares depend on nothing else, and thousands of schedules ask for the same ones."""
    return Equal().plan(Ask(step=0, total=total, workers=members))


class Unlucky(Chance):
    """Whatever may fail fails."""

    def choose(self, options: int) -> int:
        return 1 if options == 2 else 0


class Over(Exception):
    """The generation's calls can no longer end."""


class Dropped(Exception):
    """The fleet has gone on without this worker."""


class Ended(Exception):
    """The run is over."""


class Result(NamedTuple):
    """What a call gave."""

    generation: int
    members: tuple[int, ...]
    said: list[dict[str, Any]]


@dataclass
class Group:
    """The connections of one generation."""

    generation: Generation
    calls: dict[str, dict[int, Any]] = field(default_factory=dict)
    mail: dict[str, Any] = field(default_factory=dict)
    broken: bool = False
    """Somebody closed its connections."""


class Worker:
    """One process."""

    def __init__(self, world: World, name: str, session: str) -> None:
        self.world, self.name, self.session = world, name, session
        self.id = -1
        self.alive, self.frozen, self.leaving, self.left, self.done_all = True, False, False, False, False
        self.inbox: deque[dict[str, Any]] = deque()
        self.outbox: deque[Callable[[], None]] = deque()
        self.over, self.news, self.dropped, self.ended = 0, False, False, False
        self.asked_after: int | None = None
        self.answer: Generation | None = None
        self.group: Group | None = None
        self.outside = True
        self.begin_anew()
        self.story = self.life()
        self.waits_for: Callable[[], bool] = lambda: True

    def begin_anew(self) -> None:
        self.members: tuple[int, ...] = ()
        self.followed = 0
        self.unfollowed: tuple[tuple[int | None, ...], Generation] | None = None
        self.renewed: set[int] = set()
        self.feed = Feed(LENGTH, workers=1, shuffle=False)
        self.pacer: Pacer = Adaptive() if self.world.adaptive else Equal()
        self.index = self.calls = self.done = 0
        self.shares: tuple[int, ...] = ()
        self.history: list[tuple[int, int, Any]] = []
        self.plan: Plan | None = None
        self.kept: Result | None = None
        self.given: Result | None = None
        self.due = (0, False, False)
        self.finished = False

    # -- the training ----------------------------------------------------------------------------------------------

    def life(self) -> Wait:
        try:
            yield from self.register()
            while not self.finished:
                try:
                    yield from self.train()
                except Dropped:
                    self.begin_anew()
            self.leave("finished")
            self.done_all = True
        except Ended:
            pass
        yield lambda: not self.outbox
        self.alive = False
        if self.group is not None:
            self.group.broken = True

    def train(self) -> Wait:
        if self.outside:
            yield from self.recover(orderly=True)
            self.follow()
        while not self.finished:
            yield from self.boundary()
            yield from self.open_step()
            yield from self.work()
            self.commit((yield from self.call("round", self.header)))
        if self.world.rules.confirmed_end:
            yield from self.call("end", dict)

    def boundary(self) -> Wait:
        generation, anew, mine = self.due
        if not anew and self.world.rules.old_until_next_call:
            return
        self.follow()
        if not anew or generation != self.followed:
            return
        if mine:
            self.leave("left (SIGTERM)")
            raise Ended
        yield from self.recover(orderly=True)
        self.follow()

    def open_step(self) -> Wait:
        if self.plan is None:
            said = yield from self.call("plan", lambda: {"plan": self.next_plan() if self.leads else None})
            self.plan = said.said[0]["plan"]
        assert self.plan is not None
        assert len(self.plan.samples) == len(self.members), "a plan for other members"
        self.shares, self.plan = self.feed.deal(self.plan.samples, ahead=AHEAD), None
        self.done = 0

    def work(self) -> Wait:
        while self.done < self.shares[self.rank] and not self.leaving:
            yield lambda: True
            if self.world.chance.choose(8) == 1:  # a deadline, or it has noticed that somebody is lost
                break
            self.done += 1

    def header(self) -> dict[str, Any]:
        return {
            "done": self.done,
            "seconds": self.done * 1e-3 * (1 + self.id),
            "leaves": self.leaving,
            "changes": self.news or self.wanting,
            "plan": self.next_plan(beyond=sum(self.shares)) if self.leads else None,
        }

    def next_plan(self, beyond: int = 0) -> Plan:
        left = self.feed.remaining - beyond
        total = min(BATCH, left if left > 0 else LENGTH)
        if not self.world.adaptive:
            return equal_plan(total, self.members)
        return self.pacer.plan(Ask(step=self.index, total=total, workers=self.members))

    def commit(self, result: Result) -> None:
        assert result.members == self.members, "a result of other members"
        done = [said["done"] for said in result.said]
        ranges = self.feed.consume(done)
        if self.world.adaptive:
            self.pacer.observe(self.record(result, done))
        self.history.append((self.index, self.feed.epoch, (self.members, ranges)))
        self.world.check_commit(self)
        self.index += 1
        leaves = [said["leaves"] for said in result.said]
        anew = any(leaves) or any(said["changes"] for said in result.said)
        self.due = (result.generation, anew, leaves[self.rank])
        self.plan = result.said[0]["plan"]
        if self.feed.remaining == 0:
            self.finished = self.feed.epoch + 1 == EPOCHS
            if not self.finished:
                self.feed.open(self.feed.epoch + 1)

    def record(self, result: Result, done: list[int]) -> StepRecord:
        seconds = tuple(said["seconds"] for said in result.said)
        return StepRecord(self.index, 0, result.generation, self.members, self.shares, tuple(done), seconds)

    @property
    def rank(self) -> int:
        return self.members.index(self.id)

    @property
    def leads(self) -> bool:
        return self.members[0] == self.id

    @property
    def wanting(self) -> bool:
        return self.group is not None and self.group.generation.wanting > 0

    # -- calls -----------------------------------------------------------------------------------------------------

    def call(self, label: str, value: Callable[[], dict[str, Any]]) -> Wait:
        """A collective that all members make; again, among those who live, when it fails."""
        while True:
            self.follow()
            assert self.group is not None
            number = self.group.generation.number
            mine = {**value(), "at": (label, self.index, self.feed_state()), "members": self.members}
            try:
                said = yield from self.collective(f"call {self.calls}", mine)
            except Over:
                yield from self.recover(orderly=False)
                if self.given is None:
                    continue
                result, self.given = self.given, None
            else:
                assert all(theirs["at"] == mine["at"] for theirs in said), "unlike books in one call"
                result = Result(number, self.members, said)
            self.calls, self.kept = self.calls + 1, result
            return result

    def collective(self, key: str, mine: Any) -> Wait:
        group = self.group
        assert group is not None
        said = group.calls.setdefault(key, {})
        said[self.id] = mine
        everybody = group.generation.workers
        yield lambda: len(said) == len(everybody) or self.cut_off(group)
        if self.cut_off(group) and (len(said) < len(everybody) or self.world.chance.choose(2)):
            raise Over
        return [said[worker] for worker in everybody]

    def cut_off(self, group: Group) -> bool:
        return group.broken or self.over >= group.generation.number

    def post(self, key: str) -> Wait:
        """Wait for something from one other member."""
        group = self.group
        assert group is not None
        yield lambda: key in group.mail or self.cut_off(group)
        if key not in group.mail or (self.cut_off(group) and self.world.chance.choose(2)):
            raise Over
        return group.mail[key]

    # -- members ---------------------------------------------------------------------------------------------------

    def recover(self, *, orderly: bool) -> Wait:
        while True:
            if self.group is not None and not orderly:
                self.group.broken = True
            after = self.group.generation.number if self.group else 0
            generation = yield from self.next_generation(Ready(after, self.outside, orderly))
            if self.group is not None:
                self.group.broken = True
            self.group = self.world.group(generation)
            assert self.outside == (self.id in generation.fresh), "the roster and the worker differ on who has a state"
            self.renewed |= {*generation.joined, *generation.fresh}
            self.world.settling += 1
            try:
                yield from self.settle(generation)
            except Over:
                continue
            finally:
                self.world.settling -= 1
            self.outside = False
            return

    def settle(self, generation: Generation) -> Wait:
        fresh = self.outside
        mine = {"fresh": fresh, "calls": self.calls}
        said = yield from self.collective("settle", mine)
        holders = {id: theirs["calls"] for id, theirs in zip(generation.workers, said) if not theirs["fresh"]}
        newcomers = [id for id, theirs in zip(generation.workers, said) if theirs["fresh"]]
        assert generation.orderly or not newcomers, "newcomers in the middle of a step"
        if not holders:
            self.start_training(generation)
            return
        if not fresh:
            if self.world.rules.hand_over:
                yield from self.hand_over(holders)
            self.unfollowed = self.change(generation), generation
        giver = next(iter(holders))
        if newcomers and not fresh:
            self.follow()
            if self.id == giver:
                self.world.group(generation).mail["state"] = self.pack()
        elif fresh:
            self.take_over((yield from self.post("state")))

    def hand_over(self, holders: dict[int, int]) -> Wait:
        last = max(holders.values())
        assert min(holders.values()) >= last - 1, "more than one call apart"
        behind = [id for id, calls in holders.items() if calls < last]
        giver = next(id for id, calls in holders.items() if calls == last)
        assert self.group is not None
        if behind and self.id == giver:
            self.group.mail["result"] = self.kept
        self.given = None
        if self.id in behind:
            self.given = yield from self.post("result")

    def change(self, generation: Generation) -> tuple[int | None, ...]:
        old = {id: rank for rank, id in enumerate(self.members)}
        new = self.renewed if self.world.rules.newcomers_are_new else set(generation.fresh)
        return tuple(None if id in new else old.get(id) for id in generation.workers)

    def follow(self) -> None:
        """Take note of who is there now, between two calls."""
        if self.unfollowed is None:
            return
        (kept, generation), self.unfollowed = self.unfollowed, None
        if self.world.rules.claims_come_back:
            self.feed.members_changed(kept)
        else:
            lost = self.feed.state_dict()
            lost["queues"] = [[] if old is None else lost["queues"][old] for old in kept]
            self.feed.load_state_dict(lost, workers=len(kept))
        if self.shares:
            self.shares = tuple(0 if old is None else self.shares[old] for old in kept)
        self.show(generation)
        self.plan = None

    def show(self, generation: Generation) -> None:
        self.members, self.followed, self.renewed = generation.workers, generation.number, set()

    def start_training(self, generation: Generation) -> None:
        self.begin_anew()
        self.feed = Feed(LENGTH, workers=len(generation.workers), shuffle=False)
        self.show(generation)

    def pack(self) -> tuple[str, list[Any]]:
        assert self.given is None, "a state that is no step boundary's"
        state = {"feed": self.feed.state_dict(), "pacer": self.pacer.state_dict(), "index": self.index}
        return json.dumps({**state, "calls": self.calls}), list(self.history)

    def take_over(self, packed: tuple[str, list[Any]]) -> None:
        assert self.group is not None
        state = json.loads(packed[0])
        self.begin_anew()
        self.feed.load_state_dict(state["feed"], workers=len(state["feed"]["queues"]))
        self.pacer.load_state_dict(state["pacer"])
        self.index, self.calls = state["index"], state["calls"]
        self.history = list(packed[1])
        self.show(self.group.generation)

    def feed_state(self) -> str:
        return repr(self.feed.state_dict())

    # -- the roster ------------------------------------------------------------------------------------------------

    def register(self) -> Wait:
        while self.id < 0 and not self.ended:
            answered: list[str] = []
            self.outbox.append(lambda answered=answered: answered.append(self.world.register(self)))
            yield lambda answered=answered: bool(answered)
            self.ended = answered[0] == "ended"
        if self.ended:
            raise Ended

    def next_generation(self, ready: Ready) -> Wait:
        self.asked_after, self.answer, self.dropped = ready.after, None, False
        self.tell_roster(lambda: self.world.membership.ready(self.id, ready))
        yield lambda: self.answer is not None or self.ended or (self.dropped and not ready.fresh)
        if self.ended:
            raise Ended
        if self.answer is None:
            self.asked_after, self.outside = None, True
            raise Dropped
        return self.answer

    def tell_roster(self, message: Callable[[], None]) -> None:
        def deliver() -> None:
            self.world.membership.heard(self.id)
            message()

        if not self.left:
            self.outbox.append(deliver)

    def leave(self, why: str) -> None:
        self.tell_roster(lambda: self.world.membership.leave(self.id, why))
        self.left = True

    def hear(self, message: dict[str, Any]) -> None:
        if "generation" in message:
            generation = Generation.from_json(message["generation"])
            if self.asked_after is not None and generation.number > self.asked_after:
                self.answer, self.asked_after, self.news, self.dropped = generation, None, False, False
        elif "over" in message or "dropped" in message:
            self.dropped = self.dropped or "dropped" in message
            self.over = max(self.over, message.get("over", message.get("dropped", 0)))
        elif "news" in message:
            self.news = True
        elif "ended" in message:
            self.ended = True

    def listen(self) -> None:
        self.hear(self.inbox.popleft())

    def speak(self) -> None:
        self.outbox.popleft()()

    @property
    def ready_to_move(self) -> bool:
        return self.alive and not self.frozen and self.waits_for()

    def move(self) -> None:
        try:
            self.waits_for = next(self.story)
        except StopIteration:
            self.alive = False
