"""Adaptive's shares, and joint's deadlines for as long as the last steps say that they pay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.pace.forecast import Forecast
from paceline.pace.forecasting import column
from paceline.pace.joint import Joint
from paceline.pace.ledger import Ledger
from paceline.pace.pacer import Ask, PaceChange, Simulated, Traits
from paceline.pace.steering import RATE, Gain
from paceline.records import Plan, StepRecord

KEEP = 1 / 3
"""Deadlines end when they bring no more than this part of ``least_gain``."""
EVIDENCE, FEW = 20, 8
"""Steps judged before the first deadline, as many as the running means weigh, or this few that agree: no single slow
step of a start decides."""


class Auto(Joint):
    """`Adaptive` to the letter, and `Joint` while deadlines pay.

    Deadlines begin when they would have made the last steps faster by more than ``least_gain``, and end when they bring
    no more than a third of that.

    Both are running means of what really happened (see `paceline.pace.steering`), of 20 steps at least or 8 that agree.
    Where rounds cannot have a deadline (averages, NCCL, a stream of data), it stays adaptive. ``forecast`` and the
    other ``settings`` are those of `Joint`, ``adaptive`` among them. See docs/shares-and-deadlines.md.
    """

    name = "auto"
    """Name in ``pace=``, the log and checkpoints."""
    does_without = True
    """Whether it plans no deadline where a step may have none (`Ask.deadlines`)."""
    traits = Traits(follows_speed=True)
    """Facts of it for reports and the simulator."""

    def __init__(self, forecast: str | Forecast = "smoothed", *, least_gain: float = 0.03, **settings: Any) -> None:
        super().__init__(forecast, least_gain=least_gain, **settings)
        self._gain = Gain(least=least_gain, keep=KEEP * least_gain, steps=EVIDENCE, few=FEW)
        self._held = Ledger(alone_s=0.0)

    @classmethod
    def simulated(cls, *, seed: int, forecast: Forecast | None = None) -> Sequence[Simulated]:
        """Return the simulator's one row."""
        return [Simulated(cls.name, cls(seed=seed))]

    def observe(self, record: StepRecord) -> None:
        """Learn from a step, and judge whether a deadline would pay."""
        before = self._gain.on
        super().observe(record)
        self._note_last(record)
        if self._gain.on != before:
            whom = None if before else self._waited_for()
            self.change = PaceChange(record.step, deadlines=not before, saves=1 - 1 / (1 + self.gain), worker=whom)

    def _note_last(self, record: StepRecord) -> None:
        """Note by how much the last worker came after the one before it: what it alone cost a step that waited."""
        self._held.arrange(record.workers)
        alone_s = self._held["alone_s"]
        alone_s *= 1 - RATE
        if record.deadline_s is None and len(alone_s) > 1:
            seconds = column(record.seconds, len(alone_s))
            last = int(np.argmax(seconds))
            alone_s[last] += seconds[last] - np.partition(seconds, -2)[-2]

    def _waited_for(self) -> int | None:
        alone_s = self._held["alone_s"]
        last = int(np.argmax(alone_s))
        return self._held.present[last] if 2 * alone_s[last] > alone_s.sum() else None

    def plan(self, ask: Ask) -> Plan:
        """Return adaptive's shares or, where deadlines pay and may be, larger ones and a deadline."""
        return super().plan(ask) if ask.deadlines else self.adaptive.plan(ask)

    def state_dict(self) -> dict[str, Any]:
        """Return what it has learned, as plain data."""
        return {**super().state_dict(), "held": self._held.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another pacer of this kind had learned."""
        super().load_state_dict(state)
        self._held.load_state_dict(state["held"])

    def __repr__(self) -> str:
        return super().__repr__().replace("Joint(", "Auto(", 1)
