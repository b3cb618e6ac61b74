"""The four answers on top of the page: how fast, how far from the limit, who held us back, what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.observe.words.deadlines import with_deadlines
from paceline.observe.words.numbers import duration, number, percent, times
from paceline.observe.words.verdict import BALANCED, NOTABLE, Verdict
from paceline.page.whatif import WhatIf, instead

NEAR = 0.9
"""Part of the limit from which there is little left to gain, whatever the pace."""
TOO_SHORT = "too few steps to tell: only warm-up was measured"


@dataclass(frozen=True)
class Tile:
    """A question, its answer in a few words, and a line of reasons."""

    question: str
    answer: str
    reason: str = ""
    part: float | None = None
    """Length of a bar, from 0 to 1; None for no bar."""


def tiles(v: Verdict, tried: WhatIf, stuck: Mapping[int, float] | None = None) -> list[Tile]:
    """Return the four answers, or none for a run without steps; ``stuck``: part of each worker's time that was late."""
    if not v.figures.samples_per_s:
        return []
    stuck = {worker: part for worker, part in (stuck or {}).items() if part > 0}
    return [_how_fast(v), _how_far(v), _who(v, stuck), _change(v, tried)]


def _how_fast(v: Verdict) -> Tile:
    f = v.figures
    gain = (
        f"{times(v.over_equal)} times the speed of equal shares"
        if len(f.workers) > 1 and v.over_equal and not v.traits.equal_shares and not v.too_short
        else ""
    )
    each = f"{duration(f.seconds / f.steps)} per step"
    return Tile("How fast?", f"{number(f.samples_per_s)} samples/s", ", ".join(part for part in (gain, each) if part))


def _how_far(v: Verdict) -> Tile:
    f = v.figures
    if not f.limit:
        return Tile("How far from the limit?", "not known", "the workers' own times are not in the record")
    lost = {
        "stalls": f.stuck,
        "work cut off": f.cut,
        "waiting": f.waiting,
        "the round": f.round,
        "update and the rest": f.rest,
    }
    spent = ", ".join(f"{name} {percent(part)}" for name, part in lost.items() if part >= 0.005)
    reason = f"the limit is {number(f.limit)} samples/s" + (f"; lost to {spent}" if spent else "")
    return Tile("How far from the limit?", f"{percent(f.of_limit)} of it reached", reason, min(1.0, f.of_limit))


def _who(v: Verdict, stuck: Mapping[int, float]) -> Tile:
    question, f = "Who held us back?", v.figures
    if len(f.workers) < 2:
        return Tile(question, "nobody", "one machine, alone")
    if v.too_short:
        return Tile(question, "not known", TOO_SHORT)
    if sum(stuck.values()) / len(f.workers) > BALANCED:
        return _most_stuck(v, stuck)
    named = next((w for w in f.workers if w.worker == v.held_back_by), None)
    if named is not None:
        here = " it was there for" if named.steps < f.steps else ""
        often = f"last in {percent(named.last)} of the steps{here}"
        reason = f"{often}; the others waited {percent(named.blamed)} of the time for it"
        return Tile(question, v.name(named), reason)
    if with_deadlines(f):
        return Tile(question, "nobody", "a round closes at its deadline, whoever is late")
    if f.waiting > BALANCED:
        return Tile(question, "no single worker", f"they took turns, and waited {percent(f.waiting)} of the time")
    slowest = min((w for w in f.workers if w.speed > 0), key=lambda w: w.speed, default=None)
    reason = f"{v.name(slowest)} is the slowest and did {percent(slowest.share)} of the work" if slowest else ""
    return Tile(question, "nobody", reason)


def _most_stuck(v: Verdict, stuck: Mapping[int, float]) -> Tile:
    """Return who was stuck most: with deadlines nobody waits for a stuck worker, and only its own work is lost."""
    worst = max(stuck, key=lambda worker: stuck[worker])
    named = next((w for w in v.figures.workers if w.worker == worst), None)
    who = v.name(named) if named and stuck[worst] > sum(stuck.values()) / 2 else "no single worker"
    most = f"late micro-batches cost worker {worst} {percent(stuck[worst])} of its time"
    return Tile("Who held us back?", who, f"{most}; the deadline spared the others the wait")


def _change(v: Verdict, tried: WhatIf) -> Tile:
    """Return the change that is worth most: another pace, for it has a figure, else a large part of the time."""
    question = "What to change?"
    if v.too_short:
        return Tile(question, "not known", TOO_SHORT)
    return _another_pace(question, v, tried) or _what_weighs(question, v) or _no_change(question, v, tried)


def _another_pace(question: str, v: Verdict, tried: WhatIf) -> Tile | None:
    """Return the pace that the replay advises; without a replay to trust, the one that the verdict advises."""
    if (best := tried.better_than(v.pace)) is not None:
        took = f"about {instead(best.seconds, tried.actual_s)} for {_replayed(tried)}"
        return Tile(question, f"--pace {best.pace}", took)
    if v.in_reach is None or tried.known(v.pace):
        return None
    reach = f"up to {number(v.in_reach.samples_per_s)} samples/s are in reach, by an estimate"
    return Tile(question, f"--pace {v.in_reach.pace}", reach)


def _replayed(tried: WhatIf) -> str:
    if tried.span is None:
        return "these steps"
    first, last = tried.span
    return f"steps {first} to {last}, the longest stretch with the same workers"


def _what_weighs(question: str, v: Verdict) -> Tile | None:
    f = v.figures
    if v.outside > NOTABLE and v.outside > f.round:
        return Tile(
            question, "the time between steps", f"{percent(v.outside)} of the run: evaluation, saving, your own code"
        )
    if f.round > NOTABLE:
        cost = f"the round takes {percent(f.round)} of the time, whatever the batch"
        return Tile(question, "a larger global_batch", cost)
    named = next((w for w in f.workers if w.worker == v.held_back_by), None)
    if named is not None and v.too_coarse(named):
        cause = f"{v.name(named)} does one or two per step: its share cannot fit"
        return Tile(question, "a smaller micro_batch", cause)
    if f.rest > NOTABLE:
        return Tile(
            question, "the update", f"{percent(f.rest)} of a step passes after the round: optimiser and the rest"
        )
    return None


def _no_change(question: str, v: Verdict, tried: WhatIf) -> Tile:
    """Return that nothing would help, where a replay shows it, or a single machine has no shares to deal."""
    if len(v.figures.workers) < 2:
        return Tile(question, "nothing", "one machine alone, and most of its time is work")
    if tried.known(v.pace):
        return Tile(question, "nothing", "no change in sight would gain more than a few per cent")
    if v.figures.of_limit > NEAR:
        return Tile(question, "nothing much", f"{percent(v.figures.of_limit)} of what these machines can do is reached")
    off = f"the replay is off by {percent(tried.off_by(v.pace))}, too far to tell"
    return Tile(question, "not known", off if tried.answers else tried.why_not)
