"""How a run's books steer the count under deadlines, for a simulated run without epochs.

After step k, ``(k + 1) * batch`` samples should be done. A plan is made while the step before it is still under way,
supposing that what is hoped for gets done; when the step is opened, the plan is scaled to what is really wanted.
`paceline.books` does this in a run (and sees to it that an epoch keeps its number of steps, which a simulation without
epochs does not play); the tests hold the two against each other.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paceline.pace.shares import proportional
from paceline.records import Plan

LEEWAY = 0.5
"""Of the global batch: the most by which a step is asked for more or less."""


def goal(step: int, *, done: int, batch: int) -> int:
    """Samples the step should count when ``done`` were counted before it."""
    owed = (step + 1) * batch - done
    return max(1, round(batch * (1 - LEEWAY)), min(round(batch * (1 + LEEWAY)), owed))


def opened(plan: Plan, *, done: int, batch: int) -> Plan:
    """The plan as its step is dealt, when ``done`` samples were counted before it; ``plan.expects`` must be set."""
    expected = goal(plan.step, done=done, batch=batch)
    assert plan.expects
    times = expected / plan.expects
    return plan if times == 1 else replace(_scaled(plan, round(plan.total * times), times), expects=expected)


def _scaled(plan: Plan, total: int, times: float) -> Plan:
    samples = tuple(proportional(np.asarray(plan.samples, dtype=np.float64), total).tolist())
    return replace(plan, samples=samples, deadline_s=None if plan.deadline_s is None else plan.deadline_s * times)
