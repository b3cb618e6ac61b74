"""A fleet whose workers come and go: the same calls as everywhere, over a group that is formed anew among the living.

One **generation** is one membership. The roster (`paceline.roster`) says who is in it and when it is over; nobody else
decides. A call that cannot end because a member is gone raises `GenerationOver` in whoever waits in it; the worker then
*recovers*: it tells the roster that it has left the generation, waits for the next, forms its group, and **settles**:
all say which calls they have finished. A call ends on some and not on others only if it is the last one, so counts
differ by one at most, and those who have its result hand it to those who have not. After that the calls that were cut
short are made again.

Between two calls the training sees one membership (``rank``, ``size``, ``workers``), the same for the same two calls on
every worker: whoever was handed a result goes on under the old one until its next call. Newcomers enter at step
boundaries alone, where everybody comes by agreement (`reform`).
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from paceline.errors import SAME_CALLS, Dropped, FleetError, GenerationOver, LoaderDied, PacelineError
from paceline.roster import LEFT, Generation, Gone, RosterClient, RunOver
from paceline.signals import Leave
from paceline.transport.base import Pending
from paceline.transport.distributed import Linked, choose_backend, facts_of, one_line
from paceline.transport.elastic.calls import Lane, gift
from paceline.transport.elastic.changes import Change, Settler, change_to
from paceline.transport.heartbeat import CALLS, ROUNDS
from paceline.transport.nccl import NcclGroup, warm_up
from paceline.transport.network import ENGINE_TIMEOUT, Store, break_off, dist
from paceline.transport.pending import Already, Never

logger = logging.getLogger("paceline")

FORMING = timedelta(seconds=5)
"""How long the engine may take to connect members that are all there."""
STORE = timedelta(seconds=20)
BURY_S = 3.0
IN_VAIN_S = 3.0
"""How long a worker that was asked to leave waits for a roster that is away, in the middle of a step."""
STATE_TAG = 1 << 29
LOOP, TOLD = "loop", "told"
WAITED = "left (SIGTERM) while it waited"
PREFIX = "generation"
"""Of a generation's keys in the store, before its number."""


def asked_for() -> bool:
    """Whether this worker is to join a roster."""
    return bool(os.environ.get("PACELINE_ROSTER"))


