"""A fleet of one: settings and their errors, the user's own model, loops over data, loss scaling. One process."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exact_cases import Numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline
from lone import deep, flat, join, linear, mse, numbers, plain, sgd, training
from paceline import MisuseError
from paceline.observe import read_log
from paceline.observe.analysis.audit import audit
from quick import examples


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[paceline.Fleet]:
    with join(tmp_path) as fleet:
        yield fleet


def seen_by(steps: paceline.Steps, model: nn.Module) -> list[tuple[int, list[int]]]:
    """Return (epoch, samples) of every step."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=1e-9), []
    for step in steps:
        samples: list[int] = []
        for x in step:
            samples += [int(value) for value in x.flatten()]
            step.backward(model(x).mean())
        step.commit(optimizer)
        seen.append((step.epoch, samples))
    return seen


# -- bad input: a clear error, and nothing is lost -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("pace", "said"),
    [
        ("fastest", "unknown pace 'fastest'. Known names: equal, fixed:1,1,2"),
        ("", "unknown pace"),
        (7, "pace must be a name or a pacer"),
        ("fixed", "needs ratios"),
        ("fixed:1,x", "needs ratios"),
        ("fixed:1,1", "2 ratios for 1 workers"),
        ("fixed:-1", "at least 0 and not all 0"),
        ("fixed:0", "not all 0"),
        ("fixed:nan", "finite"),
    ],
)
def test_a_pace_that_makes_no_sense_is_refused_and_the_next_join_works(tmp_path: Path, pace: Any, said: str) -> None:
    with pytest.raises(ValueError) as error:
        join(tmp_path, pace)
    assert said in str(error.value)
    with join(tmp_path, "fixed:1") as fleet:
        assert fleet.world_size == 1


@pytest.mark.parametrize("ratios", [[1, 2], [], [-1.0], [0.0], [float("nan")], [float("inf")], "x", None, 3])
def test_ratios_that_make_no_sense_are_refused(tmp_path: Path, ratios: Any) -> None:
    with pytest.raises(ValueError, match="ratios"):
        join(tmp_path, paceline.Fixed(ratios))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"combine": "mean"}, "unknown combine 'mean'; known: gradients"),
        ({"combine": None}, "known: gradients"),
        ({"comm_dtype": "bf8"}, "unknown comm_dtype 'bf8'; known: float32, bf16, fp16, int8"),
        ({"comm_dtype": "int8"}, "comm_dtype 'int8' is too coarse for single gradients, and is for combine 'average'"),
        ({"comm_dtype": "bf16", "combine": "elastic-average"}, "the centre must move by just what the workers do"),
        ({"nonfinite": "ignore"}, 'nonfinite must be "stop" or "skip"'),
        ({"device": "cuda:7"}, "device cuda:7 is not there"),
        ({"device": "abacus"}, "abacus"),
        ({"seed": "x"}, "x"),
    ],
)
def test_an_option_of_join_that_makes_no_sense_is_refused(tmp_path: Path, options: Any, said: str) -> None:
    with pytest.raises(ValueError) as error:
        join(tmp_path, **options)
    assert said in str(error.value)


def test_the_variable_for_the_pace_wins_and_the_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_PACE", "equal")
    with join(tmp_path, "adaptive") as fleet:
        assert fleet.pacer.name == "equal"
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    notes = [event["text"] for event in map(json.loads, lines) if event["event"] == "note"]
    assert notes == ["pace is 'equal' as PACELINE_PACE says, not 'adaptive'"]


def test_with_averages_auto_is_allowed_and_says_that_it_stays_adaptive(tmp_path: Path) -> None:
    with join(tmp_path, pace="auto", combine="average") as fleet:
        assert fleet.pacer.name == "auto"
    notes = [event["text"] for event in read_log(tmp_path / "run").others if event["event"] == "note"]
    assert notes == ["pace auto stays adaptive: combine 'average' has no deadlines"]


