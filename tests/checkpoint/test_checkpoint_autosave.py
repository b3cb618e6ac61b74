"""Automatic saving: when it is due, off the training thread; the training continues whatever the disk does."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import paceline
from lone import deep, flat, join, linear, numbers, sgd, training
from paceline.checkpoint import autosave
from paceline.checkpoint import content as checkpoint
from paceline.checkpoint import file as checkpoint_file
from paceline.checkpoint.autosave import Autosaver, LastSave, Schedule, Snapshot

# -- when ----------------------------------------------------------------------------------------------------------


@given(every=st.integers(1, 50), last=st.integers(0, 200), step=st.integers(0, 400))
def test_by_steps_it_is_due_once_a_multiple_lies_behind_the_last_time(every: int, last: int, step: int) -> None:
    passed = any(number % every == 0 for number in range(last + 1, step + 1))
    assert Schedule(every_steps=every).due(step, 0.0, since=LastSave(last, 0.0)) == passed


@given(every=st.floats(0.1, 1e6), now=st.floats(0, 1e6), step=st.integers(1, 9))
def test_by_the_clock_it_is_due_so_many_seconds_after_the_last_time(every: float, now: float, step: int) -> None:
    assert Schedule(every_s=every).due(step, 50.0 + now, since=LastSave(0, 50.0)) == (50.0 + now - 50.0 >= every)


def test_with_both_whichever_comes_first_counts_and_no_step_is_saved_twice() -> None:
    schedule, since = Schedule(every_steps=10, every_s=60), LastSave(12, 100.0)
    assert [schedule.due(step, 130.0, since=since) for step in (13, 19, 20)] == [False, False, True]
    assert schedule.due(13, 160.0, since=since)
    assert not schedule.due(12, 1e9, since=since)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give every_steps=, every_s="),
        ({"every_steps": 0}, "every_steps must be at least 1, got 0"),
        ({"every_steps": 2.5}, "every_steps must be a whole number"),
        ({"every_s": 0}, "every_s must be a number of seconds above 0"),
        ({"every_s": -1.0}, "every_s must be"),
        ({"every_s": float("nan")}, "every_s must be"),
        ({"every_s": "60"}, "every_s must be"),
        ({"every_steps": 5, "keep": 0}, "keep must be at least 1"),
        ({"every_steps": 5, "keep": None}, "keep must be a whole number"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(tmp_path: Path, options: Any, said: str) -> None:
    with join(tmp_path) as fleet, pytest.raises(ValueError) as error:
        fleet.autosave(tmp_path / "kept", **options)
    assert said in str(error.value)


# -- one worker's saver --------------------------------------------------------------------------------------------


class Rig:
    """A saver with a clock of its own, whose state is one tensor that the training changes in every step."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.now, self.leads = 0.0, True
        self.weight = torch.zeros(1000)
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self.extra: Callable[[], Any] = lambda: None
        keep = options.pop("keep", 3)
        self.saver = Autosaver(
            folder,
            schedule=Schedule(**options),
            keep=keep,
            leads=lambda: self.leads,
            content=self._content,
            log_event=lambda event, fields: self.events.append((event, fields)),
            clock=lambda: self.now,
        )

    @contextmanager
    def _content(self) -> Iterator[dict[str, Any]]:
        yield {"weight": self.weight, "extra": checkpoint.plain(self.extra(), "extra")}

    def train(self, *steps: int, settle: bool = True) -> None:
        """Pass these boundaries, one second apart; ``settle``: let each be written before the next."""
        for step in steps:
            self.weight.fill_(step)
            self.saver.boundary(step)
            if settle:
                self.saver._finish()
            self.now += 1.0

    @property
    def saved(self) -> list[int]:
        return [fields["step"] for event, fields in self.events if event == "save"]

    @property
    def warnings(self) -> list[str]:
        return [fields["text"] for event, fields in self.events if event == "note"]


def steps_in(folder: Path) -> list[int | None]:
    return sorted(checkpoint_file.step_of(file) for file in folder.iterdir())