class Elastic(Linked):
    """The transport of a fleet whose members change."""

    name = "elastic"
    elastic = True

    def __init__(self, device: torch.device, *, emulated: str | None = None, backend: str | None = None) -> None:
        """``backend``: what the fleet needs, whatever else could be had."""
        super().__init__(device)
        self.backend = "gloo"
        self._gloo_only = backend == "gloo"
        self.settler: Settler | None = None
        self.leaving = False
        """This worker was asked to leave, and does so after the step."""
        self.at_rest = True
        """It is at no step: it may leave at once."""
        self._lanes = {CALLS: Lane(), ROUNDS: Lane()}
        self._recovering = threading.RLock()
        self._doing, self._begun = "starting", 0
        self._store_at: tuple[str, int] | None = None
        self._root: Store = None
        self._sent: list[Any] = []
        """What was handed over, on its way."""
        self._aside: Store = None
        self._now: Generation | None = None
        """The generation whose group stands."""
        self._unfollowed: Change | None = None
        """What the training has yet to follow."""
        self._renewed: set[int] = set()
        """Those who came, or came anew, since the training last followed."""
        self._gone: dict[int, Gone] = {}
        """Those who left since then."""
        self.intact: Callable[[], bool] = lambda: True
        """Whether the last round's result is still as it was, to be handed over."""
        self.deaf = False
        """Signals do not come through: the roster, which keeps the store, is away."""
        self._told = ""
        self._later: tuple[torch.Tensor, Change] | None = None
        """A state that was handed to this newcomer, of a loop that its script has yet to come to."""
        self.loop = 0
        """The number of the loop (``fleet.steps``) that this worker's script is in, from 1; 0 before the first."""
        self._free = threading.Event()
        """Not set: a round aside was handed over, and its books are not closed yet, under the old membership."""
        self._free.set()
        self._over = 0
        self._undertaker: threading.Thread | None = None
        slot = os.environ.get("PACELINE_WORKER", "")
        facts = {**facts_of(device), "emulated": emulated}
        self._member = RosterClient(
            os.environ["PACELINE_ROSTER"],
            token=os.environ.get("PACELINE_TOKEN", ""),
            name=f"{facts['host']}/{slot or os.getpid()}",
            facts=facts,
            on_over=self._on_over,
        )
        self.rank, self.size, self.workers = 1, 2, (-1, self._member.id)  # until it has entered; never the leader
        self.outside = self._member.running
        """This worker is not in the fleet (yet): its calls concern itself alone, until its first step."""
        if not self.outside:
            self._start()
        elif self._may_use_nccl([facts]):
            warm_up(device)
        self.at_rest = self.outside

    def _start(self) -> None:
        """Nobody has begun: wait for the first generation."""
        try:
            self._form(self._member.next_generation(after=0, fresh=True, orderly=True))
            self._settle(fresh=True)
        except GenerationOver as over:
            self._recover_in("paceline.join()", over)
            self.follow()

    # -- who is there ----------------------------------------------------------------------------------------------

    @property
    def id(self) -> int:
        """Who this worker is, whatever its rank."""
        return self._member.id

    @property
    def wants_change(self) -> bool:
        """Whether to form the fleet anew at the next boundary: somebody waits to enter, or the roster asks for it."""
        return self._member.news

    @property
    def below_minimum(self) -> bool:
        """Whether the present members may only finish their step."""
        return self._now is not None and self._now.wanting > 0

    def depart(self, *, agreed: bool) -> None:
        """Leave for good, at a step boundary. ``agreed``: all know of it from the last round, and come to form the
        fleet anew."""
        self._member.leave(LEFT if agreed else WAITED)
        self.outside = True

    def begin_loop(self, number: int, told: str) -> None:
        """This worker's script begins another loop, with ``number - 1`` loops before it. ``told``: what a newcomer that
        passes them by needs to know, in words of the training's own."""
        self.loop, self._told = number, told
        self._note_loop()

    def _note_loop(self) -> None:
        if not self.outside and self._rank == 0:
            with suppress(RuntimeError):
                self._root.set(TOLD, self._told)
                self._root.set(LOOP, str(self.loop))

    def fleets_told(self) -> str:
        """For a worker that waits to enter: what the fleet said when its loop began; empty when nobody knows."""
        return self._ask_fleet(TOLD)

    def fleets_loop(self) -> int:
        """For a worker that waits to enter: the loop that the fleet is in; 0 when nobody knows."""
        return int(self._ask_fleet(LOOP) or 0)

    def _ask_fleet(self, key: str) -> str:
        host, port = self._member.store
        with suppress(RuntimeError):
            store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=STORE)
            if store.check([key]):
                return str(store.get(key), "utf-8")
        return ""

    # -- from one generation to the next ---------------------------------------------------------------------------

    def reform(self) -> None:
        """All members come here at the same step boundary, and a newcomer to its first step: form the fleet anew."""
        self._recover(self._number, orderly=True)

    def cut(self, over: GenerationOver) -> None:
        """What is still under way in this generation ends now."""
        if over.generation == self._number:
            self._break_off()

    def recover(self, over: GenerationOver) -> None:
        """A call was cut short: go on among those who live. Any thread may come here; one does the work."""
        self._recover(over.generation, orderly=False)

    def _recover(self, number: int, *, orderly: bool) -> None:
        with self._recovering:
            if self._number > number and self._over < self._number:
                return  # another thread has been here
            while True:
                try:
                    fresh = self.outside
                    if not orderly:
                        self._bury()
                    self.at_rest = orderly
                    generation = self._member.next_generation(
                        after=self._number, fresh=fresh, orderly=orderly, still=self._leave_if_asked
                    )
                    self.at_rest = False
                    self._bury()  # in good order: only once everybody is out
                    self._form(generation)
                    self._settle(fresh=fresh)
                except Dropped:
                    self._fall_out()
                    raise
                except Leave:
                    if not orderly:  # else it says so itself, and saves first
                        self.depart(agreed=False)
                    raise
                except RunOver as over:
                    self.outside = True
                    logger.warning("%s", over)
                    raise SystemExit(0) from None
                except GenerationOver as error:
                    self._tell_of_failure(error)
                    continue
                return

    def _leave_if_asked(self, waited_s: float) -> None:
        """Without a roster a step cannot go on; one who was asked to leave does not wait: its part is dealt again."""
        if self.leaving and self._member.away and waited_s > IN_VAIN_S:
            raise Leave

    def _tell_of_failure(self, error: GenerationOver) -> None:
        if self._over >= self._number:  # the roster said so: somebody was lost
            logger.info("generation %d did not come about: %s", self._number, error)
            return
        names = ", ".join(str(self._now.facts[worker].get("name")) for worker in self._now.workers) if self._now else ""
        text = "generation %d did not come about though all are there (%s): can they all reach one another? %s"
        logger.warning(text, self._number, names, error)

    def _fall_out(self) -> None:
        """The fleet went on: this step is no longer this worker's, and only a peer's state can bring it back."""
        self._bury()
        self.outside = self.at_rest = True
        self._unfollowed = None
        self._begun = 0
        for lane in self._lanes.values():
            lane.forget()

    @property
    def _number(self) -> int:
        return self._now.number if self._now is not None else 0

    def _form(self, generation: Generation) -> None:
        """Connect the members of a generation, once all of them are there."""
        self._now = generation
        self._renewed |= {*generation.joined, *generation.fresh}
        self._gone |= {gone.id: gone for gone in generation.left}
        self._stars, self._spent = 0, []
        self._rank, self._size = generation.workers.index(self._member.id), len(generation.workers)
        self._alike = len({str(generation.facts[w]["device"]).split(":")[0] for w in generation.workers}) == 1
        try:
            self._open_store(generation)
            self._store.set(f"here/{self._rank}", "")
            self._await([f"here/{rank}" for rank in range(self._size)], self._store)
            if self._size > 1:
                store = dist.PrefixStore("group", self._store)
                self._group = self._form_group(store, self._rank, self._size, towards=generation.store)
                self._gpus = self._form_gpus([generation.facts[worker] for worker in generation.workers])
                self.backend = "nccl" if self._gpus is not None else "gloo"
        except RuntimeError as error:
            raise self.failed(error) from None

    def _open_store(self, generation: Generation) -> None:
        if self._store_at != generation.store:
            host, port = generation.store
            self._root = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=STORE)
            self._aside = self._root.clone()
            self._store_at = generation.store
        prefix = f"{PREFIX}{generation.number}"
        self._store = self._signals = dist.PrefixStore(prefix, self._root)
        self._board = dist.PrefixStore(prefix, self._aside)

    def _make_gloo(self, store: Store, rank: int, size: int, options: Any) -> Any:
        options._timeout = FORMING
        group = self._patiently(lambda: dist.ProcessGroupGloo(store, rank, size, options))
        group.set_timeout(ENGINE_TIMEOUT)
        return group

    def _form_gpus(self, facts: Sequence[Mapping[str, Any]]) -> NcclGroup | None:
        if not self._may_use_nccl(facts):
            return None
        store = dist.PrefixStore("gpus", self._store)
        gpus: NcclGroup = self._patiently(lambda: NcclGroup(store, self._rank, self._size, self._device))
        logger.info("worker %d of %d sums over nccl", self._rank, self._size)
        return gpus

    def _may_use_nccl(self, facts: Sequence[Mapping[str, Any]]) -> bool:
        on_gpus = all(str(one["device"]).startswith("cuda") for one in facts)
        return on_gpus and not self._gloo_only and choose_backend(facts) == "nccl"

    def _patiently(self, make: Callable[[], Any]) -> Any:
        """Connecting cannot be broken off, and engines try for long: so it happens on a thread, which is left to itself
        when the generation is over."""
        made: list[Any] = []
        thread = threading.Thread(target=_make, args=(make, made), daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.01)
            self._check()
        group = made.pop()
        if isinstance(group, BaseException):
            raise group
        return group

    def _on_over(self, number: int) -> None:
        """The roster says that a generation is over (on the member's thread): free whoever waits in it."""
        self._over = max(self._over, number)
        if number >= self._number:
            self._break_off()

    def _break_off(self) -> None:
        if self._gpus is not None:
            self._gpus.abort()
        sockets, self._sockets = self._sockets, frozenset[tuple[int, str]]()
        if sockets and self._store_at is not None:
            break_off(sockets, spare_port=self._store_at[1])

    def _bury(self) -> None:
        """End the group: what still runs in it fails now. Its destructor may wait for that, so not on this thread."""
        group, self._group = self._group, None
        if group is None:
            return
        self._break_off()
        gpus, self._gpus = self._gpus, None
        grave, self._sent = [*self._sent, *self._outbox.empty(), group], []
        self._undertaker = threading.Thread(target=_let_go, args=(grave, gpus), name="paceline-bury", daemon=True)
        self._undertaker.start()

    # -- settling --------------------------------------------------------------------------------------------------

    def _settle(self, *, fresh: bool) -> None:
        mine = {
            "fresh": fresh,
            "lanes": {name: lane.says() for name, lane in self._lanes.items()},
            "slots": list(self._slots),
            "intact": self.intact(),
            "training": self.settler.facts() if self.settler is not None else None,
        }
        try:
            said = self._gather("settle", "settling", mine)
            incumbents = [rank for rank, theirs in enumerate(said) if not theirs["fresh"]]
            if incumbents:
                self._adopt_slots([said[rank]["slots"] for rank in incumbents])
                for name in self._lanes:
                    self._hand_over(name, said, incumbents)
            elif self.settler is not None:
                raise FleetError("nobody is left who holds the state of the training: it begins anew, with new workers")
            self._unfollowed = self._change(said)
            newcomers = [rank for rank, theirs in enumerate(said) if theirs["fresh"]]
            if not incumbents:
                self.follow()
            elif newcomers:
                self._pass_state(incumbents[0], newcomers)
        except RuntimeError as error:
            if isinstance(error, PacelineError):
                raise
            raise self.failed(error) from None
        self.outside = self._later is not None
        if self.outside:  # the others wait for it in their next round
            self.rank, self.size, self.workers = 1, 2, (-1, self._member.id)
        elif self._rank == 0:
            self._note_loop()
            threading.Thread(target=_tidy, args=(self._aside.clone(), self._number), daemon=True).start()

    def _change(self, said: Sequence[dict[str, Any]]) -> Change:
        assert self._now is not None
        facts = [theirs["training"] for theirs in said]
        return change_to(self._now, workers=self.workers, renewed=self._renewed, gone=self._gone, facts=facts)

    def follow(self) -> None:
        """The training follows the group's membership, before its next call; by whichever thread comes first."""
        if self._unfollowed is None:
            return
        self._free.wait()
        with self._recovering:
            change, self._unfollowed = self._unfollowed, None
            if change is not None and self.settler is not None:
                self.settler.follow(change, partial(self._show, change))
            elif change is not None:
                self._show(change)

    def release(self) -> None:
        """The books of a round aside are closed: the training may follow who is there now."""
        self._free.set()

    def _show(self, change: Change) -> None:
        self._renewed, self._gone = set(), {}
        self.workers, self.generation = change.generation.workers, change.generation.number
        self.rank, self.size = self.workers.index(self._member.id), len(self.workers)

    def _adopt_slots(self, known: Sequence[Sequence[str]]) -> None:
        """Names were numbered one after another, so everybody knows a beginning of the same list."""
        longest = max(range(len(known)), key=lambda number: len(known[number]))
        self._slots = {name: slot for slot, name in enumerate(known[longest])}

    def _hand_over(self, name: str, said: Sequence[dict[str, Any]], incumbents: Sequence[int]) -> None:
        """Those who finished the last call give its result to those who did not."""
        intact = {rank: bool(said[rank]["intact"]) for rank in incumbents} if name == CALLS else None
        given = gift({rank: said[rank]["lanes"][name] for rank in incumbents}, intact=intact)
        if given is None:
            return
        if given.giver is None:
            if self._rank in given.behind:
                raise Dropped("the last round's result was changed in place by an optimiser, and cannot be handed over")
            return
        hand_over = self._hand_over_facts if given.facts else self._hand_over_tensors
        hand_over(name, given.giver, given.behind)
        if self._rank in given.behind:
            self._lanes[name].finish_given(facts=given.facts)
            if name == ROUNDS:
                self._free.clear()

    def _hand_over_facts(self, name: str, giver: int, behind: Sequence[int]) -> None:
        lane, key = self._lanes[name], f"given/{name}"
        if self._rank == giver:
            self._store.set(key, json.dumps(lane.result))
        elif self._rank in behind:
            self._await([key], self._store)
            lane.result = list(json.loads(self._store.get(key)))

    def _hand_over_tensors(self, name: str, giver: int, behind: Sequence[int]) -> None:
        lane = self._lanes[name]
        if self._rank == giver:  # whether it came shows in the next call
            for number, tensor in enumerate(lane.kept):
                data = _bytes_of(tensor)
                self._sent += [(data, self._engine.send([data], rank, number)) for rank in behind]
        elif self._rank in behind:  # not into the call's own tensors: what was cut short may still write there
            received = []
            for number, tensor in enumerate(lane.pending):
                data = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
                self.receive(data, giver, number)
                received.append(data.view(tensor.dtype).view(tensor.shape))
            lane.kept = received

    def _pass_state(self, giver: int, newcomers: Sequence[int]) -> None:
        """At a step boundary: the giver packs its state and sends it while it goes on; a newcomer waits for it."""
        if self._rank not in newcomers:
            self.follow()
        if self.settler is not None and self._rank == giver:
            data, group = self.settler.give(), self._group
            for rank in newcomers:
                threading.Thread(target=_send_state, args=(group, data, rank), daemon=True).start()
        elif self._rank in newcomers:
            self._take_state(giver)

    def _take_state(self, giver: int) -> None:
        size = torch.zeros(1, dtype=torch.int64)
        self.receive(size, giver, STATE_TAG)
        data = torch.empty(int(size), dtype=torch.uint8)
        self.receive(data, giver, STATE_TAG + 1)
        change, self._unfollowed = self._unfollowed, None
        assert change is not None
        assert self.settler is not None
        self._show(change)
        if not self.settler.take(data, change):
            self._later = (data, change)

    def take_later(self) -> bool:
        """The script of a newcomer has come to the loop that the fleet was in when it entered. False: the fleet was
        formed anew meanwhile, so it is to enter as one who is new."""
        later, self._later = self._later, None
        if later is None or self._over >= self._number:
            return False
        assert self.settler is not None
        self._show(later[1])
        self.outside = not self.settler.take(*later)
        return not self.outside

    # -- calls -----------------------------------------------------------------------------------------------------

    def _enter(self, label: str, *, lane: str) -> int:
        self.follow()
        number = self._lanes[lane].enter(label)
        self._report()
        return number

    def _leave(self, *, lane: str) -> None:
        self._lanes[lane].waiting = False
        self._report()

    def _finish(
        self, lane: str, began: int, *, facts: list[Any] | None = None, kept: Sequence[torch.Tensor] = ()
    ) -> bool:
        """A call that began in this generation has ended. False: it has not, for another thread has formed the fleet
        anew, and told the others so."""
        with self._recovering:
            if self._number != began:
                return False
            self._lanes[lane].finish(facts=facts, kept=kept)
            return True

    @contextmanager
    def round(self, label: str, *, aside: bool = False, keeps: Sequence[torch.Tensor] = ()) -> Iterator[None]:
        lane = ROUNDS if aside else CALLS
        self._lanes[lane].pending = keeps
        with super().round(label, aside=aside):
            began = self._number
            yield
        if not self._finish(lane, began, kept=keeps):
            raise self._why_over()  # the new one too: some of the sums may have begun there

    @torch.no_grad()
    def given(self, into: Sequence[torch.Tensor], *, aside: bool = False) -> bool:
        """After `recover`: whether others had finished the round under way; what it gave then stands in ``into``."""
        lane = self._lanes[ROUNDS if aside else CALLS]
        if not lane.given:
            self.follow()
            return False
        for mine, theirs in zip(into, lane.kept, strict=True):
            mine.copy_(theirs)
        lane.given, lane.result = False, None
        return True

    def gather(self, label: str, value: Any) -> list[Any]:
        if self.outside:
            mine = json.dumps(value() if callable(value) else value)
            return [json.loads(mine) for _ in range(self.size)]
        call = self._enter(label, lane=CALLS)
        try:
            return self._try_gather(call, label, value)
        finally:
            self._leave(lane=CALLS)

    def _try_gather(self, call: int, label: str, value: Any) -> list[Any]:
        lane = self._lanes[CALLS]
        while True:
            began, mine = self._number, value() if callable(value) else value
            try:
                values = self._gather(f"call/{call}", label, mine)
                if self._finish(CALLS, began, facts=values):
                    return values
            except RuntimeError as error:
                self._recover_in(label, error)
            if lane.given:
                lane.finish(facts=lane.result, kept=())
                return list(lane.result or [])
            self.follow()

    def _recover_in(self, label: str, error: Exception) -> None:
        if isinstance(error, PacelineError) and not isinstance(error, GenerationOver):
            raise error
        over = self.failed(error)  # the store's errors too: the roster may be gone, and come back
        if not isinstance(over, GenerationOver):
            raise over
        try:
            self.recover(over)
        except Dropped as dropped:
            raise FleetError(f"{label}: {dropped}; start it again, and it enters anew") from None

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        while not self.outside:
            try:
                super().broadcast(tensors)
                return
            except GenerationOver as over:
                self._recover_in("the leader's broadcast", over)
                if self.given(tensors):
                    return

    def _broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._size > 1:
            super()._broadcast(tensors)

    def sum(self, tensor: torch.Tensor) -> Pending:
        self.follow()
        return super().sum(tensor)

    def slot_name(self, slot: int) -> str:
        while True:
            try:
                return super().slot_name(slot)
            except GenerationOver as over:  # the roster is away: wait for it, and the worker that gave the name tells
                self._recover_in("the name of a figure", over)

    def heard(self, name: str) -> bool:
        self.follow()
        self._check()
        try:
            said = bool(self._board.check([name]))
        except RuntimeError:  # the roster is away: each worker goes by what it knows itself
            self.deaf = True
            return False
        self.deaf = False
        return said

    def signal(self, name: str) -> None:
        with suppress(GenerationOver):  # whoever listens learns of that too
            super().signal(name)

    def tally(self, name: str) -> int:
        with suppress(GenerationOver):
            return super().tally(name)
        return 0

    def forget(self, name: str) -> None:
        with suppress(GenerationOver):
            super().forget(name)

    def _started(self, start: Callable[..., Any], *args: Any, whole: bool = True) -> Pending:
        """Never raises: sums start inside backward, which must come to its end."""
        if self._over >= self._number:
            return Never(self._why_over())
        try:
            return super()._started(start, *args, whole=whole)
        except GenerationOver as over:
            return Never(over)

    @property
    def _engine(self) -> Any:
        if self._group is None:  # another thread forms it anew
            raise self._why_over()
        return self._group

    def _start_sum(self, tensor: torch.Tensor) -> Any:
        return Already() if self._size == 1 else super()._start_sum(tensor)

    def _check(self) -> None:
        if self._member.failure is not None:
            raise self._member.failure
        if self._over >= self._number:
            raise self._why_over()

    def _check_store(self, store: Store) -> None:
        """Another thread may have formed the fleet anew before this one saw that its generation was over."""
        if store is not self._store:
            raise GenerationOver("the fleet was formed anew", generation=self._number - 1)

    def _why_over(self) -> GenerationOver:
        return GenerationOver(f"generation {self._number} is over", generation=self._number)

    def failed(self, error: BaseException) -> Exception:
        if isinstance(error, GenerationOver):
            return error
        if (died := LoaderDied.told_by(error)) is not None:
            return died
        return self._member.failure or GenerationOver(one_line(error), generation=self._number)

    def _unlike_calls(self, labels: dict[int, str]) -> Exception:
        said = ", but ".join(f"worker {self.workers[rank]} called {label}" for rank, label in labels.items())
        return FleetError(f"{said}: {SAME_CALLS}")

    @property
    def calls(self) -> int:
        return self._lanes[CALLS].finished

    @calls.setter
    def calls(self, calls: int) -> None:
        self._lanes[CALLS] = Lane(entered=calls, finished=calls)

    @property
    def rounds(self) -> int:
        """Rounds aside that this worker has finished."""
        return self._lanes[ROUNDS].finished

    @rounds.setter
    def rounds(self, rounds: int) -> None:
        self._lanes[ROUNDS] = Lane(entered=rounds, finished=rounds)

    def doing(self, what: str, *, begun: int | None = None) -> None:
        self._doing = what
        self._begun = self._begun if begun is None else begun
        self._report()

    def _report(self) -> None:
        spots = {name: (lane.entered, lane.label, lane.waiting) for name, lane in self._lanes.items()}
        self._member.report(doing=self._doing, begun=self._begun, spots=spots)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self, *, failure: BaseException | None = None) -> None:
        try:
            if failure is None and not self.outside:
                self.gather("the end of the run", None)
                self._member.leave("finished")
            elif failure is not None and not self.outside:
                self._member.leave(WAITED if isinstance(failure, Leave) else f"ended with {one_line(failure)}")
        finally:
            self._member.close()
            self._bury()
            if self._undertaker is not None:  # the interpreter must not end under it
                self._undertaker.join(timeout=BURY_S)


def _make(make: Callable[[], Any], made: list[Any]) -> None:
    try:
        made.append(make())
    except RuntimeError as error:
        made.append(error)


def _let_go(grave: list[Any], gpus: NcclGroup | None) -> None:
    while grave:  # the group last: what runs in it needs it
        grave.pop(0)
    if gpus is not None:
        gpus.close()


def _tidy(store: Store, number: int) -> None:
    """Forget what generations before the last one said, by a connection of its own."""
    with suppress(RuntimeError, AttributeError):  # the roster is away, or this store cannot list its keys
        for key in store.list_keys():
            generation = key.removeprefix("/").removeprefix(PREFIX).partition("/")[0]
            if generation.isdigit() and int(generation) < number - 1:
                store.delete_key(key)


def _send_state(group: Any, data: torch.Tensor, to: int) -> None:
    """If it cannot be sent, the newcomer is gone or the generation over: either shows elsewhere."""
    try:
        group.send([torch.tensor([data.numel()], dtype=torch.int64)], to, STATE_TAG).wait(ENGINE_TIMEOUT)
        group.send([data], to, STATE_TAG + 1).wait(ENGINE_TIMEOUT)
    except RuntimeError as error:
        logger.info("the state for worker %d was not sent: %s", to, one_line(error))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
