"""Schedules whose length is not the loop's: refused, warned of, or let be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    PolynomialLR,
    SequentialLR,
)

from paceline.step.checks.schedules import LoopLength, ScheduleWatch, horizons, loader_lengths, unfinished

SAMPLES, BATCH, GLOBAL, EPOCHS = 480, 8, 32, 4
STEPS, BATCHES = 60, 240
"""Of the whole loop: updates, and what ``epochs * len(loader)`` gives."""
Make = Callable[[torch.optim.Optimizer], Any]


def cosine(optimizer: torch.optim.Optimizer, num_training_steps: int, warmup: int = 5) -> LambdaLR:
    """As Transformers makes it."""

    def factor(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
        return min(step / num_warmup_steps, 1 - step / num_training_steps)

    return LambdaLR(optimizer, partial(factor, num_warmup_steps=warmup, num_training_steps=num_training_steps))


def after_warm_up(optimizer: torch.optim.Optimizer, total: int, warmup: int = 5) -> SequentialLR:
    parts = [LinearLR(optimizer, 0.1, 1.0, warmup), CosineAnnealingLR(optimizer, total - warmup)]
    return SequentialLR(optimizer, parts, milestones=[warmup])


def watched(
    make: Make, *, every: str = "step", epochs: int = EPOCHS, steps: int | None = STEPS, workers: int = 2
) -> list[str]:
    """Run a loop that steps the schedule once per step or once per epoch; returns what was warned of."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule, said = make(optimizer), list[str]()
    lengths = loader_lengths(SAMPLES, epochs=epochs, batch_sizes=[BATCH], workers=workers)
    watch = ScheduleWatch(LoopLength(steps, epochs, lengths), find=lambda: {"scheduler": schedule}, warn=said.append)
    whole = STEPS * epochs // EPOCHS
    for number in range(whole):
        ends_epoch = (number + 1) % (STEPS // EPOCHS) == 0
        if every == "step" or ends_epoch:
            optimizer.step()
            schedule.step()
        watch.check(ends_epoch=ends_epoch, progress=(number + 1) / whole)
    assert watch.over
    return said


WRONG: dict[str, Make] = {
    "cosine": lambda o: CosineAnnealingLR(o, BATCHES),
    "Transformers' cosine": lambda o: cosine(o, BATCHES),
    "polynomial": lambda o: PolynomialLR(o, BATCHES),
    "linear": lambda o: LinearLR(o, 1.0, 0.0, BATCHES),
    "chained": lambda o: ChainedScheduler([ExponentialLR(o, 0.999), CosineAnnealingLR(o, BATCHES)]),
    "after a warm-up": lambda o: after_warm_up(o, BATCHES),
    "after a warm-up, not taken off": lambda o: after_warm_up(o, BATCHES + 5),
    "an expression": lambda o: LambdaLR(o, lambda n: 1 - n / (EPOCHS * (SAMPLES // BATCH))),
    "a default": lambda o: LambdaLR(o, lambda n, total=BATCHES: 0.1 + 0.9 * (1 - n / total)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_schedule_over_the_loaders_batches_is_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"which is epochs \* len\(loader\): that counts micro-batches.* has 60 of them"
    ):
        watched(WRONG[name])


def test_in_a_loop_of_one_epoch_it_is_warned_of() -> None:
    """The script may have an epoch loop of its own, in which the number is right."""
    (said,) = watched(lambda o: CosineAnnealingLR(o, BATCHES // EPOCHS), epochs=1, steps=STEPS // EPOCHS)
    assert "CosineAnnealingLR (scheduler) decays over 60 steps (T_max), which is epochs * len(loader)" in said
    assert "With an epoch loop of your own around fleet.steps this may be right" in said


def test_the_length_of_one_workers_part_is_refused_too() -> None:
    with pytest.raises(ValueError, match="with a part of the data for each of 2 workers"):
        watched(lambda o: CosineAnnealingLR(o, BATCHES // 2))
    with pytest.raises(ValueError, match="with a part of the data for each of 6 workers"):
        watched(lambda o: CosineAnnealingLR(o, BATCHES // 6), workers=6)


RIGHT: dict[str, Make] = {
    "cosine": lambda o: CosineAnnealingLR(o, STEPS),
    "cosine, rounded": lambda o: CosineAnnealingLR(o, STEPS - EPOCHS),
    "Transformers' cosine": lambda o: cosine(o, STEPS),
    "after a warm-up": lambda o: after_warm_up(o, STEPS),
    "after a warm-up, not taken off": lambda o: after_warm_up(o, STEPS + 5),
    "restarts": lambda o: CosineAnnealingWarmRestarts(o, BATCHES),
    "many short cycles": lambda o: CosineAnnealingLR(o, 10),
    "a warm-up alone": lambda o: LinearLR(o, 0.1, 1.0, 500),
    "what follows the progress": lambda o: LambdaLR(o, lambda n: 0.7),
    "milestones": lambda o: MultiStepLR(o, [30, 45]),
    "no number": lambda o: ExponentialLR(o, 0.99),
    "a plateau": lambda o: Metricless(o),
}


class Metricless(lr_scheduler.ReduceLROnPlateau):
    def step(self, metrics: Any = 1.0, epoch: Any = None) -> None:
        super().step(1.0)


@pytest.mark.parametrize("name", RIGHT)
def test_right_schedules_are_let_be(name: str) -> None:
    assert watched(RIGHT[name]) == []


PASSES: dict[str, Make] = {
    "step_size 60, which is len(loader)": lambda o: lr_scheduler.StepLR(o, BATCHES // EPOCHS),
    "step_size 180, which is 3 * len(loader)": lambda o: lr_scheduler.StepLR(o, 3 * BATCHES // EPOCHS),
    "step_size 30, which is len(loader), with a part of": lambda o: lr_scheduler.StepLR(o, BATCHES // EPOCHS // 2),
    "step_size_up 60, which": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, BATCHES // EPOCHS),
    "T_0 60, which": lambda o: CosineAnnealingWarmRestarts(o, BATCHES // EPOCHS),
    "total_iters 60, which": lambda o: LinearLR(o, 0.1, 1.0, BATCHES // EPOCHS),
    "milestones 60, which": lambda o: MultiStepLR(o, [60]),
}


@pytest.mark.parametrize("found", PASSES)
def test_a_schedule_that_changes_every_pass_of_the_loader_is_warned_of(found: str) -> None:
    (said,) = watched(PASSES[found])
    assert f"(scheduler) has {found}" in said
    assert "that counts micro-batches. It is stepped behind every update, of which an epoch has 15" in said


@pytest.mark.parametrize("size", [15, 45, 7])
def test_one_that_changes_every_epoch_of_steps_is_let_be(size: int) -> None:
    assert watched(lambda o: lr_scheduler.StepLR(o, size)) == []


def test_a_number_of_epochs_is_right_where_the_schedule_is_stepped_once_per_epoch() -> None:
    assert watched(lambda o: CosineAnnealingLR(o, EPOCHS), every="epoch") == []
    assert watched(lambda o: MultiStepLR(o, [2, 3]), every="epoch") == []


@pytest.mark.parametrize("number", [STEPS, BATCHES])
def test_a_number_of_steps_is_warned_of_where_the_schedule_is_stepped_once_per_epoch(number: int) -> None:
    (said,) = watched(lambda o: CosineAnnealingLR(o, number), every="epoch")
    assert (
        f"decays over {number} steps (T_max), and is stepped once per epoch: at the loop's end it will have made 4"
        in said
    )


@pytest.mark.parametrize("make", [lambda o: CosineAnnealingLR(o, 100), lambda o: MultiStepLR(o, [30, 120])])
def test_a_schedule_that_is_much_too_long_is_warned_of_once(make: Make) -> None:
    (said,) = watched(make)
    assert "and will have made 60 when the loop ends" in said


def test_with_rounds_by_the_clock_a_number_of_steps_is_warned_of() -> None:
    (said,) = watched(lambda o: CosineAnnealingLR(o, STEPS), steps=None)
    assert "nobody knows how many a worker makes: let it follow step.progress" in said


def test_a_schedule_at_the_end_of_the_training_says_what_it_has_left() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = CosineAnnealingLR(optimizer, 240)
    for _ in range(60):
        optimizer.step()
        schedule.step()
    assert "CosineAnnealingLR (mine) had made 60 of its 240 steps when training ended" in unfinished("mine", schedule)
    assert unfinished("mine", ExponentialLR(optimizer, 0.9)) == ""


def test_a_function_that_fails_for_a_step_that_never_comes_is_let_be() -> None:
    rates = [1 - n / STEPS for n in range(STEPS + 1)]
    assert watched(lambda o: LambdaLR(o, lambda n: rates[n])) == []
    assert horizons(LambdaLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), lambda n: rates[n])) == []


@pytest.mark.parametrize(("per_epoch", "warned"), [(STEPS // EPOCHS, False), (BATCHES // EPOCHS, True), (1, False)])
def test_parts_of_an_epoch_that_count_the_loaders_batches_are_warned_of(per_epoch: int, warned: bool) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule, said = CosineAnnealingWarmRestarts(optimizer, 2), list[str]()
    watch = ScheduleWatch(LoopLength(STEPS, EPOCHS, {}), find=lambda: {"scheduler": schedule}, warn=said.append)
    each = STEPS // EPOCHS
    for number in range(STEPS):
        optimizer.step()
        schedule.step(number // each + (number % each) / per_epoch)
        watch.check(ends_epoch=(number + 1) % each == 0, progress=(number + 1) / STEPS)
    assert len(said) == warned
    assert all("step.progress * epochs" in text for text in said)
