"""micro_batch="auto" finds a size in the first steps, keeps to it, and changes nothing but sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import paceline
from clocks import give_clock
from lone import deep, flat, join, linear, mse, numbers, plain, sgd, training
from paceline.step import micro_batch_size as sizing

SHARE = 64
LENGTH = 12 * SHARE


class Clock:
    """Instead of `time`: stands still but for what a micro-batch is said to take."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    give_clock(monkeypatch, sizing, CLOCK)


def costly(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A micro-batch takes 4 ms however many samples it has."""
    CLOCK.now += 0.004
    return mse(model, x, y)


def even(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A sample takes 1 ms."""
    CLOCK.now += 0.001 * len(x)
    return mse(model, x, y)


def auto(fleet: paceline.Fleet, model: nn.Module, data: Any = None, **options: Any) -> list[paceline.Step]:
    options = {"global_batch": SHARE, "micro_batch": "auto", "shuffle": False, "loss": costly} | options
    return list(training(fleet, model, sgd(model), numbers(LENGTH) if data is None else data, **options))


def counts(steps: list[paceline.Step]) -> list[int]:
    return [step.record.micro_batches[0] for step in steps]


def test_where_a_micro_batch_costs_the_same_whatever_its_size_it_becomes_the_whole_share(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        model = fleet.model(deep())
        steps = auto(fleet, model)
    assert counts(steps)[0] == 16, "an equal share holds sixteen micro-batches of the first size"
    assert counts(steps)[-1] == 1
    assert torch.allclose(flat(model), plain(deep(), numbers(LENGTH), batch=SHARE), rtol=0, atol=1e-12)
    assert [part for record in fleet.history for part in record.ranges[0]] == [
        (start, start + SHARE) for start in range(0, LENGTH, SHARE)
    ]
    assert "worker 0: micro_batch is 80; tried, with the time of a sample: 4 (" in log(tmp_path)


def test_where_only_samples_cost_the_search_ends_after_two_more_sizes(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        assert counts(auto(fleet, fleet.model(linear()), loss=even))[-1] == 4
    assert "micro_batch is 16; tried, with the time of a sample: 4 (1 ms), 8 (1 ms), 16 (1 ms)" in log(tmp_path)


def emulate(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    """This machine, in hardly any time."""
    monkeypatch.setenv("PACELINE_EMULATE", machine)
    monkeypatch.setenv("PACELINE_SAMPLE_MS", "0.0001")


def log(folder: Path) -> str:
    return (folder / "run" / "events.jsonl").read_text()


def test_on_a_machine_with_little_memory_it_stays_below_what_did_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch, "1!20")
    with join(tmp_path) as fleet:
        model = fleet.model(deep())
        steps = auto(fleet, model)
    assert counts(steps)[-1] == 4, "of 20 samples at most"
    assert torch.allclose(flat(model), plain(deep(), numbers(LENGTH), batch=SHARE), rtol=0, atol=1e-12)
    assert "ran out of memory with 32 samples at once: micro_batch is now 16" in log(tmp_path)
    assert "micro_batch is 20, which is what memory holds" in log(tmp_path)


def test_a_script_that_makes_a_loop_an_epoch_searches_once(tmp_path: Path) -> None:
    data = numbers(LENGTH)
    with join(tmp_path) as fleet:
        model = fleet.model(linear())
        auto(fleet, model, data)
        assert set(counts(auto(fleet, model, data))) == {1}


def test_with_loader_processes_every_sample_comes_once(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        model = fleet.model(linear())
        steps = auto(fleet, model, DataLoader(numbers(LENGTH), batch_size=4, num_workers=1))
    assert counts(steps)[-1] == 1
    assert torch.allclose(flat(model), plain(linear(), numbers(LENGTH), batch=SHARE), rtol=0, atol=1e-12)


class Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(zip(*numbers(LENGTH).tensors))


def test_a_stream_is_drawn_in_the_size_that_was_found(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        steps = auto(fleet, fleet.model(linear()), Endless(), shuffle=None)
    assert counts(steps)[-2] == 1, "the last step has nothing left"


def test_a_compiled_model_is_not_searched_for_and_the_log_says_so(tmp_path: Path) -> None:
    torch.compiler.reset()
    with join(tmp_path) as fleet:
        model = fleet.model(torch.compile(linear(), backend="eager"))
        steps = auto(fleet, model)
    assert set(counts(steps)) == {1}
    assert log(tmp_path).count('micro_batch=\\"auto\\" looks for no size') == 1


def test_batch_norm_gets_no_smaller_micro_batches_than_it_can_use(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        model = fleet.model(nn.Sequential(linear(), nn.BatchNorm1d(1).double()))
        assert counts(auto(fleet, model))[0] == SHARE // 16


def test_micro_batches_that_are_left_out_tell_nothing_of_speed(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        model = fleet.model(linear())
        steps = fleet.steps(numbers(LENGTH), global_batch=SHARE, micro_batch="auto")._loop
        optimizer = sgd(model)
        for step in steps:
            for _ in step:
                step.skip()
            step.commit(optimizer)
        assert not steps.loop.micro_batches.sizing.search.costs


# -- what is kept ------------------------------------------------------------------------------------------------------


def trained(folder: Path, checkpoint: Path, *, loops: int = 1, load: bool = False, **options: Any) -> list[int]:
    """Micro-batches of each step of a run that saves, or goes on from, a checkpoint."""
    data, found = numbers(LENGTH), []
    with join(folder) as fleet:
        model = fleet.model(linear())
        optimizer = sgd(model)
        fleet.track(optimizer=optimizer)
        if load:
            fleet.load(checkpoint, loops="rest")
        for _ in range(loops):
            options = {"global_batch": SHARE, "micro_batch": "auto", "loss": costly} | options
            found += counts(list(training(fleet, model, optimizer, data, **options)))
        fleet.save(checkpoint)
    return found


def test_a_resumed_run_keeps_the_size_that_was_found_on_such_a_device(tmp_path: Path) -> None:
    assert trained(tmp_path / "first", tmp_path / "saved")[-1] == 1
    assert set(trained(tmp_path / "second", tmp_path / "saved", load=True)) == {1}
    assert "worker 0: micro_batch is 80" in log(tmp_path / "second")


def test_on_another_device_it_is_searched_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path / "first", tmp_path / "saved")
    emulate(monkeypatch, "1!40")
    again = trained(tmp_path / "second", tmp_path / "saved", load=True)
    assert (again[0], again[-1]) == (16, 2)
    third = trained(tmp_path / "third", tmp_path / "saved", load=True)
    assert set(third) == {2}


def test_the_step_records_say_what_was_found_and_by_what_it_is_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch, "1!20")
    with join(tmp_path) as fleet:
        model = fleet.model(linear())
        steps = auto(fleet, model)
        given = list(training(fleet, model, sgd(model), numbers(), global_batch=16, micro_batch=4))
    assert steps[0].record.micro_size == steps[0].record.memory_bound == (0,)
    assert steps[-1].record.micro_size == (20,)
    assert steps[-1].record.memory_bound == (1,)
    assert given[0].record.micro_size == ()


def test_a_gpu_s_memory_is_asked_for_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sizing.memory_of(torch.device("cpu")) is None
    answers = {"mem_get_info": (300, 1000), "memory_reserved": 500, "memory_allocated": 200}
    answers |= {"max_memory_allocated": 450, "get_per_process_memory_fraction": 0.75}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    found = sizing.memory_of(torch.device("cuda:0"))
    assert found is not None
    assert (found.peak, found.held, found.usable) == (450, 200, 750)
