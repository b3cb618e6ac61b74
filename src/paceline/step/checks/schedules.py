"""Check that learning-rate schedules match the loop's number of steps.

A schedule counts how often it is stepped, and the script may step it once per step or once per epoch. So most are
judged when the loop has shown which of the two it does: after three steps, or after the first epoch. A length that is
``epochs * len(loader)`` counts micro-batches, and is refused; another that does not fit is warned of, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

NAMES = frozenset(
    f"{prefix}{unit}"
    for prefix in ("total_", "max_", "num_", "num_training_", "num_train_", "training_", "train_", "n_", "all_")
    for unit in ("steps", "iters", "iterations", "updates", "batches")
) | {"T_max", "t_max", "t_total", "total", "max_epochs"}
"""What people call the length of a training, in schedules and in the functions of a ``LambdaLR``."""
MILESTONE = "the last milestone"
PERIODIC = (lr_scheduler.CosineAnnealingWarmRestarts, lr_scheduler.CyclicLR)
PHASES = ("num_warmup_steps", "num_stable_steps", "num_decay_steps")
"""What Transformers' warm-up, stable and decay schedule is made of."""


@dataclass(frozen=True)
class Horizon:
    """Over how many of its steps a schedule decays."""

    steps: int
    own: int
    """The number that was given; the last part of a sequence begins later, and ends at ``steps``."""
    name: str
    """What the number is called, such as ``T_max``."""


def parts_of(schedule: LRScheduler) -> Iterator[LRScheduler]:
    """Yield a schedule, and those it is made of."""
    yield schedule
    for part in getattr(schedule, "_schedulers", ()):
        yield from parts_of(part)


def steps_made(schedule: Any) -> float | None:
    """Return how often a schedule was stepped since it was made; a chain counts as its first part does."""
    made = getattr(schedule, "last_epoch", None)
    if made is None and (parts := getattr(schedule, "_schedulers", ())):
        return steps_made(parts[0])
    return made if isinstance(made, (int, float)) else None


def horizons(schedule: LRScheduler) -> list[Horizon]:
    """Return what a schedule decays over; nothing where it does not show, or where it does not end.

    >>> import torch
    >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    >>> horizons(lr_scheduler.CosineAnnealingLR(sgd, T_max=30))
    [Horizon(steps=30, own=30, name='T_max')]
    >>> total = 50
    >>> horizons(lr_scheduler.LambdaLR(sgd, lambda n: 1 - n / total))
    [Horizon(steps=50, own=50, name='total')]
    """
    if isinstance(schedule, PERIODIC):
        return []
    if isinstance(schedule, lr_scheduler.SequentialLR):
        milestones: Any = schedule._milestones
        began = int(milestones[-1]) if milestones else 0
        return [Horizon(began + one.steps, one.own, one.name) for one in horizons(schedule._schedulers[-1])]
    if parts := getattr(schedule, "_schedulers", ()):
        return [one for part in parts for one in horizons(part)]
    if isinstance(schedule, lr_scheduler.LambdaLR):
        return _unique(found for function in schedule.lr_lambdas for found in _of_function(function))
    return _unique(_of_attributes(schedule))


def _of_attributes(schedule: Any) -> Iterator[Horizon]:
    if isinstance(schedule, lr_scheduler.LinearLR):
        if schedule.end_factor < schedule.start_factor:  # else it warms up
            yield Horizon(schedule.total_iters, schedule.total_iters, "total_iters")
        return
    if isinstance(schedule, lr_scheduler.ConstantLR):
        return
    if isinstance(schedule, lr_scheduler.MultiStepLR):
        if schedule.milestones:
            last = int(max(schedule.milestones))
            yield Horizon(last, last, MILESTONE)
        return
    yield from _named(vars(schedule))


def _of_function(function: Any) -> Iterator[Horizon]:
    numbers = dict(_numbers(function))
    if all(name in numbers for name in PHASES):
        whole = sum(numbers[name] for name in PHASES)
        yield Horizon(whole, whole, " + ".join(PHASES))
        return
    yield from _named(numbers)


def _named(numbers: Mapping[str, Any]) -> Iterator[Horizon]:
    for name, value in numbers.items():
        if name in NAMES and _is_count(value):
            yield Horizon(int(value), int(value), name)


def _numbers(function: Any) -> Iterator[tuple[str, Any]]:
    """Whole numbers that a function uses, with their names: arguments bound to it, its closure, globals."""
    if isinstance(function, partial):
        yield from _numbers(function.func)
        yield from ((name, value) for name, value in function.keywords.items() if _is_count(value))
        return
    code: Any = getattr(function, "__code__", None)
    if code is None:
        yield from ((name, value) for name, value in getattr(function, "__dict__", {}).items() if _is_count(value))
        return
    known = getattr(function, "__globals__", {})
    yield from ((name, known[name]) for name in code.co_names if _is_count(known.get(name)))
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if _is_count(value := _content(cell)):
            yield name, value
    defaults = function.__defaults__ or ()
    last = code.co_varnames[: code.co_argcount][-len(defaults) :] if defaults else ()
    yield from ((name, value) for name, value in zip(last, defaults, strict=True) if _is_count(value))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty yet
        return None


