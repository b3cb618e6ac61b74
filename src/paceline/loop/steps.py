"""The steps of a training, one after another: plan, deal, work, round, commit.

The user's thread runs the loop. Rounds that wait for everybody run on it too, and overlap with its backward; rounds
with a deadline are the proxy's (proxy.py), and this thread takes over what they gave. What a step did enters the feed,
the history and every worker's pacer once, in the books (loop/training_state.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.checkpoint import content as checkpoint
from paceline.combine import Gradients, Header
from paceline.combine.gradients.gradients import Aside
from paceline.combine.gradients.scaling import is_active
from paceline.deadline.catch_up import Copies
from paceline.deadline.in_flight import Flights
from paceline.deadline.proxy import Proxy
from paceline.deadline.side_stream import Beside
from paceline.errors import Dropped, GenerationOver, MisuseError, NonFiniteGradients
from paceline.feed import Generators
from paceline.feed.dealing import Dealing
from paceline.loop.hyperparameters import changed_rate, unlike_settings
from paceline.loop.passes import LoopPlace
from paceline.loop.replicas import Repair, fingerprint
from paceline.loop.schedules import held_at_their_end
from paceline.loop.step import Step
from paceline.loop.step_recording import has_gradient, record_of, said, void_record
from paceline.loop.step_state import Turn, Work
from paceline.loop.tracking import Tracked
from paceline.loop.training_state import Books, differ
from paceline.loop.user_code import refuse_closures
from paceline.pace import Pacer, may_set_deadlines
from paceline.pace.fitting import RECENT, fit, ladder, recent_pace
from paceline.records import History, Plan, StepRecord
from paceline.settings import LoopSettings, must_agree
from paceline.transport import Transport

if TYPE_CHECKING:
    from paceline.loop.membership import Members
    from paceline.machines import Machine

FINGERPRINT_EVERY = 100
"""Steps between two comparisons of the replicas' parameters, and how long a repair must hold."""
FIRST_FINGERPRINTS = (1, 2, 4, 8, 16, 32, 64)
"""Steps at which they are compared too: what parts them mostly does so from the beginning."""