def test_the_last_few_are_kept_and_each_belongs_to_its_step(tmp_path: Path) -> None:
    rig = Rig(tmp_path, every_steps=10, keep=2)
    rig.train(*range(45))
    rig.saver.close()
    assert rig.saved == [10, 20, 30, 40]
    assert steps_in(tmp_path) == [30, 40]
    for step in (30, 40):
        data = checkpoint_file.path_of(tmp_path, step).read_bytes()
        assert checkpoint_file.checked_version(memoryview(data), tmp_path) == 2
        assert torch.load(checkpoint_file.path_of(tmp_path, step), weights_only=True)["weight"].eq(step).all()
    assert all(fields["automatic"] for event, fields in rig.events if event == "save")


def test_seconds_count_from_the_first_step_and_then_from_the_last_save(tmp_path: Path) -> None:
    rig = Rig(tmp_path, every_s=4)
    rig.train(*range(10))
    rig.saver.close()
    assert rig.saved == [4, 8]


def test_a_training_that_resumes_goes_on_with_the_same_multiples(tmp_path: Path) -> None:
    rig = Rig(tmp_path, every_steps=10)
    rig.train(*range(17, 32))
    rig.saver.close()
    assert rig.saved == [20, 30]


def test_only_the_leader_writes_and_a_new_one_goes_on_with_the_schedule(tmp_path: Path) -> None:
    first, second = Rig(tmp_path, every_steps=10, every_s=15), Rig(tmp_path, every_steps=10, every_s=15)
    second.leads = False
    for rig in (first, second):
        rig.train(*range(1, 23))
    assert steps_in(tmp_path) == [10, 20]
    second.leads = True
    second.train(*range(23, 33))
    second.saver.close()
    assert (first.saver._since, second.saved) == (LastSave(20, 19.0), [30])


def test_what_is_due_during_a_write_is_put_off_and_not_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, write = threading.Event(), checkpoint_file.write
    monkeypatch.setattr(checkpoint_file, "write", lambda path, content: (go.wait(30), write(path, content)))
    rig = Rig(tmp_path, every_steps=2)
    rig.train(0, 1, 2, 3, 4, 5, 6, 7, settle=False)
    assert [thread.name for thread in threading.enumerate()].count("paceline-autosave") <= 1
    go.set()
    rig.saver._finish()
    rig.train(9, 10)
    rig.saver.close()
    assert rig.saved == [2, 9, 10]
    assert torch.load(checkpoint_file.path_of(tmp_path, 2), weights_only=True)["weight"].eq(2).all()


def test_the_end_of_a_loop_is_saved_too_even_while_the_one_before_is_being_written(tmp_path: Path) -> None:
    rig = Rig(tmp_path, every_steps=2)
    rig.train(0, 1, 2, settle=False)
    rig.saver.boundary(3, last=True)
    rig.saver.close()
    rig.saver.boundary(3, last=True)  # a second loop that ends where it began
    assert rig.saved == [2, 3]


def test_leaving_waits_for_a_write_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(checkpoint_file, "write", lambda path, content: go.wait(30))
    monkeypatch.setattr(autosave, "FINISH_S", 0.1)
    rig = Rig(tmp_path, every_steps=1)
    rig.train(0, 1, settle=False)
    rig.saver.boundary(2, last=True)  # nor does another write begin beside it
    rig.saver.close()
    assert [thread.name for thread in threading.enumerate()].count("paceline-autosave") == 1
    assert len(rig.warnings) == 1
    assert "was not written within" in rig.warnings[0]
    go.set()
    assert rig.saver._thread is not None
    rig.saver._thread.join(30)


