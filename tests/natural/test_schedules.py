"""Schedules made for a number of steps: the loop keeps to it, or says at its start that it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import refusals, results

pytestmark = pytest.mark.fleet

ONE_CYCLE = """
with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x[:45], y[:45]), 4, shuffle=True)
    steps = fleet.steps(loader, global_batch=12, epochs=3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=TOTAL)
    fleet.track(optimizer=optimizer, scheduler=scheduler)
    made = 0
    for step in steps:
        for a, b in step:
            step.backward(loss_fn(model(a), b))
        step.commit(optimizer)
        scheduler.step()
        made += 1
    result = [made, TOTAL]
"""


@pytest.mark.parametrize("pace", ["equal", "fixed:1,3", "adaptive", "joint", "cutoff"])
def test_len_of_the_steps_is_a_promise_under_every_pace(tmp_path: Path, pace: str) -> None:
    for made, promised in results(tmp_path, ONE_CYCLE.replace("TOTAL", "len(steps)"), PACELINE_PACE=pace):
        assert promised == 12
        assert promised - 3 <= made <= promised


@pytest.mark.parametrize("combine", ["paceline.Averaging(every_steps=2)", "paceline.research.ElasticAverage(tau=3)"])
@pytest.mark.parametrize("pace", ["equal", "fixed:1,3"])
def test_it_is_one_under_averages_by_steps(tmp_path: Path, combine: str, pace: str) -> None:
    script = ONE_CYCLE.replace("TOTAL", "len(steps)").replace("join()", f"join(combine={combine})")
    for made, promised in results(tmp_path, script, PACELINE_PACE=pace):
        assert promised == 12
        assert made <= promised


def test_with_rounds_by_the_clock_a_schedule_of_so_many_steps_is_refused_at_the_start(tmp_path: Path) -> None:
    by_number = ONE_CYCLE.replace("TOTAL", "12")
    said = refusals(tmp_path / "number", by_number, PACELINE_COMBINE="average")
    assert "OneCycleLR (scheduler) ends after 12 steps" in said
    assert "step.progress" in said
    by_len = ONE_CYCLE.replace("TOTAL", "len(steps)")
    assert "nobody knows how many" in refusals(tmp_path / "len", by_len, PACELINE_COMBINE="average")


def test_a_schedule_that_counts_micro_batches_is_refused(tmp_path: Path) -> None:
    said = refusals(tmp_path, ONE_CYCLE.replace("TOTAL", "3 * len(loader)"))
    assert "made for 36 steps, which is epochs * len(loader)" in said
    assert "the loop has 12 steps" in said


SCHEDULED = """
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR
from transformers import get_cosine_schedule_with_warmup

def warm(optimizer, total):
    parts = [LinearLR(optimizer, 0.1, 1.0, 2), CosineAnnealingLR(optimizer, total - 2)]
    return SequentialLR(optimizer, parts, milestones=[2])

def tried(make, tracked=True, when="True", own_epochs=False):
    '''The last rate, as a part of the first, or what was said.'''
    try:
        with paceline.join() as fleet:
            model = fleet.model(network())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader, epochs = DataLoader(TensorDataset(x[:45], y[:45]), 4, shuffle=True), 3
            asked = dict(global_batch=12, epochs=1 if own_epochs else epochs)
            steps = fleet.steps(loader, **asked)
            total = epochs * len(loader)
            scheduler = eval(make, {**globals(), **locals()})
            if tracked:
                fleet.track(optimizer=optimizer, scheduler=scheduler)
            for turn in range(epochs if own_epochs else 1):
                for step in fleet.steps(loader, **asked) if turn else steps:
                    for a, b in step:
                        step.backward(loss_fn(model(a), b))
                    step.commit(optimizer)
                    if eval(when):
                        scheduler.step()
    except ValueError as error:
        return str(error)
    return scheduler.get_last_lr()[0] / 0.1

result = {name: tried(**way) for name, way in WAYS.items()}
"""

COUNTS_BATCHES = {
    "cosine": {"make": "CosineAnnealingLR(optimizer, T_max=epochs * len(loader))"},
    "cosine, not tracked": {"make": "CosineAnnealingLR(optimizer, T_max=epochs * len(loader))", "tracked": False},
    "Transformers": {"make": "get_cosine_schedule_with_warmup(optimizer, 2, epochs * len(loader))"},
    "a function": {"make": "LambdaLR(optimizer, lambda n: 1 - n / (epochs * len(loader)))"},
    "after a warm-up": {"make": "warm(optimizer, epochs * len(loader))"},
}
FITS = {
    "by len(steps)": {"make": "CosineAnnealingLR(optimizer, T_max=len(steps))"},
    "Transformers, by len(steps)": {"make": "get_cosine_schedule_with_warmup(optimizer, 2, len(steps))"},
    "in epochs": {"make": "CosineAnnealingLR(optimizer, T_max=epochs)", "when": "step.ends_epoch"},
    "by the progress": {"make": "LambdaLR(optimizer, lambda n: 1 - steps.progress)"},
    "in an epoch loop of one's own": {"make": "CosineAnnealingLR(optimizer, T_max=12)", "own_epochs": True},
}


def test_schedules_that_decay_over_the_loaders_batches_are_refused_and_others_end_where_they_should(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers", reason="needs pip install 'paceline[transformers]'")
    ways = {**COUNTS_BATCHES, **FITS}
    first, second = results(tmp_path, SCHEDULED.replace("WAYS", repr(ways)))
    assert first == second
    for name in COUNTS_BATCHES:
        assert "decays over 36 steps" in first[name] or "decays over 34 steps" in first[name], (name, first[name])
        assert "the loop has 12 of them" in first[name]
    for name in FITS:
        assert first[name] == pytest.approx(0.0, abs=1e-9), (name, first[name])