@pytest.mark.parametrize("folder", ["/proc/nowhere", "a file"])
def test_a_run_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path, folder: str) -> None:
    if folder == "a file":
        folder = str(tmp_path / "taken")
        Path(folder).write_text("")
    with pytest.raises(ValueError, match=r"cannot be written .*: give another run_dir") as error:
        paceline.join(quiet=True, run_dir=folder)
    assert folder in str(error.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"global_batch": 0}, "global_batch must be at least 1, got 0"),
        ({"global_batch": -8}, "global_batch must be at least 1"),
        ({"global_batch": 8.0}, "global_batch must be a whole number"),
        ({"global_batch": "8"}, "global_batch must be a whole number"),
        ({"global_batch": None}, "global_batch must be a whole number"),
        ({"micro_batch": 0}, "micro_batch must be at least 1"),
        ({"micro_batch": -1}, "micro_batch must be at least 1"),
        ({"micro_batch": 9}, "micro_batch (9) is larger than global_batch (8)"),
        ({"micro_batch": [4, 4]}, "micro_batch has 2 entries for 1 workers"),
        ({"micro_batch": [0]}, "micro_batch must be at least 1"),
        ({"micro_batch": "large"}, 'one per worker, or "auto"'),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"epochs": 1.5}, "epochs must be a whole number"),
        ({"order": lambda epoch: []}, "at least one"),
        ({"order": lambda epoch: [40]}, "gave the index 40"),
        ({"order": lambda epoch: [0.5]}, "sequence of dataset indices"),
        ({"global_batch": 64, "drop_last": True}, "turn drop_last off"),
    ],
)
def test_sizes_that_make_no_sense_are_refused_and_the_fleet_can_be_used_again(
    fleet: paceline.Fleet, options: Any, said: str
) -> None:
    model = fleet.model(linear())
    for _ in range(2):  # before any loop, and after one
        with pytest.raises(ValueError) as error:
            fleet.steps(numbers(), **{"global_batch": 8} | options)
        assert said in str(error.value)
        assert sum(step.record.total for step in training(fleet, model, sgd(model), numbers(), global_batch=8)) == 40


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (TensorDataset(torch.empty(0, 3)), "the dataset is empty"),
        ([], "the dataset is empty"),
        (DataLoader(numbers(), batch_sampler=iter([[0, 1]])), "batch_sampler"),
        (DataLoader(numbers(), batch_size=None), "batch_size=None"),
        (object(), "has no length"),
    ],
    ids=["no rows", "no list", "batch_sampler", "no batching", "no dataset"],
)
def test_data_that_cannot_be_dealt_is_refused_and_the_fleet_can_be_used_again(
    fleet: paceline.Fleet, data: Any, said: str
) -> None:
    model = fleet.model(linear())
    for call in (lambda: fleet.steps(data, global_batch=8), lambda: fleet.evaluate(lambda *batch: {}, data)):
        with pytest.raises(ValueError) as error:
            call()
        assert said in str(error.value)
    assert len(list(training(fleet, model, sgd(model), numbers(), global_batch=8))) == 5


def test_an_order_for_an_iterable_dataset_is_refused(fleet: paceline.Fleet) -> None:
    fleet.model(linear())
    with pytest.raises(ValueError, match="order= needs a dataset with a length"):
        fleet.steps(Stream(10), global_batch=8, order=lambda epoch: [0])


def test_a_loop_before_a_model_and_a_model_after_a_loop_are_misuse(fleet: paceline.Fleet) -> None:
    with pytest.raises(MisuseError, match=r"fleet\.steps before fleet\.model"):
        fleet.steps(numbers(), global_batch=8)
    fleet.model(linear())
    fleet.steps(numbers(), global_batch=8)
    with pytest.raises(MisuseError, match="bring every model before the first step"):
        fleet.model(linear())


