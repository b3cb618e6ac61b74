"""Checkpoints: complete or absent, refused when they do not fit; a resumed run continues as if nothing had happened."""

from __future__ import annotations

import copy
import pickle
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from lone import deep, flat, join, linear, mse, numbers, sgd, training
from paceline import MisuseError
from paceline.checkpoint import file as checkpoint_file
from paceline.checkpoint import load
from quick import examples


class Run:
    """A training with everything that has state, as a script would set it up."""

    def __init__(self, fleet: paceline.Fleet) -> None:
        self.fleet = fleet
        self.model = fleet.model(nn.Sequential(deep(), nn.Dropout(0.2), nn.BatchNorm1d(1).double()))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, total_steps=50)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        self.ema = torch.optim.swa_utils.AveragedModel(self.model)
        fleet.track(optimizer=self.optimizer, scheduler=self.scheduler, scaler=self.scaler, ema=self.ema)

    def steps(self, *, epochs: int = 3, length: int = 20) -> Iterator[paceline.Step]:
        for step in training(
            self.fleet, self.model, self.optimizer, numbers(length), global_batch=6, micro_batch=3, epochs=epochs
        ):
            self.scheduler.step()
            self.ema.update_parameters(self.model)
            yield step

    def state(self) -> list[torch.Tensor]:
        kept = [*self.model.state_dict().values(), *self.ema.state_dict().values()]
        rates = torch.tensor([self.scheduler.get_last_lr()[0], self.scaler.get_scale()])
        return [tensor.clone() for tensor in (*kept, rates)]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[paceline.Fleet]:
    with join(tmp_path) as fleet:
        yield fleet