# -- trouble -------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_told_once_and_again_after_it_had_worked(tmp_path: Path) -> None:
    """The disk is full for this process alone: no file may grow beyond a few kilobytes."""
    rig = Rig(tmp_path, every_steps=1)
    rig.train(0, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for steps in ((2, 3, 4), (5,), (6, 7)):
        size = 2000 if len(steps) > 1 else limits[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            rig.train(*steps)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    rig.saver.close()
    assert rig.saved == [1, 5]
    assert steps_in(tmp_path) == [1, 5], "no half-written file either"
    assert [text.split(": ", 1)[1] for text in rig.warnings] == [
        "cannot write step-00000002.paceline, the training goes on without: File too large",
        "cannot write step-00000006.paceline, the training goes on without: File too large",
    ]


def test_each_kind_of_trouble_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter(
        [OSError(28, "No space left on device"), OSError(5, "Input/output error")] * 2 + [RuntimeError("odd")]
    )

    def fail(path: Path, content: Any) -> None:
        raise next(errors)

    monkeypatch.setattr(checkpoint_file, "write", fail)
    rig = Rig(tmp_path, every_steps=1)
    rig.train(*range(6))
    rig.saver.close()
    assert [text.rsplit(": ", 1)[1] for text in rig.warnings] == [
        "No space left on device",
        "Input/output error",
        "odd",
    ]


def test_a_folder_that_vanishes_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "kept"
    rig = Rig(folder, every_steps=1)
    rig.train(0, 1)
    shutil.rmtree(tmp_path / "a")
    rig.train(2)
    rig.saver.close()
    assert (steps_in(folder), rig.warnings) == ([2], [])


def test_a_place_that_cannot_be_written_warns_and_works_once_it_can(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file where the folder should be")
    rig = Rig(tmp_path / "kept", every_steps=1)
    rig.train(0, 1, 2)
    (tmp_path / "kept").unlink()
    rig.train(3)
    rig.saver.close()
    assert rig.saved == [3]
    assert len(rig.warnings) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_warns(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    rig = Rig(tmp_path, every_steps=1)
    rig.train(0, 1, 2)
    rig.saver.close()
    tmp_path.chmod(0o700)
    assert (rig.saved, len(rig.warnings)) == ([], 1)


def test_old_checkpoints_that_cannot_be_removed_are_told_of_once_and_saving_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, missing_ok: bool = False) -> None:
        if checkpoint_file.step_of(self) is not None:
            raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)
    rig = Rig(tmp_path, every_steps=1, keep=1)
    rig.train(0, 1, 2, 3)
    rig.saver.close()
    assert rig.saved == [1, 2, 3]
    assert len(rig.warnings) == 1
    assert "cannot remove old checkpoints: Operation not permitted" in rig.warnings[0]


def test_what_can_never_be_saved_is_refused_at_the_first_step_and_later_trouble_warns(tmp_path: Path) -> None:
    rig = Rig(tmp_path, every_steps=1)
    rig.extra = lambda: Path("x")
    with pytest.raises(ValueError, match=r"fleet\.autosave: extra is a pathlib\.PosixPath"):
        rig.train(0)
    rig = Rig(tmp_path, every_steps=1)
    rig.train(0)
    rig.extra = lambda: {}["missing"]
    rig.train(1, 2)
    rig.extra = lambda: 5
    rig.train(3)
    rig.saver.close()
    assert rig.saved == [3]
    assert len(rig.warnings) == 1
    assert "the state could not be copied: 'missing'" in rig.warnings[0]


def test_what_a_killed_writer_left_is_removed_by_the_next_start(tmp_path: Path) -> None:
    beyond_any_pid = 1 << 30
    (tmp_path / f".step-00000005.paceline.{beyond_any_pid}@{socket.gethostname()}.tmp").write_text("half")
    rig = Rig(tmp_path, every_steps=10)
    rig.train(9, 10)
    rig.saver.close()
    assert [file.name for file in tmp_path.iterdir()] == ["step-00000010.paceline"]


def test_another_trainings_later_checkpoints_are_set_aside_and_not_removed(tmp_path: Path) -> None:
    old = Rig(tmp_path, every_steps=100)
    old.train(0, 100, 200)
    new = Rig(tmp_path, every_steps=10, keep=1)
    new.train(0, 10, 20)
    new.saver.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "step-00000020.paceline",
        "step-00000100.paceline.aside1",
        "step-00000200.paceline.aside1",
    ]
    assert len(new.warnings) == 1
    assert "step-00000200.paceline.aside1, step-00000100.paceline.aside1" in new.warnings[0]


# -- in a fleet of one ---------------------------------------------------------------------------------------------


def simple(fleet: paceline.Fleet) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fleet.model(linear())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    fleet.track(optimizer=optimizer)
    return model, optimizer


def settled(fleet: paceline.Fleet, steps: Iterator[paceline.Step]) -> Iterator[paceline.Step]:
    """So that every save has time to be written: a step here takes microseconds."""
    for step in steps:
        assert fleet._saving._autosaver is not None
        fleet._saving._autosaver._finish()
        yield step


@pytest.mark.slow
@pytest.mark.parametrize("stop", [0, 4, 5, 9, 13])
def test_two_lines_at_the_top_resume_as_if_nothing_had_happened(tmp_path: Path, stop: int) -> None:
    with join(tmp_path) as fleet:
        model, optimizer = simple(fleet)
        list(training(fleet, model, optimizer, numbers(), global_batch=8, epochs=3))
        expected = flat(model)
    seen = []
    for _ in range(2):
        with join(tmp_path) as fleet:
            model, optimizer = simple(fleet)
            fleet.autosave(tmp_path / "kept", every_steps=2)
            fleet.load(tmp_path / "kept", missing_ok=True)
            steps = training(fleet, model, optimizer, numbers(), global_batch=8, epochs=3)
            for step in settled(fleet, steps):
                seen.append(step.index)
                if step.index == stop and len(seen) == stop + 1:
                    break
    assert seen[: stop + 1] == list(range(stop + 1))
    assert seen[stop + 1 :] == list(range(stop - stop % 2, 15))
    assert torch.equal(flat(model), expected)
    assert checkpoint_file.newest_first(tmp_path / "kept")[0] == checkpoint_file.path_of(tmp_path / "kept", 15)


def test_the_users_code_after_the_commit_is_part_of_the_step(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        model, optimizer = simple(fleet)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        fleet.track(scheduler=scheduler)
        best = {"index": -1}
        fleet.autosave(tmp_path / "kept", every_steps=1, keep=9, extra=lambda: dict(best))
        for step in settled(fleet, training(fleet, model, optimizer, numbers(), global_batch=8)):
            scheduler.step()
            best["index"] = step.index
    for number in range(1, 6):
        content = torch.load(checkpoint_file.path_of(tmp_path / "kept", number), weights_only=True)
        assert content["extra"] == {"index": number - 1}
        assert content["tracked"]["scheduler"]["last_epoch"] == content["steps"]["step"] == number


def test_automatic_saves_are_in_the_log_and_nothing_is_left_running(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        model, optimizer = simple(fleet)
        fleet.autosave(tmp_path / "kept", every_steps=2, keep=1)
        list(settled(fleet, training(fleet, model, optimizer, numbers(), global_batch=8)))
    lines = map(json.loads, (fleet.run_dir / "events.jsonl").read_text().splitlines())
    saves = [event for event in lines if event["event"] == "save"]
    assert [(save["step"], save["automatic"], Path(save["path"]).name) for save in saves] == [
        (2, True, "step-00000002.paceline"),
        (4, True, "step-00000004.paceline"),
        (5, True, "step-00000005.paceline"),
    ]
    assert [file.name for file in (tmp_path / "kept").iterdir()] == ["step-00000005.paceline"]
    assert not [thread for thread in threading.enumerate() if thread.name == "paceline-autosave"]


def test_an_error_of_the_users_still_lets_the_write_under_way_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, write = threading.Event(), checkpoint_file.write
    monkeypatch.setattr(checkpoint_file, "write", lambda path, content: (go.wait(30), write(path, content)))
    with join(tmp_path) as fleet:
        model, optimizer = simple(fleet)
        fleet.autosave(tmp_path / "kept", every_steps=2)
        next(step for step in training(fleet, model, optimizer, numbers(), global_batch=8) if step.index == 3)
        threading.Timer(0.1, go.set).start()
        fleet.leave(RuntimeError("mine"))
    assert [file.name for file in (tmp_path / "kept").iterdir()] == ["step-00000002.paceline"]


def test_a_second_call_takes_the_first_ones_place(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        model = fleet.model(deep())
        fleet.autosave(tmp_path / "a", every_steps=1)
        fleet.autosave(tmp_path / "b", every_steps=5)
        list(training(fleet, model, sgd(model), numbers(), global_batch=8))
    assert not (tmp_path / "a").exists()
    assert [file.name for file in (tmp_path / "b").iterdir()] == ["step-00000005.paceline"]


def test_autosave_does_not_change_what_is_trained(tmp_path: Path) -> None:
    results = []
    for every in (None, 1):
        with join(tmp_path) as fleet:
            model, optimizer = simple(fleet)
            if every:
                fleet.autosave(tmp_path / "kept", every_steps=every)
            list(training(fleet, model, optimizer, numbers(), global_batch=8, epochs=2))
            results.append(flat(model))
    assert torch.equal(*results)


# -- copies of the state ---------------------------------------------------------------------------------------------


def test_a_snapshot_keeps_what_the_training_changes() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    live = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "queues": [[0, 4], [9]]}
    buffer = io.BytesIO()
    torch.save(live, buffer)
    taken = Snapshot(live)
    taken.wait()
    optimizer.step()
    live["queues"][0].append(7)
    kept = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    assert torch.equal(taken.content["model"]["weight"], kept["model"]["weight"])
    assert not torch.equal(taken.content["model"]["weight"], model.weight)
    ours, theirs = (content["optimizer"]["state"][0] for content in (taken.content, kept))
    assert all(torch.equal(ours[name], theirs[name]) for name in ("step", "exp_avg", "exp_avg_sq"))
    assert taken.content["queues"] == [[0, 4], [9]]


def test_the_kinds_of_values_stay() -> None:
    view = torch.arange(6.0).view(2, 3).t()
    value = {
        "ordered": OrderedDict(a=torch.ones(1)),
        "several": (1, [2.5], {"x"}, None, b"y", torch.Size([1, 2]), torch.float16),
        "parameter": nn.Parameter(torch.ones(2), requires_grad=False),
        "view": view,
        "empty": torch.empty(0, 3),
        "sparse": torch.eye(2).to_sparse(),
        "half": torch.ones(2, dtype=torch.bfloat16),
    }
    content = Snapshot(value).content
    assert type(content["ordered"]) is OrderedDict
    assert content["several"] == value["several"]
    assert type(content["parameter"]) is nn.Parameter
    assert not content["parameter"].requires_grad
    assert torch.equal(content["view"], view)
    assert content["view"].data_ptr() != view.data_ptr()
    assert content["empty"].shape == (0, 3)
    assert torch.equal(content["sparse"].to_dense(), torch.eye(2))
    assert content["half"].dtype == torch.bfloat16


def test_tied_weights_are_copied_once() -> None:
    model = nn.Sequential(nn.Linear(50, 50, bias=False), nn.Linear(50, 50, bias=False))
    model[1].weight = model[0].weight
    content = Snapshot({"model": model.state_dict()}).content["model"]
    assert content["0.weight"].data_ptr() == content["1.weight"].data_ptr()
    buffer = io.BytesIO()
    torch.save(content, buffer)
    assert len(buffer.getvalue()) < 2 * 50 * 50 * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_state_is_copied_in_the_order_of_its_work_without_waiting_for_it() -> None:
    weight = torch.zeros(1 << 22, device="cuda")
    torch.cuda._sleep(200_000_000)  # about 0.1 s of work before
    weight += 1
    taken = Snapshot({"weight": weight, "again": weight.detach()})
    assert not taken._arrived[0].query(), "the training thread waited"
    weight += 1
    taken.wait()
    assert taken.content["weight"].is_pinned()
    assert taken.content["weight"].eq(1).all()
    assert taken.content["again"].data_ptr() == taken.content["weight"].data_ptr()
