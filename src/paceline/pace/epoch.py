"""Shares re-dealt once per epoch in proportion to measured speed (P0)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.pace.cost import Floats, Mask, filled, measurements, resized
from paceline.pace.forecasting import Forecasting, caps, floors
from paceline.pace.ledger import Ledger
from paceline.pace.pacer import Ask, Traits
from paceline.pace.shares import proportional
from paceline.records import Plan, StepRecord


class Epoch(Forecasting):
    """P0's rule at the end of every epoch: ``p_i <- (p_i / t_i) / sum_j (p_j / t_j)``, equal shares at first.

    ``t_i`` is the worker's mean own-compute seconds per step, ``p_i`` a real number: it is rounded only when a step is
    dealt, and ``p_i * total``, not the whole samples of it, goes into the next ``p_i``; corrections under half a sample
    would vanish otherwise, and the shares stop short of their fixed point. Share over time is speed, so the code keeps
    ``v_i = sum(p_i * total) / sum(seconds)`` over the epoch and sets ``p_i = v_i / sum_j v_j``: the same numbers, and
    right as well when a worker joined or was lost half-way. The very first step measured (compilation, cold caches)
    counts only until there is another, and so do steps with micro-batches of another size. A worker without a sample in
    an epoch keeps its last speed, and so does one that left; a new one gets the median until the epoch is over.
    """

    name = "epoch"
    """Name in ``pace=``, the log and checkpoints."""
    traits = Traits(shown=False)
    """Facts of it for reports and the simulator."""

    def __init__(self) -> None:
        super().__init__()
        self._epoch = 0
        self._ledger = Ledger(samples=0.0, seconds=0.0, steps=0.0, speed=0.0, size=0.0)

    def observe(self, record: StepRecord) -> None:
        super().observe(record)
        book = self._ledger
        book.arrange(record.workers)
        if record.epoch != self._epoch:
            self._epoch = record.epoch
            samples, seconds, speed = (book.everybody(name) for name in ("samples", "seconds", "speed"))
            speed[:] = _speed(samples, seconds, speed)
            samples[:] = seconds[:] = 0.0
        measured, done, seconds = measurements(record)
        samples = _before_rounding(filled(book["speed"]), measured, done)
        cold = measured & (book["steps"] == 1) | resized(record.micro_size, measured, book["size"])
        for name, values in (("samples", samples), ("seconds", seconds)):
            np.copyto(book[name], 0.0, where=cold)
            book[name][:] += np.where(measured, values, 0.0)
        book["steps"][:] += measured

    def plan(self, ask: Ask) -> Plan:
        """Return shares in proportion to the speeds of the epoch before."""
        weights = filled(self._speeds(ask))
        shares = proportional(weights, ask.total, unit=ask.unit, minimum=floors(ask), maximum=caps(ask))
        return self._answer(ask, shares)

    def _speeds(self, ask: Ask) -> Floats:
        """Return samples per second by the epoch before the asked one, which is planned before its first record."""
        samples, seconds, speed = (self._ledger.look_up(name, ask.workers) for name in ("samples", "seconds", "speed"))
        return speed if ask.epoch == self._epoch else _speed(samples, seconds, speed)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "epoch": self._epoch, "speeds": self._ledger.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._epoch = int(state["epoch"])
        self._ledger.load_state_dict(state["speeds"])

    def __repr__(self) -> str:
        return "Epoch()"


def _before_rounding(weights: Floats, measured: Mask, done: Floats) -> Floats:
    """Return ``p_i * total`` of those who worked, or what each did where that is not ``p_i * total`` rounded.

    Then a bound, a lost worker or a round by the clock set the shares. Rounding moves a share by less than the unit
    they are multiples of.
    """
    if not measured.any():
        return done
    worked, counts = np.where(measured, weights, 0.0), done[measured].astype(np.int64)
    dealt = worked * (counts.sum() / worked.sum())
    rounded = np.all(np.abs(dealt - done)[measured] < np.gcd.reduce(counts))
    return np.where(measured & rounded, dealt, done)


def _speed(samples: Floats, seconds: Floats, last: Floats) -> Floats:
    return np.divide(samples, seconds, out=last.copy(), where=seconds > 0)
