"""What a run with deadlines is told: who was late, what that cost, and what waiting would have cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paceline.observe.analysis.figures import Figures, WorkerFigures
from paceline.observe.words.numbers import duration, number, percent, times
from paceline.pace import WAITING, traits_of

MOST_NAMED = 3
SAME = 0.05
"""Estimates that are closer than this are called equal."""

Name = Callable[[WorkerFigures], str]
"""A worker as people know it, in the middle of a sentence."""


def with_deadlines(f: Figures) -> bool:
    """Whether deadlines made the run what it was."""
    return 2 * f.deadlines > f.steps


def deadline_sentences(f: Figures, pace: str, name: Name) -> Iterator[str]:
    """One subject each."""
    yield late(f, name)
    yield patience(f, name)
    yield " ".join(filter(None, (cut_off(f, pace), spread(f))))


def late(f: Figures, name: Name) -> str:
    """How many rounds closed without whom."""
    if not f.closed_without:
        return f"{f.deadlines:,} of {f.steps:,} rounds had a deadline, and everybody had something done by then."
    worst = sorted((w for w in f.workers if w.missed), key=lambda w: -w.missed)
    shown = worst if len(worst) <= MOST_NAMED + 1 else worst[:MOST_NAMED]
    said = [f"{f'worker {w.worker}' if place else name(w)} in {w.missed:,}{_stuck(w)}" for place, w in enumerate(shown)]
    said += [f"{len(worst) - len(shown)} more"] if len(worst) > len(shown) else []
    listed = said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"
    whom = "one worker" if len(worst) == 1 else "somebody"
    return f"{f.closed_without:,} of {f.deadlines:,} rounds with a deadline closed without {whom}: {listed}."


def _stuck(worker: WorkerFigures) -> str:
    if not worker.stalls:
        return ""
    often = "once" if worker.stalls == 1 else f"{worker.stalls:,} times"
    return f" (stuck {often}, {'for' if worker.stalls == 1 else 'each for'} about {duration(worker.stall_s)})"


def patience(f: Figures, name: Name) -> str:
    """What it would have cost to wait. An estimate, and called one."""
    if not f.patient:
        return ""
    gain = f.samples_per_s / f.patient
    if gain < 1 - SAME:
        return (
            f"Waiting for everybody would have run at about {number(f.patient)} samples/s, by an estimate, "
            f'{percent(1 / gain - 1)} faster: pace="{WAITING}" may suit these machines better.'
        )
    if gain < 1 + SAME:
        return "Waiting for everybody would have taken as long, by an estimate."
    cause = max(f.workers, key=lambda w: w.would_hold)
    mostly = f", mostly for {name(cause)}" if cause.would_hold > 1 / 2 else ""
    equal = f", equal shares {times(f.samples_per_s / f.equal)} times" if 0 < f.equal < f.patient * (1 - SAME) else ""
    return f"By an estimate, waiting for everybody would have taken {times(gain)} times as long{mostly}{equal}."


def cut_off(f: Figures, pace: str) -> str:
    """Work that came too late to count."""
    part = f.cut / (f.work + f.cut) if f.cut > 0 else 0.0
    if part < 0.005:
        return ""
    said = f"About {percent(part)} of the work was cut off and done again."
    better = traits_of(pace).if_cut
    return f'{said} pace="{better}" counts what is finished.' if better else said


def spread(f: Figures) -> str:
    return f"A step counted {number(f.count)} samples, give or take {percent(f.spread)}." if f.spread >= 0.005 else ""
