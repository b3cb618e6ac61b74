"""What is dealt for a period, and who takes how much of it: the same on every worker, from what the last round said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline import concurrency
from paceline.combine.averaging.groups import Place, place_of
from paceline.combine.averaging.period import Ints, Period, above, followed
from paceline.combine.averaging.settings import Averaging, ElasticAverage, exchanges_by_arrival
from paceline.loop.context import LoopContext
from paceline.pace.period import by_the_clock
from paceline.records import Plan

AHEAD = 2
"""Periods' worth of samples dealt at once when rounds run beside local steps: one, and one for while its round runs."""


class PeriodDealer:
    """Deals periods to the workers of a fleet."""

    def __init__(
        self, loop: LoopContext, settings: Averaging | ElasticAverage, *, overlaps: bool, lengths: Sequence[int]
    ) -> None:
        """``lengths``: how much of an epoch each worker claims when it opens; empty: it is dealt as it goes."""
        self._loop, self._settings, self._overlaps, self._lengths = loop, settings, overlaps, tuple(lengths)
        size = loop.transport.size
        self.place: Place = place_of(settings, rank=loop.transport.rank, size=size)
        self.plan: Plan | None = None
        self.together = np.zeros(size)
        """By rank: what each worker waits to do together with the others, as a number; 0: nothing."""
        self._speeds = np.zeros(size)
        """Samples a second of each worker's own work in the last period it worked in."""
        self._rates = np.zeros(size)
        """The same, waiting for the others of its group included."""

    def open(self, round_number: int) -> Period:
        """Deal a period."""
        feed = self._loop.dealing
        if not self.by_arrival:
            self.plan = self.plan or self._agree_on_plan(round_number)
        if self._lengths and feed.remaining == feed.length:
            feed.deal(self._lengths)  # an epoch opens: everybody claims its own part and the common one
        nothing, member = (0,) * len(self.place.members), self.place.member
        period = Period(began=concurrency.perf_counter(), shares=(), windows=nothing, batches=nothing, member=member)
        self.deal(period, None)
        return period

    def _agree_on_plan(self, round_number: int) -> Plan:
        """The leader hands a plan round where none came with the last round: before the first, or for other members."""
        transport, training = self._loop.transport, self._loop.training

        def mine() -> dict[str, Any] | None:
            return training.plan_for(round_number).to_json() if transport.rank == 0 else None

        return Plan.from_json(transport.gather(f"the plan after {round_number} rounds", mine)[0])

    def deal(self, period: Period, floors: Ints | None) -> None:
        """Deal to all, ``floors`` at least, and let the period go on with what this worker's group was dealt."""
        wanted, batches = self._wanted()
        wanted = np.where(self._waiting(), 0, wanted)
        if floors is not None:
            wanted = above(np.where(self._waiting(), 0, floors), wanted, self._loop.dealing.remaining)
        period.shares = self._loop.dealing.deal(tuple(wanted.tolist()))
        period.windows = tuple(period.shares[member] for member in self.place.members)
        period.batches = tuple(int(batches[member]) for member in self.place.members)

    def _waiting(self) -> NDArray[np.bool_]:
        """Who waits for the others to come to the same call. What is left of an epoch must not lie with them: those
        that are waited for may need it to get there."""
        waiting = self.together > 0
        return waiting & (not waiting.all() and not self._lengths)

    def _wanted(self) -> tuple[Ints, Ints]:
        """Samples to deal to each worker, and its samples of one local step."""
        size = self._loop.transport.size
        equal = max(1, self._loop.settings.global_batch // size)
        if self.period_s is not None:
            shares, batches = by_the_clock(
                self.place.groups, batch=equal, speeds=self._speeds, rates=self._rates, period_s=self.period_s
            )
        else:
            # With a common part everybody has as much, and is to finish it at the same time; by arrival nobody waits.
            alike = bool(self._lengths) or self.by_arrival
            batches = np.full(size, equal) if alike else np.maximum(1, self._planned())
            shares = batches * self.steps_a_period
        return shares * (AHEAD if self._overlaps else 1), batches

    def _planned(self) -> Ints:
        assert self.plan is not None
        return np.asarray(self.plan.samples)

    @property
    def by_arrival(self) -> bool:
        """Whether workers meet the centre one by one."""
        return exchanges_by_arrival(self._settings, self._loop.transport.size)

    @property
    def period_s(self) -> float | None:
        """Seconds of a period; None: it is counted in steps."""
        return self._settings.period_s if isinstance(self._settings, Averaging) else None

    @property
    def steps_a_period(self) -> int:
        settings = self._settings
        return settings.tau if isinstance(settings, ElasticAverage) else settings.every_steps or 1

    def observe(self, samples: Ints, *, seconds: NDArray[np.float64], walls: NDArray[np.float64]) -> None:
        """A round is over: what each worker had done, and in which time."""
        self._speeds = np.where(seconds > 0, samples / np.maximum(seconds, 1e-9), self._speeds)
        self._rates = np.where(walls > 0, samples / np.maximum(walls, 1e-9), self._rates)

    # -- state -------------------------------------------------------------------------------------------------------

    def members_changed(self, kept: Sequence[int | None]) -> None:
        """By new rank, ``kept`` says who the members were."""
        self.find_place()
        self._speeds, self._rates = followed(self._speeds, kept), followed(self._rates, kept)
        self.plan = None

    def find_place(self) -> None:
        """Among the members that are there now, of whom none is known to wait."""
        transport = self._loop.transport
        self.place = place_of(self._settings, rank=transport.rank, size=transport.size)
        self.together = np.zeros(transport.size)

    def state_dict(self) -> dict[str, Any]:
        return {"speeds": self._speeds.tolist(), "rates": self._rates.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["speeds"]) == self._loop.transport.size:
            self._speeds = np.array(state["speeds"])
            self._rates = np.array(state.get("rates", state["speeds"]))