@pytest.mark.parametrize("module", [None, nn.Linear, lambda x: x])
def test_what_is_no_module_is_refused_as_a_model(fleet: paceline.Fleet, module: Any) -> None:
    with pytest.raises(ValueError, match=r"fleet\.model takes a torch\.nn\.Module"):
        fleet.model(module)


@pytest.fixture
def ddp() -> Iterator[nn.Module]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield nn.parallel.DistributedDataParallel(linear())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("where", ["outside", "inside another module", "under torch.compile"])
def test_a_model_wrapped_in_ddp_is_refused(fleet: paceline.Fleet, ddp: nn.Module, where: str) -> None:
    wrapped = {
        "outside": lambda: ddp,
        "inside another module": lambda: nn.Sequential(nn.Identity(), ddp),
        "under torch.compile": lambda: torch.compile(ddp, backend="eager"),
    }[where]()
    with pytest.raises(ValueError, match="wrapped in DistributedDataParallel: pass the plain module"):
        fleet.model(wrapped)


def test_a_model_wrapped_in_data_parallel_is_refused(fleet: paceline.Fleet) -> None:
    with pytest.raises(ValueError, match="wrapped in DataParallel"):
        fleet.model(nn.DataParallel(linear()))


def test_only_things_with_state_can_be_tracked_and_a_name_stands_for_one_thing(fleet: paceline.Fleet) -> None:
    model = fleet.model(linear())
    optimizer = sgd(model)
    with pytest.raises(ValueError, match=r"fleet\.track\(lr=\.\.\.\): it has no state_dict"):
        fleet.track(lr=0.1)
    fleet.track(optimizer=optimizer)
    fleet.track(optimizer=optimizer)
    with pytest.raises(ValueError, match="that name is taken"):
        fleet.track(optimizer=sgd(model))


def test_a_second_grad_scaler_is_refused_when_it_is_tracked(fleet: paceline.Fleet) -> None:
    fleet.track(scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="more than one GradScaler"):
        fleet.track(other=torch.amp.GradScaler("cpu"))
    model = fleet.model(linear())
    assert len(list(training(fleet, model, sgd(model), numbers(), global_batch=8))) == 5


def test_sync_batch_norm_is_refused_where_counts_may_differ_but_not_for_a_worker_alone(fleet: paceline.Fleet) -> None:
    fleet.model(nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4)))
    assert len(fleet.steps(numbers(), global_batch=8, micro_batch=3)) == 5


