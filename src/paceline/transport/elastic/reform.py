"""From one generation's group to the next: noticing a lost member, forming the next group, settling which calls ended.

The roster decides when a generation is over; a worker then reports that it has left, waits for the next, forms its
process group, and **settles**: all report which calls they have finished (`paceline.transport.elastic.handover`). Any
thread of the worker may find its generation over and come here; one of them, under the lock, does the work.

Two rules leave each decision one owner. A group stands, and can be called in, only once it is settled: until then the
thread that forms it alone has it (`Forming`). And the training follows a change of members between two rounds, never
between the end of a background round and its entry in the training's state, which the thread that ran it makes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from paceline import concurrency
from paceline.errors import SAME_CALLS, Dropped, FleetError, GenerationOver, LoaderDied, PacelineError
from paceline.roster import Generation, Gone, RosterClient, RunOver
from paceline.roster.calls import BACKGROUND, name_workers, without_answer
from paceline.transport.call_sequences import ForeignCalls
from paceline.transport.distributed import one_line
from paceline.transport.elastic.changes import MembershipChange, change_to
from paceline.transport.elastic.connector import PREFIX, Connector
from paceline.transport.elastic.handover import chain_of
from paceline.transport.engines.contract import CLOSE_S, Held
from paceline.transport.group import Group, Watched, let_go
from paceline.transport.network import Store
from paceline.worker_exit import Leave

if TYPE_CHECKING:
    from paceline.transport.elastic.transport import Elastic

logger = logging.getLogger("paceline")

LEAST_PAUSE_S, MOST_PAUSE_S = 0.05, 5.0
"""Between generations that did not come about though all were there, twice as long each time."""
CHECK_S = 0.5
"""Between two looks at whether what is waited for can still come."""
IN_VAIN_S = 3.0
"""How long a worker that was asked to leave waits for a roster that is away, in the middle of a step."""


class Forming:
    """A generation whose group is being formed and settled, as far as its own waits are concerned."""

    def __init__(self, reform: Reform, generation: Generation, group: Group) -> None:
        self._reform, self.generation, self.group = reform, generation, group

    @property
    def is_over(self) -> bool:
        return self._reform.over >= self.generation.number

    def check(self) -> None:
        """Raise when this generation can no longer come about."""
        if self._reform.client.failure is not None:
            raise self._reform.client.failure
        if self.is_over:
            raise self._over("is over")

    def check_group(self, group: Group) -> None:
        """Return: nothing can take the place of this group, which one thread forms."""
        return

    def failed(self, error: BaseException, group: Group | None = None) -> Exception:
        """Return the error of the transport behind an engine's, a store's or a peer's."""
        if isinstance(error, PacelineError):
            return error
        return LoaderDied.told_by(error) or self._reform.client.failure or self._over(one_line(error))

    def unlike_calls(self, labels: dict[int, str]) -> Exception | None:
        return self._reform.unlike_calls(labels)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        """Fill a tensor with what a member sends."""
        Watched.started(lambda group: group.receive(tensor, source, tag), self, group=self.group).wait()

    def _over(self, why: str) -> GenerationOver:
        return GenerationOver(f"generation {self.generation.number}: {why}", generation=self.generation.number)


class Join(Protocol):
    """Enters this worker at the roster. ``on_over`` is called when a generation turns out to be over."""

    def __call__(self, *, on_over: Callable[[int], None]) -> RosterClient: ...