def _is_count(value: Any) -> bool:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return whole and not isinstance(value, bool) and value > 1


def periods(schedule: LRScheduler) -> Iterator[tuple[int, str]]:
    """Yield the stretches after which a schedule changes on its way, each with its name; milestones all together.

    >>> import torch
    >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    >>> list(periods(lr_scheduler.StepLR(sgd, step_size=30)))
    [(30, 'step_size')]
    >>> list(periods(lr_scheduler.MultiStepLR(sgd, [60, 20])))
    [(20, 'milestones')]
    """
    for part in parts_of(schedule):
        found: Any = part
        if isinstance(part, lr_scheduler.StepLR):
            yield found.step_size, "step_size"
        elif isinstance(part, lr_scheduler.CyclicLR):
            yield round(found.total_size * found.step_ratio), "step_size_up"
        elif isinstance(part, lr_scheduler.CosineAnnealingWarmRestarts):
            yield found.T_0, "T_0"
        elif isinstance(part, (lr_scheduler.LinearLR, lr_scheduler.ConstantLR)):
            yield found.total_iters, "total_iters"
        elif isinstance(part, lr_scheduler.MultiStepLR):
            yield math.gcd(*found.milestones), "milestones"
        elif isinstance(part, lr_scheduler.SequentialLR):
            yield math.gcd(*found._milestones), "milestones"


def _unique(found: Iterable[Horizon]) -> list[Horizon]:
    return list(dict.fromkeys(found))


def ends_at(function: Callable[[int], float], steps: int, *, not_at: int) -> bool:
    """Return whether the function of a ``LambdaLR`` comes down to 0 just at ``steps``, and is far from 0 at ``not_at``.

    >>> ends_at(lambda n: max(0.0, 1 - n / 40), 40, not_at=10), ends_at(lambda n: 0.5, 40, not_at=10)
    (True, False)
    """
    try:
        before, there, elsewhere = (float(function(number)) for number in (steps - 1, steps, not_at))
    except Exception:  # a function of the script's, called for a step that may never come
        return False
    return abs(there) < 1e-14 < before < elsewhere and elsewhere > 0.02 and math.isfinite(elsewhere)


SEEN_STEPS = 2
"""Steps, after the first, in each of which a schedule must have been stepped to count as one of every step."""
TOO_LONG = 1.5
"""How many times longer than the loop a schedule must be to be warned of: warm-up is often counted twice."""

ADVICE = "use len(steps) of steps = fleet.steps(...), or epochs * math.ceil(len(dataset) / global_batch)"


