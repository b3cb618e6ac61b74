"""A worker alone on a GPU issues updates before the device has the gradient; here a CPU plays the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from lone import flat, join, linear, numbers
from paceline.errors import MisuseError, NonFiniteGradients
from paceline.step import ahead

STEPS = 12
LATE = 5
"""A step that is not examined closely, in which the host need not wait."""


@pytest.fixture
def ahead_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "DEVICES", ("cpu",))


def adam(model: nn.Module, *, fused: bool = True) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)


def train(folder: Path, *, asks: bool = False, bad: int = -1, fused: bool = True, **options: Any) -> dict[str, Any]:
    """Twelve steps with figures and clipping; the gradient of step ``bad`` is NaN."""
    found: dict[str, Any] = {"steps": [], "ahead": [], "after": []}
    with join(folder, **options) as fleet:
        model = fleet.model(linear())
        optimizer = adam(model, fused=fused)
        fleet.track(optimizer=optimizer)
        for step in fleet.steps(numbers(96), global_batch=8, micro_batch=4):
            for x, y in step:
                loss = nn.functional.mse_loss(model(x), y)
                step.add(error=loss.detach())
                step.backward(loss * (float("nan") if step.index == bad else 1.0))
            step.commit(optimizer, clip_norm=0.5)
            found["ahead"].append(step._ahead is not None)
            found["steps"].append(step)
            found["after"].append(flat(model))
            if asks:
                found.setdefault("asked", []).append((step.loss, step.grad_norm, step.applied, step.sums))
        found["parameters"] = flat(model)
    found["log"] = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    return found


def records(found: dict[str, Any]) -> list[dict[str, Any]]:
    kept = ("step", "samples", "weight", "loss", "sums", "grad_norm", "applied", "ranges")
    return [{name: one.get(name) for name in kept} for one in found["log"] if one["event"] == "step"]


@pytest.mark.usefixtures("ahead_on_cpu")
def test_the_device_decides_as_the_host_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    early = train(tmp_path / "ahead")
    asked = train(tmp_path / "asked", asks=True)
    monkeypatch.setattr(ahead, "DEVICES", ())
    waits = train(tmp_path / "waits", asks=True)
    assert early["ahead"] == [step not in (0, 1, 2, 4, 8) for step in range(STEPS)]
    assert not any(waits["ahead"])
    for other in (early, asked):
        assert torch.equal(other["parameters"], waits["parameters"])
        assert records(other) == records(waits)
        assert [step.loss for step in other["steps"]] == [step.loss for step in waits["steps"]]
    assert asked["asked"] == waits["asked"]


@pytest.mark.usefixtures("ahead_on_cpu")
def test_a_bad_gradient_ends_the_run_before_another_update(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteGradients, match=f"NaN or infinite gradients in step {LATE}"):
        train(tmp_path, bad=LATE)


@pytest.mark.usefixtures("ahead_on_cpu")
@pytest.mark.parametrize("bad", [LATE, STEPS - 1])
def test_a_bad_gradient_is_left_out_on_the_device(tmp_path: Path, bad: int) -> None:
    found = train(tmp_path, bad=bad, nonfinite="skip")
    assert torch.equal(found["after"][bad], found["after"][bad - 1])
    assert [step.applied for step in found["steps"]] == [step != bad for step in range(STEPS)]
    assert found["parameters"].isfinite().all()
    texts = [one["text"] for one in found["log"] if one["event"] == "note"]
    assert sum("NaN or infinite gradients" in text for text in texts) == 1


@pytest.mark.usefixtures("ahead_on_cpu")
def test_the_last_step_s_bad_gradient_ends_the_loop(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteGradients, match=f"step {STEPS - 1}"):
        train(tmp_path, bad=STEPS - 1)


@pytest.mark.usefixtures("ahead_on_cpu")
@pytest.mark.parametrize("call", ["save", "evaluate", "break"])
def test_calls_between_steps_find_the_step_complete(tmp_path: Path, call: str) -> None:
    with join(tmp_path) as fleet:
        model = fleet.model(linear())
        optimizer = adam(model)
        fleet.track(optimizer=optimizer)
        data = numbers(96)
        for step in fleet.steps(data, global_batch=8, micro_batch=4):
            for x, y in step:
                step.backward(nn.functional.mse_loss(model(x), y))
            step.commit(optimizer)
            if step.index == LATE:
                assert step._ahead is not None
                if call == "break":
                    break
                if call == "save":
                    fleet.save(tmp_path / "saved.pt")
                else:
                    fleet.evaluate(lambda x, y: {"error": (model(x) - y).square().flatten()}, data)
                assert step._ahead is None
    log = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    steps = [one for one in log if one["event"] == "step"]
    assert [one["step"] for one in steps] == list(range(LATE + 1 if call == "break" else STEPS))
    assert all(one["loss"] is not None for one in steps)


@pytest.mark.usefixtures("ahead_on_cpu")
def test_an_optimizer_that_cannot_leave_out_an_update_makes_the_host_wait(tmp_path: Path) -> None:
    found = train(tmp_path, fused=False)
    assert not any(found["ahead"])
    texts = [one["text"] for one in found["log"] if one["event"] == "note"]
    assert sum("the host waits for cpu in every step: AdamW" in text for text in texts) == 1


def begun(fleet: paceline.Fleet, **kinds: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fleet.model(linear())
    optimizer = adam(model) if not kinds else torch.optim.SGD(model.parameters(), lr=0.05, fused=True, **kinds)
    fleet.track(optimizer=optimizer)
    return model, optimizer


def work(step: paceline.Step, model: nn.Module, **how: Any) -> None:
    for x, y in step:
        step.backward(nn.functional.mse_loss(model(x), y), **how)


@pytest.mark.usefixtures("ahead_on_cpu")
@pytest.mark.parametrize("how", ["skip", "no weight", "a tensor's weight"])
def test_a_step_in_which_nothing_counts_is_not_applied(tmp_path: Path, how: str) -> None:
    with join(tmp_path) as fleet:
        model, optimizer = begun(fleet)
        applied = []
        for step in fleet.steps(numbers(96), global_batch=8, micro_batch=4):
            before = flat(model)
            if step.index == LATE and how == "skip":
                for _ in step:
                    step.skip()
            else:
                weight = 0.0 if step.index == LATE else 4.0
                work(step, model, weight=torch.tensor(weight) if how == "a tensor's weight" else weight)
            step.commit(optimizer)
            applied.append(step.applied)
            assert torch.equal(flat(model), before) == (step.index == LATE)
    assert applied == [index != LATE for index in range(STEPS)]


@pytest.mark.usefixtures("ahead_on_cpu")
def test_parameters_may_be_frozen_behind_a_step(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        model, optimizer = begun(fleet)
        for step in fleet.steps(numbers(96), global_batch=8, micro_batch=4):
            if step.index == LATE + 1:
                model.bias.requires_grad_(False)
            work(step, model)
            step.commit(optimizer)
            steps = step
        assert [record.applied for record in fleet.history] == [True] * STEPS
        assert fleet.history[-1].loss == steps.loss


@pytest.mark.usefixtures("ahead_on_cpu")
def test_the_history_is_complete_whenever_it_is_read(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        model, optimizer = begun(fleet)
        for step in fleet.steps(numbers(96), global_batch=8, micro_batch=4):
            work(step, model)
            step.commit(optimizer)
            assert fleet.history[-1].loss == fleet.history[-1].loss  # not NaN
            assert fleet.history[-1] == step.record


@pytest.mark.usefixtures("ahead_on_cpu")
def test_an_error_in_the_update_is_what_the_script_gets(tmp_path: Path) -> None:
    def training() -> None:
        with join(tmp_path) as fleet:
            model, optimizer = begun(fleet)
            optimizer.register_step_pre_hook(
                lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")) if late else None
            )
            late = False
            for step in fleet.steps(numbers(96), global_batch=8, micro_batch=4):
                late = step.index == LATE
                work(step, model)
                step.commit(optimizer)

    with pytest.raises(RuntimeError, match="no memory"):
        training()


@pytest.mark.usefixtures("ahead_on_cpu")
def test_a_bad_step_behind_which_the_loop_is_left_ends_the_run(tmp_path: Path) -> None:
    def training() -> None:
        with join(tmp_path) as fleet:
            model, optimizer = begun(fleet)
            for step in fleet.steps(numbers(96), global_batch=8, micro_batch=4):
                for x, y in step:
                    step.backward(nn.functional.mse_loss(model(x), y) * (float("nan") if step.index == LATE else 1.0))
                step.commit(optimizer)
                if step.index == LATE:
                    break

    with pytest.raises(NonFiniteGradients, match=f"step {LATE}"):
        training()
    log = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert log[-1]["event"] == "end"


@pytest.mark.usefixtures("ahead_on_cpu")
def test_a_state_from_an_optimizer_that_was_not_fused_makes_the_host_wait(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        model, optimizer = begun(fleet)
        plain = adam(linear(), fused=False)
        optimizer.load_state_dict(plain.state_dict())
        for step in fleet.steps(numbers(96), global_batch=8, micro_batch=4):
            work(step, model)
            step.commit(optimizer)
            assert step._ahead is None


@pytest.mark.usefixtures("ahead_on_cpu")
def test_a_first_momentum_is_made_by_an_update_that_counts(tmp_path: Path) -> None:
    with join(tmp_path, nonfinite="skip") as fleet:
        model, optimizer = begun(fleet, momentum=0.9)
        data, ahead_of = numbers(96), []
        for step in fleet.steps(data, global_batch=8, micro_batch=4):
            if step.index == LATE:
                optimizer.state.clear()
            work(step, model)
            step.commit(optimizer)
            ahead_of.append(step._ahead is not None)
    assert not ahead_of[LATE]
    assert ahead_of[LATE + 1]


@pytest.mark.usefixtures("ahead_on_cpu")
def test_within_its_commit_a_step_has_no_result_yet(tmp_path: Path) -> None:
    def training() -> None:
        with join(tmp_path) as fleet:
            model, optimizer = begun(fleet)
            for step in fleet.steps(numbers(96), global_batch=8, micro_batch=4):
                if step.index == LATE:
                    optimizer.register_step_post_hook(lambda *_, now=step: now.loss)
                work(step, model)
                step.commit(optimizer)

    with pytest.raises(MisuseError, match="ask for its result behind"):
        training()


def test_on_a_cpu_nothing_is_left_for_later(tmp_path: Path) -> None:
    assert not any(train(tmp_path)["ahead"])
