"""Goodput in closed form, failures as fault injection makes them, and the seconds that a piece of work takes.

goodput_model.py compares public protocols by these; the rules themselves are those of `paceline.simulate.goodput`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from itertools import chain, takewhile

import numpy as np

from paceline.simulate.goodput import Change, FailureCosts, FailureRule, changes_of


def restart_goodput(*, fleet_mtbf_s: float, every_s: float, write_s: float, restart_s: float) -> float:
    """Return the goodput of restarts under exponential failures, ``tau / (M e^(R/M) (e^((tau + C)/M) - 1))``.

    M is the fleet's mean time between failures, tau the interval, C the time of a checkpoint and R that of a restart,
    in which the fleet may fail again (Daly, 2006: the exact form that his interval is derived from).
    """
    if math.isinf(fleet_mtbf_s):
        return every_s / (every_s + write_s) if math.isfinite(every_s) else 1.0
    mean = fleet_mtbf_s
    return every_s / (mean * math.exp(restart_s / mean) * math.expm1((every_s + write_s) / mean))


def elastic_goodput(machines: int, costs: FailureCosts, *, mtbf_s: float, replace_s: float) -> float:
    """Return Paceline's goodput while somebody always lives: machines present, less pauses, checkpoints and half steps.

    With T the time from a failure to the newcomer's entry, ``1 / (1 + T / M)`` of the machines are there, and each of
    the n of them fails once in ``M + T``.
    """
    away_s = replace_s + costs.start_s
    changes = machines / (mtbf_s + away_s)
    paused = changes * (costs.kill_s + costs.join_s)
    saved = 1 / (1 + costs.save_s / costs.every_s)
    return mtbf_s / (mtbf_s + away_s) * max(0.0, 1 - paused) * saved - changes * costs.step_s / 2 / machines


def failures_every(
    machines: int, *, between_s: tuple[float, float], replace_s: float, seed: int = 0
) -> Iterator[Change]:
    """Yield who fails, each after a time drawn evenly between two bounds (fault injection), and who takes its place."""
    draws = np.random.default_rng(seed)

    def one_that_is_there(away: set[int]) -> int:
        there = [machine for machine in range(machines) if machine not in away]
        return there[int(draws.integers(len(there)))] if there else 0

    return changes_of(lambda: float(draws.uniform(*between_s)), one_that_is_there, np.full(machines, replace_s))


def seconds_for(work: float, rule: FailureRule, changes: Iterable[Change], *, limit_s: float) -> float:
    """Return the seconds until a rule has done ``work``, in machine-seconds weighted by speed.

    Raises ValueError where it takes longer than ``limit_s``.
    """
    now_s = 0.0
    inside = takewhile(lambda change: change.at_s < limit_s, changes)
    for change in chain(inside, [Change(limit_s, 0, comes=False)]):
        before = copy.deepcopy(rule)
        rule.advance(change.at_s)
        if rule.spent.useful >= work:
            return _first_s(work, before, now_s, change.at_s)
        now_s = change.at_s
        if now_s < limit_s:
            (rule.came if change.comes else rule.lost)(change.machine)
    raise ValueError(f"the work is not done after {limit_s:g} s: {rule.spent.useful / work:.0%} of it is")


def _first_s(work: float, rule: FailureRule, low_s: float, high_s: float) -> float:
    """Return when ``rule`` has done ``work``, between two times without a change."""
    while high_s - low_s > 1e-3:
        middle_s, tried = (low_s + high_s) / 2, copy.deepcopy(rule)
        tried.advance(middle_s)
        low_s, high_s = (low_s, middle_s) if tried.spent.useful >= work else (middle_s, high_s)
    return high_s