def check_length(name: str, schedule: LRScheduler, *, steps: int | None, micro_batches: int | None) -> None:
    """Raise ValueError when a schedule is made for another number of steps than the loop has.

    Before the first step that shows in schedules that end, as OneCycleLR does.

    Args:
        name: The name that the schedule is tracked by.
        schedule: The schedule.
        steps: The steps of the whole loop; None where that is not known.
        micro_batches: What ``epochs * len(loader)`` gives.
    """
    for part in parts_of(schedule):
        kind = type(part).__name__
        ends: Any = getattr(part, "total_steps", None)
        if steps is None and ends is not None:
            raise ValueError(
                f"{kind} ({name}) ends after {ends} steps, but with rounds by the clock a fast worker makes more steps "
                "than a slow one, and with keep_batch=False a cut-off makes more of them: let the schedule follow "
                "step.progress (LambdaLR, see docs/networks.md), or give paceline.Averaging(every_steps=...)"
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
            meaning = f"epochs * len(loader), with a part of the data for each of {workers} workers"
            found |= {epochs * -(-part // size): meaning, epochs * (part // size): meaning}
        meaning = "epochs * len(loader)"
        found |= {epochs * -(-samples // size): meaning, epochs * (samples // size): meaning}
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
        """``find`` returns the script's schedules.

        It is called after the first step, when a worker that joins has the others' state.
        """
        self._length, self._find, self._warn = length, find, warn
        self._steps = self._epochs = 0
        self._open: list[_Watched] | None = None
        self._fractions: dict[str, float | None] = {}
        """The last fraction of an epoch, by name, of schedules that are stepped with such fractions."""

    @property
    def over(self) -> bool:
        """Whether nothing is left to look for."""
        return self._open == []

    def check(self, *, ends_epoch: bool, progress: float) -> None:
        """Look at the schedules between two steps; raise ValueError for one that counts micro-batches.

        ``ends_epoch``: the step was its epoch's last; ``progress``: the part of the loop that is done.
        """
        if self._open is None:
            known = ((name, one, steps_made(one)) for name, one in self._find().items())
            self._open = [_Watched(name, one, made) for name, one, made in known if made is not None]
            self._fractions = {one.name: _place(one.schedule) for one in self._open}
            return
        for one in self._open:
            self._check_fraction(one, ends_epoch=ends_epoch)
        self._steps, self._epochs = self._steps + 1, self._epochs + ends_epoch
        if self._steps >= SEEN_STEPS:
            self._open = [one for one in self._open if not self._judge(one, progress)]

    def _judge(self, one: _Watched, progress: float) -> bool:
        """Return whether a schedule needs no further check."""
        made, steps, epochs = one.made(), self._steps, self._epochs
        if made >= steps and made % steps == 0:
            self._check_per_step(one, int(made) // steps, progress)
            return True
        if epochs and made == epochs:
            self._check_per_epoch(one, progress)
        return epochs > 0

    def _check_fraction(self, one: _Watched, *, ends_epoch: bool) -> None:
        """Warn where ``schedule.step(epoch + i / len(loader))`` moves on by another part of an epoch than a step is."""
        before, now = self._fractions.get(one.name), _place(one.schedule)
        if before is None or now is None:  # it takes no parts of an epoch, or was warned of
            return
        self._fractions[one.name] = now
        if ends_epoch or not self._length.steps:
            return
        moved, part = now - before, self._length.epochs / self._length.steps
        if moved > 0 and not float(moved).is_integer() and not 0.8 * part < moved < 1.25 * part:
            self._fractions[one.name] = None
            self._warn(
                f"{one.kind} moves on by {moved:.3g} epochs in a step, and a step is {part:.3g} of an epoch: "
                "i / len(loader) counts the loader's batches. Write schedule.step(step.progress * epochs), or count "
                "with len(steps) of steps = fleet.steps(...)"
            )

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
        else:
            self._check_periods(one, length.steps / length.epochs)

    def _check_periods(self, one: _Watched, per_epoch: float) -> None:
        """Warn of a schedule that changes every few passes of the loader, as it counts them."""
        epochs = self._length.epochs
        lengths = sorted(self._length.loader_lengths.items(), reverse=True)
        passes = [(number // epochs, how) for number, how in lengths]
        for period, name in periods(one.schedule):
            for size, how in passes:
                if size > per_epoch + 1 and period and period % size == 0 and period // size < epochs:
                    self._warn(_counts_passes(one, period, name, how.removeprefix("epochs * "), size, per_epoch))
                    return

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


def _place(schedule: LRScheduler) -> float | None:
    """Return how far a schedule is that takes parts of an epoch; None for others."""
    if not isinstance(schedule, lr_scheduler.CosineAnnealingWarmRestarts):
        return None
    place = getattr(schedule, "T_cur", None)
    return float(place) if isinstance(place, (int, float)) else None


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
        """Return how often the schedule was stepped since."""
        return self.so_far - self.before


def _counted_batches(
    one: _Watched, away: Sequence[Horizon], wrong: Mapping[int, str], end: int
) -> tuple[Horizon, str] | None:
    """Return which length of a schedule is the length of a loader, and in words how; None when none is."""
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


def _counts_passes(one: _Watched, period: int, name: str, how: str, size: int, per_epoch: float) -> str:
    times = f"{period // size} * " if period > size else ""
    return (
        f"{one.kind} has {name} {period}, which is {times}{how}: that counts micro-batches. It is stepped behind "
        f"every update, of which an epoch has {math.ceil(per_epoch)}. If epochs are meant, use len(steps) // epochs of "
        "steps = fleet.steps(...)"
    )


def _too_long(one: _Watched, found: Horizon, end: int) -> str:
    return (
        f"{one.kind} decays over {found.steps} steps ({found.name}), and will have made {end} when the loop ends. If "
        f"the training ends there too, {ADVICE}"
    )


def _by_the_clock(one: _Watched, found: Horizon) -> str:
    return (
        f"{one.kind} decays over {found.steps} steps ({found.name}), but with rounds by the clock, or with "
        "keep_batch=False, nobody knows how many a worker makes: let it follow step.progress (LambdaLR, see "
        "docs/networks.md)"
    )


def unfinished(name: str, schedule: LRScheduler) -> str:
    """Return the warning about a schedule that has not come to its end when the training has; else nothing."""
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
    """Keep schedules among ``things`` at their end in a step more than ``len(steps)``, where torch would raise.

    There is such a step when workers were lost in the very last one.
    """
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
