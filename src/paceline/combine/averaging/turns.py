"""One worker's turns with the centre, by arrival: its own exchanges, and what it hears of the others'."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline import concurrency
from paceline.combine.averaging.arrivals import Arrivals
from paceline.combine.averaging.rounds import Round
from paceline.loop.context import LoopContext

if TYPE_CHECKING:
    from paceline.combine.averaging.periods import Periods


class Turns:
    """Arrives for the periods of one worker, and counts every exchange of the fleet in the order in which all do."""

    def __init__(self, periods: Periods, loop: LoopContext, *, first: int) -> None:
        self._periods, self._loop, self._arrivals = periods, loop, Arrivals(loop, periods.exchange)
        self.number = first
        """This worker's exchanges so far: the rounds of its emulated failures."""
        self._lasted = 0.0
        """Seconds of its last period with local steps."""

    def start(self) -> None:
        self._arrivals.start(self._loop.dealing.remaining or 0)

    def join(self, timeout: float) -> None:
        self._arrivals.join(timeout)

    def arrive(self, round: Round, call: float) -> None:
        """Meet the centre, and hear of all exchanges until then."""
        entered, self._lasted = concurrency.perf_counter(), round.period.wall_s or self._lasted
        if self._arrivals.arrive(round, call):
            self.number += 1
        self._hear(wait=False, waited_s=concurrency.perf_counter() - entered)

    def _hear(self, *, wait: bool, waited_s: float = 0.0) -> None:
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
        """Nothing is left for this worker until others arrive; or it is frozen, for as long as its last period took."""
        if self._periods.trouble().trains:
            self._hear(wait=True)
        else:
            concurrency.sleep(self._lasted)
            self._periods.end_period()

    def wait_until_met(self) -> None:
        """Arrive with a call, and hear of the others' exchanges until everybody has."""
        periods = self._periods
        while not self._loop.finished:
            periods.open = periods.open or periods.open_next()
            periods.end_period()
            while not self._arrivals.at_rest:
                self._hear(wait=True)
            self._hear(wait=False)
            if (periods.dealer.together > 0).all():
                break
        periods.open = None
        self._arrivals.call_is_over()