def test_a_loop_that_is_left_is_not_taken_for_one_that_lost_samples(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        model = fleet.model(linear())
        optimizer = sgd(model)
        for step in fleet.steps(numbers(40), global_batch=8, epochs=2):
            for x, y in step:
                step.backward(mse(model, x, y))
            step.commit(optimizer)
            if step.index == 6:
                break
    first, second = audit(run := read_log(fleet.run_dir))
    assert (first.whole, second.whole) == (True, False)
    assert first.sound
    assert second.sound
    assert run.end is not None
    assert run.end["reason"] == "finished"


@pytest.mark.parametrize(("code", "reason"), [(0, "finished"), (None, "finished"), (3, "error")])
def test_a_script_that_exits_well_has_finished(tmp_path: Path, code: int | None, reason: str) -> None:
    with pytest.raises(SystemExit), join(tmp_path) as fleet:
        sys.exit(code)
    end = read_log(fleet.run_dir).end
    assert end is not None
    assert end["reason"] == reason


def test_leaving_twice_is_harmless(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        fleet.leave()
    assert (fleet.run_dir / "events.jsonl").read_text().count('"event": "end"') == 1


# -- loops over data -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "global_batch"), [(5, 8), (1, 64), (8, 8), (9, 8)])
def test_a_dataset_shorter_than_one_global_batch_simply_works(
    fleet: paceline.Fleet, length: int, global_batch: int
) -> None:
    model = fleet.model(nn.Linear(1, 1))
    steps = fleet.steps(Numbers(length), global_batch=global_batch, epochs=2)
    seen = seen_by(steps, model)
    assert len(seen) == len(steps)
    for epoch in range(2):
        assert Counter(i for e, part in seen if e == epoch for i in part) == Counter(range(length))


@settings(deadline=None, max_examples=examples(25))
@given(
    length=st.integers(1, 40),
    global_batch=st.integers(1, 20),
    epochs=st.integers(1, 3),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_len_progress_and_ends_epoch_are_exact(
    tmp_path_factory: pytest.TempPathFactory,
    length: int,
    global_batch: int,
    epochs: int,
    drop_last: bool,
    data: st.DataObject,
) -> None:
    drop_last = drop_last and length >= global_batch
    micro_batch = data.draw(st.integers(1, global_batch))
    dealt = length - length % global_batch if drop_last else length
    with join(tmp_path_factory.mktemp("alone")) as fleet:
        model = fleet.model(linear())
        optimizer, done = sgd(model), 0
        steps = fleet.steps(
            numbers(length), global_batch=global_batch, micro_batch=micro_batch, epochs=epochs, drop_last=drop_last
        )
        for step in steps:
            assert step.progress == pytest.approx(done / (dealt * epochs), abs=1e-12)
            assert step.share == min(global_batch, dealt - done % dealt)
            sizes = []
            for x, y in step:
                sizes.append(len(x))
                step.backward(mse(model, x, y))
            assert max(sizes) <= micro_batch
            assert set(sizes[:-2]) <= {micro_batch}
            assert max(sizes[-2:]) - min(sizes[-2:]) <= 1
            step.commit(optimizer)
            done += step.record.total
            assert step.ends_epoch == (done % dealt == 0)
            assert 0 <= step.progress <= 1
            assert step.progress == pytest.approx(done / (dealt * epochs), abs=1e-12)
        assert len(steps) == len(fleet.history) == -(-dealt // global_batch) * epochs
        assert step.progress == 1.0


def test_without_shuffle_a_worker_alone_sees_the_dataset_in_its_order(fleet: paceline.Fleet) -> None:
    model = fleet.model(nn.Linear(1, 1))
    seen = seen_by(fleet.steps(Numbers(23), global_batch=8, micro_batch=3, shuffle=False, epochs=2), model)
    assert [i for _, part in seen for i in part] == list(range(23)) * 2


def test_the_shuffle_differs_from_epoch_to_epoch_and_follows_the_seed(tmp_path: Path) -> None:
    orders = []
    for seed in (1, 1, 2):
        with join(tmp_path, seed=seed) as fleet:
            model = fleet.model(nn.Linear(1, 1))
            seen = seen_by(fleet.steps(Numbers(50), global_batch=50, epochs=2), model)
            orders.append([part for _, part in seen])
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][0] != orders[0][1]


def test_an_order_of_the_users_own_is_followed_and_each_draw_counts(fleet: paceline.Fleet) -> None:
    model = fleet.model(nn.Linear(1, 1))
    orders = [[3, 3, 1, 0, 3], [9, 8, 7, 6, 5]]
    steps = fleet.steps(Numbers(10), global_batch=2, epochs=2, order=lambda epoch: orders[epoch])
    assert [i for _, part in seen_by(steps, model) for i in part] == orders[0] + orders[1]


def test_an_order_that_grows_from_epoch_to_epoch_keeps_the_global_batch(fleet: paceline.Fleet) -> None:
    model = fleet.model(nn.Linear(1, 1))
    steps = fleet.steps(Numbers(40), global_batch=8, epochs=3, order=lambda epoch: range((20, 5, 11)[epoch]))
    seen = seen_by(steps, model)
    assert [(epoch, len(part)) for epoch, part in seen] == [(0, 8), (0, 8), (0, 4), (1, 5), (2, 8), (2, 3)]


def test_a_data_loaders_own_settings_are_used(fleet: paceline.Fleet) -> None:
    model = fleet.model(nn.Linear(1, 1))
    loader = DataLoader(Numbers(10), batch_size=4, shuffle=False, drop_last=True)
    steps = fleet.steps(loader, global_batch=4)
    assert len(steps) == 2
    assert [part for _, part in seen_by(steps, model)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (torch.tensor([float(i)]) for i in range(self.length))


def test_a_stream_is_drawn_to_its_end_in_every_epoch(fleet: paceline.Fleet) -> None:
    model = fleet.model(nn.Linear(1, 1))
    steps = fleet.steps(Stream(11), global_batch=4, micro_batch=3, epochs=2)
    with pytest.raises(TypeError, match="does not say how many steps"):
        len(steps)
    seen = seen_by(steps, model)
    assert [i for epoch, part in seen for i in part if epoch == 0] == list(range(11))
    assert [i for epoch, part in seen for i in part if epoch == 1] == list(range(11))


def test_a_step_that_finds_the_stream_at_its_end_updates_nothing(fleet: paceline.Fleet) -> None:
    model = fleet.model(nn.Linear(1, 1))
    seen_by(fleet.steps(Stream(8), global_batch=4), model)
    assert [(record.total, record.applied) for record in fleet.history if not record.total] in ([], [(0, False)])
    assert sum(record.total for record in fleet.history) == 8


# -- the user's own module -----------------------------------------------------------------------------------------


def test_the_model_is_the_users_own_module_with_its_own_names(fleet: paceline.Fleet) -> None:
    net = deep()
    assert fleet.model(net) is net
    fleet.steps(numbers(), global_batch=8)
    assert list(net.state_dict()) == list(deep().state_dict())
    assert type(net) is nn.Sequential


@pytest.mark.parametrize("raised", [False, True])
def test_after_the_fleet_is_left_the_model_is_an_ordinary_one(tmp_path: Path, raised: bool) -> None:
    net = deep()
    with pytest.raises(KeyError) if raised else join(tmp_path / "unused"), join(tmp_path) as fleet:
        for _ in training(fleet, fleet.model(net), sgd(net), numbers(), global_batch=8):
            if raised:
                raise KeyError("a bug in the script")
    mse(net, *numbers().tensors).backward()
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("when", ["before", "after", "in place"])
def test_a_compiled_model_trains_as_the_plain_one(tmp_path: Path, backend: str, when: str) -> None:
    torch.compiler.reset()
    net = linear()
    with join(tmp_path) as fleet:
        if when == "before":
            model = fleet.model(torch.compile(net, backend=backend))
        elif when == "after":
            model = torch.compile(fleet.model(net), backend=backend)
        else:
            model = fleet.model(net)
            model.compile(backend=backend)
        list(training(fleet, model, sgd(model), numbers(), global_batch=8, micro_batch=4, shuffle=False))
    assert torch.allclose(flat(net), plain(linear(), numbers(), batch=8), atol=1e-12)
    assert list(net.state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_over_a_shared_layer_trains_as_without(tmp_path: Path, reentrant: bool) -> None:
    class Shared(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            torch.manual_seed(6)
            self.first, self.shared, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)
            self.checkpointed = checkpointed
            self.double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for _ in range(2):
                x = (
                    checkpoint(self._block, x, use_reentrant=reentrant) if self.checkpointed else self._block(x)  # type: ignore[assignment]
                )
            return self.last(x)

        def _block(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.shared(x))

    with join(tmp_path) as fleet:
        model = fleet.model(Shared(True))
        list(training(fleet, model, sgd(model), numbers(), global_batch=8, micro_batch=4, shuffle=False))
    assert torch.allclose(flat(model), plain(Shared(False), numbers(), batch=8), atol=1e-12)


def test_a_deep_copy_is_free_of_the_fleet(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        model = fleet.model(deep())
        ema = copy.deepcopy(model)
        for _ in training(fleet, model, sgd(model), numbers(), global_batch=8, micro_batch=4, shuffle=False):
            mse(ema, *numbers().tensors).backward()  # its own gradients, its own business
            late = copy.deepcopy(model)
            mse(late, *numbers().tensors).backward()
            with torch.no_grad():
                for kept, new in zip(ema.parameters(), model.parameters(), strict=True):
                    kept.lerp_(new, 0.1)
    assert torch.allclose(flat(model), plain(deep(), numbers(), batch=8), atol=1e-12)


def test_a_whole_model_can_be_pickled_in_the_middle_of_a_training(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        model = fleet.model(deep())
        for _ in training(fleet, model, sgd(model), numbers(), global_batch=8):
            again = pickle.loads(pickle.dumps(model))
            assert torch.equal(flat(again), flat(model))
            break


def test_a_channels_last_model_keeps_its_layout_and_trains_as_ever(tmp_path: Path) -> None:
    def conv() -> nn.Sequential:
        torch.manual_seed(2)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 1)).double()

    x = torch.randn(16, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.mean((1, 2, 3)).unsqueeze(1))
    with join(tmp_path) as fleet:
        model = fleet.model(conv().to(memory_format=torch.channels_last))
        list(training(fleet, model, sgd(model), data, global_batch=8, micro_batch=4, shuffle=False))
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(flat(model), plain(conv(), data, batch=8), atol=1e-12)


def test_parameters_of_several_dtypes_train_together(tmp_path: Path) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.short, self.middle, self.long = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)
            self.short.bfloat16()
            self.long.double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.long(self.middle(self.short(x.bfloat16()).float()).double())

    expected = Mixed()
    with join(tmp_path) as fleet:
        model = fleet.model(Mixed())
        list(training(fleet, model, sgd(model), numbers(8), global_batch=8, shuffle=False, clip_norm=0.5))
    plain(expected, numbers(8), batch=8, clip_norm=0.5)
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in expected.parameters()]
    assert torch.allclose(flat(model), flat(expected), atol=1e-2)


def test_frozen_unused_and_shared_parameters_train_as_on_one_machine(tmp_path: Path) -> None:
    def net() -> nn.Module:
        torch.manual_seed(8)
        parts = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("first", "frozen", "unused")})
        parts["again"] = parts["first"]
        parts["frozen"].requires_grad_(False)
        parts["last"] = nn.Linear(3, 1)
        return parts.double()

    def loss(parts: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(parts["again"](torch.tanh(parts["first"](x))))
        return nn.functional.mse_loss(parts["last"](parts["frozen"](x)), y)

    expected = net()
    before = expected["unused"].weight.detach().clone()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01)  # decays only what has a gradient
    x, y = numbers().tensors
    for number, part in enumerate(torch.arange(40).split(8)):
        expected["frozen"].requires_grad_(number >= 2)
        optimizer.zero_grad()
        loss(expected, x[part], y[part]).backward()
        optimizer.step()
    with join(tmp_path) as fleet:
        model = fleet.model(net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in training(
            fleet, model, optimizer, numbers(), loss=loss, global_batch=8, micro_batch=3, shuffle=False
        ):
            model["frozen"].requires_grad_(step.index >= 1)
    assert torch.allclose(flat(model), flat(expected), atol=1e-12)
    assert torch.equal(model["unused"].weight, before)


def test_two_models_train_in_one_step(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        first, second = fleet.model(deep()), fleet.model(linear())
        optimizers = sgd(first), sgd(second)
        for step in fleet.steps(numbers(), global_batch=8, micro_batch=4, shuffle=False):
            for x, y in step:
                step.backward(mse(first, x, y) + mse(second, x, y))
            step.commit(*optimizers)
    assert torch.allclose(flat(first), plain(deep(), numbers(), batch=8), atol=1e-12)
    assert torch.allclose(flat(second), plain(linear(), numbers(), batch=8), atol=1e-12)


def test_dropout_is_the_same_whatever_the_script_drew_before(tmp_path: Path) -> None:
    results = []
    for noise in (1, 2):
        with join(tmp_path, seed=3) as fleet:
            model = fleet.model(nn.Sequential(linear(), nn.Dropout(0.5)))
            torch.manual_seed(noise)
            list(training(fleet, model, sgd(model), numbers(), global_batch=8, micro_batch=4))
            results.append(flat(model))
    assert torch.equal(*results)


# -- loss scaling --------------------------------------------------------------------------------------------------


def losses_with_overflows(overflows: set[int]) -> Any:
    """Return a loss whose gradient overflows in the given steps (counted by calls)."""
    calls = iter(range(10**6))

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse(model, x, y) * (float("inf") if next(calls) in overflows else 1.0)

    return loss


@pytest.mark.parametrize("overflows", [set(), {0}, {1, 2}, {0, 3, 4}])
def test_a_tracked_scaler_trains_and_scales_as_torchs_own_loop(tmp_path: Path, overflows: set[int]) -> None:
    options = {"init_scale": 2.0**10, "growth_interval": 2}
    expected, theirs = linear(dtype=torch.float32), torch.amp.GradScaler("cpu", **options)
    optimizer, loss = sgd(expected), losses_with_overflows(overflows)
    data = numbers(48, dtype=torch.float32)
    x, y = data.tensors
    for part in torch.arange(48).split(8):
        optimizer.zero_grad()
        theirs.scale(loss(expected, x[part], y[part])).backward()
        theirs.unscale_(optimizer)
        nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
        theirs.step(optimizer)
        theirs.update()
    with join(tmp_path) as fleet:
        model, ours = fleet.model(linear(dtype=torch.float32)), torch.amp.GradScaler("cpu", **options)
        fleet.track(scaler=ours)
        steps = training(
            fleet,
            model,
            sgd(model),
            data,
            loss=losses_with_overflows(overflows),
            clip_norm=1.0,
            global_batch=8,
            shuffle=False,
        )
        applied = [step.applied for step in steps]
        assert sum(record.total for record in fleet.history) == 48
    assert applied == [number not in overflows for number in range(6)]
    assert ours.state_dict() == theirs.state_dict()
    assert torch.allclose(flat(model), flat(expected), atol=1e-6)


def test_a_scaler_tracked_in_the_middle_of_a_step_does_not_scale_half_of_it(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        model = fleet.model(linear())
        optimizer = sgd(model)
        for step in fleet.steps(numbers(), global_batch=8, micro_batch=4, shuffle=False):
            for number, (x, y) in enumerate(step):
                if step.index == 0 and number == 1:
                    fleet.track(scaler=torch.amp.GradScaler("cpu"))
                step.backward(mse(model, x, y))
            step.commit(optimizer)
    assert torch.allclose(flat(model), plain(linear(), numbers(), batch=8), atol=1e-9)


def test_a_disabled_scaler_changes_nothing(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        model = fleet.model(linear())
        fleet.track(scaler=torch.amp.GradScaler("cpu", enabled=False))
        list(training(fleet, model, sgd(model), numbers(), global_batch=8, shuffle=False))
    assert torch.allclose(flat(model), plain(linear(), numbers(), batch=8), atol=1e-12)


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_nan_gradients_stop_or_skip_by_choice(tmp_path: Path, nonfinite: str) -> None:
    with join(tmp_path, nonfinite=nonfinite) as fleet:
        model = fleet.model(linear())
        steps = training(fleet, model, sgd(model), numbers(), loss=losses_with_overflows({1}), global_batch=8)
        if nonfinite == "stop":
            with pytest.raises(paceline.NonFiniteGradients, match="worker 0 had NaN or infinite gradients in step 1"):
                list(steps)
        else:
            assert [step.applied for step in steps] == [True, False, True, True, True]
    assert flat(model).isfinite().all()
