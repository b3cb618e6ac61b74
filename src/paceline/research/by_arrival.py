"""Exchanges by arrival: each worker meets the centre when its own tau steps are done, and nobody waits for a peer.

Every worker's thread runs small rounds, one about every `EVERY_S`, whatever its loop does meanwhile. The first sum of
such a round carries who has arrived and how long each has waited. Who has waited longest (of equals, the lowest rank)
meets the centre; the others' turn comes in the next rounds. Only then is there a second sum: what that worker did, and
its push, which every replica of the centre adds. So all replicas go through the same exchanges in the same order and
stay equal. A loop waits for its own turn alone: milliseconds, and the sums of those before it.

Each loop counts the exchanges in that same order when it comes by (`Arrivals.news`), so all workers deal alike, late or
not. The thread ends, on all workers after the same round, when the epoch's samples are done or when all wait in a call:
at rest, the training's state is complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from paceline import concurrency
from paceline.averaging.merge import DISTANCE, PRESENT, SAMPLES, STEPS
from paceline.averaging.parameter_round import ParameterRound, RoundExchange
from paceline.averaging.period import Floats, Period
from paceline.averaging.periods import Periods
from paceline.gradients import Header
from paceline.gradients.fleet_sums import Flats
from paceline.research.elastic_average import TURN, Springs
from paceline.step.context import LoopContext
from paceline.transport.group import wait_for_all

EVERY_S = 0.005
"""How long a round waits for this worker to arrive, in seconds."""
FIRST = 2
"""Columns of a round's table before a worker's facts: what it waits to do with all others, and its period's seconds."""


