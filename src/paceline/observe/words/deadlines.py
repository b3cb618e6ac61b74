"""Sentences about deadlines: when and why a pace began to set them, who was late, and what waiting would have cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.observe.analysis.figures import Figures, WorkerFigures
from paceline.observe.log import sanitise
from paceline.observe.words.numbers import duration, number, percent, times
from paceline.pace import WAITING, traits_of

MOST_NAMED = 3
SAME = 0.05
"""Relative difference below which two estimates are called equal."""
Name = Callable[[WorkerFigures], str]
"""A function from a worker to its name in the middle of a sentence."""


@dataclass(frozen=True)
class Switch:
    """A ``pace`` event of the log: the pace began to set deadlines, or ended it."""

    step: int
    """Step after which the change took effect."""
    deadlines: bool
    saves: float
    worker: int | None

    @property
    def why(self) -> str:
        """Return the reason: ``worker 3 kept the others waiting: a deadline saves 9 %``."""
        who = "now this worker and now that one" if self.worker is None else f"worker {self.worker}"
        return f"{who} kept the others waiting: a deadline saves {percent(self.saves)}"

    @property
    def text(self) -> str:
        """Return the line to show when the change happens.

        >>> Switch(312, True, 0.09, 3).text
        'after step 312 rounds have a deadline, for worker 3 kept the others waiting: a deadline saves 9 %'
        >>> Switch(480, False, 0.004, None).text
        'after step 480 everybody is waited for again: a deadline no longer pays'
        """
        if self.deadlines:
            return f"after step {self.step} rounds have a deadline, for {self.why}"
        return f"after step {self.step} everybody is waited for again: a deadline no longer pays"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def parse_switch(event: Mapping[str, Any]) -> Switch | None:
    """Return the change in a ``pace`` event; None for another event, or one that lacks a necessary field."""
    step, saves, worker = sanitise.count_or(event.get("step"), -1), event.get("saves"), event.get("worker")
    known = sanitise.is_number(saves) and abs(saves) <= 1  # type: ignore[arg-type]
    if event.get("event") != "pace" or step < 0 or not isinstance(event.get("deadlines"), bool) or not known:
        return None
    named = sanitise.count_or(worker, -1)
    return Switch(step, event["deadlines"], float(saves or 0.0), named if named >= 0 else None)


def switches(events: Iterable[Mapping[str, Any]]) -> tuple[Switch, ...]:
    """Return the changes among a log's events, in order."""
    return tuple(switch for event in events if (switch := parse_switch(event)) is not None)


def switches_text(found: Sequence[Switch]) -> str:
    """Return all changes in a sentence; empty when there was none.

    >>> switches_text([Switch(312, True, 0.09, 3), Switch(480, False, 0.0, None)])
    'Rounds had a deadline from step 312 to step 480, for worker 3 kept the others waiting: a deadline saves 9 %.'
    """
    first = next((switch for switch in found if switch.deadlines), None)
    if first is None:
        return f"Everybody was waited for again after step {found[0].step}: a deadline no longer paid." if found else ""
    later = found[found.index(first) + 1 :]
    until = f" to step {later[0].step}" if len(later) == 1 else ""
    more = f" Deadlines ended and began again, {len(later)} changes in all." if len(later) > 1 else ""
    return f"Rounds had a deadline from step {first.step}{until or ' on'}, for {first.why}.{more}"


def with_deadlines(f: Figures) -> bool:
    """Return whether more than half of the steps had a deadline."""
    return 2 * f.deadlines > f.steps


def deadline_sentences(f: Figures, pace: str, name: Name) -> Iterator[str]:
    """Yield the sentences about a run with deadlines, one subject each."""
    yield late(f, name)
    yield patience(f, name)
    yield " ".join(filter(None, (cut_off(f, pace), spread(f))))


def late(f: Figures, name: Name) -> str:
    """Return how many rounds closed without whom."""
    if not f.closed_without:
        return f"{f.deadlines:,} of {f.steps:,} rounds had a deadline, and everybody had something done by then."
    worst = sorted((w for w in f.workers if w.missed), key=lambda w: -w.missed)
    shown = worst if len(worst) <= MOST_NAMED + 1 else worst[:MOST_NAMED]
    each = [f"{f'worker {w.worker}' if index else name(w)} in {w.missed:,}{_stuck(w)}" for index, w in enumerate(shown)]
    each += [f"{len(worst) - len(shown)} more"] if len(worst) > len(shown) else []
    listed = each[0] if len(each) == 1 else f"{', '.join(each[:-1])} and {each[-1]}"
    whom = "one worker" if len(worst) == 1 else "somebody"
    return f"{f.closed_without:,} of {f.deadlines:,} rounds with a deadline closed without {whom}: {listed}."


def _stuck(worker: WorkerFigures) -> str:
    if not worker.stalls:
        return ""
    often = "once" if worker.stalls == 1 else f"{worker.stalls:,} times"
    return f" (stuck {often}, {'for' if worker.stalls == 1 else 'each for'} about {duration(worker.stall_s)})"


def patience(f: Figures, name: Name) -> str:
    """Return what it would have cost to wait for everybody, as an estimate."""
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
    """Return how much work came too late to count."""
    part = f.cut / (f.work + f.cut) if f.cut > 0 else 0.0
    if part < 0.005:
        return ""
    sentence = f"About {percent(part)} of the work was cut off and done again."
    better = traits_of(pace).if_cut
    return f'{sentence} pace="{better}" counts what is finished.' if better else sentence


def spread(f: Figures) -> str:
    return f"A step counted {number(f.count)} samples, give or take {percent(f.spread)}." if f.spread >= 0.005 else ""