class Reform:
    """The group as it stands, and how the next one comes about."""

    def __init__(
        self,
        transport: Elastic,
        device: torch.device,
        *,
        join: Join,
        cpu_engine: bool = False,
        connector: Callable[..., Connector] = Connector,
    ) -> None:
        self._transport, self._lanes, self._hand_over = transport, transport.lanes, transport.hand_over
        self.group = Group(1, 2)
        self.now: Generation | None = None
        """The generation whose group stands."""
        self.over = 0
        """The last generation known here to be over: by the roster, or because this worker gave it up."""
        self._lock = concurrency.RLock()
        self._undelivered: MembershipChange | None = None
        """The change that the training has yet to follow."""
        self._renewed: set[int] = set()
        """Those who came, or came once more, since the training last followed a change."""
        self._gone: dict[int, Gone] = {}
        """Those who left since then."""
        self._forming: Forming | None = None
        """The generation that one of this worker's threads is forming."""
        self._tried = 0
        """The last generation that this worker was in, or that did not come about."""
        self._closing: list[concurrency.Thread] = []
        self._in_vain = 0
        """Generations in turn for which all were there, and which did not come about."""
        self.connector = connector(device, check=self._check_forming, cpu_engine=cpu_engine)
        self.client = join(on_over=self._on_over)
        self.client.network = self._network
        foreign = ForeignCalls()
        self.client.foreign = lambda: foreign.current()[0]

    @property
    def number(self) -> int:
        """Number of the generation whose group stands; 0: none yet."""
        return self.now.number if self.now is not None else 0

    @property
    def must_change(self) -> bool:
        """Whether to re-form the group at the next boundary: its members are too few for another step."""
        return self.now is not None and self.now.wanting > 0

    @property
    def may_change(self) -> bool:
        """Whether somebody waits to enter, or the roster asks for it."""
        return self.client.news

    # -- the group's watch -----------------------------------------------------------------------------------------

    def check(self) -> None:
        if self.client.failure is not None:
            raise self.client.failure
        if self.is_over:
            raise self.why_over()

    def _check_forming(self) -> None:
        if self._forming is not None:
            self._forming.check()

    def check_group(self, group: Group) -> None:
        """Raise when another thread has re-formed the group before this one saw that its generation was over."""
        if group is not self.group:
            raise GenerationOver("the group was re-formed", generation=group.generation)

    @property
    def is_over(self) -> bool:
        return self.over >= self.number

    def why_over(self) -> GenerationOver:
        return GenerationOver(f"generation {self.number} is over", generation=self.number)

    def failed(self, error: BaseException, group: Group | None = None) -> Exception:
        """Return the error behind an engine's or a store's.

        ``group`` is the one in which the call was made: another thread may have formed the next one since, which this
        error must not end.
        """
        if isinstance(error, GenerationOver):
            return error
        if (died := LoaderDied.told_by(error)) is not None:
            return died
        number = self.number if group is None else group.generation
        return self.client.failure or GenerationOver(one_line(error), generation=number)

    def _network(self) -> str:
        """Return, in words, whom this worker's packets do not reach."""
        if self.now is None:
            return ""
        names = name_workers({one: self.now.facts[one] for one in self.now.workers})
        return without_answer(self.group.unanswered(), list(names.values()))

    def unlike_calls(self, labels: dict[int, str]) -> Exception | None:
        """Return None while the roster is there: it sees these calls too, and knows whose are the fleet's."""
        if not self.client.away:
            return None
        workers = self._transport.workers
        reports = ", but ".join(f"worker {workers[rank]} called {label}" for rank, label in labels.items())
        return FleetError(f"{reports}: {SAME_CALLS}")

    # -- from one generation to the next ---------------------------------------------------------------------------

    def standing(self) -> tuple[int, Group, bool]:
        """Return the generation that stands, its group, and whether the training has yet to receive it.

        Waits while another thread forms the next.
        """
        with self._lock:
            return self.number, self.group, self._undelivered is not None

    def start(self) -> None:
        """Wait for the first generation, when nobody has begun."""
        with self._lock:
            self._enter(self.client.next_generation(after=0, fresh=True, orderly=True), fresh=True)

    def re_form(self, number: int, *, orderly: bool) -> None:
        """Leave generation ``number`` for the next. ``orderly``: from a step boundary, to which all members come."""
        with self._lock:
            if self.number > number and not self.is_over:
                return  # another thread has been here
            if self._transport.outside and not orderly and self._transport.listener is not None:
                text = "the fleet went on without this worker, as another of its threads was told"
                raise Dropped(text, generation=number)  # it enters anew at a step boundary, never in mid-call
            asks_orderly = orderly
            while not self._try(boundary=orderly, orderly=asks_orderly):
                asks_orderly = False  # others may still be forming what failed here: the roster ends it for them too
                self._pause()
            self._in_vain = 0

    def _try(self, *, boundary: bool, orderly: bool) -> bool:
        """Try to form the next generation; returns whether it came about.

        ``boundary``: this worker is at a step's boundary; ``orderly``: so are all others, and come by themselves.
        """
        transport = self._transport
        try:
            fresh = transport.outside
            if not orderly:
                self.close_group()
            transport.at_rest = boundary
            generation = self.client.next_generation(
                after=max(self.number, self._tried), fresh=fresh, orderly=orderly, still=self._leave_if_asked
            )
            transport.at_rest = False
            self.close_group()  # in good order: only once everybody is out
            self._enter(generation, fresh=fresh)
        except Dropped:
            self._fall_out()
            raise
        except Leave:
            if not boundary:  # else the caller reports it, and saves first
                transport.depart(agreed=False)
            raise
        except RunOver as over:
            transport.entered(False)
            logger.warning("%s", over)
            raise SystemExit(0) from None
        except GenerationOver as error:
            self._log_failure(error)
            return False
        return True

    def _enter(self, generation: Generation, *, fresh: bool) -> None:
        """Form and settle the group of a generation; from then on it stands."""
        self._tried = generation.number
        self._renewed |= {*generation.joined, *generation.fresh}
        self._gone |= {gone.id: gone for gone in generation.left}
        try:
            group = self.connector.open_store(generation, worker=self.client.id)
        except (RuntimeError, ConnectionError) as error:
            self.connector.forget_store()
            raise self.client.failure or GenerationOver(one_line(error), generation=generation.number) from None
        forming = self._forming = Forming(self, generation, group)
        try:
            self._form(forming)
            reports = self._settle(forming, fresh=fresh)
        except BaseException as error:
            self._forming = None
            self.connector.break_off(group)
            self._close_detached(group)
            if isinstance(error, (RuntimeError, ConnectionError)) and not isinstance(error, PacelineError):
                self.connector.forget_store()  # its connection may be what broke
                raise forming.failed(error) from None
            raise
        self._transport.since = self._transport.since or generation.number
        self.now = generation
        self.group = group  # after its number: see `break_off`
        self._forming = None  # only now: a generation that ends meanwhile finds its group in the one or the other
        self._bring_everybody_in(reports)

    def _pause(self) -> None:
        """Wait between attempts: what keeps workers apart who are all there, a firewall or a variable, lasts."""
        pause_s = min(MOST_PAUSE_S, LEAST_PAUSE_S * 2**self._in_vain) if self._in_vain > 1 else 0.0
        until = concurrency.monotonic() + pause_s
        while concurrency.monotonic() < until and not self._transport.leaving:
            concurrency.sleep(LEAST_PAUSE_S)

    def _leave_if_asked(self, waited_s: float) -> None:
        """Raise Leave in a worker that was asked to leave, where the roster is unreachable.

        A step cannot go on without a roster, and the worker's part is dealt again.
        """
        if self._transport.leaving and self.client.away and waited_s > IN_VAIN_S:
            raise Leave

    def _log_failure(self, error: GenerationOver) -> None:
        if self.over >= self._tried:  # the roster reports so: somebody was lost
            logger.info("generation %d did not come about: %s", self._tried, error)
            return
        self._in_vain += 1
        last = self.client.generation
        names = ", ".join(str(last.facts[worker].get("name")) for worker in last.workers) if last else ""
        text = "generation %d did not come about though all are there (%s): can they all reach one another? %s"
        logger.warning(text, self._tried, names, error)

    def _fall_out(self) -> None:
        """Leave the step: the fleet went on, and only a peer's state can bring this worker back."""
        self.close_group()
        self._undelivered = None
        self._hand_over.recorded.set()
        self._transport.entered(False)
        self._transport.fell_out = self._transport.listener is not None
        self._transport.at_rest = True
        self._lanes.forget()

    def _form(self, forming: Forming) -> None:
        """Connect the members of a generation, once all of them are there."""
        group = forming.group
        group.store.set(f"here/{group.rank}", "")
        group.wait_for([f"here/{rank}" for rank in range(group.size)], watch=forming)
        if group.size > 1:
            self._transport.backend = self.connector.connect(group, forming.generation, watch=forming)

    # -- the end of a group ----------------------------------------------------------------------------------------

    def _on_over(self, number: int) -> None:
        """Free the threads that wait in a generation that is over (on the client's thread)."""
        self.over = max(self.over, number)
        forming = self._forming  # before the group that stands, which takes its place meanwhile
        self.break_off(number)
        if forming is not None and number >= forming.generation.number:
            self.connector.break_off(forming.group)

    def give_up(self, number: int) -> None:
        """Leave a generation over new connections to the store; any thread that looks goes on."""
        self.connector.forget_store()
        self._on_over(number)

    def break_off(self, number: int) -> None:
        """Break off what is under way in the group, unless it is of a later generation than ``number``."""
        group = self.group  # before the number, which changes first: the group is never newer than that says
        if number >= self.number:
            self.connector.break_off(group)

    def close_group(self) -> None:
        """End the group: what still runs in it fails now."""
        self.connector.break_off(self.group)
        self._close_detached(self.group)

    def _close_detached(self, group: Group) -> None:
        """Close a group that was broken off; its destructor may wait for what runs in it, so on another thread."""
        held = group.close()
        if not held:
            return
        held.insert(0, Held(*self._hand_over.sent))
        self._hand_over.sent = []
        closing = concurrency.Thread(target=let_go, args=(held,), name="paceline-close-group", daemon=True)
        self._closing.append(closing)
        closing.start()

    def close(self) -> None:
        """Close for good: the interpreter must not end while groups are closed on threads."""
        self.client.close()
        self.close_group()
        until = concurrency.monotonic() + CLOSE_S
        for closing in self._closing:
            closing.join(timeout=max(0.0, until - concurrency.monotonic()))

    # -- settling --------------------------------------------------------------------------------------------------

    def _settle(self, forming: Forming, *, fresh: bool) -> list[dict[str, Any]]:
        """Agree on how far each is, and hand results over to those who lack them; return all reports."""
        transport, listener = self._transport, self._transport.listener
        mine = {
            "fresh": fresh,
            "lanes": {name: self._lanes[name].report() for name in self._lanes},
            "slots": transport.slots.names(),
            "intact": transport.intact(),
            "training": listener.facts() if listener is not None else None,
            "held": list(listener.held()) if listener is not None and fresh else [],
        }
        reports = forming.group.gather("settle", "settling", mine, watch=forming)
        incumbents = [rank for rank, theirs in enumerate(reports) if not theirs["fresh"]]
        if incumbents:
            transport.slots.adopt([reports[rank]["slots"] for rank in incumbents])
            self._hand_over.results(forming, reports, incumbents)
        elif listener is not None:
            raise FleetError("nobody is left who holds the state of the training: it begins anew, with new workers")
        return reports

    def _bring_everybody_in(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Prepare the training's news of the group that stands now, and give a state to those who are new."""
        transport = self._transport
        incumbents = [rank for rank, theirs in enumerate(reports) if not theirs["fresh"]]
        newcomers = [rank for rank, theirs in enumerate(reports) if theirs["fresh"]]
        self._undelivered = self._change([theirs["training"] for theirs in reports])
        if not incumbents:
            self.deliver_members_changed()
        elif newcomers:
            held = set[str].intersection(*(set(reports[rank]["held"]) for rank in newcomers))
            self._bring_in(newcomers, giver=incumbents[0], held=held)
        transport.entered(self._hand_over.later is None)
        if self.group.rank == 0 and not transport.outside:
            with suppress(RuntimeError):  # the roster is away: a later leader tidies
                tidy = partial(_tidy, self.connector.signals_root.clone(), self.number)
                concurrency.Thread(target=tidy, name="paceline-tidy", daemon=True).start()

    def _change(self, facts: Sequence[Any]) -> MembershipChange:
        assert self.now is not None
        workers = self._transport.workers
        return change_to(self.now, workers=workers, renewed=self._renewed, gone=self._gone, facts=facts)

    def _bring_in(self, newcomers: Sequence[int], *, giver: int, held: Collection[str]) -> None:
        """Pass a state on, at a step boundary: the giver sends it once, and newcomers hand it to one another.

        ``held``: the digests of parts that all newcomers hold.
        """
        assert self.now is not None
        rank, facts = self.group.rank, self.now.facts
        chain = chain_of(newcomers, [str(facts[id].get("host")) for id in self.now.workers], giver=giver)
        if rank not in newcomers:
            self.deliver_members_changed()
            if rank == giver:
                self._hand_over.send_state(chain, held)
            return
        data = self._hand_over.receive_state(giver, chain)
        change, self._undelivered = self._undelivered, None
        assert change is not None
        self._hand_over.take_over(data, change)

    def deliver_members_changed(self) -> None:
        """Deliver the group's members to the training, before its next call; by whichever thread comes first."""
        while self._undelivered is not None:
            if not self._hand_over.recorded.wait(CHECK_S):
                self._raise_failure()
                continue
            with self._lock:
                if not self._hand_over.recorded.is_set():  # another round has ended meanwhile
                    continue
                change, self._undelivered = self._undelivered, None
                listener = self._transport.listener
                if change is not None and listener is not None:
                    listener.members_changed(change, partial(self.show, change))
                elif change is not None:
                    self.show(change)

    def _raise_failure(self) -> None:
        if self.client.failure is not None:
            raise self.client.failure

    def show(self, change: MembershipChange) -> None:
        """Show the members after a change in the transport's rank, size and workers."""
        self._renewed, self._gone = set(), {}
        self._transport.show(change.generation)

    def finish(self, lane: str, began: int, *, facts: list[Any] | None, tensors: Sequence[torch.Tensor]) -> bool:
        """End a call that began in this generation; False: another thread has re-formed the group.

        What a background round gave is not in the training's state yet.
        """
        with self._lock:
            if self.number != began:
                return False
            self._lanes[lane].finish(facts=facts, tensors=tensors)
            if lane == BACKGROUND:
                self._hand_over.recorded.clear()
            return True


def _tidy(store: Store, number: int) -> None:
    """Delete the store's keys of generations before the previous one, by a connection of its own."""
    with suppress(RuntimeError, AttributeError):  # the roster is away, or this store cannot list its keys
        for key in store.list_keys():
            generation = key.removeprefix("/").removeprefix(PREFIX).partition("/")[0]
            if generation.isdigit() and int(generation) < number - 1:
                store.delete_key(key)