class Arrivals:
    """The thread of one worker, what it hands to the thread, and what the thread reports to it."""

    def __init__(self, springs: Springs, loop: LoopContext, exchange: RoundExchange) -> None:
        if len(exchange.statistics):
            raise ValueError(
                "exchange='arrival' has no round in which batch norm's running statistics could be merged: use "
                "GroupNorm, or exchange='round'"
            )
        self._loop, self._exchange, self._springs = loop, exchange, springs
        self._room = Flats(loop.gradients.everything)
        self._lock = concurrency.Condition()
        self._call = 0.0
        self._mine: ParameterRound | None = None
        """What this worker has arrived with, until it has met the centre."""
        self._since = 0.0
        self._left = 0
        """Samples of the epoch that no exchange has counted."""
        self._over: deque[ParameterRound] = deque()
        """Exchanges that this worker's loop has not counted."""
        self.at_rest = True
        """Whether the thread has ended."""
        self._thread: concurrency.Thread | None = None
        self._error: BaseException | None = None

    # -- the user's thread -------------------------------------------------------------------------------------------

    def start(self, left: int) -> None:
        """Begin to meet. ``left``: samples of the epoch; all workers hold the same state now."""
        self.join()  # it has reported its last exchange before it ended
        assert not self._over
        self._left, self.at_rest = left, False
        self._thread = concurrency.Thread(target=self._run, name="paceline-arrivals", daemon=True)
        self._thread.start()

    def arrive(self, round: ParameterRound, call: float) -> bool:
        """Meet the centre, after waiting for this worker's turn; return False where the thread ended before.

        Then nothing was done that had to be counted. ``call``: what it waits to do together with the others.
        """
        self._exchange.finish_kernels()
        with self._lock:
            self._mine, self._since, self._call = round, concurrency.perf_counter(), call
            self._lock.notify_all()
            self._lock.wait_for(lambda: self._mine is None or self.at_rest)
            met, self._mine = self._mine is None, None
        self._check()
        return met

    def news(self, *, wait: bool) -> list[ParameterRound]:
        """Return the exchanges since the last time, in their order.

        ``wait``: until there is one, or the thread has ended.
        """
        with self._lock:
            if wait:
                self._lock.wait_for(lambda: bool(self._over) or self.at_rest)
            exchanges = list(self._over)
            self._over.clear()
        self._check()
        return exchanges

    def call_is_over(self) -> None:
        self._call = 0.0

    def join(self, timeout: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._round():
                pass
        except BaseException as error:  # it is the user's thread's
            self._error = error
        finally:
            with self._lock:
                self.at_rest = True
                self._lock.notify_all()

    def _round(self) -> bool:
        """Run a small round; return False after the last."""
        transport = self._loop.transport
        with self._lock:
            self._lock.wait_for(lambda: self._mine is not None, EVERY_S)
            mine, call, since = self._mine, self._call, self._since
        table = torch.zeros(transport.size, FIRST + TURN + 1, dtype=torch.float64)
        if mine is not None:
            table[transport.rank, : FIRST + TURN] = mine.table[transport.rank]
            table[transport.rank, FIRST + DISTANCE] = self._springs.distance()
            table[transport.rank, FIRST + TURN] = max(1e-9, concurrency.perf_counter() - since)
        table[transport.rank, 0] = call
        with transport.round("the exchanges by arrival", background=True):
            self._sum([table])
            first = next_turn(table[:, FIRST + TURN].numpy())
            if first is None:
                return not bool((table[:, 0] > 0).all())
            self._meet(first, only(table, first), mine if first == transport.rank else None)
        return self._left > 0

    def _meet(self, first: int, table: torch.Tensor, mine: ParameterRound | None) -> None:
        """Let the worker of rank ``first`` meet the centre, on every worker alike; ``mine``: it is this one."""
        round = mine or self._another_s()
        round.table = table
        if mine is not None:
            round.total.fill(self._springs.part(round.facts))
        self._sum([round.header.tensor(), *round.total.flats])
        self._springs.take(round.facts, round.total.views, self._loop.script.optimizers)
        self._exchange.finish_kernels()
        with self._lock:
            round.ended, self._left = concurrency.perf_counter(), self._left - int(table[first, FIRST + SAMPLES])
            self._over.append(round)
            if mine is not None:
                self._mine = None
            self._lock.notify_all()

    def _another_s(self) -> ParameterRound:
        """Return room for the exchange of another worker, whose period is not known here; its sum is not kept."""
        for flat in self._room.flats:
            flat.zero_()
        nobody_s = Period(began=0.0, shares=(), windows=(), batches=(), member=0)
        header, nothing = Header(self._exchange.layout), torch.empty(0)
        return ParameterRound(nobody_s, header=header, table=nothing, statistics=nothing, total=self._room)

    def _sum(self, parts: Sequence[torch.Tensor]) -> None:
        wait_for_all([self._loop.transport.sum(part) for part in parts])


class ArrivalTurns:
    """Arrives for the periods of one worker, and counts every exchange of the fleet in the order in which all do."""

    def __init__(self, springs: Springs, periods: Periods, loop: LoopContext, *, first: int) -> None:
        self._periods, self._loop, self._arrivals = periods, loop, Arrivals(springs, loop, periods.exchange)
        self.number = first
        """This worker's exchanges so far: the rounds of its emulated failures."""
        self._lasted = 0.0
        """Seconds of its last period with local steps."""

    def start(self) -> None:
        self._arrivals.start(self._loop.dealing.remaining or 0)

    def join(self, timeout: float) -> None:
        self._arrivals.join(timeout)

    def arrive(self, round: ParameterRound, call: float) -> None:
        """Meet the centre, and count all exchanges until then."""
        entered, self._lasted = concurrency.perf_counter(), round.period.wall_s or self._lasted
        if self._arrivals.arrive(round, call):
            self.number += 1
        self._count(wait=False, waited_s=concurrency.perf_counter() - entered)

    def _count(self, *, wait: bool, waited_s: float = 0.0) -> None:
        """Count the exchanges since the last time, in their order."""
        periods = self._periods
        for round in self._arrivals.news(wait=wait):
            assert periods.open is not None
            if round.period is periods.open:
                periods.open = periods.open.followed(concurrency.perf_counter())
                periods.close_round(round, waited_s)
            else:
                round.period = periods.open
                periods.close_round(round, 0.0)

    def stand_still(self) -> None:
        """Wait until others arrive, as nothing is left; or, frozen, for as long as the last period took."""
        if self._periods.trouble().trains:
            self._count(wait=True)
        else:
            concurrency.sleep(self._lasted)
            self._periods.end_period()

    def wait_until_met(self) -> None:
        """Arrive with a call, and count the others' exchanges until everybody has."""
        periods = self._periods
        while not self._loop.position.finished:
            periods.open = periods.open or periods.open_next()
            periods.end_period()
            while not self._arrivals.at_rest:
                self._count(wait=True)
            self._count(wait=False)
            if (periods.dealer.together > 0).all():
                break
        periods.open = None
        self._arrivals.call_is_over()


def next_turn(waited: Floats) -> int | None:
    """Return the rank that has waited longest; of equals, the lowest; None where nobody waits.

    >>> next_turn(np.array([0.0, 0.2, 0.2])), next_turn(np.zeros(3))
    (1, None)
    """
    return int(np.argmax(waited)) if waited.any() else None


def only(table: torch.Tensor, first: int) -> torch.Tensor:
    """Return the table of an exchange: the facts of the worker whose turn it is, and what each waits to do with all.

    A worker that only says that it waits, and has made no step, does not exchange.
    """
    alone = torch.zeros_like(table)
    alone[:, 0], alone[first] = table[:, 0], table[first]
    facts = alone[first, FIRST:]
    exchanges = bool(facts[STEPS] > 0 or facts[PRESENT] == 0)
    facts[TURN], facts[PRESENT] = float(exchanges), facts[PRESENT] * exchanges
    return alone
