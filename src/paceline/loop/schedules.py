"""Check that learning-rate schedules match the loop's number of steps.

A schedule counts how often it is stepped, and the script may step it once per step or once per epoch. So most are
judged when the loop has shown which of the two it does: after three steps, or after the first epoch. A length that is
``epochs * len(loader)`` counts micro-batches, and is refused; another that does not fit is warned of, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from paceline.loop.horizons import MILESTONE, Horizon, ends_at, horizons, parts_of, steps_made

SEEN_STEPS = 2
"""Steps, after the first, in each of which a schedule must have been stepped to count as one of every step."""
TOO_LONG = 1.5
"""How many times longer than the loop a schedule must be to be warned of: warm-up is often counted twice."""

ADVICE = "use len(steps) of steps = fleet.steps(...), or epochs * math.ceil(len(dataset) / global_batch)"


def check_length(name: str, schedule: LRScheduler, *, steps: int | None, micro_batches: int | None) -> None:
    """Raise ValueError when a schedule is made for another number of steps than the loop has, as far as that shows
    before the first step: in one that ends, as OneCycleLR does.

    Args:
        name: that it is tracked by.
        steps: of the whole loop; None where workers make as many as they find time for.
        micro_batches: what ``epochs * len(loader)`` gives.
    """
    for part in parts_of(schedule):
        kind = type(part).__name__
        ends: Any = getattr(part, "total_steps", None)
        if steps is None and ends is not None:
            raise ValueError(
                f"{kind} ({name}) ends after {ends} steps, but with rounds by the clock a fast worker makes more steps "
                "than a slow one: let the schedule follow step.progress (LambdaLR, see docs/averaging.md), or give "
                "paceline.Averaging(every_steps=...)"
            )
        if ends is not None and ends == micro_batches != steps:
            raise ValueError(
                f"{kind} ({name}) is made for {ends} steps, which is epochs * len(loader): that counts micro-"
                f"batches, and the loop has {steps} steps; {ADVICE}"
            )


@dataclass(frozen=True)
class LoopLength:
    """How long a loop is, by every way to count."""

    steps: int | None
    """Updates of the whole loop; None where workers make as many as they find time for."""
    epochs: int
    loader_lengths: Mapping[int, str]
    """What ``epochs * len(loader)`` may give, and in words how."""


def loader_lengths(samples: int, *, epochs: int, batch_sizes: Iterable[int], workers: int) -> dict[int, str]:
    """Return what a script may count as the steps of a training, from the length of its own loader.

    >>> loader_lengths(100, epochs=2, batch_sizes=[8], workers=2)
    {14: 'epochs * len(loader), with a part of the data for each of 2 workers', 12: 'epochs * len(loader), with a part \
of the data for each of 2 workers', 26: 'epochs * len(loader)', 24: 'epochs * len(loader)'}
    """
    found: dict[int, str] = {}
    for size in batch_sizes:
        if workers > 1:
            part = -(-samples // workers)
            said = f"epochs * len(loader), with a part of the data for each of {workers} workers"
            found |= {epochs * -(-part // size): said, epochs * (part // size): said}
        said = "epochs * len(loader)"
        found |= {epochs * -(-samples // size): said, epochs * (samples // size): said}
    return found


class ScheduleWatch:
    """Looks at a loop's schedules between its first steps, until it is known how often each is stepped."""

    def __init__(
        self,
        length: LoopLength,
        *,
        find: Callable[[], Mapping[str, LRScheduler]],
        warn: Callable[[str], None],
    ) -> None:
        """``find`` gives the script's schedules. It is asked after the first step: by then a worker that joins has the
        others' state."""
        self._length, self._find, self._warn = length, find, warn
        self._steps = self._epochs = 0
        self._open: list[_Watched] | None = None

    @property
    def over(self) -> bool:
        """Whether nothing is left to look for."""
        return self._open == []

    def look(self, *, ends_epoch: bool, progress: float) -> None:
        """A step is over and the next one begins. ``ends_epoch``: the step was its epoch's last; ``progress``: the part
        of the loop that is done. Raise ValueError for a schedule that counts micro-batches."""
        if self._open is None:
            known = ((name, one, steps_made(one)) for name, one in self._find().items())
            self._open = [_Watched(name, one, made) for name, one, made in known if made is not None]
            return
        self._steps, self._epochs = self._steps + 1, self._epochs + ends_epoch
        if self._steps >= SEEN_STEPS:
            self._open = [one for one in self._open if not self._judge(one, progress)]

    def _judge(self, one: _Watched, progress: float) -> bool:
        """Whether a schedule needs no further look."""
        made, steps, epochs = one.made(), self._steps, self._epochs
        if made >= steps and made % steps == 0:
            self._check_per_step(one, int(made) // steps, progress)
            return True
        if epochs and made == epochs:
            self._check_per_epoch(one, progress)
        return epochs > 0

    def _check_per_step(self, one: _Watched, rate: int, progress: float) -> None:
        length = self._length
        if length.steps is None:
            if found := horizons(one.schedule):
                self._warn(_by_the_clock(one, found[0]))
            return
        end = int(one.so_far) + rate * round((1.0 - progress) * length.steps)
        slack = max(length.epochs, end // 20)
        away = [found for found in horizons(one.schedule) if min(abs(found.steps - end), abs(found.own - end)) > slack]
        wrong = {number: how for number, how in length.loader_lengths.items() if abs(number - end) > slack}
        if (counted := _counted_batches(one, away, wrong, end)) is not None:
            self._refuse(_counts_batches(one, *counted, end))
        elif length.epochs > 1 and (long := [horizon for horizon in away if horizon.steps >= TOO_LONG * end]):
            self._warn(_too_long(one, long[0], end))

    def _refuse(self, text: str) -> None:
        """Raise ValueError; warn where this loop may be one epoch of several that the script makes itself."""
        if self._length.epochs > 1:
            raise ValueError(text)
        self._warn(f"{text}. With an epoch loop of your own around fleet.steps this may be right")

    def _check_per_epoch(self, one: _Watched, progress: float) -> None:
        length = self._length
        end = int(one.so_far) + round((1.0 - progress) * length.epochs)
        for found in horizons(one.schedule):
            counts_steps = found.own in length.loader_lengths or found.own == length.steps
            if counts_steps and length.epochs > 1 and found.steps >= TOO_LONG * end:
                self._warn(
                    f"{one.kind} decays over {found.steps} steps ({found.name}), and is stepped once per epoch: at the "
                    f"loop's end it will have made {end}. Step it behind every step.commit, or give it {length.epochs}"
                )


@dataclass(frozen=True)
class _Watched:
    """A schedule, and how often it had been stepped when it was first looked at."""

    name: str
    schedule: LRScheduler
    before: float

    @property
    def kind(self) -> str:
        return f"{type(self.schedule).__name__} ({self.name})"

    @property
    def so_far(self) -> float:
        return steps_made(self.schedule) or 0.0

    def made(self) -> float:
        """How often it was stepped since."""
        return self.so_far - self.before


def _counted_batches(
    one: _Watched, away: Sequence[Horizon], wrong: Mapping[int, str], end: int
) -> tuple[Horizon, str] | None:
    """Which length of a schedule is the length of a loader, and in words how; None when none is."""
    for found in away:
        how = wrong.get(found.own) or wrong.get(found.steps)
        if how is not None and found.name != MILESTONE:
            return found, how
    for part in parts_of(one.schedule):
        for function in dict.fromkeys(part.lr_lambdas) if isinstance(part, LambdaLR) else ():
            for number, how in wrong.items():
                if number > end and ends_at(function, number, not_at=end):
                    return Horizon(number, number, "its function"), how
    return None


def _counts_batches(one: _Watched, found: Horizon, how: str, end: int) -> str:
    return (
        f"{one.kind} decays over {found.own} steps ({found.name}), which is {how}: that counts micro-batches. It is "
        f"stepped behind every update, and the loop has {end} of them; {ADVICE}"
    )


def _too_long(one: _Watched, found: Horizon, end: int) -> str:
    return (
        f"{one.kind} decays over {found.steps} steps ({found.name}), and will have made {end} when the loop ends. If "
        f"the training ends there too, {ADVICE}"
    )


def _by_the_clock(one: _Watched, found: Horizon) -> str:
    return (
        f"{one.kind} decays over {found.steps} steps ({found.name}), but with rounds by the clock nobody knows how "
        "many a worker makes: let it follow step.progress (LambdaLR, see docs/averaging.md)"
    )


def unfinished(name: str, schedule: LRScheduler) -> str:
    """What to say of a schedule that ends, when the training does and it has not; else nothing."""
    for part in parts_of(schedule):
        ends: Any = getattr(part, "total_steps", None)
        if ends is not None and part.last_epoch < ends - 1:
            return _ended_early(name, part, part.last_epoch, ends)
    made = steps_made(schedule) or 0
    for found in horizons(schedule):
        if made > 0 and found.steps >= TOO_LONG * made:
            return _ended_early(name, schedule, int(made), found.steps)
    return ""


def _ended_early(name: str, schedule: LRScheduler, made: int, ends: int) -> str:
    return (
        f"{type(schedule).__name__} ({name}) had made {made} of its {ends} steps when training ended: "
        "it counts steps of the fleet, of which an epoch has ceil(samples / global_batch), not micro-batches"
    )


@contextmanager
def held_at_their_end(things: Iterable[Any]) -> Iterator[None]:
    """A step more than ``len(steps)``, because workers were lost in the very last one: a schedule among ``things`` that
    has made all of its steps stays there, where torch would raise."""
    ended = [part for thing in things if isinstance(thing, LRScheduler) for part in parts_of(thing) if _has_ended(part)]
    kinds = [type(schedule) for schedule in ended]
    for schedule, kind in zip(ended, kinds, strict=True):  # not an attribute: those are a schedule's state
        schedule.__class__ = type(kind.__name__, (kind,), {"step": lambda self, *args, **kwargs: None})
    try:
        yield
    finally:
        for schedule, kind in zip(ended, kinds, strict=True):
            schedule.__class__ = kind


def _has_ended(schedule: LRScheduler) -> bool:
    ends: Any = getattr(schedule, "total_steps", None)
    return ends is not None and schedule.last_epoch >= ends
