"""How the count is steered when deadlines make it vary: what a step should count, and plans made to fit.

A plan is made while the step before it is still under way, supposing that what is hoped for gets done; when its step is
opened, it is scaled to what is really wanted. Runs and the simulator use the same functions.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paceline.pace.shares import proportional
from paceline.records import Plan

LEEWAY = 0.5
"""A step makes up for what earlier deadlines left owing by this part of the global batch at most."""
LEAST = 0.7
"""No step is asked for less than this part of it, however much earlier ones did: thin steps do harm."""


def goal(step: int, *, done: int, batch: int) -> int:
    """Return the samples the step of this number should count when ``done`` were counted before it.

    After step k, ``(k + 1) * batch`` should be done.

    >>> goal(3, done=700, batch=256), goal(3, done=1000, batch=256)
    (324, 179)
    """
    return max(least(batch), min(round(batch * (1 + LEEWAY)), (step + 1) * batch - done))


def least(batch: int) -> int:
    """Return the fewest samples a step is asked for."""
    return max(1, round(batch * LEAST))


def made_for(plan: Plan, expected: int) -> Plan:
    """Return the plan, made to expect ``expected`` samples.

    When it was made, the step before it was still to be done, and may have done more or less than was hoped.

    >>> plan = made_for(Plan(generation=0, step=0, samples=(9, 3), deadline_s=1.0, expects=8), 12)
    >>> plan.samples, plan.deadline_s, plan.expects
    ((14, 4), 1.5, 12)
    """
    if plan.expects is None or plan.expects == expected or not plan.expects:
        return plan
    scale = expected / plan.expects
    return replace(_scaled(plan, round(plan.total * scale), scale), expects=expected)


def for_all(plan: Plan, left: int) -> Plan:
    """Return the plan with ``left`` samples dealt in all, and no less time for them.

    >>> for_all(Plan(generation=0, step=0, samples=(6, 2), deadline_s=1.0), 12).deadline_s
    1.5
    """
    if plan.total == left or not plan.total:
        return plan
    return _scaled(plan, left, max(1.0, left / plan.total))


def _scaled(plan: Plan, total: int, times: float) -> Plan:
    samples = tuple(proportional(np.asarray(plan.samples, dtype=float), total).tolist())
    deadline_s = None if plan.deadline_s is None else plan.deadline_s * times
    return replace(plan, samples=samples, deadline_s=deadline_s)


def without_singles(plan: Plan) -> Plan:
    """Move shares of one sample to the largest share: batch norm cannot train on a single one.

    >>> without_singles(Plan(generation=0, step=0, samples=(7, 1, 4))).samples
    (8, 0, 4)
    """
    if plan.total < 2 or 1 not in plan.samples:
        return plan
    samples = [0 if share == 1 else share for share in plan.samples]
    samples[int(np.argmax(samples))] += plan.total - sum(samples)
    return replace(plan, samples=tuple(samples))
