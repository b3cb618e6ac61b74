"""The Accelerator in one process: what it does alone, and what it refuses."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

if find_spec("accelerate") is None:
    pytest.skip("needs pip install 'paceline[accelerate]'", allow_module_level=True)

import accelerate
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.tracking import GeneralTracker
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ProjectConfiguration,
)

from paceline.adapters.accelerate import Accelerator
from paceline.adapters.accelerate.fleet_values import packed, unpacked
from paceline.adapters.accelerate.joined import JoinedFleet
from paceline.errors import MisuseError
from paceline.transport import MPI_SIZES

INHERITED = set(
    """
    autocast clear deepspeed_plugin
    deepspeed_ulysses_dl_adapter device dispatch_batches distributed_type even_batches fp8_backend get_state_dict
    gradient_accumulation_steps is_composable_parallelism_enabled is_fsdp2
    is_last_process is_local_main_process is_main_process local_process_index logging_dir
    maybe_context_parallel mixed_precision multi_device non_blocking num_processes on_last_process
    on_local_main_process on_local_process on_main_process on_process optimizer_step_was_skipped
    parallelism_config prepare print process_index profile project_dir
    register_for_checkpointing register_load_state_pre_hook register_save_state_pre_hook save save_iteration
    save_model set_trigger should_save_model split_batches split_between_processes sync_gradients
    torch_device_mesh trigger_sync_in_backward unwrap_model use_distributed use_seedable_sampler
    use_stateful_dataloader verify_device_map
    """.split()  # noqa: SIM905
)
"""What is right as Accelerate has it: it depends on nothing else than the number of processes and who is main."""


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path / "run"))
    yield
    if JoinedFleet.current is not None:
        JoinedFleet.current.leave()
    JoinedFleet.current = None
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def made(**more: Any) -> Accelerator:
    return Accelerator(cpu=True, quiet=True, **more)


def data(count: int = 12) -> TensorDataset:
    x = torch.arange(count, dtype=torch.float64)[:, None]
    return TensorDataset(x / count, 2 * x / count)


def ready(accelerator: Accelerator, batch: int = 4) -> tuple[Any, Any, Any]:
    model = nn.Linear(1, 1).double()
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data(), batch_size=batch))


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def test_every_public_name_of_accelerates_own_is_ours_or_known_to_be_right() -> None:
    names = {name for name in dir(accelerate.Accelerator) if not name.startswith("_")}
    ours = [kind for kind in Accelerator.__mro__ if kind.__module__.startswith("paceline.")]
    own = {name for kind in ours for name in vars(kind) if not name.startswith("_")}
    assert names - own == INHERITED


def test_a_fleet_of_one_is_accelerates_own_loop() -> None:
    torch.manual_seed(0)
    accelerator = made()
    model, optimizer, loader = ready(accelerator)
    assert (len(loader), loader.batch_size, accelerator.num_processes) == (3, 4, 1)
    assert accelerator.is_main_process
    assert str(accelerator.distributed_type) == "DistributedType.NO"
    before = accelerator.unwrap_model(model).weight.item()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            assert accelerator.sync_gradients
            optimizer.step()
            assert not accelerator.optimizer_step_was_skipped
            optimizer.zero_grad()
    assert model.weight.item() != before
    assert accelerator.last_step is not None
    assert accelerator.last_step.index == 2


def test_accumulation_makes_one_update_of_several_batches() -> None:
    accelerator = made(gradient_accumulation_steps=2)
    model, optimizer, loader = ready(accelerator, batch=2)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    synced = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            synced.append(accelerator.sync_gradients)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert len(loader) == 6
    assert synced == [False, True] * 3
    assert schedule.get_last_lr() == [0.1 / 8]


def test_a_prepared_model_is_copied_and_pickled_and_its_copies_are_plain() -> None:
    accelerator = made()
    model, optimizer, loader = ready(accelerator)
    for batch in loader:
        loss = loss_of(model, batch)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            loss_of(other, batch).backward()
            other.zero_grad()
            assert other.weight.grad is None
        accelerator.backward(loss)
        model.zero_grad()
        optimizer.step()
    assert accelerator.last_step is not None
    assert accelerator.last_step.index == 2


def test_several_optimizers_make_one_update() -> None:
    accelerator = made()
    model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1)).double()
    ones, others = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    model, ones, others, loader = accelerator.prepare(model, ones, others, DataLoader(data(), batch_size=4))
    for number, batch in enumerate(loader):
        accelerator.backward(loss_of(model, batch))
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        assert norm > 0
        ones.step()
        if number % 2:
            others.step()
        ones.zero_grad()
        others.zero_grad()
    assert accelerator.last_step is not None
    assert accelerator.last_step.index == 2


def test_an_optimizer_whose_gradient_is_to_last_beyond_an_update_is_refused() -> None:
    accelerator = made()
    model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1)).double()
    ones, others = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    model, ones, others, loader = accelerator.prepare(model, ones, others, DataLoader(data(), batch_size=4))
    batches = iter(loader)
    accelerator.backward(loss_of(model, next(batches)))
    ones.step()
    ones.zero_grad()
    loss = loss_of(model, next(batches))
    with pytest.raises(MisuseError, match=r"optimizer 2 .*zero_grad\(\)"):
        accelerator.backward(loss)


@pytest.mark.parametrize("how", ["before the next backward", "the model's"])
def test_a_gradient_that_is_cleared_without_an_update_is_the_scripts_own_wish(how: str) -> None:
    accelerator = made()
    model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1)).double()
    ones, others = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    model, ones, others, loader = accelerator.prepare(model, ones, others, DataLoader(data(), batch_size=4))
    for batch in loader:
        if how == "before the next backward":
            ones.zero_grad()
            others.zero_grad()
        accelerator.backward(loss_of(model, batch))
        ones.step()
        if how == "the model's":
            model.zero_grad()
    assert accelerator.last_step is not None
    assert accelerator.last_step.index == 2


@pytest.mark.parametrize("several", [False, True])
def test_an_optimizer_of_a_module_that_was_not_prepared_is_refused(several: bool) -> None:
    accelerator = made()
    model, centers = nn.Linear(1, 1).double(), nn.Linear(1, 1).double()
    parameters = list(centers.parameters()) if several else [*model.parameters(), *centers.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(), batch_size=4))
    if several:
        accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"not prepared.*accelerator\.prepare"):
        next(iter(loader))


def test_drop_last_leaves_out_what_is_no_batch_of_all_processes() -> None:
    accelerator = made(gradient_accumulation_steps=2)
    model = nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = DataLoader(data(44), batch_size=8, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, rows)
    updates = seen = 0
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        updates += accelerator.sync_gradients
        seen += len(batch[0])
    assert (updates, seen, len(loader)) == (3, 40, 5)


class Growing(Dataset[Any]):
    """Rows that hold the epoch."""

    epoch = -1

    def __len__(self) -> int:
        return 12

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        row = torch.full((1,), float(self.epoch), dtype=torch.float64)
        return row, row


def pass_over(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, *, stop: int = 99) -> list[float]:
    """Train until an update; return the epochs that the batches hold."""
    held = []
    for number, batch in enumerate(loader):
        held += batch[0][:, 0].unique().tolist()
        accelerator.backward(loss_of(model, batch) * 0)
        optimizer.step()
        if number == stop:
            break
    return held


@pytest.mark.parametrize("processes", [0, 1])
def test_a_dataset_gets_the_number_of_the_pass(processes: int, tmp_path: Path) -> None:
    def ready() -> tuple[Any, Any, Any]:
        loader = DataLoader(Growing(), batch_size=4, num_workers=processes)
        model = nn.Linear(1, 1).double()
        return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)

    accelerator = made()
    model, optimizer, loader = ready()
    assert [pass_over(accelerator, model, optimizer, loader) for _ in range(2)] == [[0.0] * 3, [1.0] * 3]
    assert pass_over(accelerator, model, optimizer, loader, stop=0) == [2.0]
    accelerator.save_state(tmp_path / "state")
    accelerator.free_memory()
    model, optimizer, loader = ready()
    accelerator.load_state(tmp_path / "state")
    assert pass_over(accelerator, model, optimizer, accelerator.skip_first_batches(loader, 1)) == [2.0] * 2
    assert pass_over(accelerator, model, optimizer, loader) == [3.0] * 3
    loader.set_epoch(7)
    assert pass_over(accelerator, model, optimizer, loader) == [7.0] * 3
    assert pass_over(accelerator, model, optimizer, loader) == [8.0] * 3


def test_a_scheduler_prepared_before_its_optimizer_stands_still_in_a_skipped_update() -> None:
    accelerator = made(nonfinite="skip")
    model = nn.Linear(1, 1).double()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(plain, 1, 0.5))
    model, optimizer, loader = accelerator.prepare(model, plain, DataLoader(data(), batch_size=4))
    for number, batch in enumerate(loader):
        accelerator.backward(loss_of(model, batch) * (float("nan") if number == 1 else 1))
        optimizer.step()
        schedule.step()
    assert schedule.get_last_lr() == [0.1 / 4]


@pytest.mark.parametrize("clip", ["clip_grad_value_", "clip_grad_norm_"])
def test_clipping_takes_one_tensor_as_torch_does(clip: str) -> None:
    accelerator = made()
    model, optimizer, loader = ready(accelerator)
    for batch in loader:
        accelerator.backward(loss_of(model, batch) * 100)
        getattr(accelerator, clip)(model.weight, 1e-3)
        assert abs(model.weight.grad.item()) <= 1e-3 * (1 + 1e-6)
        optimizer.step()


def test_a_kept_exception_holds_no_loop_under_way() -> None:
    accelerator, kept = made(), []

    def train(fails: bool) -> None:
        model, optimizer, loader = ready(accelerator)
        batches = iter(loader)  # held by the frame, which the exception holds
        for number, batch in enumerate(batches):
            if fails and number == 1:
                raise RuntimeError("out of memory")
            accelerator.backward(loss_of(model, batch))
            optimizer.step()

    for fails in (True, False):
        try:
            train(fails)
        except RuntimeError as error:
            kept.append(error)
        accelerator.free_memory()
    assert accelerator.last_step is not None
    assert accelerator.last_step.index == 2


def test_a_loop_that_is_kept_between_two_updates_is_over_when_another_begins() -> None:
    accelerator = made()
    model, optimizer, loader = ready(accelerator)
    kept = iter(loader)
    accelerator.backward(loss_of(model, next(kept)))
    optimizer.step()
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
    with pytest.raises(MisuseError, match="another training loop"):
        next(kept)
    kept = iter(loader)
    accelerator.backward(loss_of(model, next(kept)))
    with pytest.raises(MisuseError, match="second training loop inside"):
        next(iter(loader))


def test_a_schedule_that_runs_past_its_end_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = made(global_batch=8)
    model, optimizer, loader = ready(accelerator, batch=2)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * len(loader)))
    warned: list[str] = []
    schedule._warn = warned.append
    for _ in range(4):
        for batch in loader:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            schedule.step()
    assert len(warned) == 1
    assert "makes 4 steps per update" in warned[0]


def test_a_function_that_ends_with_the_training_is_not_past_its_end() -> None:
    accelerator = made(global_batch=8)
    model, optimizer, loader = ready(accelerator, batch=2)
    total = 2 * len(loader)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: max(0, 1 - n / (4 * total))))
    warned: list[str] = []
    schedule._warn = warned.append
    for _ in range(2):
        for batch in loader:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            schedule.step()
    assert schedule.get_last_lr() == [0.0]
    assert warned == []


def test_a_second_optimizer_takes_the_parameters_of_a_first_one_over() -> None:
    accelerator = made()
    body, more = nn.Linear(1, 1).double(), nn.Linear(1, 1).double()
    first = torch.optim.SGD([*body.parameters(), *more.parameters()], lr=0.1)
    body, more, first, loader = accelerator.prepare(body, more, first, DataLoader(data(), batch_size=4))
    for batch in loader:
        accelerator.backward(loss_of(lambda x: more(body(x)), batch))
        first.step()
    second = accelerator.prepare(torch.optim.SGD(body.parameters(), lr=0.1))
    before = more.weight.item()
    for batch in loader:
        second.zero_grad()
        accelerator.backward(loss_of(body, batch))
        second.step()
    assert accelerator.last_step is not None
    assert accelerator.last_step.applied
    assert more.weight.item() == before


def test_a_model_that_is_prepared_after_a_loop_is_refused_with_what_to_write() -> None:
    accelerator = made()
    model, optimizer, loader = ready(accelerator)
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
    with pytest.raises(MisuseError, match=r"prepare every model before the first loop, also one that is trained later"):
        accelerator.prepare(nn.Linear(1, 1).double())
    accelerator.prepare(nn.Linear(1, 1).double().requires_grad_(False))


def test_an_evaluation_needs_no_optimizer_and_knows_the_mode() -> None:
    accelerator = made()
    model, loader = accelerator.prepare(nn.Linear(1, 1).double(), DataLoader(data(), batch_size=5))
    model.eval()
    assert [len(x) for x, _ in loader] == [5, 5, 2]
    model.train()
    with torch.no_grad():
        assert [len(x) for x, _ in accelerator.skip_first_batches(loader, 1)] == [5, 2]
    assert [len(x) for x, _ in loader] == [5, 5, 2], "nothing could train"
    batches = iter(loader)
    loss_of(model, next(batches)).backward()
    with pytest.raises(MisuseError, match="without a prepared optimizer"):
        next(batches)
    with pytest.raises(MisuseError, match="with a prepared optimizer"):
        accelerator.backward(torch.ones((), requires_grad=True))


def test_even_batches_are_set_on_a_loader_and_for_a_block() -> None:
    accelerator = made()
    model, _, loader = ready(accelerator)
    assert loader.batch_sampler.even_batches
    with accelerator.join_uneven_inputs([model], even_batches=False):
        assert not loader.batch_sampler.even_batches
    assert loader.batch_sampler.even_batches
    loader.batch_sampler.even_batches = False
    assert not loader.batch_sampler.even_batches
    assert len(loader.batch_sampler) == len(loader) == 3
    with pytest.raises(MisuseError, match="update by update"):
        next(iter(loader.batch_sampler))


def test_misuse_is_named() -> None:
    accelerator = made()
    model, optimizer, loader = ready(accelerator)
    with pytest.raises(MisuseError, match="outside of a training loop"):
        accelerator.backward(torch.ones((), requires_grad=True))
    with pytest.raises(MisuseError, match="without load_state"):
        next(iter(accelerator.skip_first_batches(loader, 2)))
    model.eval()
    for batch in loader:
        with pytest.raises(MisuseError, match=r"model.train\(\)"):
            accelerator.backward(loss_of(model, batch))
    model.train()
    batches = iter(loader)
    accelerator.backward(loss_of(model, next(batches)))
    with pytest.raises(MisuseError, match=r"without optimizer\.step"):
        next(batches)
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: 0.0)


def test_a_call_for_all_in_the_middle_of_an_update_is_refused() -> None:
    accelerator = made(gradient_accumulation_steps=2)
    model, optimizer, loader = ready(accelerator, batch=2)
    for batch in loader:
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        if not accelerator.sync_gradients:
            with pytest.raises(MisuseError, match="in the middle of an update"):
                accelerator.gather(loss.detach())
            with pytest.raises(MisuseError, match="in the middle of an update"):
                accelerator.save_state("nowhere")
        optimizer.step()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"fsdp_plugin": FullyShardedDataParallelPlugin}, "fsdp_plugin"),
        ({"parallelism_config": object()}, "parallelism_config"),
        ({"megatron_lm_plugin": object()}, "megatron_lm_plugin"),
        ({"deepspeed_plugin": object()}, "deepspeed_plugin"),
        ({"mixed_precision": "fp8"}, "fp8"),
        ({"pace": "joint"}, "deadlines"),
        ({"pace": "cutoff"}, "deadlines"),
        ({"combine": "average"}, "averages of parameters"),
        ({"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook="fp16")]}, "comm_dtype="),
        ({"device_placement": False}, "device="),
        ({"gradient_accumulation_plugin": GradientAccumulationPlugin(2, sync_with_dataloader=False)}, "epoch"),
    ],
)
def test_what_a_fleet_cannot_honour_is_refused_in_a_sentence(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        made(**settings)


def test_engines_of_accelerate_launch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="ACCELERATE_USE_FSDP"):
        made()


def test_a_global_batch_that_gives_a_scheduler_no_whole_number_of_steps_is_refused() -> None:
    accelerator = made(global_batch=6)
    model, optimizer, loader = ready(accelerator)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    batches = iter(loader)
    accelerator.backward(loss_of(model, next(batches)))
    accelerator.backward(loss_of(model, next(batches)))
    optimizer.step()
    with pytest.raises(ValueError, match="split_batches=True"):
        schedule.step()


def test_split_batches_divide_the_loaders_own() -> None:
    accelerator = made(dataloader_config=DataLoaderConfiguration(split_batches=True))
    _, _, loader = ready(accelerator)
    assert (loader.global_batch, loader.processes, len(loader)) == (4, 1, 3)


def test_checkpoints_are_named_and_limited(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = made(project_config=project)
    model, optimizer, loader = ready(accelerator)
    weights = []
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        accelerator.save_state()
        weights.append(model.weight.item())
    names = sorted(one.name for one in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_1", "checkpoint_2"]
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state()
    assert model.weight.item() == weights[-1]
    with pytest.raises(ValueError, match=r"paceline\.pt"):
        accelerator.load_state(tmp_path)
    accelerator.save_model(model, tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_mixed_precision_computes_in_bfloat16_and_returns_float32() -> None:
    accelerator = made(mixed_precision="bf16")
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(4, 1), torch.ones(4, 1)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        assert model(batch[0]).dtype == torch.float32
        with accelerator.autocast():
            assert (batch[0] @ batch[0].T).dtype == torch.bfloat16
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
    assert model.weight.dtype == torch.float32


def test_fp16_on_a_cpu_is_float32_as_in_accelerate() -> None:
    accelerator = made(mixed_precision="fp16")
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = DataLoader(TensorDataset(torch.ones(4, 1), torch.ones(4, 1)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches)
    for batch in loader:
        with accelerator.autocast():
            assert model(batch[0]).dtype == torch.float32
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
    assert accelerator.scaler is None


def test_a_gradient_scaler_scales_once_and_skips_an_overflow() -> None:
    """Accelerate makes its scaler on GPUs alone: this one stands for it."""
    weights = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**20)):
        accelerator = made()
        accelerator.scaler = scaler
        torch.manual_seed(0)
        model, optimizer, loader = ready(accelerator)
        schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        skipped = []
        for number, batch in enumerate(loader):
            loss = loss_of(model, batch)
            overflow = scaler is not None and number == 1
            accelerator.backward(loss * float("inf") if overflow else loss if number != 1 else loss * 0)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            if scaler is not None or number != 1:
                optimizer.step()
                skipped.append(accelerator.optimizer_step_was_skipped)
                schedule.step()
            else:
                optimizer.param_groups[0]["lr"], rate = 0.0, optimizer.param_groups[0]["lr"]
                optimizer.step()
                optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
        weights.append(model.weight.item())
        accelerator.end_training()
        if scaler is not None:
            assert skipped == [False, True, False]
            assert scaler.get_scale() == 2.0**19
    assert weights[0] == pytest.approx(weights[1], rel=1e-12)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(10, dtype=torch.float64)[:, None])


def test_a_stream_is_trained_on_and_has_no_length() -> None:
    accelerator = made()
    model = nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Stream(), batch_size=4))
    with pytest.raises(TypeError):
        len(loader)
    updates = 0
    for x in loader:
        accelerator.backward(model(x).pow(2).mean())
        optimizer.step()
        updates += accelerator.sync_gradients
    assert updates == 3


def test_another_training_may_follow_with_the_same_accelerator_or_a_new_one() -> None:
    accelerator = made()
    for number in range(3):
        model, optimizer, loader = ready(accelerator)
        for batch in loader:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
        accelerator.free_memory()
        if number:
            accelerator = made()
    assert accelerator.fleet is JoinedFleet.current.fleet  # type: ignore[union-attr]


def test_a_refusal_of_a_step_says_what_to_write_in_accelerates_loop() -> None:
    accelerator = Accelerator(cpu=True, quiet=True)
    model = nn.Linear(3, 1)
    data = DataLoader(TensorDataset(torch.randn(16, 3, generator=torch.Generator().manual_seed(0))), 4)
    *_, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
    with pytest.raises(MisuseError, match=r"had no step\.backward.* In Accelerate's loop every batch"):
        list(loader)
    accelerator.end_training()


class SizedStream(Stream):
    def __len__(self) -> int:
        return 10


def test_the_length_of_a_stream_is_its_own() -> None:
    accelerator = made()
    loader = accelerator.prepare(DataLoader(SizedStream(), batch_size=4))
    assert len(loader) == 3


def test_a_loaders_length_stays_in_updates_whatever_was_prepared_since() -> None:
    accelerator = made(global_batch=8)
    first, test = accelerator.prepare(DataLoader(data(44), batch_size=4), DataLoader(data(44), batch_size=4))
    lengths = [len(first)]
    model = nn.Linear(1, 1).double()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    lengths.append(len(first))
    for batch in first:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
    model.eval()
    lengths += [len(first), len(accelerator.skip_first_batches(first, 2))]
    assert lengths == [6, 6, 6, 4]
    assert len(test) == sum(1 for _ in test) == 11


def test_a_global_batch_smaller_than_the_loaders_batch_is_one_micro_batch() -> None:
    accelerator = made(global_batch=4)
    model, optimizer, loader = ready(accelerator, batch=8)
    assert len(pass_over(accelerator, model, optimizer, loader)) == 12


@pytest.mark.parametrize(
    "value", [np.float64(0.5), np.float32("nan"), np.arange(6).reshape(2, 3), np.array(["ab", "c"])]
)
def test_values_of_numpy_travel_as_they_are(value: Any) -> None:
    found = unpacked(json.loads(json.dumps(packed([value]))))[0]
    assert type(found) is type(value)
    assert found.dtype == value.dtype
    np.testing.assert_array_equal(found, value)
    with pytest.raises(TypeError, match="ndarray"):
        packed(np.array([object()]))


def test_a_folder_may_begin_with_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    accelerator = made()
    model, optimizer, loader = ready(accelerator)
    pass_over(accelerator, model, optimizer, loader, stop=0)
    accelerator.save_state("~/state")
    accelerator.load_state("~/state")
    assert (tmp_path / "state" / "paceline.pt").exists()


def test_a_checkpoint_between_two_epochs_is_gone_on_from_with_the_next(tmp_path: Path) -> None:
    for saves in (True, False):
        accelerator = made()
        model, optimizer, loader = ready(accelerator)
        if saves:
            pass_over(accelerator, model, optimizer, loader)
            accelerator.save_state(tmp_path / "state")
        else:
            accelerator.load_state(tmp_path / "state")
            pass_over(accelerator, model, optimizer, loader)
            assert accelerator.last_step is not None
            assert accelerator.last_step.index == 5
        accelerator.end_training()


def test_a_resume_with_other_updates_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    for batch in (8, 4):
        accelerator = made()
        monkeypatch.setattr(accelerator.joined.context, "warn", warned.append)
        model, optimizer, loader = ready(accelerator, batch=batch)
        if batch == 8:
            pass_over(accelerator, model, optimizer, loader, stop=0)
            accelerator.save_state(tmp_path / "state")
        else:
            accelerator.load_state(tmp_path / "state")
        accelerator.end_training()
    (text,) = [text for text in warned if "samples per update" in text]
    assert "Accelerator(global_batch=8)" in text


def test_a_second_accelerator_cannot_ask_for_another_fleet() -> None:
    made(pace="equal")
    made(pace="equal")
    made()
    with pytest.raises(MisuseError, match="pace='fixed:1'"):
        made(pace="fixed:1")


@pytest.mark.parametrize("text", ["yes", "on", "1", "True"])
def test_accelerates_variable_for_the_cpu_is_read_as_accelerate_does(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", text)
    monkeypatch.setenv("PACELINE_DEVICE", "meta")
    assert Accelerator(quiet=True).device.type == "cpu"


@pytest.mark.parametrize("name", MPI_SIZES)
def test_processes_of_mpi_without_ranks_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    made().end_training()
    monkeypatch.setenv(name, "2")
    with pytest.raises(ValueError, match=f"{name} is 2.*paceline run"):
        made()


def test_a_worker_that_becomes_the_main_process_starts_its_own_trackers() -> None:
    class Figures(GeneralTracker):
        name, requires_logging_directory, tracker = "figures", False, None
        config, rows = None, ()

        def store_init_configuration(self, values: Any) -> None:
            self.config = values

        def log(self, values: Any, step: Any = None, **_: Any) -> None:
            self.rows = (*self.rows, step)

    tracker = Figures()
    accelerator = made(log_with=tracker)
    accelerator.state._shared_state["process_index"] = PartialState._shared_state["process_index"] = 1
    accelerator.init_trackers("project", {"lr": 1})
    accelerator.log({"loss": 1.0}, step=0)
    assert (tracker.config, tracker.rows) == (None, ())
    accelerator.joined.show_members()
    accelerator.log({"loss": 1.0}, step=1)
    assert accelerator.get_tracker("figures") is tracker
    assert (tracker.config, tracker.rows) == ({"lr": 1}, (1,))