class Steps:
    """What ``fleet.steps`` returns: iterate it for steps; ``len(steps)`` is their number over all epochs.

    A script needs these and ``index``, ``rounds`` and ``progress``; the other members are for the library's own parts.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        pacer: Pacer,
        gradients: Gradients,
        dealing: Dealing,
        settings: LoopSettings,
        unit: int,
        avoid_singles: bool,
        seed: int,
        device: torch.device,
        machine: Machine | None,
        nonfinite: str,
        history: History,
        first_index: int,
        place: LoopPlace,
        observe: Callable[[str, Mapping[str, Any]], None],
        repair: Callable[[], Repair],
        tracking: Tracked,
        snapshot: Callable[[], dict[str, Any]],
        restore: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.gradients, self.dealing, self.device, self.machine, self.seed = gradients, dealing, device, machine, seed
        self.settings, self.auto = settings, settings.auto
        self._whole = unit > 1
        dealing.smallest = 2 if avoid_singles else 1
        self.paces: deque[float] = deque(maxlen=RECENT)
        """Seconds a sample of this worker's last micro-batches."""
        self._beside = Beside(device)
        self._transport, self._nonfinite = transport, nonfinite
        self._observe, self._repair = observe, repair
        self._tracking, self._snapshot, self._restore = tracking, snapshot, restore
        tracking.forget_steps()
        self._copies = Copies(transport)
        self.books = Books(
            transport=transport,
            pacer=pacer,
            dealing=dealing,
            settings=settings,
            unit=unit,
            avoid_singles=avoid_singles,
            history=history,
            first_index=first_index,
            first_epoch=place.first_epoch,
            observe=observe,
        )
        self.place = place
        self._flights = Flights(
            device, beside=self._beside, gradients=gradients, changed=self.books.changed, paces=self.paces
        )
        others = transport.size > 1 or transport.elastic
        self._proxy = self._make_proxy() if others and may_set_deadlines(pacer) else None
        self.members: Members | None = None
        """Follows who is there, where workers come and go."""
        self.at_boundary: Callable[[Steps], None] = lambda steps: None
        """Called between two steps, and after the last: the state is whole then."""
        self.before_first: Callable[[Steps], None] = lambda steps: None
        self.after_first = self.before_first
        """Called before the first step, when the script has brought everything, and before the second."""
        self._begun = 0
        self.copyable = True
        """Whether a copy of a peer's state would hold everything that has state."""
        self.dataset_length: int | None = None
        self.alike = True
        """Whether all workers have the same kind of device; others round differently, and are compared less often."""
        self.micro_batches: int | None = None
        """What a DataLoader would count as steps, in all epochs."""
        self.finished = self._closed = False
        self.left = False
        """Whether the script has come to the end of the loop, or has left it."""
        self._turns: dict[int, Turn] = {}
        self._first = self._next = first_index
        self._progress = 0.0
        self._agreed_epoch = -1
        self._repaired: int | None = None
        """The step after which replicas were made equal last."""
        self._step: Step | None = None
        self.full_shares: tuple[int, ...] = ()
        """The shares of the last step of a whole global batch that this worker's loop began; empty before the first."""
        self._commit_s = 0.0
        self._checked: set[int] = set()

    def _make_proxy(self) -> Proxy:
        if self.dealing.length is None:
            raise ValueError(
                "rounds with a deadline (pace joint or cutoff) need a dataset with a length: an iterable one cannot "
                "give again what a deadline cut off; use pace adaptive"
            )
        return Proxy(
            beside=self._beside,
            landed=self._flights.count_landed,
            transport=self._transport,
            books=self.books,
            gradients=self.gradients,
            header=self._write_header,
            record=self._bounded_record,
            opened=self._register,
            copyable=lambda: self.copyable and not self._tracking.stepped_untracked(),
        )

    # -- the loop --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self.dealing.length is None:
            raise TypeError("an iterable dataset does not say how many steps it makes")
        if self.most is None:
            raise TypeError(
                "with rounds by the clock a fast worker makes more steps than a slow one, so nobody knows how many: "
                "follow step.progress, or use paceline.Averaging(every_steps=...)"
            )
        self.books.promised = self.most // self.settings.epochs
        return self.most

    @property
    def most(self) -> int | None:
        """The number of steps, where it is known: no worker makes more."""
        if self.dealing.length is None:
            return None
        return -(-self.dealing.length // self.settings.global_batch) * self.settings.epochs

    @property
    def _beyond_promise(self) -> bool:
        """Whether the open step is one more than the number of steps: workers were lost in the very last one."""
        length, books = self.dealing.length, self.books
        last = books.dealing.epoch == books.end_epoch - 1
        return last and length is not None and books.epoch_step * self.settings.global_batch >= length

    def __iter__(self) -> Iterator[Step]:
        self.left = False
        try:
            while not self.finished:
                if self.members is not None and self.members.passed_by:
                    self.finished = True
                    return
                step = self._begin()
                if step is None:
                    self.finished = True
                    return
                self._step = step
                with held_at_their_end(self._tracking.things.values()) if self._beyond_promise else nullcontext():
                    yield step
                self._require_committed()
            if self._begun == 1:  # there was one step
                self._look_at_the_script()
            self.at_boundary(self)
        finally:
            self.left = True
            if self.finished:
                self._copies.give(self._packed)
            self._transport.doing("after the last step")

    def _begin(self) -> Step | None:
        """The next step. None: the fleet is in a later loop, which this newcomer's script has to come to first."""
        self._require_open()
        self._look_at_the_script()
        if self.members is not None:
            self.members.at_boundary()
            if self.members.still_outside:
                return None
        self._copies.give(self._packed)
        if self._proxy is not None:
            self._take_copy(self._proxy)
        self.at_boundary(self)
        began = time.perf_counter()
        self._transport.doing(f"step {self._next}", begun=self._next + 1)
        turn = self._turns.get(self._next) or self._open_here()
        own_print, own_rates = self._fingerprint(turn), self._tracking.digest()
        with self.books.changed:
            if turn.dealt >= self.settings.global_batch and turn.generation == self._transport.generation:
                self.full_shares = turn.plan.samples
            missed = turn.closed
            share = 0 if missed else turn.shares[self._transport.rank]
            self.dealing.take_up(share)
            if not missed:
                turn.start(began)
                turn.fingerprint, turn.rates = own_print, own_rates
            self._flights.clear()
            self.gradients.begin(turn.dealt)
            self._beside.follow()
        if turn.bounded and not missed:
            assert self._proxy is not None
            self._proxy.begun(turn)
        return Step(self, turn, share=share, began=began)

    def _look_at_the_script(self) -> None:
        """Before the first step, and before the second: what the first one used shows by then."""
        if self._begun < 2:
            (self.after_first if self._begun else self.before_first)(self)
            self._begun += 1

    def _open_here(self) -> Turn:
        """Open a turn on this thread: the first, or one after a round that waited for everybody."""
        self._check_order()  # first: the plan is for those who are there after it
        plan = self.books.plan or self._hand_round_plan()
        turn = self.books.open(plan)
        self._register(turn)
        if self._proxy is not None:
            self._proxy.watch(turn)
        return turn

    def _register(self, turn: Turn) -> None:
        self._turns[turn.index] = turn

    def _hand_round_plan(self) -> Plan:
        """The leader hands a plan round: for the first step and, since then there is something to know about the
        machines and equal shares may be very wrong for them, for the second too."""

        def mine() -> dict[str, Any] | None:
            return self.books.first_plan().to_json() if self._transport.rank == 0 else None

        return Plan.from_json(self._transport.gather("the plan of the first steps", mine)[0])

    def _check_order(self) -> None:
        """A custom order must be the same on every worker, or samples would be lost and doubled in silence."""
        if self._agreed_epoch == self.dealing.epoch:
            return
        self._agreed_epoch = self.dealing.epoch
        if (digest := self.dealing.order_digest()) is not None:
            must_agree(self._transport, f"order({self.dealing.epoch})", {"the order's digest": digest})

    def _require_open(self) -> None:
        if self._closed:
            raise MisuseError("this loop has ended: a later fleet.steps took its place, or the fleet was left")

    def _require_committed(self) -> None:
        if self._step is not None and not self._step.committed:
            raise MisuseError(f"step {self._step.index} was not committed: call step.commit(optimizer) in every step")

    @property
    def leaving(self) -> bool:
        """This worker was asked to leave: it takes no further micro-batch, and what it has left is dealt to others."""
        return self.members is not None and self.members.leaving

    @property
    def hands_over_state(self) -> bool:
        """Whether a worker's state may have to be taken over by another one."""
        return self._transport.elastic or self._proxy is not None

    @property
    def begun(self) -> bool:
        """Whether the first step has been given out."""
        return self._step is not None

    @property
    def index(self) -> int:
        """The next step's index."""
        return self._next

    @property
    def current_index(self) -> int:
        """The index of the step that the loop is in, its commit included; before the first, the first's."""
        return self._next if self._step is None else self._step.index

    @property
    def rounds(self) -> int:
        """Shared updates so far."""
        return self._next

    @property
    def progress(self) -> float:
        """The part of the whole training that is done, in [0, 1]; the same on every worker."""
        return self._progress

    def meet(self, label: str) -> AbstractContextManager[Any]:
        """Everybody comes to this call, with equal parameters: a step's commit has seen to that."""
        self._copies.decline()  # who waits for one must come here too, on its own way
        return nullcontext()

    def models_were_set(self) -> None:
        """A checkpoint was loaded behind this loop: the models have other weights than its last round left."""
        self.gradients.statistics_were_set()

    def shown(self) -> AbstractContextManager[Any]:
        """In the context the parameters are those to show and to save."""
        return nullcontext()

    def renew_data(self) -> None:
        """Hand the dataset as it is now to this worker's loader processes: for ``persistent_workers``, or in the middle
        of an epoch. Without persistent workers every epoch begins with it."""
        self.dealing.renew()

    def learn_with(self, learn: Callable[[StepRecord], None] | None) -> None:
        """Who hears of every record."""
        self.books.learn = learn

    # -- far behind --------------------------------------------------------------------------------------------------

    def _take_copy(self, proxy: Proxy) -> None:
        """Take over a peer's state where one was promised, and with it the peer's place in the training."""
        with self.books.changed:
            self.books.changed.wait_for(lambda: proxy.error or proxy.copied is None or proxy.copied.here)
            copy, proxy.copied = proxy.copied, None
        error = proxy.error or (copy.error if copy is not None else None)
        if error is not None:
            raise error
        if copy is None:
            return
        state = checkpoint.unpack(copy.data, device=self.device)
        skipped = copy.index + 1 - self._next
        self._take_place(state)
        assert self._next == copy.index + 1
        with self.books.changed:
            for index in [index for index in self._turns if index < self._next]:
                self._copies.note(self._turns.pop(index))
        self._copies.decline()
        text = f"worker {self._transport.rank} was {skipped} steps behind and took over a peer's state"
        self._observe("note", {"level": "warning", "text": text})

    def _take_place(self, state: Mapping[str, Any]) -> None:
        """Take over a peer's replica and its place in the training."""
        self._restore(state)
        self.gradients.train_only(state["trained"])
        self.gradients.load_state_dict(state["gradients"])
        self.gradients.statistics_were_set()
        self._transport.calls = state["calls"]
        self._next, self.finished, self._progress = state["next"], state["finished"], state["progress"]
        self.full_shares = tuple(state["full_shares"])
        numbers = Generators()
        numbers.load_state_dict(state["random"])
        numbers.restore()

    def _place(self) -> dict[str, Any]:
        """This worker's replica and its place in the training, at a step boundary."""
        return {
            **self._snapshot(),
            "gradients": self.gradients.state_dict(),
            "calls": self._transport.calls,
            "next": self._next,
            "finished": self.finished,
            "progress": self._progress,
            "full_shares": list(self.full_shares),
            "trained": self.gradients.trained,
            "random": Generators().state_dict(),
        }

    def _packed(self) -> torch.Tensor:
        return checkpoint.pack(self._place())

    # -- newcomers ---------------------------------------------------------------------------------------------------

    @property
    def open_turn(self) -> Turn | None:
        """The step under way, unless its books are closed."""
        return self._turns.get(self.books.index)

    def whole_state(self) -> dict[str, Any]:
        """At a step boundary: everything that a newcomer needs to be where this worker is."""
        with self.books.changed:
            order = self.dealing.order_digest()
            books = self.books.whole_state()
        proxy = self._proxy.place if self._proxy is not None else None
        epoch = self._agreed_epoch
        return {
            **self._place(),
            "books": books,
            "agreed_epoch": epoch,
            "order": order,
            "seed": self.seed,
            "proxy": proxy,
        }

    def take_over(self, state: Mapping[str, Any], *, ahead: Sequence[int]) -> None:
        """A peer's `whole_state`: this worker goes on where the peer is."""
        self._take_place(state)
        with self.books.changed:
            self.books.take_over(state["books"], ahead=ahead)
            if self.dealing.order_digest() != state["order"]:
                raise ValueError(f"this worker's order({self.dealing.epoch}) is not the fleet's")
            self._turns.clear()
            if self._proxy is not None:
                self._proxy.stop()
                self._proxy = self._make_proxy()
                self._proxy.take_place(state["proxy"])
            self._agreed_epoch, self.seed = state["agreed_epoch"], state["seed"]

    def follow(self, kept: Sequence[int | None]) -> None:
        """Members changed: by new rank, ``kept`` says who they were."""
        self._copies.forget()
        if self._proxy is not None:
            self._proxy.forget_copy()

    # -- work under a deadline ---------------------------------------------------------------------------------------

    def room(self, turn: Turn) -> int | None:
        """The samples that the time left allows; 0: none. None: there is no deadline."""
        if turn.until is None:
            return None
        whole, smallest = self.dealing.micro_batch, self.dealing.smallest
        sizes = [size for size in ladder(whole) if size >= smallest] if not self._whole else [whole]
        fits = fit(turn.until - time.perf_counter(), recent_pace(list(self.paces)), sizes)
        return fits or (0 if turn.work.samples else sizes[-1])  # try, or a slow worker would never be seen to recover

    def taking(self, turn: Turn, now: float) -> bool:
        """The loop wants a micro-batch: False when the round closed without it."""
        with self.books.changed:
            turn.busy_since = now if turn.open else None
            return not turn.closed

    def check(self, turn: Turn) -> bool:
        """Before a backward, and before it joins: False when it would be for nothing."""
        with self.books.changed:
            if turn.open:
                self.gradients.check_aside()
            return turn.open

    def add_figures(self, turn: Turn, figures: dict[str, Any]) -> None:
        """Figures of ``step.add`` that belong to no micro-batch."""
        with self.books.changed:
            turn.work.add(Work(added=figures))

    def finished_one(self, turn: Turn, done: Work, aside: Aside | None, began: float) -> None:
        """The loop is done with a micro-batch that it took at ``began``: it counts once the device is done with it."""
        self.check(turn)
        self._flights.start(turn, done, aside or self.gradients.no_gradient(), began)
        with self.books.changed:
            self.gradients.show()

    def more(self, turn: Turn) -> bool:
        """The share is done: whether another lap has more."""
        assert self._proxy is not None
        if turn.closed or not turn.last:
            return False
        self._flights.land(turn)  # else what is dealt again might still come in
        try:
            return self._proxy.idle(turn, gone=False)
        except Dropped:  # the commit says so
            return False

    # -- the round -------------------------------------------------------------------------------------------------

    def exchange(self, step: Step, clip_norm: float | None, *, own: bool) -> bool:
        """Run the step's round; True when there is a gradient to apply, which then is in ``p.grad``. ``own``: code of
        the user's own comes before the update."""
        turn = step.turn
        here = True
        try:
            if turn.bounded:
                here = self._await_round(turn)
            else:
                self._run_round(turn)
        except Dropped as dropped:
            self._give_up(step, dropped)
            return False
        header = turn.header
        assert header is not None
        self._compare_rates(turn, header)
        apply = self._may_apply(step, header) and here
        if apply:
            self.gradients.mean(header, clip_norm, own=own)
        if not turn.bounded:
            turn.record = replace(self._record(turn, header), grad_norm=self.gradients.known_norm if apply else None)
            step.record = self.dealing.told(turn.record)
        else:
            step.record = turn.record
        return apply

    def _run_round(self, turn: Turn) -> None:
        """A round that waits for everybody, on this thread."""
        if self.members is not None:
            self.members.keep_up()
        finite = self.gradients.finish()
        entered = time.perf_counter()
        while True:
            try:
                header = self._write_header(turn, True, finite)
            except GenerationOver as over:  # the store that names figures is away
                self.gradients.recover(over)
                continue
            if self.gradients.exchange(header, turn.work.samples, f"the round of step {turn.index}"):
                break
        waited = time.perf_counter() - entered
        self._round_s = max(0.0, waited - float(header.column("seconds").max() - turn.work.seconds))
        turn.header = header

    def _give_up(self, step: Step, dropped: Dropped) -> None:
        """The fleet went on without this worker: its step does not count, and the next begins with a peer's state."""
        turn = step.turn
        turn.void = True
        step.record = turn.record = void_record(turn)
        self._observe("note", {"level": "warning", "text": f"step {turn.index}: {dropped}; it enters anew"})

    def _await_round(self, turn: Turn) -> bool:
        """A round that the proxy runs; it may be over long since. False: a peer's state is taken over instead."""
        proxy = self._proxy
        assert proxy is not None
        self._flights.land(turn)
        if turn.open and turn.began is not None:
            self.check(turn)
        if not turn.over:
            proxy.idle(turn, gone=True)
        with self.books.changed:
            self.books.changed.wait_for(lambda: turn.over or proxy.error)
        if not turn.over and proxy.error is not None:
            raise proxy.error
        assert turn.header is not None
        self.gradients.show()
        self._beside.rejoin()
        self._copies.note(turn)
        total = turn.total
        if total is None:
            self._copies.decline()
            return False
        self._beside.lend([*total.flats, total.statistics])
        self.gradients.adopt(total, turn.header)
        return True

    def _write_header(self, turn: Turn, counts: bool, finite: bool) -> Header:
        header, work = Header(self.gradients.layout), turn.work if counts else Work()
        overflow = not finite and is_active(self.gradients.scaler)
        busy = 0.0 if turn.idle or not turn.bounded else time.perf_counter() - (turn.busy_since or turn.opened)
        header.write(
            self._transport.rank,
            samples=work.samples,
            weight=float(work.weight),
            loss=float(work.loss_sum),
            squares=self.gradients.squares(float(work.weight)) if counts else 0.0,
            seconds=turn.work.seconds,
            micro_batches=work.micro_batches,
            slowest_s=work.slowest_s,
            shortfall_s=work.shortfall_s,
            unfinished_s=busy,
            behind=max(0, turn.index - self._next),
            late_s=self._flights.late_s(),
            overflow=overflow,
            nonfinite=not finite and not overflow,
            ended=self.dealing.ended or turn.shares[self._transport.rank] == 0,
            fingerprint=turn.fingerprint,
            rates=turn.rates,
            **(self.members.intentions() if self.members is not None else {}),
        )
        self._add_figures(header, work.added)
        if turn.next_plan is not None:
            header.write_plan(turn.next_plan)
        return header

    def _add_figures(self, header: Header, added: Mapping[str, Any]) -> None:
        """Figures of ``step.add``, under the numbers that the fleet knows their names by."""
        for name, value in added.items():
            header.add(self._transport.slot(name), float(value))

    def _said(self, header: Header) -> dict[str, Any]:
        return said(header, self._transport.slot_name)

    def _may_apply(self, step: Step, header: Header) -> bool:
        bad = np.flatnonzero(header.column("nonfinite"))
        if bad.size and self._nonfinite == "stop":
            raise NonFiniteGradients(self._nonfinite_text(step, header, bad.tolist()))
        if bad.size:
            self._warn_all(self._nonfinite_text(step, header, bad.tolist()))
        return has_gradient(header)

    def _nonfinite_text(self, step: Step, header: Header, workers: list[int]) -> str:
        losses = header.column("loss")[workers]
        who = " and ".join(f"worker {worker}" for worker in workers)
        loss = "its loss was finite" if np.isfinite(losses).all() else "the loss itself was NaN or infinite"
        said = f"{who} had NaN or infinite gradients in step {step.index} ({loss})"
        if self._nonfinite == "skip":
            return f"{said}: the update was skipped"
        skip = 'paceline.join(nonfinite="skip") leaves such steps out'
        return f"{said}: stopped before the update. {skip}; a GradScaler must be tracked with fleet.track(scaler=...)"

    def _record(self, turn: Turn, header: Header) -> StepRecord:
        emulated = self.machine is not None
        return record_of(turn, header, self._transport.slot_name, round_s=self._round_s, emulated=emulated)

    def _bounded_record(self, turn: Turn, header: Header, entered: float) -> StepRecord:
        """The record of a round that the proxy ran: it is over now, and this worker entered it then."""
        wall_s = time.perf_counter() - turn.opened
        busy = float((header.column("seconds") + header.column("unfinished_s")).max())
        latest = max(entered - turn.opened, min(busy, turn.plan.deadline_s or busy))
        self._round_s = max(0.0, wall_s - latest)
        return replace(self._record(turn, header), wall_s=wall_s + self._commit_s)

    # -- the commit ------------------------------------------------------------------------------------------------

    def commit(self, step: Step, updated: float) -> None:
        """The step is over on this worker. In a round without a deadline the books change here; ``updated``: since when
        the update was under way."""
        turn = step.turn
        header = turn.header
        if turn.void:
            self.gradients.clear(overflow=False)
            self._turns.clear()
            return
        assert header is not None
        if self.members is not None:
            self.members.closed(turn, header)
        self.gradients.clear(overflow=bool(header.column("overflow").any()))
        self._next += 1
        if not turn.bounded:
            self._close_books(turn, header, step.began)
        elif self._proxy is not None:
            self._proxy.taken_over(turn)
        self._turns.pop(turn.index, None)
        step.record, step.ends_epoch = turn.record, turn.ends_epoch  # a stream's end shows only now
        self.finished, self._progress = turn.finishes, turn.progress
        self._commit_s = time.perf_counter() - updated
        if not turn.bounded:
            self._compare_replicas(turn, header)
        self._transport.doing(f"its own code after step {step.index}")

    def _close_books(self, turn: Turn, header: Header, began: float) -> None:
        assert turn.record is not None
        with self.books.changed:
            record = self.books.close(turn, header, replace(turn.record, wall_s=time.perf_counter() - began))
            turn.over = turn.closed = True
            self.books.changed.notify_all()
        self.books.note(record)

    def grad_norm(self, step: Step) -> float:
        """What ``step.grad_norm`` says: the norm of the step's mean gradient before clipping."""
        if step is not self._step or step.record is None:
            raise MisuseError(
                f"the gradients of step {step.index} are no longer there: ask before the next step begins"
            )
        return self.gradients.norm() if step.applied else float("nan")

    # -- watchfulness ----------------------------------------------------------------------------------------------

    def _fingerprint(self, turn: Turn) -> float:
        early = self.alike and turn.index in FIRST_FINGERPRINTS
        regular = turn.index % FINGERPRINT_EVERY == 0 or early
        due = self._transport.size > 1 and (regular or turn.compare)
        return 1.0 + fingerprint(self.gradients.everything) if due else 0.0

    def rates(self) -> list[Any]:
        """The learning rates of all known optimisers now."""
        return self._tracking.rates()

    def check_rates_held(self, after_first: Sequence[Any]) -> None:
        """Raise MisuseError when they have changed since this worker's first micro-batch of the step: a step has one
        update, and another worker has another number of micro-batches."""
        if (now := self.rates()) != after_first:
            groups = [name for name, _ in self._tracking.hyperparameters()]
            raise MisuseError(changed_rate(groups, after_first, now, step=self._next))

    def _compare_rates(self, turn: Turn, header: Header) -> None:
        """Every worker must update with the same learning rates and other settings of its optimisers."""
        said = header.column("rates")
        if len(set(said[said > 0].tolist())) > 1:
            everybody = self._transport.gather("comparing learning rates", self._tracking.hyperparameters)
            if said_so := unlike_settings(everybody, step=turn.index, missing=self._tracking.missing()):
                raise MisuseError(said_so)

    def _compare_replicas(self, turn: Turn, header: Header) -> None:
        if not differ(header):
            return
        found, again = self._repair(), self._repaired
        self.gradients.statistics_were_set()
        self._repaired = turn.index
        within = again is not None and turn.index - again <= FINGERPRINT_EVERY
        text = found.text(turn.index, missing=self._tracking.missing())
        if within and not found.harmless:
            raise MisuseError(
                f"{text}. It is the second time within {FINGERPRINT_EVERY} steps, so making them equal does not help: "
                "stopped"
            )
        self._warn_all(f"{text}. Parameters and everything tracked were set to worker 0's")

    def _warn_all(self, text: str) -> None:
        """A warning that every worker has: the leader's is enough."""
        self._observe("note", {"level": "warning", "text": text, "everywhere": True})

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """An optimiser of parameters that are not the fleet's would let replicas drift apart."""
        for optimizer in optimizers:
            if id(optimizer) in self._checked:
                continue
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise ValueError(f"step.commit takes optimizers, got {type(optimizer).__name__}")
            refuse_closures(optimizer)
            ours = {id(parameter) for parameter in self.gradients.everything}
            groups = (group["params"] for group in optimizer.param_groups)
            if any(id(parameter) not in ours for group in groups for parameter in group):
                raise ValueError(
                    "the optimizer has parameters that are not in fleet.model(...): build it from the module that "
                    "fleet.model returns"
                )
            self._checked.add(id(optimizer))
        if self._transport.elastic:
            self._refuse_untracked(optimizers)

    def _refuse_untracked(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """``optimizers`` of this commit; those that the script stepped itself were seen doing so."""
        for optimizer in (*optimizers, *self._tracking.stepped_untracked()):
            if not self._tracking.is_tracked(optimizer):
                raise MisuseError(
                    f"the optimizer ({type(optimizer).__name__}) is not tracked, so a worker that joins could not take "
                    "over its state: call fleet.track(optimizer=optimizer) before the first step"
                )

    def pad(self, index: int, samples: int, started: float) -> float:
        """Take as long as the emulated machine would; returns the seconds by which the host was too slow."""
        assert self.machine is not None
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return self.machine.pad(index, samples, started)

    def shrink(self, samples: int, *, again: bool) -> bool:
        """Memory ran out with so many samples at once: use at most half as many from here on."""
        if not self.dealing.shrink(samples // 2, again=again):
            return False
        text = f"worker {self._transport.rank} ran out of memory with {samples} samples at once: "
        self._observe("note", {"level": "warning", "text": text + f"micro_batch is now {self.dealing.micro_batch}"})
        return True

    def require_current(self, step: Step) -> None:
        """A step of a loop that was left must not go on: its samples are no longer its own."""
        if self._closed or step is not self._step:
            raise MisuseError(f"step {step.index} is over: its loop was left, or a later step has begun")

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state that belongs to the parameters as they are on this worker, however far the fleet has gone on."""
        with self.books.changed:
            turn = self._turns.get(self._next)
            books = turn.before if turn is not None and turn.before is not None else self.books.state_dict()
            return {**books, "gradients": self.gradients.state_dict()}

    def pace_state(self) -> dict[str, Any]:
        """The pacer's state as of the last step that entered the books."""
        with self.books.changed:
            return self.books.pacer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; before the first step."""
        self.gradients.load_state_dict(state["gradients"])
        self.books.load_state_dict(state)
        self._next, self.finished, self._progress = self.books.index, self.books.finished, self.books.progress

    def pass_over(self, step: int) -> None:
        """This loop was over before ``step``, in a run that this one goes on from: it gives no steps."""
        self.books.finish(step)
        self._first = self._next = step
        self.finished, self._progress = True, 1.0

    def await_proxy(self) -> None:
        """Once the transport is closed: the process must not end under the proxy's thread."""
        if self._proxy is not None:
            self._proxy.join()

    def close(self, *, orderly: bool = True) -> None:
        """End the loop. ``orderly``: not because of an error, which would have said enough."""
        if self._closed:
            return
        self._closed = True
        if orderly:
            self._copies.give(self._packed)
            self._copies.join()
        if self._proxy is not None:
            self._proxy.stop_together() if orderly and not self.finished else self._proxy.stop()
            if orderly:
                self._proxy.join()
        if orderly and self._step is not None and not self._step.committed:
            text = f"the loop was left in step {self._step.index}, before its commit: its samples were not counted"
            self._warn_all(text)
        if orderly and not self.finished and self.books.index > self._first:
            self._observe("left", {"step": self.books.index})
        self.dealing.close()
        self.gradients.detach()
