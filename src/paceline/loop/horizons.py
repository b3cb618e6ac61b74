"""The number of its own steps over which a learning-rate schedule decays, read from the schedule.

torch's schedules hold it as an attribute (``T_max``, ``total_steps``, ``total_iters``), those of other packages under
similar names. A ``LambdaLR`` has it in its function: as an argument of a ``functools.partial``, in the closure, as a
default, or as a global variable of the script. Periodic schedules (warm restarts, cycles) have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

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


def _unique(found: Iterable[Horizon]) -> list[Horizon]:
    return list(dict.fromkeys(found))


def ends_at(function: Callable[[int], float], steps: int, *, not_at: int) -> bool:
    """Whether the function of a ``LambdaLR`` comes down to 0 just at ``steps``, and is far from 0 at ``not_at``.

    >>> ends_at(lambda n: max(0.0, 1 - n / 40), 40, not_at=10), ends_at(lambda n: 0.5, 40, not_at=10)
    (True, False)
    """
    try:
        before, there, elsewhere = (float(function(number)) for number in (steps - 1, steps, not_at))
    except Exception:  # a function of the script's, called for a step that may never come
        return False
    return abs(there) < 1e-14 < before < elsewhere and elsewhere > 0.02 and math.isfinite(elsewhere)