def simple(fleet: paceline.Fleet) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fleet.model(linear())
    optimizer = sgd(model)
    fleet.track(optimizer=optimizer)
    return model, optimizer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of the simplest training, half-way through its first epoch."""
    path = tmp_path / "saved.pt"
    with join(tmp_path) as fleet:
        model, optimizer = simple(fleet)
        for step in training(fleet, model, optimizer, numbers(), global_batch=8):
            if step.index == 2:
                fleet.save(path, extra={"best": 0.5})
                break
    return path


# -- going on ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save_at", [3, 9])
def test_a_second_phase_is_shuffled_alike_after_a_save_in_any_step_of_the_first(tmp_path: Path, save_at: int) -> None:
    """Ten steps a phase: the last of them ends its loop, and the script still begins with that loop."""

    def run(name: str, load: Path | None = None) -> torch.Tensor:
        with join(tmp_path / name) as fleet:
            model, optimizer = simple(fleet)
            first = fleet.load(load, loops="rest")["phase"] if load else 0
            phases = [numbers(), numbers(30)]
            for phase in range(first, 2):
                for step in training(fleet, model, optimizer, phases[phase], global_batch=8, epochs=2):
                    if step.index == save_at and load is None:
                        fleet.save(tmp_path / "c.pt", extra={"phase": phase})
        return flat(model)

    assert torch.equal(run("whole"), run("rest", tmp_path / "c.pt"))


@pytest.mark.slow
@pytest.mark.parametrize("stop", [0, 2, 3, 4, 7, 11])  # 3, 7 and 11 end an epoch
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(tmp_path: Path, stop: int) -> None:
    path = tmp_path / "c.pt"
    with join(tmp_path, seed=5) as fleet:
        whole = Run(fleet)
        for step in whole.steps():
            if step.index == stop:
                fleet.save(path, extra={"step": step.index, "best": torch.tensor(0.5)})
        expected, ranges = whole.state(), [record.ranges for record in fleet.history]
    with join(tmp_path, seed=99) as fleet:  # the checkpoint's seed counts
        torch.manual_seed(1)
        resumed = Run(fleet)
        extra = fleet.load(path)
        assert extra["step"] == stop
        assert float(extra["best"]) == 0.5
        indices = [step.index for step in resumed.steps()]
        assert indices == list(range(stop + 1, 12))
        assert [record.ranges for record in fleet.history] == ranges[stop + 1 :]
        for ours, theirs in zip(resumed.state(), expected, strict=True):
            assert torch.equal(ours, theirs)


def test_after_the_last_epoch_more_epochs_can_be_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    with join(tmp_path) as fleet:
        whole = Run(fleet)
        list(whole.steps(epochs=4))
        expected = whole.state()
    with join(tmp_path) as fleet:
        first = Run(fleet)
        list(first.steps(epochs=2))
        fleet.save(path)
    with join(tmp_path) as fleet:
        second = Run(fleet)
        fleet.load(path)
        steps = list(second.steps(epochs=4))
        assert [step.epoch for step in steps] == [2] * 4 + [3] * 4
        assert steps[0].index == 8
        assert steps[-1].progress == 1.0
        assert all(torch.equal(a, b) for a, b in zip(second.state(), expected, strict=True))


def test_a_finished_run_loaded_with_as_many_epochs_has_nothing_left_to_do(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    with join(tmp_path) as fleet:
        run = Run(fleet)
        list(run.steps(epochs=1))
        fleet.save(path)
    with join(tmp_path) as fleet:
        run = Run(fleet)
        fleet.load(path)
        before = run.state()
        assert list(run.steps(epochs=1)) == []
        assert all(torch.equal(a, b) for a, b in zip(run.state(), before, strict=True))


def test_a_checkpoint_taken_in_the_middle_of_a_step_repeats_that_step(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    with join(tmp_path) as fleet:
        model, optimizer = simple(fleet)
        for step in fleet.steps(numbers(), global_batch=8, micro_batch=4):
            for number, (x, y) in enumerate(step):
                step.backward(mse(model, x, y))
                if step.index == 1 and number == 0:
                    fleet.save(path)
            step.commit(optimizer)
        expected = flat(model)
    with join(tmp_path) as fleet:
        model, optimizer = simple(fleet)
        fleet.load(path)
        steps = list(training(fleet, model, optimizer, numbers(), global_batch=8, micro_batch=4))
    assert [step.index for step in steps] == [1, 2, 3, 4]
    assert torch.equal(flat(model), expected)


def test_a_checkpoint_from_before_the_first_step_and_one_saved_again_unused(tmp_path: Path, saved: Path) -> None:
    with join(tmp_path) as fleet:
        simple(fleet)
        fleet.save(tmp_path / "first.pt")
        assert fleet.load(tmp_path / "first.pt") is None
        fleet.load(saved)
        fleet.save(tmp_path / "again.pt")
    with join(tmp_path) as fleet:
        model, optimizer = simple(fleet)
        fleet.load(tmp_path / "again.pt")
        assert [s.index for s in training(fleet, model, optimizer, numbers(), global_batch=8)] == [3, 4]


def test_the_learned_pace_is_part_of_the_checkpoint(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        model, optimizer = simple(fleet)
        list(training(fleet, model, optimizer, numbers(), global_batch=8))
        fleet.save(tmp_path / "c.pt")
        learned = fleet.pacer.state_dict()
    with join(tmp_path) as fleet:
        simple(fleet)
        fleet.load(tmp_path / "c.pt")
        assert fleet.pacer.state_dict() == learned
    with join(tmp_path, "equal") as fleet:  # another pace begins anew
        simple(fleet)
        fleet.load(tmp_path / "c.pt")


# -- what does not fit is refused, and nothing is changed ----------------------------------------------------------


def assert_refused(fleet: paceline.Fleet, path: Path, said: str) -> str:
    """Loading raises ValueError with these words and changes neither the model nor what is tracked."""
    before = copy.deepcopy(states(fleet))
    with pytest.raises(ValueError) as error:
        fleet.load(path)
    assert said in str(error.value)
    assert path.name in str(error.value)
    assert same(states(fleet), before)
    return str(error.value)


def states(fleet: paceline.Fleet) -> list[Any]:
    return [thing.state_dict() for thing in (*fleet._context.models, *fleet._context.tracking.things.values())]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("what", ["nothing", "a byte", "cut short", "no end", "text", "zeros"])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(fleet: paceline.Fleet, saved: Path, what: str) -> None:
    whole = saved.read_bytes()
    content = {
        "nothing": b"",
        "a byte": b"P",
        "cut short": whole[: len(whole) // 2],
        "no end": whole[:-1],
        "text": b"hello, I am a checkpoint\n",
        "zeros": bytes(1000),
    }
    simple(fleet)
    saved.write_bytes(content[what])
    assert_refused(fleet, saved, "is not a whole checkpoint")


@settings(deadline=None, max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=60) | st.binary(max_size=60).map(lambda tail: b"\x80\x02" + tail + b"."))
def test_any_bytes_at_all_are_refused_with_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"c\.pt"):
        load.parse(data, path=Path("c.pt"), device=torch.device("cpu"))


@pytest.mark.parametrize(
    "content",
    [
        {"model": {}},
        {"paceline_checkpoint": 1},
        {"paceline_checkpoint": "one"},
        {"paceline_checkpoint": 1, "models": None, "tracked": {}, "pace": {}, "seed": 0, "steps": None},
        [1, 2],
        torch.zeros(3),
    ],
    ids=["another tool's", "hardly anything", "an odd version", "no models", "a list", "a tensor"],
)
def test_a_file_that_is_no_checkpoint_of_ours_is_refused(fleet: paceline.Fleet, tmp_path: Path, content: Any) -> None:
    simple(fleet)
    torch.save(content, tmp_path / "foreign.pt")
    assert_refused(fleet, tmp_path / "foreign.pt", "was not written by fleet.save")


def test_a_checkpoint_of_a_newer_version_is_refused(fleet: paceline.Fleet, tmp_path: Path) -> None:
    torch.save({"paceline_checkpoint": 3}, tmp_path / "newer.pt")
    assert_refused(fleet, tmp_path / "newer.pt", "a newer version of Paceline")


def test_a_checkpoint_of_version_1_is_still_read(fleet: paceline.Fleet, saved: Path) -> None:
    content = torch.load(saved, weights_only=True)
    assert content["paceline_checkpoint"] == 2
    del content["steps"]["dataset_length"]  # version 1 had neither this nor a checksum
    torch.save(content | {"paceline_checkpoint": 1}, saved)
    model, optimizer = simple(fleet)
    assert fleet.load(saved) == {"best": 0.5}
    assert [s.index for s in training(fleet, model, optimizer, numbers(), global_batch=8)] == [3, 4]


def test_a_checkpoint_whose_checksum_was_cut_off_is_refused(fleet: paceline.Fleet, saved: Path) -> None:
    simple(fleet)
    torch.save(torch.load(saved, weights_only=True), saved)  # whole for torch, and without a checksum
    assert_refused(fleet, saved, "its end, with the checksum, is missing")


@pytest.mark.slow
def test_one_flipped_bit_anywhere_is_refused_and_changes_nothing(fleet: paceline.Fleet, saved: Path) -> None:
    simple(fleet)
    whole = saved.read_bytes()
    for bit in range(3, len(whole) * 8, len(whole) * 8 // 60):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        saved.write_bytes(damaged)
        assert_refused(fleet, saved, "saved.pt")
    saved.write_bytes(whole)
    assert fleet.load(saved) == {"best": 0.5}


class Trap:
    """Unpickling it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_code_in_a_checkpoint_is_not_run(fleet: paceline.Fleet, tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    simple(fleet)
    torch.save({"paceline_checkpoint": 1, "extra": Trap(trap)}, tmp_path / "trap.pt")
    first = assert_refused(fleet, tmp_path / "trap.pt", "trap.pt")
    (tmp_path / "trap.pt").write_bytes(pickle.dumps(Trap(trap)))
    second = assert_refused(fleet, tmp_path / "trap.pt", "trap.pt")
    assert not trap.exists()
    assert "can still be loaded" not in first + second, "the error must not tell how to run the code after all"


def test_a_checkpoint_that_is_not_there_is_named(fleet: paceline.Fleet, tmp_path: Path) -> None:
    assert_refused(fleet, tmp_path / "missing.pt", "cannot read the checkpoint")
    assert_refused(fleet, tmp_path, "holds no checkpoint of fleet.autosave")


def test_where_a_missing_checkpoint_is_fine_nothing_changes_and_none_comes_back(
    fleet: paceline.Fleet, tmp_path: Path, saved: Path
) -> None:
    model, _ = simple(fleet)
    before = flat(model)
    for nothing in (tmp_path / "missing.pt", tmp_path / "missing", tmp_path):
        assert fleet.load(nothing, missing_ok=True) is None
    assert torch.equal(flat(model), before)
    assert fleet.load(saved, missing_ok=True) == {"best": 0.5}
    saved.write_bytes(b"PK")  # there, and damaged: that is not the same as missing
    with pytest.raises(ValueError, match="not a whole checkpoint"):
        fleet.load(saved, missing_ok=True)


class Follower:
    """The transport of worker 1, whose leader is lost a given number of times while it sends the checkpoint to all."""

    rank, shard, shards = 1, 0, 1

    def __init__(self, path: Path, lost: int) -> None:
        self.path, self.lost, self.broadcasts = path, lost, 0

    def gather(self, label: str, value: Any) -> list[Any]:
        if callable(value):
            return [[str(self.path), self.path.stat().st_size, None, []], value()]
        return [True, value]

    def broadcast(self, tensors: list[torch.Tensor], *, inside: bool) -> None:
        self.broadcasts += 1
        if self.broadcasts > self.lost:
            tensors[0].copy_(torch.frombuffer(bytearray(self.path.read_bytes()), dtype=torch.uint8))


@pytest.mark.parametrize("lost", [0, 1, 3, 100])
def test_a_leader_lost_while_it_hands_the_checkpoint_round_is_followed_by_another(saved: Path, lost: int) -> None:
    transport: Any = Follower(saved, lost)
    options: Any = {"device": torch.device("cpu"), "missing_ok": True, "warn": print}
    if lost == 100:
        with pytest.raises(ValueError, match="did not reach every worker"):
            load.fetch(transport, saved, **options)
        return
    found = load.fetch(transport, saved, **options)
    assert found is not None
    assert found.content["extra"] == {"best": 0.5}
    assert transport.broadcasts == lost + 1


# -- a folder ------------------------------------------------------------------------------------------------------


def fill(folder: Path, *steps: int) -> None:
    """Checkpoints of the simplest training under the names that autosave gives; each step is its own extra."""
    with join(folder.parent) as fleet:
        simple(fleet)
        for step in steps:
            fleet.save(checkpoint_file.path_of(folder, step), extra=step)


def test_a_folder_stands_for_its_newest_checkpoint(fleet: paceline.Fleet, tmp_path: Path) -> None:
    simple(fleet)
    fill(tmp_path / "kept", 90, 1000, 110)
    (tmp_path / "kept" / "step-00002000.paceline.bak").write_text("not ours")
    (tmp_path / "kept" / "step-3000.paceline").write_text("not ours either")
    assert fleet.load(tmp_path / "kept") == 1000


def test_damaged_checkpoints_of_a_folder_are_named_and_the_one_before_is_taken(
    fleet: paceline.Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    simple(fleet)
    fill(tmp_path / "kept", 10, 20, 30)
    newest, middle = checkpoint_file.newest_first(tmp_path / "kept")[:2]
    newest.write_bytes(newest.read_bytes()[:-1])
    middle.write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    assert fleet.load(tmp_path / "kept") == 10
    assert not (tmp_path / "sprung").exists()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "step-00000030.paceline is not a whole checkpoint" in said[0]
    assert "step-00000020.paceline is not a whole checkpoint" in said[1]
    assert all(text.endswith("passed over") for text in said)


def test_a_folder_of_damaged_checkpoints_alone_never_starts_anew_in_silence(
    fleet: paceline.Fleet, tmp_path: Path
) -> None:
    simple(fleet)
    fill(tmp_path / "kept", 10, 20)
    for file in checkpoint_file.newest_first(tmp_path / "kept"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"no checkpoint in .*kept is whole: .*00000020.*; .*00000010"):
        fleet.load(tmp_path / "kept", missing_ok=True)


def test_a_newer_versions_checkpoint_in_a_folder_is_not_passed_over(fleet: paceline.Fleet, tmp_path: Path) -> None:
    simple(fleet)
    fill(tmp_path / "kept", 10, 20)
    newest = checkpoint_file.path_of(tmp_path / "kept", 20)
    newest.write_bytes(newest.read_bytes().replace(b"paceline checkpoint 2 ", b"paceline checkpoint 3 "))
    with pytest.raises(ValueError, match=r"step-00000020\.paceline was written by a newer version"):
        fleet.load(tmp_path / "kept")


def test_other_names_than_were_tracked_are_refused_and_listed(fleet: paceline.Fleet, saved: Path) -> None:
    model = fleet.model(linear())
    assert_refused(fleet, saved, "holds optimizer, which the script does not track")
    fleet.track(optimizer=sgd(model), ema=copy.deepcopy(model))
    assert_refused(fleet, saved, "lacks ema: fleet.track(...) must name the same things")


def test_another_number_of_models_is_refused(fleet: paceline.Fleet, saved: Path) -> None:
    simple(fleet)
    fleet.model(linear())
    assert_refused(fleet, saved, "holds 1 models, and fleet.model was called 2 times")


@pytest.mark.parametrize("other", ["shape", "names", "dtype"])
def test_a_checkpoint_of_another_model_is_refused_before_anything_changes(
    fleet: paceline.Fleet, saved: Path, other: str
) -> None:
    net = {"shape": nn.Linear(3, 2).double(), "names": deep(), "dtype": linear(dtype=torch.float32)}[other]
    model = fleet.model(net)
    fleet.track(optimizer=sgd(model))
    if other == "dtype":
        fleet.load(saved)  # torch converts
        assert model.weight.dtype == torch.float32
    else:
        assert_refused(fleet, saved, "does not fit the model")


def test_a_state_that_does_not_fit_a_tracked_object_is_refused_before_the_model_changes(
    fleet: paceline.Fleet, saved: Path
) -> None:
    model = fleet.model(linear())
    with torch.no_grad():
        model.weight.zero_()
    fleet.track(optimizer=torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1))
    with pytest.raises(ValueError, match="optimizer"):
        fleet.load(saved)
    assert not model.weight.any()


def test_loading_in_the_middle_of_a_loop_is_misuse(fleet: paceline.Fleet, saved: Path) -> None:
    model, optimizer = simple(fleet)
    loop = training(fleet, model, optimizer, numbers(), global_batch=8)
    next(loop)
    with pytest.raises(MisuseError, match=r"call it before the first step"):
        fleet.load(saved)
    loop.close()  # once it was left, models and tracked things may be set back
    del loop
    fleet.load(saved)


def test_a_loop_over_other_data_is_refused_and_the_right_data_still_resume(tmp_path: Path, saved: Path) -> None:
    with join(tmp_path) as fleet:
        model, optimizer = simple(fleet)
        fleet.load(saved)
        for wrong in (numbers(39), numbers(41)):
            with pytest.raises(ValueError, match="dataset_length was 40 and is"):
                fleet.steps(wrong, global_batch=8)
        with pytest.raises(ValueError, match="shuffle was True and is False"):
            fleet.steps(numbers(), global_batch=8, shuffle=False)
        steps = list(training(fleet, model, optimizer, numbers(), global_batch=8))
        assert [step.index for step in steps] == [3, 4]


def test_other_data_are_refused_before_a_weight_changes_and_after_the_last_epoch_too(
    fleet: paceline.Fleet, tmp_path: Path, saved: Path
) -> None:
    simple(fleet)
    fleet.steps(numbers(39), global_batch=8)
    assert_refused(fleet, saved, "dataset_length was 40 and is 39 now")
    with join(tmp_path / "whole") as other:
        model, optimizer = simple(other)
        list(training(other, model, optimizer, numbers(), global_batch=8))
        other.save(saved)
    assert_refused(fleet, saved, "dataset_length was 40 and is 39 now")


# -- writing -------------------------------------------------------------------------------------------------------


def test_a_path_that_cannot_be_written_is_an_os_error_and_the_training_goes_on(
    fleet: paceline.Fleet, tmp_path: Path
) -> None:
    model, optimizer = simple(fleet)
    (tmp_path / "file").write_text("")
    for _ in training(fleet, model, optimizer, numbers(), global_batch=8):
        for path in ("/proc/nowhere/c.pt", tmp_path / "file" / "c.pt", tmp_path):
            with pytest.raises(OSError, match="cannot write"):
                fleet.save(path)
    assert len(fleet.history) == 5


def test_folders_on_the_way_are_made(fleet: paceline.Fleet, tmp_path: Path) -> None:
    fleet.save(tmp_path / "a" / "b" / "c.pt")
    assert (tmp_path / "a" / "b" / "c.pt").exists()


def test_a_save_that_fails_half_way_leaves_the_old_file_and_nothing_else(
    fleet: paceline.Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kept"
    simple(fleet)
    fleet.save(folder / "c.pt", extra=1)
    before = (folder / "c.pt").read_bytes()

    def fail(content: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        with pytest.raises(OSError, match=r"cannot write .*c\.pt: No space left on device"):
            fleet.save(folder / "c.pt", extra=2)
    assert (folder / "c.pt").read_bytes() == before
    assert [file.name for file in folder.iterdir()] == ["c.pt"]


def test_a_full_disk_leaves_the_old_file_and_is_an_os_error(fleet: paceline.Fleet, tmp_path: Path) -> None:
    """The disk is full for this process alone: no file may grow beyond a few kilobytes."""
    folder = tmp_path / "kept"
    fleet.model(nn.Linear(100, 100))
    fleet.save(folder / "c.pt")
    before = (folder / "c.pt").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(OSError, match="cannot write"):
            fleet.save(folder / "c.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (folder / "c.pt").read_bytes() == before
    assert [file.name for file in folder.iterdir()] == ["c.pt"]


@pytest.mark.parametrize(
    "extra", [object(), Path("x"), {"f": print}, [lambda: 0]], ids=["object", "path", "function", "lambda"]
)
def test_what_could_not_be_loaded_again_is_refused_when_it_is_saved(
    fleet: paceline.Fleet, tmp_path: Path, extra: Any
) -> None:
    with pytest.raises(ValueError, match="plain values and tensors"):
        fleet.save(tmp_path / "c.pt", extra=extra)
    assert not (tmp_path / "c.pt").exists()


def test_numpy_numbers_in_extra_are_saved_for_good_or_refused_at_once(fleet: paceline.Fleet, tmp_path: Path) -> None:
    try:
        fleet.save(tmp_path / "c.pt", extra={"best": np.float64(0.5), "seen": np.arange(3)})
    except ValueError:
        assert not (tmp_path / "c.pt").exists()
    else:
        assert fleet.load(tmp_path / "c.pt")["best"] == 0.5


def test_a_save_is_noted_in_the_log(fleet: paceline.Fleet, tmp_path: Path) -> None:
    fleet.save(tmp_path / "c.pt")
    fleet.leave()
    assert '"event": "save"' in (fleet.run_dir / "events.jsonl").read_text()


def test_a_model_with_no_data_yet_and_no_tracked_things_round_trips(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        model = fleet.model(deep())
        list(training(fleet, model, sgd(model), TensorDataset(*numbers().tensors), global_batch=8))
        fleet.save(tmp_path / "c.pt")
        expected = flat(model)
    with join(tmp_path) as fleet:
        model = fleet.model(nn.Sequential(*[copy.deepcopy(layer) for layer in deep()]))
        fleet.load(tmp_path / "c.pt")
        assert torch.equal(flat(model), expected)
